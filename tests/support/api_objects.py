"""One object of each kind that the API addresses, for tests of its document."""

from typing import Any

from django.utils import timezone

from catalog import audit
from catalog.audit import SYSTEM
from catalog.hints import actions as hints
from catalog.search import golden_queries
from catalog.tools.actions import save_custom_tool
from sessions_app.agents import api_keys
from sessions_app.models import Agent, AgentSession, Grant, ScriptRun
from sessions_app.rules import actions as rules
from sessions_app.rules.schemas import RuleIn
from tests.support.agent_client import AgentClient, make_group
from tests.support.factories import ingest_tools, make_server, tool_object
from toolcrib.notifications import actions as webhooks


def make_objects() -> dict[str, Any]:
    """Create one object of each kind; return their ids and an API key of each scope."""
    server = make_server(slug="github")
    ingest_tools(
        server, tool_object("create_issue", description="Create an issue."), tool_object("list")
    )
    schema = {"type": "object", "properties": {"word": {"type": "string"}}}
    definition = tool_object("shout", description="Shout a word.", inputSchema=schema)
    shout = save_custom_tool(definition, actor=SYSTEM)
    make_group("own", shout)
    limits = dict.fromkeys(
        ("calls_per_minute", "searches_per_minute", "cost_per_minute", "max_sessions"), 100_000
    )
    agent = AgentClient(Agent.objects.create(name="scout", all_groups=True, **limits))
    session = agent.open(mode="deferred")
    session.load("mcp:github", "list")
    own = session.call("shout", {"word": "hey"})
    session.search("issue")
    key, _ = api_keys.create_key("scout", "agent", agent=agent.agent, actor=SYSTEM)
    hint = hints.add(shout, "alias", "yell", actor=SYSTEM)
    marked = golden_queries.set_expected_tools(
        "make an issue", ["github__create_issue"], origin="api", actor=SYSTEM
    )
    entry = audit.record(SYSTEM, "group.rename", shout)
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
            "client_call_id": own.json["call_id"],
            "grant_id": grant.grant_id,
            "run_id": run.run_id,
            "webhook_id": webhook.pk,
            "/agents": "scout",
            "/rules": "Ask first",
            "/tools": "shout",
            "/sessions": "github__create_issue",
        },
    }
