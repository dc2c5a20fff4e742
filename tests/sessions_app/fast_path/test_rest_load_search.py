"""Loads and searches on the fast path and on the ordinary route: same responses and records."""

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import pytest
from django.db import OperationalError

from catalog import cache
from catalog.audit import SYSTEM
from sessions_app.agents import actions as agent_actions
from sessions_app.agents import api_keys, rate_limits
from sessions_app.dispatch import concurrency, operations
from sessions_app.fast_path import rest_load_search
from sessions_app.models import Agent, AgentSession, ApiKey, Event
from sessions_app.sessions import lifecycle, loading
from tests.sessions_app.fast_path.test_rest_call import Answer, Web
from tests.support.agent_client import make_agent_client
from tests.support.factories import ingest_tools, make_program, tool_object
from tests.support.waiting import scaled

pytestmark = pytest.mark.django_db(transaction=True)

ALL = {"group_id": "mcp:raw"}
FIND = {"query": "say something"}
# Operation, body, expected status, and whether the fast path answers.
ASKED: dict[str, tuple[str, Any, int, bool]] = {
    "a group": ("load", ALL, 200, True),
    "one tool": ("load", {**ALL, "tool_names": ["say"]}, 200, True),
    "some that are not there": ("load", {**ALL, "tool_names": ["say", "x"]}, 200, True),
    "a group that is not there": ("load", {"group_id": "mcp:x"}, 200, True),
    "too many names": ("load", {**ALL, "tool_names": ["x"] * 10_001}, 422, True),
    "NUL": ("load", {"group_id": "a\0"}, 422, True),
    "no group": ("load", {}, 422, False),
    "more fields": ("load", {**ALL, "more": 1}, 422, False),
    "a list": ("load", [], 422, False),
    "no JSON": ("load", b"{", 400, False),
    "a key twice": ("load", b'{"group_id": "a", "group_id": "b"}', 422, False),
    "far too deep": ("load", b"[" * 20_000, 422, False),
    "words": ("search", FIND, 200, True),
    "words nothing has": ("search", {"query": "xylophone"}, 200, True),
    "a pattern": ("search", {"pattern": "s.y"}, 200, True),
    "a bad pattern": ("search", {"pattern": "("}, 400, True),
    "nothing": ("search", {}, 422, True),
    "a name": ("search", {"name": "raw__say"}, 200, True),
    "a name, loaded": ("search", {**FIND, "load": True, "detail": "full"}, 200, True),
    "a strange detail": ("search", {**FIND, "detail": "x"}, 422, False),
}


@pytest.fixture
def agent():
    ingest_tools(make_program("raw_calls", slug="raw"), *map(tool_object, ("say", "later", "seen")))
    cache.clear()
    rate_limits.clear()
    return make_agent_client("scout", mode="deferred")


def ask(agent, what, body, *, session=None, key=None, ordinary=False, **headers) -> Answer:
    web = Web(agent.key, agent.open().id if session is None else session)

    async def only_ordinary(scope: Any, receive: Any, send: Any, ordinary: Any) -> None:
        await ordinary(scope, receive, send)

    to = only_ordinary if ordinary else rest_load_search.load_or_search
    return asyncio.run(web.post(to, what, body, key, headers))


def traces(session: str) -> Any:
    found = AgentSession.objects.get(session_id=session)
    events = Event.objects.filter(session=found).order_by("pk")
    rows = found.expansions.values_list("group_id", "names", "listed", "pins", "sequence")
    ledger = loading.token_ledger(found)
    return list(events.values_list("kind", "group_id", "tokens", "details")), list(rows), ledger


