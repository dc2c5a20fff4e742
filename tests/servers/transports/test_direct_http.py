"""HTTP failures during a call, with the direct caller and with the SDK's client.

Every test runs with both. Their messages may differ, but they must agree on the outcome of the
call, and neither may ever send a call twice.
"""

import asyncio
import gzip
import json
import socket
import zlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from servers.connections import calls as upstream_calls
from servers.connections.calls import CallOutcome
from servers.transports import direct_http
from servers.transports import http as upstream_http
from tests.support.factories import make_server
from tests.support.upstream_calls import (
    SHORT_TIMEOUT,
    call_target,
    wait_until,
    without_direct_caller,
)
from tests.support.upstreams.scripted import (
    DONE_RESULT,
    EVENT_STREAM,
    JSON,
    ReceivedRequest,
    Script,
    ScriptedServer,
    full_response,
    response_head,
)
from tests.support.waiting import scaled

pytestmark = pytest.mark.django_db(transaction=True)
DONE = [{"type": "text", "text": "done"}]
MIB = 1024 * 1024


class Trial:
    """A scripted server and calls to it. `run` returns the outcome of each call."""

    def __init__(self, client: str, era: str = "modern") -> None:
        self.client = client
        listener = socket.create_server(("127.0.0.1", 0))
        self.server = make_server(url=f"http://127.0.0.1:{listener.getsockname()[1]}/mcp")
        self.upstream = ScriptedServer(listener, self._answer, era=era)
        self._scripts: list[Script] = []

    async def _answer(self, asked: ReceivedRequest) -> bool | None:
        return await self._scripts[min(len(self.upstream.calls), len(self._scripts)) - 1](asked)

    def run(self, *scripts: Script, within: float = SHORT_TIMEOUT) -> list[CallOutcome]:
        """Call once for each script, one after another."""
        self._scripts = list(scripts)

        async def scenario() -> list[CallOutcome]:
            async with (
                asyncio.timeout(scaled(40)),
                self.upstream.serving(),
                upstream_calls.call_pool(),
            ):
                return [await self._call(within) for _ in scripts]

        with self.client_in_use():
            return asyncio.run(scenario())

    def client_in_use(self) -> AbstractContextManager[None]:
        return without_direct_caller() if self.client == "sdk" else nullcontext()

    async def _call(self, within: float) -> CallOutcome:
        return await upstream_calls.call(call_target(self.server), "ping", {}, timeout=within)


async def good(asked: ReceivedRequest) -> bool:
    await asked.write(full_response(asked.result()))
    return True


def says(raw: Any, *, closes: bool = True) -> Script:
    """Return a script that writes bytes, or the result of a function of the request."""

    async def script(asked: ReceivedRequest) -> bool:
        await asked.write(raw(asked) if callable(raw) else raw)
        return not closes

    return script


@pytest.fixture(params=["direct", "sdk"])
def trial(request, transactional_db):
    return Trial(request.param)


@pytest.fixture(params=["direct", "sdk"])
def older(request, transactional_db):
    return Trial(request.param, "legacy")


def chunked(*chunks: bytes) -> bytes:
    parts = [b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks]
    return b"".join([*parts, b"0\r\n\r\n"])


# --- Unusual, but valid ---------------------------------------------------------------------------

