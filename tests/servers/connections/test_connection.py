"""MCP connections: transports, listings, listening and failures."""

import asyncio
import json
import socket
import time
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from django.conf import settings

from servers.connections.connection import Connection, connect, run_session
from servers.connections.sdk_compat import raw_request
from servers.errors import ListingError, UpstreamError
from tests.support.upstreams.healthy import weather
from tests.support.upstreams.many import paginated_server
from tests.support.upstreams.running import http_spec, received_by, running_http, stdio_spec
from tests.support.waiting import scaled

MODERN, LEGACY = "2026-07-28", "2025-11-25"
TOOLS = {"get_forecast", "get_temperature", "list_stations", "report_weather"} | {
    "add_tool",
    "rename_description",
    "remove_tool",
}


def run(coroutine):
    async def in_time():
        async with asyncio.timeout(scaled(100)):
            return await coroutine

    return asyncio.run(in_time())


@asynccontextmanager
async def opened(how, **options):
    """Connect to the weather server over a transport and a protocol version."""
    transport, _, era = how.partition(" ")
    legacy = ("--legacy",) if era == "legacy" else ()
    if transport == "memory":
        async with run_session(
            weather(), mode="legacy" if legacy else "auto", **options
        ) as connection:
            yield connection
    elif transport == "stdio":
        async with connect(stdio_spec("healthy", *legacy), **options) as connection:
            yield connection
    else:
        kind = ("--sse", "0") if transport == "sse" else ()
        with running_http("healthy", *kind, *legacy) as url:
            async with connect(http_spec(url, transport=transport), **options) as connection:
                yield connection


async def failure(spec) -> UpstreamError:
    """Return the error of connecting and listing."""
    try:
        async with connect(spec) as connection:
            await connection.list_tools()
    except UpstreamError as error:
        return error
    raise AssertionError("It did not fail.")


async def listing_failure(server) -> ListingError:
    async with run_session(server) as connection:
        with pytest.raises(ListingError) as caught:
            await connection.list_tools()
    return caught.value


def tools_file(tmp_path, text):
    path = tmp_path / "tools.json"
    path.write_text(text)
    return str(path)


async def call(connection: Connection, tool, **arguments):
    """Call a tool without the SDK's own tools/list before it."""
    params = {"name": tool, "arguments": arguments}
    result: Any = await raw_request(connection._client.session, "tools/call", params)
    return result["content"][0]["text"]


@pytest.fixture(scope="module")
def raw():
    with running_http("raw_http") as url:
        yield url


# --- Transports and listening -----------------------------------------------------------------

WAYS = [
    ("memory modern", MODERN),
    ("memory legacy", LEGACY),
    ("stdio modern", MODERN),
    ("stdio legacy", LEGACY),
    ("http modern", MODERN),
    ("http legacy", LEGACY),
    ("sse modern", MODERN),
]


@pytest.mark.parametrize(("how", "version"), WAYS)
def test_tools_are_listed_raw_in_both_eras_over_every_transport(how, version):
    async def scenario():
        async with opened(how) as connection:
            listing = await connection.list_tools()
        assert connection.protocol_version == version
        assert connection.server_info == {"name": "weather", "version": "1.2.0", "title": "Weather"}
        assert connection.instructions == "Ask for forecasts by city."
        assert {tool["name"] for tool in listing.tools} == TOOLS
        forecast = next(tool for tool in listing.tools if tool["name"] == "get_forecast")
        assert forecast["annotations"]["readOnlyHint"] is True
        assert forecast["outputSchema"]["properties"]["days"] == {
            "title": "Days",
            "type": "integer",
        }
        assert listing.pages == 1

    run(scenario())


@pytest.mark.parametrize("how", [how for how, _ in WAYS])
def test_a_changed_list_reaches_the_callback_in_both_eras_over_every_transport(how):
    async def scenario():
        changed = asyncio.Event()
        async with opened(how, on_list_changed=changed.set) as connection:
            listening = asyncio.create_task(connection.listen())
            for number in range(100):  # changes before the subscription is open are not reported
                await call(connection, "add_tool", name=f"extra_{number}")
                try:
                    await asyncio.wait_for(changed.wait(), 0.2)
                    break
                except TimeoutError:
                    continue
            assert changed.is_set()
            assert not listening.done()
            names = {tool["name"] for tool in (await connection.list_tools()).tools}
            assert "extra_0" in names
            listening.cancel()
            await asyncio.wait({listening})

    run(scenario())


