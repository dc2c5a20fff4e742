"""Calls, searches, loads and details at the agent API: responses, records, no stale authorization.

Every test runs twice over the endpoint as it is served: with the authorization cached, and with the
cache cleared before each request.
"""

import asyncio
import json
import threading
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError
from django.utils import timezone

from catalog import cache
from catalog.audit import SYSTEM
from catalog.models import Tool
from catalog.tools.actions import hold, set_call_policy
from servers.connections import calls as upstream_calls
from servers.models import Server
from servers.registration import actions as server_actions
from sessions_app.agents import actions as agent_actions
from sessions_app.agents import api_keys, rate_limits, slots
from sessions_app.dispatch import authorization, dispatcher, operations
from sessions_app.ledger import calls as call_ledger
from sessions_app.ledger import writer as ledger_writer
from sessions_app.ledger.writer import LedgerCursor
from sessions_app.models import Agent, AgentSession, ApiKey, Call, Event
from sessions_app.sessions import endpoint, lifecycle, loading, surface
from tests.support.agent_client import make_agent_client
from tests.support.asgi_requests import AsgiResponse, bearer_headers, exchange, make_scope
from tests.support.factories import ingest_tools, make_program, tool_object
from tests.support.waiting import scaled, wait_for
from toolcrib.lib import json_codec

SAY = {"type": "object", "properties": {"result": {"type": "string"}}, "required": ["result"]}
CONTENT = json.dumps({"content": [{"type": "text", "text": "done"}], "resultType": "complete"})
BODY = {"tool_name": "raw__say", "arguments": {"result": CONTENT}}


@pytest.fixture
def agent(transactional_db):
    server = make_program("raw_calls", slug="raw")
    ingest_tools(
        server, tool_object("say", inputSchema=SAY), tool_object("later"), tool_object("seen")
    )
    cache.clear()
    authorization.clear()
    rate_limits.clear()
    yield make_agent_client("scout", mode="deferred", calls_in_flight=3)
    authorization.clear()


class Web:
    """The endpoint, called as uvicorn would call it."""

    def __init__(self, key: str, session: str, *, cached: bool) -> None:
        self.key, self.session, self.cached = key, session, cached
        self.left = asyncio.Event()  # the client disconnects

    async def call(
        self, body: Any = None, *, key: str | None = None, **headers: str
    ) -> AsgiResponse:
        return await self.post("call", BODY if body is None else body, key=key, **headers)

    async def post(
        self, what: str, body: Any, *, key: str | None = None, **headers: str
    ) -> AsgiResponse:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.send("POST", what, data, key, headers)

    async def send(
        self, method: str, what: str, data: bytes, key: str | None, headers: dict[str, str]
    ) -> AsgiResponse:
        if not self.cached:
            authorization.clear()
        url = f"/api/v1/sessions/{self.session}/{what}"
        scope = make_scope(method, url, bearer_headers(key or self.key, data, headers))
        found = endpoint.find_operation(scope)
        assert found is not None

        async def app(*args: Any) -> None:
            await endpoint.serve(*found, *args)

        return await exchange(app, scope, data, self.left)


@pytest.fixture(params=["cached", "uncached"])
def run(agent, request):
    """Run a scenario with the batch writer and the call pool."""

    def run(scenario: Any, *, on_loop: bool = True) -> Any:
        session = agent.open().id

        async def inside() -> Any:
            web = Web(agent.key, session, cached=request.param == "cached")
            async with (
                asyncio.timeout(scaled(60)),
                ledger_writer.run_writer(on_loop=on_loop),
                upstream_calls.call_pool(),
            ):
                return await scenario(web)

        return asyncio.run(inside())

    return run


async def in_database(work: Any, *args: Any, **named: Any) -> Any:
    return await asyncio.to_thread(_closing, work, *args, **named)


def _closing(work: Any, *args: Any, **named: Any) -> Any:
    from django.db import connection

    try:
        return work(*args, **named)
    finally:
        connection.close()


