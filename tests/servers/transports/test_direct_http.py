"""What a server may do to an HTTP client in mid-call: the lean client and the SDK's, side by side.

Every test runs over both. They need not use the same words, but must agree on what became of the
call, and neither may ever send one twice.
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
from tests.support.upstream_calls import SOON, target, through_the_sdk, until
from tests.support.upstreams.scripted import (
    EVENTS,
    GOOD,
    JSON,
    Asked,
    Script,
    Scripted,
    head,
    whole,
)

pytestmark = pytest.mark.django_db(transaction=True)
FIT = [{"type": "text", "text": "done"}]
MIB = 1024 * 1024


class Trial:
    """A server by a script, and calls to it. `run` gives what became of each."""

    def __init__(self, client: str, era: str = "modern") -> None:
        self.client = client
        listener = socket.create_server(("127.0.0.1", 0))
        self.server = make_server(url=f"http://127.0.0.1:{listener.getsockname()[1]}/mcp")
        self.upstream = Scripted(listener, self._answer, era=era)
        self._scripts: list[Script] = []

    async def _answer(self, asked: Asked) -> bool | None:
        return await self._scripts[min(len(self.upstream.calls), len(self._scripts)) - 1](asked)

    def run(self, *scripts: Script, within: float = SOON) -> list[CallOutcome]:
        """Call once for each script, one after another."""
        self._scripts = list(scripts)

        async def scenario() -> list[CallOutcome]:
            async with asyncio.timeout(40), self.upstream.serving(), upstream_calls.call_pool():
                return [await self._call(within) for _ in scripts]

        with self.way():
            return asyncio.run(scenario())

    def way(self) -> AbstractContextManager[None]:
        return through_the_sdk() if self.client == "sdk" else nullcontext()

    async def _call(self, within: float) -> CallOutcome:
        return await upstream_calls.call(target(self.server), "ping", {}, timeout=within)


async def good(asked: Asked) -> bool:
    await asked.write(whole(asked.result()))
    return True


def says(raw: Any, *, closes: bool = True) -> Script:
    """A script that writes bytes, or those that a function makes of the request."""

    async def script(asked: Asked) -> bool:
        await asked.write(raw(asked) if callable(raw) else raw)
        return not closes

    return script


@pytest.fixture(params=["lean", "sdk"])
def trial(request, transactional_db):
    return Trial(request.param)


@pytest.fixture(params=["lean", "sdk"])
def older(request, transactional_db):
    return Trial(request.param, "legacy")


def chunked(*chunks: bytes) -> bytes:
    parts = [b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks]
    return b"".join([*parts, b"0\r\n\r\n"])


# --- Well-formed, if unusual ----------------------------------------------------------------------

UNUSUAL = {
    "HTTP/1.0, ended by the connection": lambda a: head("200 OK", JSON, version="1.0") + a.result(),
    "HTTP/1.0 with a length": lambda a: whole(a.result(), version="1.0"),
    "HTTP/1.1, ended by the connection": lambda a: head("200 OK", JSON) + a.result(),
    "100 Continue first": lambda a: head("100 Continue") + whole(a.result()),
    "several 1xx first": lambda a: head("103 Early", "Link: <x>") * 3 + whole(a.result()),
    "chunks": lambda a: (
        head("200 OK", JSON, "Transfer-Encoding: chunked") + chunked(a.result()[:7], a.result()[7:])
    ),
    "chunks with extensions": lambda a: (
        head("200 OK", JSON, "Transfer-Encoding: chunked")
        + b"%x;a=b\r\n%b\r\n0\r\nTrailer: x\r\n\r\n" % (len(a.result()), a.result())
    ),
    "gzip": lambda a: whole(gzip.compress(a.result()), "Content-Encoding: gzip"),
    "deflate": lambda a: whole(zlib.compress(a.result()), "Content-Encoding: deflate"),
    "GZIP in capitals": lambda a: whole(gzip.compress(a.result()), "content-encoding: GZIP"),
    "a kind with parameters": lambda a: whole(
        a.result(), "Content-Type: Application/JSON; charset=utf-8"
    ),
    "the id as a text": lambda a: whole(a.result(id=str(a.body["id"]))),
    "events": lambda a: head("200 OK", EVENTS) + b"data: " + a.result() + b"\n\n",
    "events with comments and other names": lambda a: (
        head("200 OK", EVENTS)
        + b": hello\n\nevent: other\ndata: {}\n\nretry: 5\n\nevent: message\r\ndata: "
        + a.result()
        + b"\r\n\r\n"
    ),
    "an event of several lines": lambda a: (
        head("200 OK", EVENTS)
        + b'data: {"jsonrpc": "2.0",\ndata: '
        + a.result()[1 + len('"jsonrpc": "2.0",') :]
        + b"\n\n"
    ),
    "gzipped events": lambda a: whole(
        gzip.compress(b"data: " + a.result() + b"\n\n"), EVENTS, "Content-Encoding: gzip"
    ),
}


def test_what_is_unusual_and_well_formed_is_read(trial):
    made = [says(answer) for answer in UNUSUAL.values()]
    found = dict(zip(UNUSUAL, trial.run(*made), strict=True))
    assert {what: outcome.state for what, outcome in found.items()} == dict.fromkeys(
        UNUSUAL, "succeeded"
    )
    assert all(outcome.content == FIT for outcome in found.values())
    assert len(trial.upstream.calls) == len(UNUSUAL)


# --- Answers that are lost or garbled -------------------------------------------------------------

CHUNKS = ("200 OK", JSON, "Transfer-Encoding: chunked")
LOST = {
    "closed at once": b"",
    "closed in the head": b"HTTP/1.1 200 OK\r\nContent-Ty",
    "closed after the head": head("200 OK", JSON, "Content-Length: 100"),
    "closed in the body": lambda a: whole(a.result())[:-5],
    "closed in a chunk": lambda a: head(*CHUNKS) + b"%x\r\n%b" % (500, a.result()),
    "closed before the last chunk": lambda a: (
        head(*CHUNKS) + chunked(a.result()).removesuffix(b"0\r\n\r\n")
    ),
    "a chunk of no size": lambda a: head(*CHUNKS) + b"zz\r\n" + a.result() + b"\r\n0\r\n\r\n",
    "a chunk with a sign": lambda a: head(*CHUNKS) + b"-5\r\n" + a.result() + b"\r\n0\r\n\r\n",
    "more than the chunk's size": lambda a: (
        head(*CHUNKS) + b"5\r\n" + a.result() + b"\r\n0\r\n\r\n"
    ),
    "garbage for gzip": lambda a: whole(b"\0" * 40, "Content-Encoding: gzip"),
    "an encoding nobody asked for": lambda a: whole(a.result(), "Content-Encoding: br"),
    "events that end without an answer": head("200 OK", EVENTS) + b": nothing\n\n",
    "another protocol": head("101 Switching Protocols", "Upgrade: x", "Connection: Upgrade"),
    "headers without end": head("200 OK", *(f"X-{n}: {'y' * 90}" for n in range(2000)))[:-2],
    "one endless header": b"HTTP/1.1 200 OK\r\nX: " + b"y" * 300_000,
    "1xx without end": head("103 Early", "Link: <x>") * 8000,
}


def test_an_answer_that_is_lost_leaves_the_outcome_unknown_and_nothing_is_sent_again(trial):
    both = [script for raw in LOST.values() for script in (says(raw), good)]
    outcomes = trial.run(*both)
    lost = dict(zip(LOST, outcomes[::2], strict=True))
    assert {what: end.state for what, end in lost.items()} == dict.fromkeys(LOST, "unknown")
    said = "Whether the tool ran is not known."
    assert all(end.message.endswith(said) and end.content is None for end in lost.values())
    assert {end.state for end in outcomes[1::2]} == {"succeeded"}
    assert len(trial.upstream.calls) == len(both)


def test_a_reset_leaves_the_outcome_unknown(trial):
    async def reset(asked: Asked) -> bool:
        asked.writer.transport.abort()
        return False

    lost, after = trial.run(reset, good)
    assert (lost.state, after.state) == ("unknown", "succeeded"), lost
    assert len(trial.upstream.calls) == 2


TAKEN = {
    "a web page": whole(b"<html>secret body</html>", "Content-Type: text/html"),
    "a kind that is not MCP": whole(b"secret body", "Content-Type: text/plain"),
    "no content": head("204 No Content"),
    "accepted, and no more": whole(b"", status="202 Accepted"),
    "created": whole(b"{}", "Content-Type: text/plain", status="201 Created"),
    "see there": whole(b"", "Location: /done", status="303 See Other"),
    "see elsewhere": whole(b"", "Location: http://192.0.2.1/", status="303 See Other"),
    "see, and not where": whole(b"", "Content-Type: text/plain", status="303 See Other"),
}


def test_what_a_server_took_and_did_not_answer_properly_is_unknown_and_nothing_is_sent_again(trial):
    found = dict(zip(TAKEN, trial.run(*map(says, TAKEN.values())), strict=True))
    assert {what: end.state for what, end in found.items()} == dict.fromkeys(TAKEN, "unknown")
    told = "".join(end.message for end in found.values())
    assert "secret body" not in told
    assert "The server said" not in told
    assert len(trial.upstream.calls) == len(TAKEN)


INVALID = {
    "another id": lambda a: whole(a.result(id=a.body["id"] + 1)),
    "no id": lambda a: whole(b'{"jsonrpc": "2.0", "result": %b}' % GOOD.encode()),
    "a list of two answers": lambda a: whole(b"[%b, %b]" % (a.result(), a.result())),
    "two answers in a body": lambda a: whole(a.result() + a.result()),
    "gzip that turns to garbage": lambda a: whole(
        gzip.compress(a.result())[:12] + b"\xff" * 60, "Content-Encoding: gzip"
    ),
    "half of gzip": lambda a: whole(gzip.compress(a.result())[:-20], "Content-Encoding: gzip"),
    "an empty body": lambda a: whole(b""),
}


def test_an_answer_that_is_none_fails_and_says_that_the_tool_ran(trial):
    found = dict(zip(INVALID, trial.run(*map(says, INVALID.values())), strict=True))
    assert {what: (end.state, end.code) for what, end in found.items()} == dict.fromkeys(
        INVALID, ("failed", "result_invalid")
    )


@pytest.mark.parametrize("kind", [JSON, EVENTS])
def test_a_bomb_is_cut_at_the_cap(trial, kind, settings):
    settings.MAX_MESSAGE_BYTES = settings.MAX_RESULT_BYTES = MIB
    bomb = gzip.compress(b"data: " + b"0" * (64 * MIB), 9)
    assert len(bomb) < MIB / 8
    zipped = says(whole(bomb, kind, "Content-Encoding: gzip"))
    deflated = says(whole(zlib.compress(b"0" * (64 * MIB)), kind, "Content-Encoding: deflate"))
    outcomes = trial.run(zipped, deflated, good)
    assert [end.code for end in outcomes] == ["result_too_large", "result_too_large", ""]


# --- Two answers to one request -------------------------------------------------------------------


def test_the_second_answer_to_a_request_is_nobodys(transactional_db):
    """In the same stroke, and in an event stream. httpx2 would give the former to the next call."""
    trial = Trial("lean")

    def forged(asked: Asked) -> bytes:
        return whole(asked.result('{"content": []}', id=asked.body["id"] + 1))

    first, second, third = trial.run(
        says(lambda a: whole(a.result()) + forged(a), closes=False),
        says(
            lambda a: (
                head("200 OK", EVENTS)
                + b"data: %b\n\ndata: %b\n\n" % (a.result(), a.result('{"content": []}'))
            )
        ),
        good,
    )
    assert [end.content for end in (first, second, third)] == [FIT, FIT, FIT], third


def test_an_answer_that_comes_before_it_is_asked_for_is_nobodys(trial):
    """Some milliseconds after the first answer, when the connection is idle."""

    async def twice(asked: Asked) -> bool:
        await asked.write(whole(asked.result()))

        async def later() -> None:
            await asked.write(whole(asked.result('{"content": []}', id=asked.body["id"] + 1)))
            sent.set()

        asyncio.get_running_loop().call_later(
            0.05, lambda: tasks.append(asyncio.ensure_future(later()))
        )
        return True

    async def scenario() -> list[Any]:
        async with asyncio.timeout(40), trial.upstream.serving(), upstream_calls.call_pool():
            first = await trial._call(SOON)
            await sent.wait()
            for _ in range(5):  # so that the loop reads it
                await asyncio.sleep(0)
            return [first, await trial._call(SOON)]

    sent, tasks = asyncio.Event(), list[Any]()
    trial._scripts = [twice, good]
    if trial.client == "sdk":
        with through_the_sdk():
            outcomes = asyncio.run(scenario())
    else:
        outcomes = asyncio.run(scenario())
    assert [end.content for end in outcomes] == [FIT, FIT]
    assert len(trial.upstream.calls) == 2


# --- Redirects ------------------------------------------------------------------------------------


def redirect(to: str, status: str = "307 There") -> Script:
    return says(whole(b"", f"Location: {to}", status=status), closes=False)


def test_a_redirect_within_the_origin_is_followed_and_the_tool_runs_once(trial):
    before, after = trial.run(good, redirect("/mcp"), good)[1:]
    assert (before.state, after.state) == ("succeeded", "succeeded")
    # The redirected one is asked for twice, or thrice where the SDK has to take it up.
    assert 4 <= len(trial.upstream.calls) <= 5


@pytest.mark.parametrize("status", ["301 X", "302 X"])
def test_a_redirect_that_does_not_say_to_ask_again_is_refused_and_the_tool_not_called_twice(
    trial, status
):
    refused, after = trial.run(redirect("/mcp", status), good)
    assert (refused.state, refused.code) == ("failed", "redirect")
    assert after.state == "succeeded"
    assert len(trial.upstream.calls) == 2


@pytest.mark.parametrize("status", ["301 X", "302 X", "307 X", "308 X"])
def test_a_redirect_to_another_origin_is_refused_and_nobody_is_reached_there(trial, status):
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(0.05)
        away = f"http://127.0.0.1:{other.getsockname()[1]}/mcp"
        (refused,) = trial.run(redirect(away, status))
        assert (refused.state, refused.code) == ("failed", "redirect")
        with pytest.raises(TimeoutError):
            other.accept()


@pytest.mark.parametrize(
    "to", ["http://169.254.169.254/latest", "file:///etc/passwd", "http://[::bad/"]
)
def test_a_redirect_to_what_must_not_be_reached_is_refused(trial, to):
    (refused,) = trial.run(redirect(to))
    assert (refused.state, refused.code) == ("failed", "redirect")


def test_redirects_without_end_are_given_up(trial):
    (given_up,) = trial.run(redirect("/mcp"))
    assert (given_up.state, given_up.code) == ("failed", "redirect")
    assert len(trial.upstream.calls) <= 6


# --- Streams that break off -----------------------------------------------------------------------


def breaks(event: bytes = b"id: 7\nretry: 1\ndata:\n\n") -> Script:
    return says(head("200 OK", EVENTS) + event)


def test_a_stream_of_the_older_era_is_taken_up_where_it_broke(older):
    async def rest(asked: Asked) -> bool:
        (call,) = older.upstream.calls
        await asked.write(head("200 OK", EVENTS) + b"data: " + call.result() + b"\n\n")
        return False

    async def resumed(asked: Asked) -> bool:
        if asked.headers.get("last-event-id") != "7":
            await asked.write(whole(b"", status="405 No"))
            return True
        assert asked.headers["mcp-session-id"] == "s1"
        return await rest(asked)

    older.upstream.streams = resumed
    (outcome,) = older.run(breaks())
    assert (outcome.state, outcome.content) == ("succeeded", FIT)
    assert len(older.upstream.calls) == 1


def test_a_stream_that_nobody_knows_any_more_leaves_the_outcome_unknown(older):
    lost, after = older.run(breaks(), good)
    assert (lost.state, after.state) == ("unknown", "succeeded"), lost
    assert len(older.upstream.calls) == 2


def test_a_stream_of_the_newer_era_is_not_taken_up_again(trial):
    lost, after = trial.run(breaks(), good)
    assert (lost.state, after.state) == ("unknown", "succeeded"), lost
    again = [asked for asked in trial.upstream.others if "last-event-id" in asked.headers]
    assert trial.client == "sdk" or not again  # the SDK tries, in vain


# --- A server that asks back ----------------------------------------------------------------------

BACK = {
    "sampling/createMessage": {"messages": [], "maxTokens": 1},
    "elicitation/create": {
        "message": "Your password?",
        "requestedSchema": {"type": "object", "properties": {}},
    },
    "roots/list": {},
    "nonsense/asked": {},
    "ping": {},
}


def test_a_server_that_asks_back_is_told_no_and_its_answer_is_heard(older):
    async def asks(asked: Asked) -> bool:
        await asked.write(head("200 OK", EVENTS))
        for number, (method, params) in enumerate(BACK.items()):
            message = {"jsonrpc": "2.0", "id": f"back {number}", "method": method, "params": params}
            await asked.write(b"data: " + json.dumps(message).encode() + b"\n\n")
        await until(lambda: len(replies()) == len(BACK), "all were answered")
        await asked.write(b"data: " + asked.result() + b"\n\n")
        return False

    def replies() -> dict[str, Any]:
        posted = [asked.body for asked in older.upstream.others if "method" not in asked.body]
        return {body["id"]: body for body in posted if "id" in body}

    (outcome,) = older.run(asks)
    assert (outcome.state, outcome.content) == ("succeeded", FIT)
    told = [replies()[f"back {number}"] for number in range(len(BACK))]
    assert all("error" in each and "result" not in each for each in told[:-1])
    assert told[-1]["result"] == {}
    assert len(older.upstream.calls) == 1


def test_a_server_of_the_newer_era_is_not_answered_when_it_asks_back(trial):
    asks = b'data: {"jsonrpc": "2.0", "id": 1, "method": "sampling/createMessage"}\n\n'
    (outcome,) = trial.run(
        says(lambda a: head("200 OK", EVENTS) + asks + b"data: " + a.result() + b"\n\n")
    )
    assert outcome.content == FIT
    assert not [asked for asked in trial.upstream.others if "result" in asked.body]


# --- Calls that are given up ----------------------------------------------------------------------


class Deaf:
    """A server of the older era that answers no call, and takes no word of one given up."""

    def __init__(self, client: str = "lean") -> None:
        self.trial = Trial(client, "legacy")
        self.trial._scripts = [self.silent]
        self.trial.upstream.notices = self.never
        self.hung_up = 0

    async def silent(self, asked: Asked) -> bool:
        await asked.hung_up()
        return False

    async def never(self, asked: Asked) -> bool:
        await asked.hung_up()
        self.hung_up += 1
        return False

    @property
    def told(self) -> int:
        posted = [asked.body.get("method") for asked in self.trial.upstream.others]
        return posted.count("notifications/cancelled")

    async def give_up(self, count: int) -> None:
        """Make so many calls at once and cancel them when the server has them."""
        before = len(self.trial.upstream.calls)
        calls = [asyncio.create_task(self.trial._call(SOON)) for _ in range(count)]
        await until(lambda: len(self.trial.upstream.calls) == before + count, "all were sent")
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def run(self, scenario: Any) -> None:
        async def in_time() -> None:
            async with (
                asyncio.timeout(40),
                self.trial.upstream.serving(),
                upstream_calls.call_pool(),
            ):
                await scenario()

        asyncio.run(in_time())


@pytest.mark.parametrize("client", ["lean", "sdk"])
def test_a_server_that_takes_no_word_of_a_call_given_up_is_hung_up_on(monkeypatch, client):
    monkeypatch.setattr(upstream_http, "POST_TIMEOUT", 0.2)
    deaf = Deaf(client)

    async def scenario() -> None:
        await deaf.give_up(3)
        await until(lambda: (deaf.told, deaf.hung_up) == (3, 3), "nothing is left of the three")

    deaf.run(scenario)


@pytest.mark.parametrize("client", ["lean", "sdk"])
def test_a_server_that_takes_no_word_of_calls_given_up_still_gets_the_next(monkeypatch, client):
    monkeypatch.setattr(upstream_http, "MAX_CANCELS", 2)
    deaf = Deaf(client)

    async def scenario() -> None:
        await deaf.give_up(3)
        await until(lambda: deaf.told == 2, "two are told")
        deaf.trial._scripts = [good]
        outcome = await deaf.trial._call(SOON)
        assert (outcome.state, outcome.content) == ("succeeded", FIT)
        assert (deaf.told, deaf.hung_up) == (2, 0)

    deaf.run(scenario)


def test_calls_given_up_are_told_a_few_at_a_time_and_leave_room_for_what_a_server_asks(monkeypatch):
    monkeypatch.setattr(upstream_http, "MAX_CANCELS", 3)
    monkeypatch.setattr(direct_http, "MAX_ASKED_BACK", 2)
    deaf = Deaf()

    async def asks(asked: Asked) -> bool:
        await asked.write(head("200 OK", EVENTS))
        await asked.write(b'data: {"jsonrpc": "2.0", "id": "back", "method": "ping"}\n\n')
        await asked.write(b"data: " + asked.result() + b"\n\n")
        return False

    async def scenario() -> None:
        await deaf.give_up(8)
        await until(lambda: deaf.told == 3, "three are told")
        await deaf.give_up(2)
        deaf.trial._scripts = [asks]
        outcome = await deaf.trial._call(SOON)
        assert (outcome.state, outcome.content) == ("succeeded", FIT)
        assert (deaf.told, deaf.hung_up) == (3, 0)

    deaf.run(scenario)