UNUSUAL = {
    "HTTP/1.0, ended by the connection": lambda a: (
        response_head("200 OK", JSON, version="1.0") + a.result()
    ),
    "HTTP/1.0 with a length": lambda a: full_response(a.result(), version="1.0"),
    "HTTP/1.1, ended by the connection": lambda a: response_head("200 OK", JSON) + a.result(),
    "100 Continue first": lambda a: response_head("100 Continue") + full_response(a.result()),
    "several 1xx first": lambda a: (
        response_head("103 Early", "Link: <x>") * 3 + full_response(a.result())
    ),
    "chunks": lambda a: (
        response_head("200 OK", JSON, "Transfer-Encoding: chunked")
        + chunked(a.result()[:7], a.result()[7:])
    ),
    "chunks with extensions": lambda a: (
        response_head("200 OK", JSON, "Transfer-Encoding: chunked")
        + b"%x;a=b\r\n%b\r\n0\r\nTrailer: x\r\n\r\n" % (len(a.result()), a.result())
    ),
    "gzip": lambda a: full_response(gzip.compress(a.result()), "Content-Encoding: gzip"),
    "deflate": lambda a: full_response(zlib.compress(a.result()), "Content-Encoding: deflate"),
    "GZIP in capitals": lambda a: full_response(
        gzip.compress(a.result()), "content-encoding: GZIP"
    ),
    "a content type with parameters": lambda a: full_response(
        a.result(), "Content-Type: Application/JSON; charset=utf-8"
    ),
    "the id as a string": lambda a: full_response(a.result(id=str(a.body["id"]))),
    "events": lambda a: response_head("200 OK", EVENT_STREAM) + b"data: " + a.result() + b"\n\n",
    "events with comments and other names": lambda a: (
        response_head("200 OK", EVENT_STREAM)
        + b": hello\n\nevent: other\ndata: {}\n\nretry: 5\n\nevent: message\r\ndata: "
        + a.result()
        + b"\r\n\r\n"
    ),
    "an event of several lines": lambda a: (
        response_head("200 OK", EVENT_STREAM)
        + b'data: {"jsonrpc": "2.0",\ndata: '
        + a.result()[1 + len('"jsonrpc": "2.0",') :]
        + b"\n\n"
    ),
    "gzipped events": lambda a: full_response(
        gzip.compress(b"data: " + a.result() + b"\n\n"), EVENT_STREAM, "Content-Encoding: gzip"
    ),
}


def test_unusual_but_valid_responses_are_parsed(trial):
    scripts = [says(response) for response in UNUSUAL.values()]
    outcomes = dict(zip(UNUSUAL, trial.run(*scripts), strict=True))
    assert {what: outcome.state for what, outcome in outcomes.items()} == dict.fromkeys(
        UNUSUAL, "succeeded"
    )
    assert all(outcome.content == DONE for outcome in outcomes.values())
    assert len(trial.upstream.calls) == len(UNUSUAL)


# --- Lost and corrupted responses -----------------------------------------------------------------

CHUNKS = ("200 OK", JSON, "Transfer-Encoding: chunked")
LOST = {
    "closed at once": b"",
    "closed in the head": b"HTTP/1.1 200 OK\r\nContent-Ty",
    "closed after the head": response_head("200 OK", JSON, "Content-Length: 100"),
    "closed in the body": lambda a: full_response(a.result())[:-5],
    "closed in a chunk": lambda a: response_head(*CHUNKS) + b"%x\r\n%b" % (500, a.result()),
    "closed before the last chunk": lambda a: (
        response_head(*CHUNKS) + chunked(a.result()).removesuffix(b"0\r\n\r\n")
    ),
    "a chunk without a valid size": lambda a: (
        response_head(*CHUNKS) + b"zz\r\n" + a.result() + b"\r\n0\r\n\r\n"
    ),
    "a chunk with a sign": lambda a: (
        response_head(*CHUNKS) + b"-5\r\n" + a.result() + b"\r\n0\r\n\r\n"
    ),
    "more than the chunk's size": lambda a: (
        response_head(*CHUNKS) + b"5\r\n" + a.result() + b"\r\n0\r\n\r\n"
    ),
    "garbage for gzip": lambda a: full_response(b"\0" * 40, "Content-Encoding: gzip"),
    "an encoding that was not requested": lambda a: full_response(
        a.result(), "Content-Encoding: br"
    ),
    "events that end without a response": response_head("200 OK", EVENT_STREAM) + b": nothing\n\n",
    "another protocol": response_head(
        "101 Switching Protocols", "Upgrade: x", "Connection: Upgrade"
    ),
    "headers without end": response_head("200 OK", *(f"X-{n}: {'y' * 90}" for n in range(2000)))[
        :-2
    ],
    "one endless header": b"HTTP/1.1 200 OK\r\nX: " + b"y" * 300_000,
    "1xx without end": response_head("103 Early", "Link: <x>") * 8000,
}