def stable_fields(answer: AsgiResponse) -> dict[str, Any]:
    """Return a response without the fields that differ from call to call."""
    mutable = ("call_id", "duration_ms")
    return {name: value for name, value in answer.json.items() if name not in mutable}


def test_every_call_gives_the_same_response_row_and_timeline(run, agent):
    async def scenario(web):
        return [await web.call() for _ in range(3)]

    _, second, third = run(scenario)
    assert second.status == 200
    assert second.headers["content-type"] == "application/json"
    assert second.headers["x-content-type-options"] == "nosniff"
    assert len(second.headers["x-request-id"]) == 12
    assert second.body.decode() == json.dumps(
        second.json, sort_keys=True, separators=(",", ":"), ensure_ascii=False
    )
    assert stable_fields(second) == {
        "tool_name": "raw__say",
        "state": "succeeded",
        "is_error": False,
        "content": [{"type": "text", "text": "done"}],
        "structured_content": None,
        "tokens": second.json["tokens"],
        "implicit_load": True,
    }
    rows = list(Call.objects.order_by("pk").values())
    assert [row["call_id"] for row in rows][1:] == [second.json["call_id"], third.json["call_id"]]
    differs = {"id", "call_id", "accepted_at", "sent_at", "finished_at", "deadline"}
    first, *others = [
        {name: value for name, value in row.items() if name not in differs} for row in rows
    ]
    assert others == [first, first]
    assert first["state"] == "succeeded"
    assert first["holder"] == call_ledger.THIS_PROCESS
    assert all(row["accepted_at"] <= row["sent_at"] <= row["finished_at"] for row in rows)
    assert all(row["deadline"] - row["accepted_at"] == timedelta(seconds=60) for row in rows)
    kinds = list(Event.objects.order_by("pk").values_list("kind", flat=True))
    assert kinds == ["opened", *["implicit_load", "called"] * 3]
    session = AgentSession.objects.get()
    assert (session.calls, session.errors) == (3, 0)
    assert session.tokens_call == 3 * second.json["tokens"]


REFUSED = {
    "no JSON": (b"{", 400, "bad_request"),
    "a key twice": (b'{"tool_name": "a", "tool_name": "b"}', 422, "invalid"),
    "a key twice inside": (b'{"tool_name": "a", "arguments": {"x": 1, "x": 2}}', 422, "invalid"),
    "no name": ({"arguments": {}}, 422, "invalid"),
    "more fields": ({**BODY, "more": 1}, 422, "invalid"),
    "a timeout that is true": ({**BODY, "timeout": True}, 422, "invalid"),
    "no time": ({**BODY, "timeout": 0}, 422, "invalid"),
    "NUL": ({"tool_name": "raw__say", "arguments": {"result": "\0"}}, 422, "invalid"),
    "NaN": (b'{"tool_name": "raw__say", "arguments": {"result": NaN}}', 422, "invalid"),
    "a list": (b"[]", 422, "invalid"),
}


def test_invalid_requests_get_an_error_and_run_nothing(run):
    async def scenario(web):
        assert (await web.call()).status == 200
        return {what: await web.call(body) for what, (body, _, _) in REFUSED.items()}

    for what, answer in run(scenario).items():
        assert (answer.status, answer.code) == REFUSED[what][1:], (what, answer.body)
    assert Call.objects.count() == 1


def test_errors_that_a_model_can_correct_are_results(run):
    bodies = [
        {"tool_name": "raw__say", "arguments": {}},
        {"tool_name": "raw__nothing", "arguments": {}},
        {"tool_name": "search_tools", "arguments": {}},
        {"tool_name": "raw__say", "arguments": [1]},
    ]

    async def scenario(web):
        await web.call()
        return [await web.call(body) for body in bodies]

    answers = run(scenario)
    assert [answer.json["error"]["code"] for answer in answers] == [
        "invalid_arguments",
        "unknown_tool",
        "meta_tool",
        "invalid_arguments",
    ]
    assert all(answer.status == 200 and answer.json["state"] == "refused" for answer in answers)


