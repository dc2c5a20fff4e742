"""A call on the fast path and on the ordinary path: same responses, and no stale authorization.

Every test runs three times over the ASGI application as it is served: with the authorization cache
filled, with the cache cleared before each call, and without the cache.
"""

import asyncio
import json
import threading
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from catalog import cache
from catalog.audit import SYSTEM
from catalog.models import Tool
from catalog.tools.actions import hold, set_call_policy
from servers.connections import calls as upstream_calls
from servers.models import Server
from servers.registration import actions as server_actions
from sessions_app.agents import actions as agent_actions
from sessions_app.agents import api_keys
from sessions_app.dispatch import authorization_cache, dispatcher
from sessions_app.fast_path import rest_call
from sessions_app.ledger import batch_writer
from sessions_app.ledger import calls as call_ledger
from sessions_app.models import Agent, AgentSession, ApiKey, Call, Event
from sessions_app.sessions import lifecycle
from tests.support.agent_client import make_agent_client
from tests.support.factories import ingest_tools, make_program, tool_object
from tests.support.waiting import scaled, wait_for
from toolcrib.asgi import ApiHandler
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
    authorization_cache.clear()
    yield make_agent_client("scout", mode="deferred", calls_in_flight=3)
    authorization_cache.clear()


class Answer:
    def __init__(self, status: int, headers: dict[str, str], body: bytes, short: bool) -> None:
        self.status, self.headers, self.body, self.short = status, headers, body, short

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        return str(self.json["error"]["code"])


class Web:
    """The API's application, called as uvicorn would call it."""

    def __init__(self, key: str, session: str, *, way: str = "cached") -> None:
        self.key, self.session, self.way = key, session, way
        self.short = way != "ordinary"
        self.api = ApiHandler()
        self.left = asyncio.Event()  # the client disconnects

    async def call(self, body: Any = None, *, key: str | None = None, **headers: str) -> Answer:
        """Send a call; `Answer.short` is whether it took the fast path."""
        if self.way != "cached":
            authorization_cache.clear()
        return await self.post(rest_call.call, "call", BODY if body is None else body, key, headers)

    async def post(
        self, to: Any, what: str, body: Any, key: str | None, headers: dict[str, str]
    ) -> Answer:
        raw = body if isinstance(body, bytes) else json.dumps(body)
        raw = raw if isinstance(raw, bytes) else raw.encode()
        given = {
            "host": "localhost",
            "authorization": f"Bearer {key or self.key}",
            "content-type": "application/json",
            "content-length": str(len(raw)),
        }
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        scope = {
            "type": "http",
            "method": "POST",
            "path": f"/api/v1/sessions/{self.session}/{what}",
            "raw_path": b"",
            "query_string": b"",
            "headers": [(name.encode(), text.encode("latin-1")) for name, text in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "scheme": "http",
            "http_version": "1.1",
        }
        return await self._ask(to, scope, raw)

    async def _ask(self, to: Any, scope: dict[str, Any], raw: bytes) -> Answer:
        messages = [{"type": "http.request", "body": raw, "more_body": False}]
        messages_sent: list[dict[str, Any]] = []
        long = False

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await self.left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            messages_sent.append(message)

        async def ordinary(*args: Any) -> None:
            nonlocal long
            long = True
            await self.api(*args)

        await to(scope, receive, send, ordinary)
        if not messages_sent:
            return Answer(0, {}, b"", not long)
        names = {name.decode().lower(): text.decode() for name, text in messages_sent[0]["headers"]}
        body = b"".join(message.get("body", b"") for message in messages_sent[1:])
        return Answer(messages_sent[0]["status"], names, body, not long)


@pytest.fixture(params=["cached", "uncached", "ordinary"])
def run(agent, request, monkeypatch):
    """Run a scenario with the batch writer and the call pool, in one of the three modes."""
    if request.param == "ordinary":
        monkeypatch.setattr(authorization_cache, "load", lambda *_: None)

    def run(scenario: Any) -> Any:
        session = agent.open().id

        async def inside() -> Any:
            web = Web(agent.key, session, way=request.param)
            async with (
                asyncio.timeout(scaled(60)),
                batch_writer.run_writer(),
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


def stable_fields(answer: Answer) -> dict[str, Any]:
    """Return a response without the fields that differ from call to call."""
    mutable = ("call_id", "duration_ms")
    return {name: value for name, value in answer.json.items() if name not in mutable}


def test_both_paths_give_the_same_response_row_and_timeline(run, agent):
    async def scenario(web):
        return web.short, [await web.call() for _ in range(3)]

    short, answers = run(scenario)
    assert [answer.short for answer in answers] == [short] * 3
    _, second, third = answers
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


def test_invalid_requests_get_the_same_error_on_both_paths(run):
    async def scenario(web):
        assert (await web.call()).status == 200
        return {what: await web.call(body) for what, (body, _, _) in REFUSED.items()}

    for what, answer in run(scenario).items():
        assert (answer.status, answer.code) == REFUSED[what][1:], (what, answer.body)
        assert not answer.short, what
    assert Call.objects.count() == 1


def test_errors_that_a_model_can_correct_are_results_on_both_paths(run):
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


def test_unusual_hosts_and_content_types_take_the_ordinary_path(run, settings):
    async def scenario(web):
        await web.call()
        strange = await web.call(host="evil.example")
        asked = await web.call(content_type="text/plain")
        return strange, asked

    strange, asked = run(scenario)
    assert strange.status == 400
    assert not strange.short
    assert not asked.short


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
        lambda: agent_actions.disable(Agent.objects.get(), actor=SYSTEM),
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
    from sessions_app.sessions import loading

    async def scenario(web):
        before = [(await web.call()).json["implicit_load"] for _ in range(2)]
        session = await in_database(AgentSession.objects.get)
        await in_database(loading.load, session, "mcp:raw", ["say"])
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

        holding = asyncio.create_task(batch_writer.commit(batch_writer.WriteJob(hold)))
        await asyncio.to_thread(held.wait, 30)
        asked = asyncio.create_task(web.call())
        await asyncio.to_thread(wait_for, lambda: batch_writer._writer._queue)
        web.left.set()
        if web.short:
            assert (await asked).status == 0
        else:
            await asyncio.wait({asked})
        release.set()
        await holding
        await in_database(wait_for, lambda: Call.objects.count() == 2, 20)
        await in_database(
            wait_for, lambda: not Call.objects.filter(state__in=("accepted", "sent")), 20
        )
        return await in_database(lambda: list(Call.objects.order_by("pk").values()))

    first, second = run(scenario)
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
    from django.db import OperationalError

    async def scenario(web):
        await web.call()
        await web.call()
        before = await in_database(Call.objects.count)

        def full(self: Any, entry: Any) -> bool:
            raise OperationalError("database or disk is full")

        with monkeypatch.context() as broken:
            broken.setattr("sessions_app.ledger.sql.LedgerCursor.insert", full)
            refused = await web.call()
        assert await in_database(Call.objects.count) == before
        seen = await web.call({"tool_name": "raw__seen", "arguments": {}})
        return refused, seen

    refused, seen = run(scenario)
    assert (refused.status, refused.code) == (503, "busy")
    assert refused.headers["retry-after"] == "2"
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

    monkeypatch.setattr(rest_call, "parse_strict", parsed)

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
