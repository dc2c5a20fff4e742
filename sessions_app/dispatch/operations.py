"""Search, load and details: what an agent asks of Toolcrib itself, over REST and MCP.

As calls (dispatcher.py): planned from the authorization, in a thread, and committed with it.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TypeVar
from weakref import WeakValueDictionary

from sessions_app.agents import rate_limits, slots
from sessions_app.dispatch.authorization import Authorization, Caller, run_authorized
from sessions_app.ledger.writer import LedgerCursor
from sessions_app.scripts.signatures import Language
from sessions_app.sessions import search as session_search
from sessions_app.sessions.loading import LoadResult, SessionLoads
from sessions_app.sessions.search import SessionQuery, SessionSearch, ToolDetails
from toolcrib.lib.payloads import check_value
from toolcrib.lib.telemetry import metrics, tracing

T = TypeVar("T")
Write = Callable[[LedgerCursor], None]
Planned = tuple[T, Write, SessionLoads | None]  # the result, what to commit, and the loads
Plan = Callable[[Authorization], Planned[T]]

_load_locks: WeakValueDictionary[tuple[object, ...], asyncio.Lock] = WeakValueDictionary()


async def search(caller: Caller, query: SessionQuery) -> SessionSearch:
    """Search the tools of a session; with `load`, also load the hits."""
    if not tracing.enabled:
        return await _search(caller, query)
    attributes = {"mcp.method.name": "tools/call", "gen_ai.tool.name": "search_tools"}
    with tracing.server_span("tools/call search_tools", attributes) as span:
        found = await _search(caller, query)
        span.set_attribute("toolcrib.search.strategy", found.result.strategy)
        span.set_attribute("toolcrib.search.hits", len(found.result.hits))
        return found


async def _search(caller: Caller, query: SessionQuery) -> SessionSearch:
    counted_limit = None  # that the search was counted against

    def plan(authorization: Authorization) -> Planned[SessionSearch]:
        found = session_search.search_session(authorization, query, authorization.is_loaded)
        return found, found.write, found.loads

    async def attempt(authorization: Authorization) -> SessionSearch:
        nonlocal counted_limit
        if tracing.enabled:
            tracing.annotate(authorization.trace_attributes)
        check_value(query.texts, "")
        counted_limit = await rate_limits.count_once(authorization.agent, "searches", counted_limit)
        return await _plan_and_commit(plan, authorization)

    started = time.monotonic()
    found = await run_authorized(caller, attempt)
    if metrics.enabled:
        _count_search(found, time.monotonic() - started)
    if found.error is not None:
        raise found.error
    return found


def _count_search(found: SessionSearch, seconds: float) -> None:
    outcome = "refused" if found.error else "found" if found.result.hits else "empty"
    changes = metrics.observed("toolcrib_search_duration_seconds", seconds)
    metrics.record((metrics.counted("toolcrib_searches", outcome), *changes))


async def load(
    caller: Caller,
    group_id: str,
    names: Sequence[str] | None,
    *,
    confirmed: bool = False,
    as_signatures: Language | None = None,
) -> LoadResult:
    """Load all tools of a group, or those named. A large group needs a confirmation."""

    def plan(authorization: Authorization) -> Planned[LoadResult]:
        check_value({"group_id": group_id, "tool_names": names}, "")
        loads = SessionLoads(authorization)
        result = loads.load(group_id, names, confirmed=confirmed, as_signatures=as_signatures)
        return result, loads.write, loads

    # One at a time in a session: each would be outdated by the one before it.
    session = await caller.find_session(renew=False)
    key = asyncio.get_running_loop(), caller.digest, session
    async with _load_locks.setdefault(key, asyncio.Lock()):
        loaded = await _run_charged(caller, plan, lambda result: result.size)
    if loaded.refusal is not None:
        raise loaded.refusal
    return loaded


async def details(caller: Caller, name: str, detail: str) -> ToolDetails:
    """Return a tool's definition. Raises if the session has no such tool."""

    def plan(authorization: Authorization) -> Planned[ToolDetails]:
        check_value(name, "/name")
        found = session_search.tool_details(authorization, name, detail)
        return found, found.write, found.loads

    found = await _run_charged(caller, plan, lambda found: len(found.text))
    if found.error is not None:
        raise found.error
    return found


async def _run_charged(caller: Caller, plan: Plan[T], size_of: Callable[[T], int]) -> T:
    """Run an operation; charge its agent a base cost before, and the bytes of the result after."""
    agent = None

    async def attempt(authorization: Authorization) -> T:
        nonlocal agent
        if agent is None:
            await rate_limits.check_request(authorization.agent)
            agent = authorization.agent
        return await _plan_and_commit(plan, authorization)

    result = await run_authorized(caller, attempt)
    await rate_limits.add_bytes(agent, size_of(result))
    return result


async def _plan_and_commit(plan: Plan[T], authorization: Authorization) -> T:
    def plan_with_successor(authorization: Authorization) -> tuple[T, Write, Authorization | None]:
        result, write, loads = plan(authorization)
        return result, write, authorization.after(loads) if loads and loads.is_changed else None

    result, write, successor = await slots.run(
        authorization.digest, plan_with_successor, authorization
    )
    await authorization.commit(write, successor)
    return result
