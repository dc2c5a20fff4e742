"""Lists of the API, generated from its schema: each ends with a cursor that is null."""

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import quote

import pytest
from django.utils import timezone

from sessions_app.models import AgentSession, Grant, HeldCall, Webhook
from tests.support.asgi_requests import send_api
from tests.support.factories import make_call
from tests.support.growing import add_related_rows
from tests.support.seeding import seed
from tests.toolcrib.test_api_access import DOCUMENT

pytestmark = [pytest.mark.django_db, pytest.mark.timeout(240)]
# Answers with rows that are no pages: parts of one object, which is read or replaced whole.
WHOLE = {
    "get_server": "Names of its credentials.",
    "get_group": "The group as its page shows it; list_group_members has pages.",
    "get_tool": "Findings and dropped overrides of one definition.",
    "lint_tool": "Findings of one definition.",
    "get_golden_query": "One result for each strategy.",
    "get_golden_standing": "Newest runs up to `limit`; list_golden_queries has pages.",
    "get_prices": "A document that PUT replaces.",
    "get_health": "Measurements of one process at one moment.",
    "get_session_tools": "The array that a model is given, for which half an array has no use.",
    "get_call": "The content of one result.",
    "get_script": "Calls of one run, at most 50.",
}
OF_HELD_CALLS = {"/api/v1/calls", "/api/v1/sessions/{session_id}/grants"}


def schema_of_answer(operation: dict[str, Any]) -> dict[str, Any]:
    content = operation["responses"].get("200", operation["responses"].get(200, {}))
    schema: dict[str, Any] = content.get("content", {}).get("application/json", {})
    schema = schema.get("schema", {})
    if "$ref" in schema:
        schema = DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def lists() -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            properties = schema_of_answer(operation).get("properties", {})
            if method == "get" and "next_cursor" in properties:
                yield path, properties["next_cursor"]


LISTS = dict(lists())


@pytest.fixture
def examples(db: None) -> dict[str, Any]:
    """Rows for every list, and the values of parameters in paths."""
    examples = seed(tools=24, groups=4, calls=100, sessions=20)
    add_related_rows(examples)
    session = AgentSession.objects.get(session_id=examples["session_id"])
    now = timezone.now()
    for _ in range(2):
        Grant.objects.create(session=session, tools=["*"], created_by="ada")
        call = make_call(session, state="held")
        HeldCall.objects.create(
            call=call, session=session, digest="0", held_at=now, expires_at=now + timedelta(hours=1)
        )
    hook = Webhook.objects.create(name="ops", address="https://ops.example/")
    return {**examples, "webhook_id": hook.pk}


@pytest.mark.parametrize("path", LISTS)
def test_the_cursor_of_a_list_is_a_text_or_null(path: str) -> None:
    schema = LISTS[path]
    kinds = {kind["type"] for kind in schema.get("anyOf", [schema])}
    assert kinds in ({"string", "null"}, {"null"}), f"{path}: {schema}"


def test_the_last_page_of_every_list_has_no_cursor(
    examples: dict[str, Any], admin_token: str
) -> None:
    assert len(LISTS) > 25
    cursors = {path: read_cursors(path, examples, admin_token) for path in LISTS}

    for path, (*earlier, last) in cursors.items():
        assert all(isinstance(cursor, str) and cursor for cursor in earlier), path
        assert last is None, path
    several = {path for path, seen in cursors.items() if len(seen) > 1}
    assert several >= OF_HELD_CALLS
    assert len(several) > 10


def read_cursors(path: str, examples: dict[str, Any], token: str) -> list[str | None]:
    """Read a list to its end, first one item and then the rest; return the cursors."""
    cursors: list[str | None] = []
    query = "limit=1"
    while not cursors or cursors[-1]:
        status, page = read_page(path, query, examples, token)
        assert status == 200, f"{path}?{query}: {page}"
        cursors.append(page["next_cursor"])
        query = f"limit=200&cursor={quote(str(cursors[-1]))}"
    return cursors


def read_page(path: str, query: str, examples: dict[str, Any], token: str) -> tuple[int, Any]:
    tool = examples["public_name"]
    named = {**examples, "name": tool} if path.startswith("/api/v1/tools/") else examples
    for name, value in named.items():
        path = path.replace("{" + name + "}", quote(str(value), safe=""))
    response = send_api("GET", f"{path}?{query}", b"", {"Authorization": f"Bearer {token}"})
    return response.status_code, json.loads(response.content)


def test_a_list_accepts_no_cursor_but_its_own(examples: dict[str, Any], admin_token: str) -> None:
    of_tools = read_cursors("/api/v1/tools", examples, admin_token)[0]
    of_agents = read_cursors("/api/v1/agents", examples, admin_token)[0]
    for path in LISTS:
        other = of_agents if path == "/api/v1/tools" else of_tools
        for cursor in (str(other), "zzz", "1", "AA==", "é"):
            status, answer = read_page(path, f"cursor={quote(cursor)}", examples, admin_token)
            assert (status, answer["error"]["code"]) == (422, "invalid"), f"{path}: {cursor}"
            assert answer["error"]["details"]["problems"][0]["at"] == "query.cursor", path


def test_every_list_has_a_limit_and_a_cursor() -> None:
    for path in LISTS:
        operation = DOCUMENT["paths"][path]["get"]
        names = {parameter["name"] for parameter in operation["parameters"]}
        assert names >= {"limit", "cursor"}, path


def test_every_answer_with_rows_is_a_page_or_one_object() -> None:
    whole = set()
    for methods in DOCUMENT["paths"].values():
        operation = methods.get("get", {"responses": {}})
        answer = schema_of_answer(operation)
        parts = answer.get("properties", {"": answer})
        rows = [
            name
            for name, part in parts.items()
            if part.get("type") == "array" and part.get("items", {}).get("type") != "string"
        ]
        if "next_cursor" in parts or not rows:
            continue
        whole.add(operation["operationId"])
        assert operation["operationId"] in WHOLE, rows
    assert whole == WHOLE.keys()