def test_a_lost_response_leaves_the_outcome_unknown_and_nothing_is_sent_again(trial):
    both = [script for raw in LOST.values() for script in (says(raw), good)]
    outcomes = trial.run(*both)
    lost = dict(zip(LOST, outcomes[::2], strict=True))
    assert {what: end.state for what, end in lost.items()} == dict.fromkeys(LOST, "unknown")
    unknown = "Whether the tool ran is not known."
    assert all(end.message.endswith(unknown) and end.content is None for end in lost.values())
    assert {end.state for end in outcomes[1::2]} == {"succeeded"}
    assert len(trial.upstream.calls) == len(both)


def test_a_reset_leaves_the_outcome_unknown(trial):
    async def reset(asked: ReceivedRequest) -> bool:
        asked.writer.transport.abort()
        return False

    lost, after = trial.run(reset, good)
    assert (lost.state, after.state) == ("unknown", "succeeded"), lost
    assert len(trial.upstream.calls) == 2


ACCEPTED = {
    "a web page": full_response(b"<html>secret body</html>", "Content-Type: text/html"),
    "a content type that is not MCP": full_response(b"secret body", "Content-Type: text/plain"),
    "no content": response_head("204 No Content"),
    "accepted, without content": full_response(b"", status="202 Accepted"),
    "created": full_response(b"{}", "Content-Type: text/plain", status="201 Created"),
    "see other": full_response(b"", "Location: /done", status="303 See Other"),
    "see other, another origin": full_response(
        b"", "Location: http://192.0.2.1/", status="303 See Other"
    ),
    "see other, without a location": full_response(
        b"", "Content-Type: text/plain", status="303 See Other"
    ),
}


def test_an_accepted_call_without_a_valid_response_is_unknown_and_nothing_is_sent_again(trial):
    ends = dict(zip(ACCEPTED, trial.run(*map(says, ACCEPTED.values())), strict=True))
    assert {what: end.state for what, end in ends.items()} == dict.fromkeys(ACCEPTED, "unknown")
    messages = "".join(end.message for end in ends.values())
    assert "secret body" not in messages
    assert "The server returned an error" not in messages
    assert len(trial.upstream.calls) == len(ACCEPTED)


INVALID = {
    "another id": lambda a: full_response(a.result(id=a.body["id"] + 1)),
    "no id": lambda a: full_response(b'{"jsonrpc": "2.0", "result": %b}' % DONE_RESULT.encode()),
    "a list of two responses": lambda a: full_response(b"[%b, %b]" % (a.result(), a.result())),
    "two responses in a body": lambda a: full_response(a.result() + a.result()),
    "corrupted gzip": lambda a: full_response(
        gzip.compress(a.result())[:12] + b"\xff" * 60, "Content-Encoding: gzip"
    ),
    "truncated gzip": lambda a: full_response(
        gzip.compress(a.result())[:-20], "Content-Encoding: gzip"
    ),
    "an empty body": lambda a: full_response(b""),
}


def test_an_invalid_response_fails_with_a_message_that_the_tool_ran(trial):
    ends = dict(zip(INVALID, trial.run(*map(says, INVALID.values())), strict=True))
    assert {what: (end.state, end.code) for what, end in ends.items()} == dict.fromkeys(
        INVALID, ("failed", "result_invalid")
    )


@pytest.mark.parametrize("kind", [JSON, EVENT_STREAM])
def test_a_compression_bomb_is_stopped_at_the_size_limit(trial, kind, settings):
    settings.MAX_MESSAGE_BYTES = settings.MAX_RESULT_BYTES = MIB
    bomb = gzip.compress(b"data: " + b"0" * (64 * MIB), 9)
    assert len(bomb) < MIB / 8
    zipped = says(full_response(bomb, kind, "Content-Encoding: gzip"))
    deflated = says(
        full_response(zlib.compress(b"0" * (64 * MIB)), kind, "Content-Encoding: deflate")
    )
    outcomes = trial.run(zipped, deflated, good)
    assert [end.code for end in outcomes] == ["result_too_large", "result_too_large", ""]