def test_aliases_nulls_and_digits_are_taken_for_what_they_mean(run):
    async def scenario(web):
        arguments = BODY["arguments"]
        return [
            await web.call({"name": "raw__say", "args": arguments}),
            await web.call({"tool_name": "raw__say", "arguments": arguments, "timeout": None}),
            await web.call({**BODY, "timeout": "30"}),
            await web.call({**BODY, "name": "raw__say"}),
            await web.call({**BODY, "name": "raw__seen"}),
            await web.call({**BODY, "timeout": "soon"}),
        ]

    *accepted, different, word = run(scenario)
    assert [answer.json["state"] for answer in accepted] == ["succeeded"] * 4
    assert {answer.status for answer in (different, word)} == {422}
    assert "differ" in different.json["error"]["details"]["problems"][0]["problem"]
    deadlines = [row.deadline - row.accepted_at for row in Call.objects.order_by("pk")]
    assert deadlines[2] == timedelta(seconds=30)


def test_an_invalid_body_is_reported_only_to_a_valid_key(run):
    async def scenario(web):
        return [await web.call(b"{", key=key) for key in (web.key, "tcb_nothing")]

    assert [answer.status for answer in run(scenario)] == [400, 401]


# --- What changes between two calls ---------------------------------------------------------------


CHANGES = {
    "key revoked": (
        lambda: api_keys.revoke(ApiKey.objects.get(scope="agent"), actor=SYSTEM),
        (401, "unauthorized"),
    ),
    "key deleted": (lambda: ApiKey.objects.all().delete(), (401, "unauthorized")),
    "key expired": (
        lambda: ApiKey.objects.update(expires_at=timezone.now() - timedelta(seconds=1)),
        (401, "unauthorized"),
    ),
    "agent disabled": (
        lambda: agent_actions.set_enabled(Agent.objects.get(), False, actor=SYSTEM),
        (401, "unauthorized"),
    ),
    "session closed": (
        lambda: lifecycle.close_session(AgentSession.objects.get()),
        (409, "session_closed"),
    ),
    "session idle": (
        lambda: AgentSession.objects.update(last_used_at=timezone.now() - timedelta(days=2)),
        (409, "session_expired"),
    ),
    "group taken": (
        lambda: agent_actions.set_groups(Agent.objects.get(), [], actor=SYSTEM),
        (200, "unknown_tool"),
    ),
    "tool held": (
        lambda: hold(Tool.objects.get(name="say"), "why", actor=SYSTEM),
        (200, "held"),
    ),
    "tool denied": (
        lambda: set_call_policy(Tool.objects.get(name="say"), "deny", actor=SYSTEM),
        (200, "denied"),
    ),
    "server disabled": (
        lambda: server_actions.set_enabled(
            Server.objects.get(tools__name="say"), False, actor=SYSTEM
        ),
        (200, "server_disabled"),
    ),
    "trust made strict": (lambda: _strict(), (200, "waiting")),
    "no calls left": (
        lambda: agent_actions.change(Agent.objects.get(), calls_per_minute=1, actor=SYSTEM),
        (429, "rate_limited"),
    ),
}


def _strict() -> None:
    """Make a change pending, cache it, and only then set the trust to strict."""
    server = Server.objects.get(tools__name="say")
    more = {**SAY, "description": "changed"}
    ingest_tools(
        server, tool_object("say", inputSchema=more), tool_object("later"), tool_object("seen")
    )
    cache.current()
    server_actions.change_settings(server, {"trust": "strict"}, actor=SYSTEM)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_applies_to_the_next_call(run, change):
    act, (status, code) = CHANGES[change]

    async def scenario(web):
        assert [(await web.call()).status for _ in range(2)] == [200, 200]
        await in_database(act)
        return await web.call()

    answer = run(scenario)
    assert (answer.status, answer.code) == (status, code), answer.body
    assert Call.objects.filter(state="succeeded").count() == 2