@pytest.mark.parametrize("asked", ASKED)
def test_both_paths_give_the_same_bytes_events_and_rows(agent, asked):
    what, body, status, short = ASKED[asked]
    sessions = [agent.open().id for _ in range(2)]
    answers = [
        ask(agent, what, body, session=session, ordinary=ordinary)
        for session, ordinary in zip(sessions, (False, True), strict=True)
    ]
    quick, slow = answers
    assert (quick.status, slow.status) == (status, status), (quick.body, slow.body)
    assert (quick.short, slow.short) == (short, False)
    assert quick.body == slow.body
    for answer in answers:
        assert len(answer.headers.pop("x-request-id")) == 12
        assert answer.headers.pop("content-length", str(len(answer.body))) == str(len(answer.body))
    assert quick.headers == slow.headers
    assert traces(sessions[0]) == traces(sessions[1])


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"content_type": "application/json; charset=utf-8"},
        {"content_encoding": "gzip"},
        {"authorization": "Basic c2NvdXQ6"},
        {"authorization": "bearer tcb_x"},
        {"transfer_encoding": "chunked"},
    ],
)
def test_requests_that_are_not_plain_take_the_ordinary_route(agent, headers):
    assert not ask(agent, "load", ALL, **headers).short


CHANGES = {
    "key revoked": (
        lambda: api_keys.revoke(ApiKey.objects.get(), actor=SYSTEM),
        401,
        "unauthorized",
    ),
    "agent disabled": (
        lambda: agent_actions.set_enabled(Agent.objects.get(), False, actor=SYSTEM),
        401,
        None,
    ),
    "session closed": (
        lambda: lifecycle.close_session(AgentSession.objects.get()),
        409,
        "session_closed",
    ),
}


@pytest.mark.parametrize("what", ["load", "search"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_applies_to_the_next_request(agent, change, what):
    act, status, code = CHANGES[change]
    session, body = agent.open().id, ALL if what == "load" else FIND
    assert ask(agent, what, body, session=session).status == 200
    act()
    answer = ask(agent, what, body, session=session)
    assert answer.status == status
    assert code in (None, answer.code)


def test_other_agents_sessions_invalid_keys_and_invalid_paths_are_rejected(agent):
    other = make_agent_client("other", mode="deferred")
    session = agent.open().id
    assert ask(agent, "load", ALL, session=session, key=other.key).code == "unknown_session"
    assert ask(agent, "load", ALL, session=session, key="tcb_nothing").status == 401
    _, operator = api_keys.create_key("reads", "operator", actor=SYSTEM)
    assert ask(agent, "load", ALL, session=session, key=operator).status == 403
    for odd in ("", "a/b", "a\0b"):
        answer = ask(agent, "load", ALL, session=odd)
        assert answer.status in (404, 405), (odd, answer.body)


def test_searches_are_counted_once_and_rate_limited(agent):
    agent.agent.searches_per_minute = 2
    agent.agent.save()
    session = agent.open().id
    answers = [ask(agent, "search", FIND, session=session) for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 429]
    assert answers[2].headers["retry-after"]
    assert answers[2].short


def test_a_database_error_is_reported_at_once_and_nothing_is_loaded(agent, monkeypatch):
    def locked(*args: Any, **named: Any) -> None:
        raise OperationalError("database is locked")

    session = agent.open().id
    monkeypatch.setattr(loading, "_record_load", locked)
    answer = ask(agent, "load", ALL, session=session)
    assert (answer.status, answer.code, answer.short) == (503, "busy", True)
    assert answer.headers["retry-after"]
    assert json.loads(json.dumps(traces(session)[1])) == []


def test_a_search_that_fails_in_the_database_is_counted_once(agent, monkeypatch):
    def locked(*args: Any, **named: Any) -> None:
        raise OperationalError("database is locked")

    counted = []
    monkeypatch.setattr(rate_limits, "check_rate", lambda *args: counted.append(args))
    monkeypatch.setattr(operations.session_search, "search_session", locked)
    answer = ask(agent, "search", FIND)
    assert (answer.status, answer.code) == (503, "busy")
    assert len(counted) == 1


def test_a_client_that_disconnects_while_queued_searches_nothing(agent):
    web = Web(agent.key, agent.open().id)

    async def scenario() -> Answer:
        async with AsyncExitStack() as held:
            for _ in range(concurrency.MAX_CONCURRENT):
                await held.enter_async_context(concurrency.concurrency_slot())
            asking = asyncio.create_task(
                web.post(rest_load_search.load_or_search, "search", FIND, None, {})
            )
            web.left.set()
            return await asyncio.wait_for(asking, scaled(30))

    assert asyncio.run(scenario()).status == 0  # the client has disconnected
    kinds = Event.objects.values_list("kind", flat=True)
    assert "searched" not in kinds