# --- Two responses to one request -----------------------------------------------------------------


def test_a_second_response_to_a_request_is_dropped(transactional_db):
    """In the same packet, and in an event stream. httpx2 would give the former to the next call."""
    trial = Trial("direct")

    def forged(asked: ReceivedRequest) -> bytes:
        return full_response(asked.result('{"content": []}', id=asked.body["id"] + 1))

    first, second, third = trial.run(
        says(lambda a: full_response(a.result()) + forged(a), closes=False),
        says(
            lambda a: (
                response_head("200 OK", EVENT_STREAM)
                + b"data: %b\n\ndata: %b\n\n" % (a.result(), a.result('{"content": []}'))
            )
        ),
        good,
    )
    assert [end.content for end in (first, second, third)] == [DONE, DONE, DONE], third


def test_an_unsolicited_response_on_an_idle_connection_is_dropped(trial):
    """It arrives some milliseconds after the first response."""

    async def twice(asked: ReceivedRequest) -> bool:
        await asked.write(full_response(asked.result()))

        async def later() -> None:
            await asked.write(
                full_response(asked.result('{"content": []}', id=asked.body["id"] + 1))
            )
            sent.set()

        asyncio.get_running_loop().call_later(
            0.05, lambda: tasks.append(asyncio.ensure_future(later()))
        )
        return True

    async def scenario() -> list[Any]:
        async with (
            asyncio.timeout(scaled(40)),
            trial.upstream.serving(),
            upstream_calls.call_pool(),
        ):
            first = await trial._call(SHORT_TIMEOUT)
            await sent.wait()
            for _ in range(5):  # let the loop read it
                await asyncio.sleep(0)
            return [first, await trial._call(SHORT_TIMEOUT)]

    sent, tasks = asyncio.Event(), list[Any]()
    trial._scripts = [twice, good]
    if trial.client == "sdk":
        with without_direct_caller():
            outcomes = asyncio.run(scenario())
    else:
        outcomes = asyncio.run(scenario())
    assert [end.content for end in outcomes] == [DONE, DONE]
    assert len(trial.upstream.calls) == 2


# --- Redirects ------------------------------------------------------------------------------------


def redirect(to: str, status: str = "307 There") -> Script:
    return says(full_response(b"", f"Location: {to}", status=status), closes=False)


def test_a_redirect_within_the_origin_is_followed_and_the_tool_runs_once(trial):
    redirected, after = trial.run(good, redirect("/mcp"), good)[1:]
    assert (redirected.state, after.state) == ("succeeded", "succeeded")
    # The redirected call is sent twice, or three times where the SDK takes over.
    assert 4 <= len(trial.upstream.calls) <= 5


@pytest.mark.parametrize("status", ["301 X", "302 X"])
def test_a_redirect_that_does_not_preserve_the_method_fails_and_the_tool_is_not_called_twice(
    trial, status
):
    rejected, after = trial.run(redirect("/mcp", status), good)
    assert (rejected.state, rejected.code) == ("failed", "redirect")
    assert after.state == "succeeded"
    assert len(trial.upstream.calls) == 2


@pytest.mark.parametrize("status", ["301 X", "302 X", "307 X", "308 X"])
def test_a_redirect_to_another_origin_fails_and_is_not_followed(trial, status):
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(0.05)
        away = f"http://127.0.0.1:{other.getsockname()[1]}/mcp"
        (rejected,) = trial.run(redirect(away, status))
        assert (rejected.state, rejected.code) == ("failed", "redirect")
        with pytest.raises(TimeoutError):
            other.accept()