def test_a_servers_new_timeout_applies_at_once(run):
    def slower() -> None:
        server = Server.objects.get(tools__name="say")
        server.call_timeout = 300
        server.save()

    async def scenario(web):
        await web.call()
        await in_database(slower)
        await web.call()

    run(scenario)
    deadlines = [row.deadline - row.accepted_at for row in Call.objects.order_by("pk")]
    assert deadlines == [timedelta(seconds=60), timedelta(seconds=300)]


def test_a_load_applies_to_the_next_call(run, agent):
    async def scenario(web):
        before = [(await web.call()).json["implicit_load"] for _ in range(2)]
        await web.post("load", {"group_id": "mcp:raw", "tool_names": ["say"]})
        return before, (await web.call()).json["implicit_load"], await web.call()

    before, after, again = run(scenario)
    assert (before, after) == ([True, True], False)
    assert again.json["implicit_load"] is False


def test_another_agents_session_and_an_unknown_key_are_rejected(run, agent):
    other = make_agent_client("other", mode="deferred")

    async def scenario(web):
        await web.call()
        return await web.call(key=other.key), await web.call(key="tcb_nothing")

    stranger, nobody = run(scenario)
    assert (stranger.status, stranger.code) == (404, "unknown_session")
    assert (nobody.status, nobody.code) == (401, "unauthorized")
    assert nobody.headers["www-authenticate"] == "Bearer"


# --- Idempotency, limits, disconnects -------------------------------------------------------------


def test_an_idempotency_key_runs_once_and_returns_its_response_again(run):
    async def scenario(web):
        await web.call()
        first = await web.call(idempotency_key="a")
        again = await web.call(idempotency_key="a")
        other = await web.call({"tool_name": "raw__seen"}, idempotency_key="a")
        bad = await web.call(idempotency_key=" ")
        concurrent = await asyncio.gather(*(web.call(idempotency_key="b") for _ in range(3)))
        return first, again, other, bad, concurrent

    first, again, other, bad, concurrent = run(scenario)
    assert again.body == first.body
    assert (other.status, other.code) == (409, "idempotency_conflict")
    assert (bad.status, bad.code) == (422, "invalid")
    assert {answer.status for answer in concurrent} <= {200, 409}
    assert Call.objects.filter(idempotency_key="b").count() == 1
    assert len({answer.body for answer in concurrent if answer.status == 200}) == 1


def test_calls_in_flight_are_limited_and_a_call_is_counted_once(run, agent):
    later = {"tool_name": "raw__later", "arguments": {"seconds": 1}}

    async def scenario(web):
        await web.call()
        return await asyncio.gather(*(web.call(later) for _ in range(5)))

    answers = run(scenario)
    refused = [answer for answer in answers if answer.status == 429]
    assert {answer.code for answer in refused} == {"too_many_calls"}
    assert {answer.headers["retry-after"] for answer in refused} == {"1"}
    assert len(refused) == 2


def test_a_disconnect_during_the_commit_leaves_no_call_open(run):
    async def scenario(web):
        await web.call()
        held, release = threading.Event(), threading.Event()

        def hold(cursor: Any) -> None:
            held.set()
            release.wait(scaled(30))

        holding = asyncio.create_task(ledger_writer.commit(ledger_writer.WriteJob(hold)))
        await asyncio.to_thread(held.wait, 30)
        asked = asyncio.create_task(web.call())
        await asyncio.to_thread(wait_for, lambda: ledger_writer._writer._queue)
        web.left.set()
        assert (await asked).status == 0
        release.set()
        await holding
        await in_database(wait_for, lambda: Call.objects.count() == 2, 20)
        await in_database(
            wait_for, lambda: not Call.objects.filter(state__in=("accepted", "sent")), 20
        )
        return await in_database(lambda: list(Call.objects.order_by("pk").values()))

    first, second = run(scenario, on_loop=False)
    assert first["state"] == "succeeded"
    assert (second["state"], second["error_code"], second["sent_at"]) == (
        "cancelled", "cancelled", None,
    )  # fmt: skip


