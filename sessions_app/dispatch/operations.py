"""Search, load and details: what an agent asks of Toolcrib itself, over REST and MCP.

As calls (dispatcher.py): planned from the authorization, in a thread, and committed with it.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from sessions_app.agents import rate_limits
from sessions_app.dispatch.authorization import Authorization, Caller, run_authorized
from sessions_app.ledger import writer as ledger_writer
from sessions_app.sessions import search as session_search
from sessions_app.sessions.loading import LoadResult, SessionLoads
from sessions_app.sessions.search import SessionQuery, SessionSearch, ToolDetails
from toolcrib.lib.payloads import check_value

T = TypeVar("T")

# Searches are CPU-bound and compete for the GIL with each other and with the event loop, which
# serves the calls of all agents. More than one per CPU gives no more throughput.
MAX_CONCURRENT = (
    len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
)
_load_locks: WeakValueDictionary[tuple[object, ...], asyncio.Lock] = WeakValueDictionary()
_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


async def search(caller: Caller, query: SessionQuery) -> SessionSearch:
    """Search the tools of a session; with `load`, also load the hits."""
    counted_limit = None  # that the search was counted against

    def plan(authorization: Authorization) -> tuple[SessionSearch, Authorization | None]:
        found = session_search.search_session(authorization, query, authorization.is_shown)
        return found, _successor(authorization, found.loads)

    async def attempt(authorization: Authorization) -> SessionSearch:
        nonlocal counted_limit
        check_value(query.texts, "")
        if counted_limit != authorization.agent.searches_per_minute:
            await rate_limits.check_search(authorization.agent)
            counted_limit = authorization.agent.searches_per_minute
        found, successor = await _run_with_slot(plan, authorization)
        await authorization.commit(found.write, successor)
        return found

    return await run_authorized(caller, attempt)


async def load(caller: Caller, group_id: str, names: Sequence[str] | None) -> LoadResult:
    """Load all tools of a group, or those named."""

    def plan(authorization: Authorization) -> tuple[LoadResult, SessionLoads, Authorization | None]:
        check_value({"group_id": group_id, "tool_names": names}, "")
        loads = SessionLoads(authorization)
        result = loads.load(group_id, names)
        return result, loads, _successor(authorization, loads)

    async def attempt(authorization: Authorization) -> LoadResult:
        result, loads, successor = await _run_with_slot(plan, authorization)
        await authorization.commit(loads.write, successor)
        return result

    # One at a time in a session: each would be outdated by the one before it.
    session = await caller.find_session(renew=False)
    key = asyncio.get_running_loop(), caller.digest, session
    async with _load_locks.setdefault(key, asyncio.Lock()):
        return await _charged(caller, attempt, lambda result: result.size)


async def details(caller: Caller, name: str, detail: str) -> ToolDetails:
    """Return a tool's definition. Raises if the session has no such tool."""

    def plan(authorization: Authorization) -> ToolDetails:
        check_value(name, "/name")
        return session_search.tool_details(authorization, name, detail)

    async def attempt(authorization: Authorization) -> ToolDetails:
        found = await _run_with_slot(plan, authorization)
        await authorization.commit(found.write)
        return found

    found = await _charged(caller, attempt, lambda found: len(found.text))
    if found.error is not None:
        raise found.error
    return found


def _successor(authorization: Authorization, loads: SessionLoads | None) -> Authorization | None:
    """Return the authorization after loads; None if they change nothing."""
    if loads is None or loads.version == authorization.loads_version:
        return None
    return authorization.after(loads)


async def _charged(
    caller: Caller, attempt: Callable[[Authorization], Awaitable[T]], size_of: Callable[[T], int]
) -> T:
    """Run an operation; charge its agent a base cost before, and the bytes of the result after."""
    agent = None

    async def charge_and_attempt(authorization: Authorization) -> T:
        nonlocal agent
        if agent is None:
            await rate_limits.check_request(authorization.agent)
            agent = authorization.agent
        return await attempt(authorization)

    result = await run_authorized(caller, charge_and_attempt)
    await rate_limits.add_bytes(agent, size_of(result))
    return result


async def _run_with_slot(function: Callable[[Authorization], T], authorization: Authorization) -> T:
    """Run a function in a thread when one of the slots is free, in order of arrival.

    Cancelled while waiting, it never runs. Cancelled while running, it keeps its slot until done.
    """
    loop = asyncio.get_running_loop()
    async with _semaphores.setdefault(loop, asyncio.Semaphore(MAX_CONCURRENT)):
        task = asyncio.ensure_future(ledger_writer.run_off_loop(function, authorization))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # mark as retrieved
            raise