@pytest.mark.parametrize(
    "to", ["http://169.254.169.254/latest", "file:///etc/passwd", "http://[::bad/"]
)
def test_a_redirect_to_a_blocked_target_fails(trial, to):
    (rejected,) = trial.run(redirect(to))
    assert (rejected.state, rejected.code) == ("failed", "redirect")


def test_endless_redirects_fail(trial):
    (outcome,) = trial.run(redirect("/mcp"))
    assert (outcome.state, outcome.code) == ("failed", "redirect")
    assert len(trial.upstream.calls) <= 6


# --- Streams that end early -----------------------------------------------------------------------


def breaks(event: bytes = b"id: 7\nretry: 1\ndata:\n\n") -> Script:
    return says(response_head("200 OK", EVENT_STREAM) + event)


def test_a_stream_of_the_legacy_protocol_is_resumed(older):
    async def rest(asked: ReceivedRequest) -> bool:
        (call,) = older.upstream.calls
        await asked.write(
            response_head("200 OK", EVENT_STREAM) + b"data: " + call.result() + b"\n\n"
        )
        return False

    async def resumed(asked: ReceivedRequest) -> bool:
        if asked.headers.get("last-event-id") != "7":
            await asked.write(full_response(b"", status="405 No"))
            return True
        assert asked.headers["mcp-session-id"] == "s1"
        return await rest(asked)

    older.upstream.on_get = resumed
    (outcome,) = older.run(breaks())
    assert (outcome.state, outcome.content) == ("succeeded", DONE)
    assert len(older.upstream.calls) == 1


def test_a_stream_that_cannot_be_resumed_leaves_the_outcome_unknown(older):
    lost, after = older.run(breaks(), good)
    assert (lost.state, after.state) == ("unknown", "succeeded"), lost
    assert len(older.upstream.calls) == 2


def test_a_stream_of_the_modern_protocol_is_not_resumed(trial):
    lost, after = trial.run(breaks(), good)
    assert (lost.state, after.state) == ("unknown", "succeeded"), lost
    resumed = [asked for asked in trial.upstream.other_requests if "last-event-id" in asked.headers]
    assert trial.client == "sdk" or not resumed  # the SDK tries, without success


# --- Requests of the server -----------------------------------------------------------------------

SERVER_REQUESTS = {
    "sampling/createMessage": {"messages": [], "maxTokens": 1},
    "elicitation/create": {
        "message": "Your password?",
        "requestedSchema": {"type": "object", "properties": {}},
    },
    "roots/list": {},
    "nonsense/asked": {},
    "ping": {},
}


def test_requests_of_the_server_are_rejected_and_its_response_is_received(older):
    async def asks(asked: ReceivedRequest) -> bool:
        await asked.write(response_head("200 OK", EVENT_STREAM))
        for number, (method, params) in enumerate(SERVER_REQUESTS.items()):
            message = {"jsonrpc": "2.0", "id": f"back {number}", "method": method, "params": params}
            await asked.write(b"data: " + json.dumps(message).encode() + b"\n\n")
        await wait_until(lambda: len(replies()) == len(SERVER_REQUESTS), "all were answered")
        await asked.write(b"data: " + asked.result() + b"\n\n")
        return False

    def replies() -> dict[str, Any]:
        posted = [
            asked.body for asked in older.upstream.other_requests if "method" not in asked.body
        ]
        return {body["id"]: body for body in posted if "id" in body}

    (outcome,) = older.run(asks)
    assert (outcome.state, outcome.content) == ("succeeded", DONE)
    answers = [replies()[f"back {number}"] for number in range(len(SERVER_REQUESTS))]
    assert all("error" in answer and "result" not in answer for answer in answers[:-1])
    assert answers[-1]["result"] == {}
    assert len(older.upstream.calls) == 1


def test_requests_of_a_server_with_the_modern_protocol_are_not_answered(trial):
    request = b'data: {"jsonrpc": "2.0", "id": 1, "method": "sampling/createMessage"}\n\n'
    (outcome,) = trial.run(
        says(
            lambda a: (
                response_head("200 OK", EVENT_STREAM) + request + b"data: " + a.result() + b"\n\n"
            )
        )
    )
    assert outcome.content == DONE
    assert not [asked for asked in trial.upstream.other_requests if "result" in asked.body]