def test_a_callback_that_raises_does_not_affect_the_connection(caplog):
    async def scenario():
        called = asyncio.Event()

        def fail():
            called.set()
            raise RuntimeError("mine")

        async with opened("stdio legacy", on_list_changed=fail) as connection:
            await call(connection, "add_tool", name="extra")
            await called.wait()
            assert len((await connection.list_tools()).tools) == len(TOOLS) + 1

    run(scenario())
    assert "Callback for changed tools failed" in caplog.text


def test_a_lost_subscription_is_renewed_and_counts_as_a_change():
    async def scenario(url):
        changed = asyncio.Event()
        async with connect(http_spec(f"{url}/flaky-listen"), on_list_changed=changed.set) as c:
            listening = asyncio.create_task(c.listen())
            await changed.wait()  # the server sent no notification, but closed the stream once
            assert not listening.done()
            listening.cancel()
            await asyncio.wait({listening})

    with running_http("raw_http") as url:
        run(scenario(url))


def test_listening_to_a_server_without_subscriptions_waits_until_the_connection_closes():
    async def scenario():
        async with connect(stdio_spec("raw_stdio")) as connection:
            listening = asyncio.create_task(connection.listen())
            await connection.list_tools()
            assert not listening.done()
            connection._state.mark_dead()
            with pytest.raises(UpstreamError) as caught:
                await listening
        assert caught.value.code == "closed"

    run(scenario())


def test_listening_ends_when_the_server_is_gone():
    async def scenario():
        with running_http("healthy") as url:
            context = connect(http_spec(url))
            connection = await context.__aenter__()
            listening = asyncio.create_task(connection.listen())
            await connection.list_tools()
        with pytest.raises(UpstreamError) as caught:
            await listening
        assert caught.value.code == "closed"
        assert connection.closed.is_set()
        await context.__aexit__(None, None, None)

    run(scenario())


def test_a_lost_sse_stream_closes_the_connection():
    async def scenario():
        with running_http("healthy", "--sse", "0") as url:
            context = connect(http_spec(url, transport="sse"))
            connection = await context.__aenter__()
            await connection.list_tools()
            assert not connection.closed.is_set()
        await asyncio.wait_for(connection.closed.wait(), scaled(5))
        with pytest.raises(UpstreamError):
            await connection.list_tools()
        await context.__aexit__(None, None, None)

    run(scenario())


def test_a_lost_session_closes_the_connection_and_a_hanging_delete_times_out():
    async def scenario(url):
        async with connect(http_spec(f"{url}/tools?era=legacy&session=forgotten")) as connection:
            with pytest.raises(UpstreamError) as caught:
                await connection.list_tools()
            assert caught.value.code == "closed"
            assert connection.closed.is_set()

    with running_http("raw_http") as url:
        run(scenario(url))


def test_a_get_stream_that_the_server_rejects_does_not_close_the_connection(raw):
    async def scenario():
        async with connect(http_spec(f"{raw}/tools?era=legacy&session=kept")) as connection:
            for _ in range(20):
                await connection.list_tools()
            assert not connection.closed.is_set()

    run(scenario())


def test_a_stream_that_ends_at_once_is_reopened_with_a_delay():
    async def scenario(url):
        async with connect(http_spec(f"{url}/tools?era=legacy&session=eager")) as connection:
            for _ in range(100):
                await connection.list_tools()

    with running_http("raw_http") as url:
        started = time.monotonic()
        run(scenario(url))
        took = time.monotonic() - started
        requests = received_by(url)["requests"]
    assert 1 <= [request["method"] for request in requests].count("GET") <= 2 + took