def test_a_disconnect_cancels_and_records_the_call(run):
    async def scenario(web):
        await web.call()
        await web.call({"tool_name": "raw__seen", "arguments": {}})
        later = {"tool_name": "raw__later", "arguments": {"seconds": 30}}
        call = asyncio.create_task(web.call(later))
        await in_database(wait_for, Call.objects.filter(state="sent").exists)
        web.left.set()
        await asyncio.wait({call})
        await in_database(wait_for, lambda: not dispatcher._in_flight)

    run(scenario)
    row = Call.objects.get(tool_name="raw__later")
    assert (row.state, row.error_code) == ("unknown", "cancelled")


def test_a_clock_jump_does_not_recover_a_running_call(run):
    async def scenario(web):
        await web.call()
        later = {"tool_name": "raw__later", "arguments": {"seconds": 2}}
        call = asyncio.create_task(web.call(later))
        rows = Call.objects.filter(state="sent")
        await in_database(wait_for, rows.exists)
        # The effect of a clock that jumps an hour forward.
        past = timezone.now() - timedelta(hours=1)
        await in_database(rows.update, deadline=past)
        assert await in_database(call_ledger.recover_lost_calls) == 0
        answer = await call
        await in_database(wait_for, lambda: not call_ledger.active_call_ids)
        return answer

    assert run(scenario).json["state"] == "succeeded"
    session = AgentSession.objects.get()
    assert (session.calls, session.errors) == (2, 0)
    assert Event.objects.filter(kind="called").count() == 2


def test_nothing_is_sent_if_the_ledger_cannot_be_written(run, agent, monkeypatch):
    async def scenario(web):
        await web.call()
        await web.call()
        before = await in_database(Call.objects.count)

        def full(self: Any, entry: Any) -> bool:
            raise OperationalError("database or disk is full")

        with monkeypatch.context() as broken:
            broken.setattr("sessions_app.ledger.writer.LedgerCursor.insert", full)
            refused = await web.call()
        assert await in_database(Call.objects.count) == before
        seen = await web.call({"tool_name": "raw__seen", "arguments": {}})
        return refused, seen

    refused, seen = run(scenario)
    assert (refused.status, refused.code) == (503, "busy")
    assert refused.headers["retry-after"] == "30"
    sent = json.loads(seen.json["content"][0]["text"])
    names = [each["params"]["name"] for each in sent if each.get("method") == "tools/call"]
    assert names == ["say", "say", "seen"]


def test_large_arguments_and_results_are_passed_on_and_stored_truncated(run):
    async def scenario(web):
        await web.call()
        text = json.dumps({"content": [{"type": "text", "text": "x" * 600_000}]})
        return await web.call({"tool_name": "raw__say", "arguments": {"result": text}})

    answer = run(scenario)
    assert answer.status == 200
    assert answer.json["content"][0]["text"] == "x" * 600_000
    row = Call.objects.latest("pk")
    assert row.result_bytes > 600_000
    assert json.loads(row.result_copy)["cut"] is True


def test_a_large_body_is_parsed_off_the_event_loop(run, monkeypatch):
    """The sender is not authenticated yet, and parsing calls Python for each object."""
    where = []

    def parsed(body):
        where.append(threading.current_thread() is threading.main_thread())
        return json_codec.parse_strict(body)

    monkeypatch.setattr(endpoint, "parse_strict", parsed)

    async def scenario(web):
        await web.call()
        large = {"tool_name": "raw__say", "arguments": {"result": "x", "more": [{}] * 30_000}}
        return await web.call(large)

    run(scenario)
    assert where == [True, False]


def test_recording_a_result_is_not_cancelled(run):
    """Toolcrib stops, or a key is revoked, just after the server has answered."""

    async def scenario(web):
        await web.call()
        call = upstream_calls.call

        async def call_then_stop(*args, **named):
            outcome = await call(*args, **named)
            dispatcher.cancel_all_calls()
            return outcome

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(upstream_calls, "call", call_then_stop)
            return await web.call()

    answer = run(scenario)
    assert (answer.status, answer.json["state"]) == (200, "succeeded")
    assert set(Call.objects.values_list("state", flat=True)) == {"succeeded"}


