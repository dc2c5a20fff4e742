"""Servers that answer calls in every way there is, and what it takes to ask them."""

import asyncio
import urllib.request
from contextlib import contextmanager

from servers.connections import calls as upstream_calls
from servers.connections import connection
from servers.connections.calls import CallTarget
from tests.support.factories import make_program, make_server
from tests.support.upstreams.running import running_http
from tests.support.waiting import wait_for

SOON = 20  # seconds, for what should take none


def run(scenario):
    """Run a scenario with calls open, and nothing left of it afterwards."""

    async def in_time():
        async with asyncio.timeout(50), upstream_calls.call_pool():
            return await scenario()

    return asyncio.run(in_time())


def target(server, session="", **fields):
    isolation = "per_session" if session else "shared"
    return CallTarget(server.pk, server.slug, server.generation, isolation, session, **fields)


async def ask(server, tool, within=SOON, session="", on=None, **arguments):
    """Call with these arguments."""
    options = {"timeout": within, **(on or {})}
    return await upstream_calls.call(target(server, session), tool, arguments, **options)


async def waits(server, which, names):
    """Wait until a workshop says that these waits began, or were given up."""
    async with asyncio.timeout(SOON):
        while not set(names) <= set((await ask(server, "cancelled")).structured[which]):
            pass


async def begun(server, tool):
    """Wait until raw_calls says that it got a call of this tool, over a connection that works."""
    async with asyncio.timeout(SOON):
        while f'"name": "{tool}"' not in (await ask(server, "seen")).content[0]["text"]:
            pass


async def let_go(server):
    """Have the calls end that raw_calls holds."""
    asking = urllib.request.urlopen, f"{server.url}/let-go"
    (await asyncio.to_thread(*asking, timeout=SOON)).close()


async def until(check, what):
    await asyncio.to_thread(wait_for, check, SOON, what=what, every=0.01)


@contextmanager
def through_the_sdk():
    """Have every call go through the SDK's client, also where the lean one would do."""
    made = connection.Connection.__init__

    def without_lean(self, *args):
        made(self, *args)
        self._lean = None

    connection.Connection.__init__ = without_lean
    try:
        yield
    finally:
        connection.Connection.__init__ = made


@contextmanager
def upstream(how, module="raw_calls"):
    """A server reached in one of the ways there are: stdio, http or sse, modern or legacy.

    Over http by the lean client, or with `sdk` by the SDK's.
    """
    if how.endswith(" sdk"):
        with through_the_sdk(), upstream(how.removesuffix(" sdk"), module) as server:
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


HTTP = ["http", "http sdk"]
WAYS = [
    *("stdio modern", "stdio legacy"),
    *("http modern", "http modern sdk", "http legacy", "http legacy sdk"),
]
TWO_WAYS = ["stdio", *HTTP]
