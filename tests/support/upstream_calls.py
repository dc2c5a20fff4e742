"""Upstream servers for tests of calls, over every transport, and helpers to call them."""

import asyncio
import urllib.request
from contextlib import contextmanager

from servers.connections import calls as upstream_calls
from servers.connections import connection
from servers.connections.calls import CallTarget
from tests.support.factories import make_program, make_server
from tests.support.upstreams.running import running_http
from tests.support.waiting import scaled, wait_for

SHORT_TIMEOUT = 20  # seconds, for operations that should be immediate


def run_scenario(scenario):
    """Run a scenario with calls enabled, and close everything afterwards."""

    async def in_time():
        async with asyncio.timeout(scaled(50)), upstream_calls.call_pool():
            return await scenario()

    return asyncio.run(in_time())


def call_target(server, session="", **fields):
    isolation = "per_session" if session else "shared"
    return CallTarget(server.pk, server.slug, server.generation, isolation, session, **fields)


async def call_tool(server, tool, within=SHORT_TIMEOUT, session="", options=None, **arguments):
    """Call a tool with these arguments; `options` are further options of the call."""
    options = {"timeout": within, **(options or {})}
    return await upstream_calls.call(call_target(server, session), tool, arguments, **options)


def in_flight(server_id):
    """Return how many calls of this process a server is working on."""
    active = upstream_calls.current_pool()
    return active.bulkhead(server_id).running if active is not None else 0


async def wait_until_reported(server, key, names):
    """Wait until `workshop` reports these calls of `wait` under a key: begun or given_up."""
    async with asyncio.timeout(scaled(SHORT_TIMEOUT)):
        while not set(names) <= set((await call_tool(server, "cancelled")).structured[key]):
            pass


async def wait_until_received(server, tool):
    """Wait until `raw_calls` reports that it received a call of this tool."""
    async with asyncio.timeout(scaled(SHORT_TIMEOUT)):
        while f'"name": "{tool}"' not in (await call_tool(server, "seen")).content[0]["text"]:
            pass


async def release_held_calls(server):
    """Let `raw_calls` respond to the calls of its tool `held`."""
    request = urllib.request.urlopen, f"{server.url}/let-go"
    (await asyncio.to_thread(*request, timeout=SHORT_TIMEOUT)).close()


async def wait_until(check, what):
    """Poll for a condition without blocking the event loop."""
    await asyncio.to_thread(wait_for, check, SHORT_TIMEOUT, what=what, every=0.01)


@contextmanager
def without_direct_caller():
    """Make every call through the SDK's client, without the direct caller."""
    init = connection.Connection.__init__

    def init_without_caller(self, *args):
        init(self, *args)
        self._direct_caller = None

    connection.Connection.__init__ = init_without_caller
    try:
        yield
    finally:
        connection.Connection.__init__ = init


@contextmanager
def running_upstream(how, module="raw_calls"):
    """Run a server as `how` says: stdio, http or sse, then modern or legacy.

    Over http the direct caller is used; with the suffix ` sdk`, the SDK's client.
    """
    if how.endswith(" sdk"):
        with without_direct_caller(), running_upstream(how.removesuffix(" sdk"), module) as server:
            yield server
        return
    transport, _, era = how.partition(" ")
    if module == "raw_calls":
        options = ("--era", era or "modern")
        http = (*options, "--http")
    else:
        options = http = ("--legacy",) if era == "legacy" else ()
    if transport == "stdio":
        yield make_program(module, *options)
    elif transport == "sse":
        with running_http(module, *options, "--sse") as url:
            yield make_server(url=url, transport="sse")
    else:
        with running_http(module, *http) as url:
            yield make_server(url=url if url.endswith("/mcp") else f"{url}/mcp")


HTTP_CLIENTS = ["http", "http sdk"]
TRANSPORTS_AND_ERAS = [
    *("stdio modern", "stdio legacy"),
    *("http modern", "http modern sdk", "http legacy", "http legacy sdk"),
]
TRANSPORTS = ["stdio", *HTTP_CLIENTS]