# --- Search, load, details ------------------------------------------------------------------------

ALL = {"group_id": "mcp:raw"}
FIND = {"query": "say something"}
# Operation, body, expected status.
ASKED: dict[str, tuple[str, Any, int]] = {
    "a group": ("load", ALL, 200),
    "one tool": ("load", {**ALL, "tool_names": ["say"]}, 200),
    "some that are not there": ("load", {**ALL, "tool_names": ["say", "x"]}, 200),
    "a group that is not there": ("load", {"group_id": "mcp:x"}, 200),
    "too many names": ("load", {**ALL, "tool_names": ["x"] * 10_001}, 422),
    "NUL": ("load", {"group_id": "a\0"}, 422),
    "no group": ("load", {}, 422),
    "more fields": ("load", {**ALL, "more": 1}, 422),
    "a list": ("load", [], 422),
    "no JSON": ("load", b"{", 400),
    "a key twice": ("load", b'{"group_id": "a", "group_id": "b"}', 422),
    "far too deep": ("load", b"[" * 20_000, 422),
    "words": ("search", FIND, 200),
    "words nothing has": ("search", {"query": "xylophone"}, 200),
    "a pattern": ("search", {"pattern": "s.y"}, 200),
    "a bad pattern": ("search", {"pattern": "("}, 400),
    "nothing": ("search", {}, 422),
    "a name": ("search", {"name": "raw__say"}, 200),
    "a name, loaded": ("search", {**FIND, "load": True, "detail": "full"}, 200),
    "a strange detail": ("search", {**FIND, "detail": "x"}, 422),
    "nulls and digits": ("search", {**FIND, "limit": "5", "name": None, "server": None}, 200),
    "null instead of an unknown field": ("search", {**FIND, "more": None}, 422),
}


def traces(session: str) -> Any:
    found = AgentSession.objects.get(session_id=session)
    events = Event.objects.filter(session=found).order_by("pk")
    rows = found.expansions.values_list("group_id", "names", "listed", "pins", "sequence")
    ledger = loading.token_ledger(found)
    return list(events.values_list("kind", "group_id", "tokens", "details")), list(rows), ledger


@pytest.mark.parametrize("asked", ASKED)
def test_loads_and_searches_are_the_same_with_and_without_a_cached_authorization(agent, asked):
    what, body, status = ASKED[asked]

    def ask(*, cached: bool) -> tuple[str, AsgiResponse]:
        session = agent.open().id

        async def scenario() -> AsgiResponse:
            async with ledger_writer.run_writer():
                web = Web(agent.key, session, cached=cached)
                await web.post("load", {"group_id": "nothing"})  # fills the cache
                return await web.post(what, body)

        return session, asyncio.run(scenario())

    (first, quick), (second, slow) = ask(cached=True), ask(cached=False)
    assert (quick.status, slow.status) == (status, status), (quick.body, slow.body)
    assert quick.body == slow.body
    for answer in (quick, slow):
        assert len(answer.headers.pop("x-request-id")) == 12
        assert answer.headers["content-length"] == str(len(answer.body))
    assert quick.headers == slow.headers
    assert traces(first) == traces(second)


@pytest.mark.parametrize("what", ["load", "search", "tools/raw__say"])
@pytest.mark.parametrize("change", ["key revoked", "agent disabled", "session closed"])
def test_a_change_applies_to_the_next_operation(run, change, what):
    act, (status, code) = CHANGES[change]

    async def ask(web):
        if what.startswith("tools/"):
            return await web.send("GET", what, b"", None, {})
        return await web.post(what, ALL if what == "load" else FIND)

    async def scenario(web):
        assert (await ask(web)).status == 200
        await in_database(act)
        return await ask(web)

    answer = run(scenario)
    assert (answer.status, answer.code) == (status, code)