# --- Cancelled calls ------------------------------------------------------------------------------


class Deaf:
    """A server with the legacy protocol that answers neither calls nor cancel notifications."""

    def __init__(self, client: str = "direct") -> None:
        self.trial = Trial(client, "legacy")
        self.trial._scripts = [self.silent]
        self.trial.upstream.on_cancelled = self.never
        self.hung_up = 0

    async def silent(self, asked: ReceivedRequest) -> bool:
        await asked.wait_for_disconnect()
        return False

    async def never(self, asked: ReceivedRequest) -> bool:
        await asked.wait_for_disconnect()
        self.hung_up += 1
        return False

    @property
    def cancels(self) -> int:
        posted = [asked.body.get("method") for asked in self.trial.upstream.other_requests]
        return posted.count("notifications/cancelled")

    async def cancel_calls(self, count: int) -> None:
        """Make `count` concurrent calls and cancel them when the server has received them."""
        before = len(self.trial.upstream.calls)
        calls = [asyncio.create_task(self.trial._call(SHORT_TIMEOUT)) for _ in range(count)]
        await wait_until(lambda: len(self.trial.upstream.calls) == before + count, "all were sent")
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def run(self, scenario: Any) -> None:
        async def in_time() -> None:
            async with (
                asyncio.timeout(scaled(40)),
                self.trial.upstream.serving(),
                upstream_calls.call_pool(),
            ):
                await scenario()

        asyncio.run(in_time())


@pytest.mark.parametrize("client", ["direct", "sdk"])
def test_cancel_notifications_that_are_not_answered_time_out(monkeypatch, client):
    monkeypatch.setattr(upstream_http, "POST_TIMEOUT", 0.2)
    deaf = Deaf(client)

    async def scenario() -> None:
        await deaf.cancel_calls(3)
        await wait_until(
            lambda: (deaf.cancels, deaf.hung_up) == (3, 3), "all three were disconnected"
        )

    deaf.run(scenario)


@pytest.mark.parametrize("client", ["direct", "sdk"])
def test_cancel_notifications_that_are_not_answered_do_not_block_the_next_call(monkeypatch, client):
    monkeypatch.setattr(upstream_http, "MAX_CANCELS", 2)
    deaf = Deaf(client)

    async def scenario() -> None:
        await deaf.cancel_calls(3)
        await wait_until(lambda: deaf.cancels == 2, "two are sent")
        deaf.trial._scripts = [good]
        outcome = await deaf.trial._call(SHORT_TIMEOUT)
        assert (outcome.state, outcome.content) == ("succeeded", DONE)
        assert (deaf.cancels, deaf.hung_up) == (2, 0)

    deaf.run(scenario)


def test_cancel_notifications_are_limited_and_leave_room_for_replies_to_the_server(monkeypatch):
    monkeypatch.setattr(upstream_http, "MAX_CANCELS", 3)
    monkeypatch.setattr(direct_http, "MAX_SERVER_REQUESTS", 2)
    deaf = Deaf()

    async def asks(asked: ReceivedRequest) -> bool:
        await asked.write(response_head("200 OK", EVENT_STREAM))
        await asked.write(b'data: {"jsonrpc": "2.0", "id": "back", "method": "ping"}\n\n')
        await asked.write(b"data: " + asked.result() + b"\n\n")
        return False

    async def scenario() -> None:
        await deaf.cancel_calls(8)
        await wait_until(lambda: deaf.cancels == 3, "three are sent")
        await deaf.cancel_calls(2)
        deaf.trial._scripts = [asks]
        outcome = await deaf.trial._call(SHORT_TIMEOUT)
        assert (outcome.state, outcome.content) == ("succeeded", DONE)
        assert (deaf.cancels, deaf.hung_up) == (3, 0)

    deaf.run(scenario)