def test_no_task_is_left_after_the_block():
    async def scenario():
        for how in ("memory modern", "stdio modern", "http legacy", "sse modern"):
            async with opened(how) as connection:
                listening = asyncio.create_task(connection.listen())
                await connection.list_tools()
                listening.cancel()
                await asyncio.wait({listening})
            assert asyncio.all_tasks() == {asyncio.current_task()}, how

    asyncio.run(scenario())


def test_cancelling_while_connecting_is_not_swallowed():
    async def scenario():
        task = asyncio.create_task(failure(stdio_spec("raw_stdio", "--do", "hang")))
        await asyncio.wait({task}, timeout=0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())


def test_an_exception_in_the_block_is_raised_unchanged():
    async def scenario():
        async with opened("stdio modern"):
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        run(scenario())


@pytest.mark.parametrize("transport", ["http", "sse"])
def test_connecting_works_on_uvloop(transport):
    async def scenario(url):
        async with connect(http_spec(url, transport=transport)) as connection:
            return await connection.list_tools()

    kind = ("--sse", "0") if transport == "sse" else ()
    with (
        running_http("healthy", *kind) as url,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        assert len(runner.run(scenario(url)).tools) == len(TOOLS)


# --- Listings ---------------------------------------------------------------------------------


def test_one_malformed_tool_does_not_affect_the_others(tmp_path):
    tools = [{"name": "good", "inputSchema": {"type": "object"}}, 7, None, {"inputSchema": {}}, "x"]
    spec = stdio_spec("raw_stdio", "--tools-file", tools_file(tmp_path, json.dumps(tools)))

    async def scenario():
        async with connect(spec) as connection:
            return await connection.list_tools()

    assert list(run(scenario()).tools) == tools


@pytest.mark.parametrize("era", ["modern", "legacy"])
def test_one_malformed_tool_does_not_affect_the_others_over_http(tmp_path, era):
    tools = [{"name": "good", "inputSchema": {"type": "object"}}, {"name": "bad"}]

    async def scenario(url):
        async with connect(http_spec(f"{url}/tools?era={era}")) as connection:
            return await connection.list_tools()

    path = tools_file(tmp_path, json.dumps(tools))
    with running_http("raw_http", "--tools-file", path) as url:
        assert list(run(scenario(url)).tools) == tools


@pytest.mark.parametrize(
    "text", ['{"tools": {"a": 1}}', '{"tools": null}', "{}", '{"tools": "x"}', "7"]
)
def test_a_result_without_a_list_of_tools_is_a_protocol_error(tmp_path, text):
    spec = stdio_spec("raw_stdio", "--tools-file", tools_file(tmp_path, text))
    assert run(failure(spec)).code == "protocol"


@pytest.mark.parametrize(
    ("cursor", "code"),
    [
        ("same", "cursor_repeated"),
        ("empty", "cursor_repeated"),
        ("cycle", "cursor_loop"),
        ("endless", "page_limit"),
        ("huge", "cursor_invalid"),
    ],
)
def test_invalid_cursors_fail_with_their_own_codes(cursor, code):
    assert run(listing_failure(paginated_server(10, 1, cursor))).code == code


@pytest.mark.parametrize("cursor", ["7", "true", "[]", '{"a": 1}'])
def test_a_cursor_must_be_a_string(tmp_path, cursor):
    text = f'{{"tools": [], "nextCursor": {cursor}}}'
    spec = stdio_spec("raw_stdio", "--tools-file", tools_file(tmp_path, text))
    assert run(failure(spec)).code == "cursor_invalid"


def test_a_null_cursor_ends_the_list(tmp_path):
    path = tools_file(tmp_path, '{"tools": [{"name": "a"}], "nextCursor": null}')

    async def scenario():
        async with connect(stdio_spec("raw_stdio", "--tools-file", path)) as connection:
            return await connection.list_tools()

    assert run(scenario()).pages == 1


def test_ten_thousand_tools_in_a_hundred_pages_are_listed_and_one_more_fails():
    async def scenario():
        async with run_session(paginated_server(10_000, 100)) as connection:
            listing = await connection.list_tools()
        assert (len(listing.tools), listing.pages) == (10_000, 100)
        assert len({tool["name"] for tool in listing.tools}) == 10_000
        assert listing.ttl_ms == 60_000

    run(scenario())
    assert run(listing_failure(paginated_server(10_001, 50))).code == "tool_limit"


def test_one_page_over_the_limit_fails(monkeypatch):
    monkeypatch.setattr(settings, "MAX_PAGES", 3)
    assert run(listing_failure(paginated_server(40, 4))).code == "page_limit"


def test_the_size_limit_applies_to_all_pages_together(monkeypatch):
    monkeypatch.setattr(settings, "MAX_LISTING_BYTES", 5_000)
    error = run(listing_failure(paginated_server(200, 10)))
    assert error.code == "listing_too_large"
    assert "4.883 KiB" in error.message


@pytest.mark.parametrize(
    ("ttl", "expected"),
    [("5000", 5000), ("0", 0), ("1000000000000000000", 10**18)]
    + [(junk, None) for junk in ("-1", '"5"', "true", "1.5", "null", "[]")],
)
def test_a_ttl_that_is_not_a_non_negative_integer_is_ignored(tmp_path, ttl, expected):
    path = tools_file(tmp_path, f'{{"tools": [], "ttlMs": {ttl}}}')

    async def scenario():
        async with connect(stdio_spec("raw_stdio", "--tools-file", path)) as connection:
            return await connection.list_tools()

    assert run(scenario()).ttl_ms == expected


def test_a_server_without_tools_has_an_empty_listing():
    from mcp.server import Server

    async def scenario():
        async with run_session(Server("silent")) as connection:
            return await connection.list_tools()

    assert run(scenario()).tools == ()


@pytest.mark.parametrize("what", ["drip", "drip-sse", "hang"])
def test_a_list_that_never_ends_stops_at_the_deadline(monkeypatch, what):
    monkeypatch.setattr(settings, "SYNC_TIMEOUT", 1)
    with running_http("raw_http") as url:
        error = run(failure(http_spec(f"{url}/list/{what}")))
    assert isinstance(error, ListingError)
    assert error.code == "timeout"
    assert "1 s" in error.message


def test_calls_succeed_while_a_list_hangs(monkeypatch):
    monkeypatch.setattr(settings, "SYNC_TIMEOUT", 1)

    async def scenario(url):
        async with connect(http_spec(f"{url}/list/hang")) as connection:
            listing = asyncio.create_task(connection.list_tools())
            assert await call(connection, "ping") == "pong"
            with pytest.raises(ListingError):
                await listing
            assert await call(connection, "ping") == "pong"

    with running_http("raw_http") as url:
        run(scenario(url))


def test_one_failed_request_does_not_affect_the_others():
    async def scenario(url):
        async with connect(http_spec(f"{url}/list/reset")) as connection:
            for _ in range(3):
                with pytest.raises(UpstreamError):
                    await connection.list_tools()
                assert await call(connection, "ping") == "pong"
            assert not connection.closed.is_set()

    with running_http("raw_http") as url:
        run(scenario(url))


# --- Failures ---------------------------------------------------------------------------------

FAILURES = [
    # what the server does, the code, a part of the message, and whether retrying is pointless
    ("401", "auth", "credentials", True),
    ("403", "auth", "403", True),
    ("404", "http_status", "404", True),
    ("418", "http_status", "418", True),
    ("429", "http_status", "429", False),
    ("500", "http_status", "500", False),
    ("503", "http_status", "503", False),
    ("html", "not_mcp", "HTML", True),
    ("plain-json", "not_mcp", "not MCP", True),
    ("not-json", "not_mcp", "not MCP", True),
    ("not-http", "not_mcp", "not HTTP", True),
    ("redirect-out", "redirect", "another origin, http://169.254.169.254,", True),
    ("redirect-loop", "redirect", "redirects only", True),
    ("redirect-302", "redirect", "redirects only", True),
    ("big-json", "too_large", "10 MiB", False),
    ("big-sse", "too_large", "10 MiB", False),
    ("gzip-bomb", "too_large", "10 MiB", False),
    ("huge-header", "too_large", "headers", True),
    ("reset", "closed", "lost", False),
    ("cut", "closed", "incomplete", False),
    ("list/401", "auth", "credentials", True),
    ("list/500", "http_status", "500", False),
    ("list/html", "not_mcp", "HTML", True),
    ("list/plain-json", "protocol", "cannot be read", False),
    ("list/big-json", "too_large", "a response of more than 10 MiB", False),
    ("list/big-sse", "too_large", "an event of more than 10 MiB", False),
    ("list/gzip-bomb", "too_large", "10 MiB", False),
    ("list/cut", "closed", "incomplete", False),
]


@pytest.mark.parametrize(("what", "code", "words", "parked"), FAILURES)
@pytest.mark.parametrize("era", ["modern", "legacy"])
def test_every_failure_has_a_code_and_a_message_that_quotes_nothing(
    raw, what, code, words, parked, era
):
    spec = http_spec(f"{raw}/{what}?era={era}&key=hunter2", headers={"X-Api-Key": "hunter2"})
    error = run(failure(spec))
    assert (error.code, error.parked, error.status) == (code, parked, 502)
    assert words in error.message
    text = f"{error.message} {error.hint} {error.detail} {error.as_json()} {error!r}"
    assert "hunter2" not in text
    assert "secret body" not in text


@pytest.mark.parametrize("what", ["drip", "drip-sse", "hang"])
def test_a_handshake_that_never_ends_stops_at_the_deadline(raw, monkeypatch, what):
    monkeypatch.setattr(settings, "HANDSHAKE_TIMEOUT", 1)
    error = run(failure(http_spec(f"{raw}/{what}")))
    assert error.code == "timeout"
    assert "handshake within 1 s" in error.message


def test_a_closed_port_refuses_the_connection():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    error = run(failure(http_spec(f"http://127.0.0.1:{port}/mcp")))
    assert (error.code, error.parked) == ("refused", False)


def test_a_server_that_accepts_no_connection_times_out(monkeypatch):
    monkeypatch.setattr(settings, "CONNECT_TIMEOUT", 1)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for client in waiting:  # fill the backlog, so that the next connection gets no answer
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        error = run(failure(http_spec(f"http://127.0.0.1:{full.getsockname()[1]}/mcp")))
        for client in waiting:
            client.close()
    assert error.code == "timeout"
    assert "connection within 1 s" in error.message


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("sse-elsewhere", "redirect"),
        ("sse-nowhere", "redirect"),
        ("sse-deaf", "http_status"),
        ("html", "not_mcp"),
        ("404", "http_status"),
        ("401", "auth"),
        ("redirect-out", "redirect"),
        ("redirect-loop", "redirect"),
        ("big-sse", "too_large"),
    ],
)
def test_sse_servers_fail_at_once_with_the_same_codes(raw, what, code):
    error = run(failure(http_spec(f"{raw}/{what}", transport="sse")))
    assert error.code == code


def test_the_information_reported_by_a_server_is_truncated():
    from mcp.server import MCPServer

    server = MCPServer("n" * 500, version="v" * 500, instructions="é" * 40_000)

    async def scenario():
        async with run_session(server) as connection:
            return connection

    connection = run(scenario())
    assert connection.server_info == {"name": "n" * 200, "version": "v" * 200}
    assert len(connection.instructions.encode()) == 32 * 1024


def test_a_server_with_an_unknown_protocol_version_fails_with_a_message():
    """Hostile input 29."""
    error = run(failure(stdio_spec("raw_stdio", "--era", "unknown")))
    assert error.code == "protocol"
    assert error.message.endswith(".")


def test_a_server_that_reports_the_modern_protocol_and_answers_in_the_legacy_one_is_listed():
    """Hostile input 29: its list carries no resultType and no ttl."""

    async def scenario():
        async with connect(stdio_spec("raw_stdio", "--era", "modern")) as connection:
            return connection.protocol_version, await connection.list_tools()

    version, listing = run(scenario())
    assert version == "2026-07-28"
    assert len(listing.tools) == 1
    assert listing.ttl_ms is None
