"""Property-based tests of the API, generated from its OpenAPI document.

Every operation gets valid and invalid requests, first with random ids and then with ids of
existing objects. Examples are the same in every run.
"""

from functools import lru_cache

import pytest
import schemathesis
from django.core.signals import request_finished, request_started
from django.db import close_old_connections
from django.utils import timezone
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from catalog import audit
from catalog.audit import SYSTEM
from catalog.hints import actions as hints
from catalog.models import Tool
from catalog.search import golden_queries
from catalog.tools.actions import save_custom_tool
from sessions_app.agents import api_keys
from sessions_app.models import Agent, AgentSession, Grant, ScriptRun
from sessions_app.rules import actions as rules
from sessions_app.rules.schemas import RuleIn
from tests.support.agent_client import AgentClient, make_group
from tests.support.asgi_requests import wsgi_application
from tests.support.factories import ingest_tools, make_server, tool_object
from toolcrib.api import api
from toolcrib.notifications import actions as webhooks

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
DOCUMENT = api.get_openapi_schema()
OPERATIONS = [
    (method.upper(), path, scope)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
    for scope in ("agent", "admin")
    if scope == "admin" or {"AgentAuth": []} in operation["security"]
    if not path.endswith("/stream")  # has no end
]
EXAMPLES = settings(
    max_examples=12,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
UNREACHABLE = "http://127.0.0.1:9/mcp"  # the only URL that these tests connect to


@lru_cache
def load_schema():
    return schemathesis.openapi.from_wsgi("/api/v1/openapi.json", wsgi_application)


@pytest.fixture
def document(objects):
    """The OpenAPI document, with the application on the test's database connection."""
    for signal in (request_started, request_finished):
        signal.disconnect(close_old_connections)
    yield load_schema()
    for signal in (request_started, request_finished):
        signal.connect(close_old_connections)


@pytest.fixture
def objects(db):
    """One object of each kind, and the API keys."""
    server = make_server(slug="github")
    ingest_tools(
        server, tool_object("create_issue", description="Create an issue."), tool_object("list")
    )
    shout = save_custom_tool(tool_object("shout", description="Shout a word."), actor=SYSTEM)
    make_group("own", shout)
    limits = dict.fromkeys(
        ("calls_per_minute", "searches_per_minute", "cost_per_minute", "max_sessions"), 100_000
    )
    agent = AgentClient(Agent.objects.create(name="scout", all_groups=True, **limits))
    session = agent.open(mode="deferred")
    session.load("mcp:github", "list")
    session.call("shout", {"word": "hey"})
    session.search("issue")
    key, _ = api_keys.create_key("scout", "agent", agent=agent.agent, actor=SYSTEM)
    hint = hints.add(shout, "alias", "yell", actor=SYSTEM)
    marked = golden_queries.set_expected_tools(
        "make an issue", ["github__create_issue"], origin="api", actor=SYSTEM
    )
    entry = audit.record(SYSTEM, "group.rename", Tool.objects.first())
    values = {"name": "Ask first", "effect": "hold", "match": {"tools": ["shout"]}}
    rules.create(RuleIn.model_validate(values), actor=SYSTEM)
    held = session.call("shout", {"word": "hey"})
    row = AgentSession.objects.get()
    grant = Grant.objects.create(session=row, rule_name="Ask first", tools=["shout"])
    now = timezone.now()
    run = ScriptRun.objects.create(
        session=row, agent=row.agent, language="python", engine="none", code="1", state="failed",
        started_at=now, finished_at=now, deadline=now, timeout=1,
    )  # fmt: skip
    webhook, _ = webhooks.create(
        "team", "json", "http://127.0.0.1:8123/hook", ["alert.raised"], actor=SYSTEM
    )
    return {
        "agent": agent.key,
        "admin": api_keys.create_key("tests", "admin", actor=SYSTEM)[1],
        "operator": api_keys.create_key("tests", "operator", actor=SYSTEM)[1],
        "ids": {
            "session_id": session.id,
            "slug": "github",
            "group_id": "own",
            "key": str(key.pk),
            "audit_id": entry.pk,
            "hint_id": hint.pk,
            "golden_id": marked.pk,
            "call_id": held.json["call_id"],
            "grant_id": grant.grant_id,
            "run_id": run.run_id,
            "webhook_id": webhook.pk,
            "/agents": "scout",
            "/rules": "Ask first",
            "/tools": "shout",
            "/sessions": "github__create_issue",
        },
    }


def use_existing_ids(case, ids):
    """Replace ids in the request by existing ones; return whether there are any."""
    area = "/" + case.path.removeprefix("/api/v1/").split("/")[0]
    for name in case.path_parameters or {}:
        case.path_parameters[name] = ids[area] if name == "name" else ids[name]
    return bool(case.path_parameters)


def replace_urls(value):
    """Replace generated URLs, so that no request connects to another host."""
    if isinstance(value, dict):
        return {key: replace_urls(sub) for key, sub in value.items()}
    if isinstance(value, list):
        return [replace_urls(sub) for sub in value]
    return UNREACHABLE if isinstance(value, str) and "//" in value else value


def fuzz(document, objects, method, path, scope):
    operation = document[path][method]
    headers = {"Authorization": f"Bearer {objects[scope]}"}
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

        @EXAMPLES
        @given(operation.as_strategy(generation_mode=mode))
        def send(case):
            case.body = replace_urls(case.body)
            case.call_and_validate(headers=headers, checks=CHECKS)
            if use_existing_ids(case, objects["ids"]):
                case.call_and_validate(headers=headers, checks=CHECKS)

        send()


@pytest.mark.parametrize(("method", "path", "scope"), OPERATIONS)
def test_every_response_is_documented(document, objects, method, path, scope):
    fuzz(document, objects, method, path, scope)