def test_other_agents_sessions_and_invalid_keys_are_rejected(run, agent):
    other = make_agent_client("other", mode="deferred")
    _, operator = api_keys.create_key("reads", "operator", actor=SYSTEM)

    async def scenario(web):
        await web.post("load", ALL)
        return [await web.post("load", ALL, key=key) for key in (other.key, "tcb_no", operator)]

    answers = run(scenario)
    assert [answer.status for answer in answers] == [404, 401, 403]
    assert answers[0].code == "unknown_session"


@pytest.mark.parametrize("session", ["", "a/b", "a\0b"])
def test_odd_session_ids_are_not_found(agent, session):
    response = agent.send("POST", f"/sessions/{session.replace(chr(0), '%00')}/load", ALL)
    assert response.status in (404, 405)


def test_searches_are_counted_once_and_rate_limited(run, agent):
    agent.agent.searches_per_minute = 2
    agent.agent.save()

    async def scenario(web):
        return [await web.post("search", FIND) for _ in range(3)]

    answers = run(scenario)
    assert [answer.status for answer in answers] == [200, 200, 429]
    assert answers[2].headers["retry-after"]


def test_loads_and_details_are_charged_for_their_bytes(run, agent):
    charged = []

    async def scenario(web):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(rate_limits, "add_cost", lambda _, size: charged.append(size))
            loaded = await web.post("load", ALL)
            details = await web.send("GET", "tools/raw__say", b"", None, {})
        return loaded, details

    loaded, details = run(scenario)
    assert charged[1] == len(details.body)
    assert abs(charged[0] - len(loaded.body)) < 300


def test_a_database_error_is_reported_at_once_and_nothing_is_loaded(run, monkeypatch):
    def locked(*args: Any, **named: Any) -> None:
        raise OperationalError("database is locked")

    async def scenario(web):
        with monkeypatch.context() as broken:
            broken.setattr(LedgerCursor, "save_expansion", locked)
            return web.session, await web.post("load", ALL)

    session, answer = run(scenario)
    assert (answer.status, answer.code) == (503, "busy")
    assert answer.headers["retry-after"]
    assert traces(session)[1] == []


def test_a_search_that_fails_in_the_database_is_counted_once(run, monkeypatch):
    def locked(*args: Any, **named: Any) -> None:
        raise OperationalError("database is locked")

    counted = []

    async def scenario(web):
        with monkeypatch.context() as broken:
            broken.setattr(rate_limits, "check_rate", lambda *args: counted.append(args))
            broken.setattr(operations.session_search, "search_session", locked)
            return await web.post("search", FIND)

    answer = run(scenario)
    assert (answer.status, answer.code) == (503, "busy")
    assert len(counted) == 1


def test_a_client_that_disconnects_while_queued_searches_nothing(run, monkeypatch):
    async def scenario(web):
        async with AsyncExitStack() as stack:
            for number in range(slots.MAX_CONCURRENT):
                await stack.enter_async_context(slots.slot(f"key {number}"))
            asking = asyncio.create_task(web.post("search", FIND))
            web.left.set()
            return await asyncio.wait_for(asking, scaled(30))

    assert run(scenario).status == 0  # the client has disconnected
    assert "searched" not in Event.objects.values_list("kind", flat=True)


def test_two_loads_of_one_session_at_once_are_both_kept(run):
    async def scenario(web):
        names = [["say"], ["later"], ["seen"]]
        bodies = [{**ALL, "tool_names": some} for some in names]
        return await asyncio.gather(*(web.post("load", body) for body in bodies))

    answers = run(scenario)
    assert [answer.json["expanded"] for answer in answers] == [True] * 3
    session = AgentSession.objects.get()
    assert loading.export_state(session)["expanded_groups"] == {"mcp:raw": None}
    pins = surface.context_of(session).scope.tools.keys() & set(surface.pins_of(session))
    assert len(pins) == 3
    assert session.loads_version == 3
    seqs = sorted(pin["seq"] for pin in surface.pins_of(session).values())
    assert seqs == [1, 2, 3]
