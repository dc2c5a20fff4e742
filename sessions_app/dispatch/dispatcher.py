"""Dispatch a call: decide (planning), commit it (ledger), send it (servers), record its end.

The real tool is known before anything else looks: validation, policy, ledger and timeline see
it, never the dispatcher. What a model can mend comes back as a result that says how.
"""

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import DatabaseError
from django.utils import timezone

from catalog.audit import Actor
from catalog.cache import CachedTool
from catalog.definitions.validation import validators
from catalog.models import Tool
from servers.connections import calls as upstream_calls
from servers.connections.calls import CallOutcome
from servers.spec import OnProgress
from servers.transports.jsonrpc import LARGE_BYTES
from sessions_app.agents import rate_limits
from sessions_app.dispatch import authorization_cache, key_revocation, planner
from sessions_app.dispatch.authorization_cache import Acceptance, Token
from sessions_app.dispatch.planner import CallFinishedLocally, CallPlan, CallRequest
from sessions_app.ledger import batch_writer
from sessions_app.ledger import calls as call_ledger
from sessions_app.ledger.calls import CallResponse, CallResult
from sessions_app.models import Agent, CallState
from toolcrib.lib.db_threads import run_in_db_thread
from toolcrib.lib.errors import ToolcribError
from toolcrib.lib.json_codec import canonical
from toolcrib.lib.token_counter import count

__all__ = ["CallNotSent", "CallPlan", "CallRequest", "dispatch", "try_tool"]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
# Characters of a result that are counted exactly. A megabyte takes 30 ms, half of such a call:
# larger ones are estimated from pieces of them.
EXACT_TOKEN_CHARACTERS, TOKEN_SAMPLES = 100_000, 10
MARK_SENT_AFTER = 0.25  # seconds under way, after which the ledger says that a call was sent
ON_LOOP_BYTES = 64 * 1024  # bytes of a request that are worked through on the event loop


class CallNotSent(ToolcribError):
    """Nothing reached the server, and trying again may work."""

    code = "busy"
    status = 503


class OutcomeNotRecorded(ToolcribError):
    """The call was sent, and how it ended could not be written down."""

    code = "unknown_outcome"
    status = 502


class _InFlightCall:
    """A call under way, whether or not its caller is there. It ends with Toolcrib, or its key."""

    def __init__(self, plan: CallPlan, task: "asyncio.Task[CallResponse]") -> None:
        self.plan, self.task = plan, task
        self.key = plan.key

    def end(self, why: ToolcribError) -> None:
        self.plan.revoked = True
        self.cancel()

    def over(self, task: "asyncio.Task[CallResponse]") -> None:
        _in_flight.discard(self)
        call_ledger.active_call_ids.discard(self.plan.entry.call_id)
        key_revocation.unregister(self)
        # Where the caller has left, nobody else looks at it.
        problem = None if task.cancelled() else task.exception()
        if problem is not None and not isinstance(problem, ToolcribError | DatabaseError):
            logger.error("A call failed", exc_info=problem)

    def cancel(self) -> None:
        """From any thread: a call that a person tries has a loop of its own."""
        self.task.get_loop().call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self.plan.asking:  # else its end is being recorded, which must not be cut short
            self.task.cancel()


_in_flight: set[_InFlightCall] = set()


def _on_database(function: Callable[P, R]) -> Callable[P, "asyncio.Future[R]"]:
    return sync_to_async(function)  # type: ignore[return-value]


async def dispatch(
    agent: Agent,
    session_id: str,
    request: CallRequest,
    on_progress: OnProgress | None = None,
    *,
    key: int | None = None,
    token: Token | None = None,
    counted: int = 0,
) -> str:
    """Carry out one call of a session; return the answer as canonical JSON.

    `key` is the one it was asked for with: the call ends where that is revoked. `token` is its
    digest where the ledger is to check that too; `counted` is the limit that the call was held to
    already.
    """
    if token is None:
        plan, counted = await try_fast_path(agent.pk, session_id, request, counted=counted)
        if plan is not None:
            plan.key = key
            return (await _execute(plan, on_progress)).body
    found = await _on_database(planner.plan_from_database)(
        agent, session_id, request, counted=counted
    )
    if isinstance(found, str):
        return found
    if isinstance(found, CallFinishedLocally):
        return (await call_ledger.finish(found.entry, found.ending)).body
    await call_ledger.accept(found.entry, agent)
    found.key = key
    return (await _execute(found, on_progress)).body


async def try_fast_path(
    token: Token, session_id: str, request: CallRequest, size: int = 0, counted: int = 0
) -> tuple[CallPlan | None, int]:
    """Accept a call by what is remembered of its session, in one round to the ledger.

    What is not known yet, or has changed, is found out first. Returns no plan where the long way
    has to be gone, and the limit the call was held to so far.
    """
    for _ in range(2 if batch_writer.is_running() else 0):
        ready = authorization_cache.get(token, session_id)
        if ready is None or not ready.knows(request.tool_name):
            ready = await run_in_db_thread(
                authorization_cache.load, token, session_id, request.tool_name
            )
        if ready is None:
            break
        if size > ON_LOOP_BYTES or not planner.is_cheap_to_plan(ready, request):
            plan = await asyncio.to_thread(planner.plan_from_cache, ready, request)
        else:
            plan = planner.plan_from_cache(ready, request)
        if plan is None:
            break
        if counted != ready.agent.calls_per_minute:
            try:
                await _count(ready.agent)
            except rate_limits.RateLimited:
                break  # it was not counted; who asks may not be who they were
            counted = ready.agent.calls_per_minute
        verdict = await authorization_cache.accept_call(plan.entry, ready)
        if verdict is Acceptance.ACCEPTED:
            return plan, counted
        authorization_cache.invalidate(token, session_id)
        if verdict is Acceptance.REFUSED:
            break
    return None, counted


async def _count(agent: Agent) -> None:
    if settings.REDIS_URL:
        await asyncio.to_thread(rate_limits.check_rate, agent, "calls", agent.calls_per_minute)
    else:
        rate_limits.check_rate(agent, "calls", agent.calls_per_minute)


async def dispatch_fast(
    token: Token, session_id: str, request: CallRequest, size: int
) -> CallResponse | int:
    """Carry out a call the short way; or return the limit it was held to, for the long one."""
    plan, counted = await try_fast_path(token, session_id, request, size)
    return counted if plan is None else await _execute(plan, None)


async def try_tool(tool: Tool, arguments: dict[str, Any], *, actor: Actor) -> dict[str, Any]:
    """Call a tool as a person, outside any session, by the same checks and ledger."""
    found = await _on_database(planner.plan_try)(tool, arguments, actor)
    if isinstance(found, CallFinishedLocally):
        answer = await call_ledger.finish(found.entry, found.ending)
    else:
        await call_ledger.accept(found.entry, None)
        found.key = actor.id if actor.kind == "token" else None
        try:
            answer = await _execute(found, None)
        finally:
            await upstream_calls.forget_session(found.target.session)
    told: dict[str, Any] = json.loads(answer.body)
    return told


# --- Send ---------------------------------------------------------------------------------------


async def _execute(plan: CallPlan, on_progress: OnProgress | None) -> CallResponse:
    """Send and record. Where the caller leaves, the call is cancelled and still recorded."""
    task = asyncio.create_task(_run(plan, on_progress))
    carried = _InFlightCall(plan, task)
    _in_flight.add(carried)
    call_ledger.active_call_ids.add(plan.entry.call_id)
    key_revocation.register(carried)
    task.add_done_callback(carried.over)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        plan.left = True
        if plan.asking:
            task.cancel()
        raise


def cancel_all_calls() -> None:
    """End all calls under way, since Toolcrib stops: their callers are told, and the ledger."""
    for carried in list(_in_flight):
        carried.plan.stopping = True
        carried.cancel()


async def _run(plan: CallPlan, on_progress: OnProgress | None) -> CallResponse:
    plan.asking = True
    try:
        given_up = plan.left or plan.stopping or plan.revoked  # before it began
        outcome = _cancelled(plan) if given_up else await _send(plan, on_progress)
    except asyncio.CancelledError:
        outcome = _cancelled(plan)
    finally:
        plan.asking = False
    return await _record(plan, outcome)


async def _send(plan: CallPlan, on_progress: OnProgress | None) -> CallOutcome:
    shown: asyncio.TimerHandle | None = None

    async def sent() -> None:
        nonlocal shown
        plan.entry.sent_at, plan.sent = timezone.now(), True
        shown = asyncio.get_running_loop().call_later(MARK_SENT_AFTER, _show_sent, plan)

    def late(what: str) -> None:
        noting = asyncio.ensure_future(
            run_in_db_thread(call_ledger.record_late_answer, plan.entry.pk or 0, what)
        )
        noting.add_done_callback(lambda done: done.cancelled() or done.exception())

    try:
        return await upstream_calls.call(
            plan.target,
            plan.item.original_name,
            plan.arguments,
            timeout=plan.timeout,
            schema=plan.schema,
            on_sent=sent,
            on_late=late,
            on_progress=on_progress,
            checked=True,  # by planning
        )
    finally:
        if shown is not None:
            shown.cancel()


def _show_sent(plan: CallPlan) -> None:
    noting = asyncio.ensure_future(call_ledger.mark_sent(plan.entry))
    noting.add_done_callback(lambda done: done.cancelled() or done.exception())


def _cancelled(plan: CallPlan) -> CallOutcome:
    if plan.revoked:
        unsure = "Whether the tool ran is not known." if plan.sent else "It was not sent."
        return CallOutcome(
            "unknown" if plan.sent else "cancelled",
            code="key_revoked",
            message=f"The key of this call was revoked while it was under way. {unsure}",
        )
    if plan.stopping and not plan.sent:
        return CallOutcome("not_sent", code="stopping", message="Toolcrib is stopping.")
    if plan.stopping:
        return CallOutcome(
            "unknown",
            code="stopping",
            message="Toolcrib stopped while the call was under way. Whether the tool ran is not "
            "known.",
            hint="Look what it did before calling it again.",
        )
    if plan.sent:
        return CallOutcome(
            "unknown",
            code="cancelled",
            message="The caller left while the call was under way. Whether the tool ran is not "
            "known.",
        )
    return CallOutcome("cancelled", code="cancelled", message="The caller left before it was sent.")


# --- Record -------------------------------------------------------------------------------------


async def _record(plan: CallPlan, outcome: CallOutcome) -> CallResponse:
    if outcome.state == "not_sent":
        plan.entry.idempotency_key = None  # nothing happened under it
        plan.entry.sent_at = None
    brief = outcome.size <= LARGE_BYTES and _is_compiled(plan.item)
    ending = (
        _call_result(plan, outcome)
        if brief
        else await asyncio.to_thread(_call_result, plan, outcome)
    )
    try:
        answer = await call_ledger.finish(plan.entry, ending)
    except DatabaseError:
        logger.exception("The end of call %s could not be recorded", plan.entry.call_id)
        if not plan.sent:
            raise
        raise OutcomeNotRecorded(
            "The call was sent, and how it ended could not be recorded.",
            hint="Look what the tool did before calling it again.",
        ) from None
    if outcome.code == "key_revoked":
        raise key_revocation.KeyRevoked
    if outcome.state == "not_sent" and outcome.code in ("busy", "stopping"):
        raise CallNotSent(
            outcome.message,
            hint=outcome.hint or "Try again.",
            code=outcome.code,
            details={"retry_after": 1},
        )
    return answer


def _call_result(plan: CallPlan, outcome: CallOutcome) -> CallResult:
    if outcome.state == "succeeded":
        content = outcome.content or []
        problems = [] if outcome.is_error else _output_problems(plan.item, outcome)
        if problems:
            return _bad_output(plan.item, outcome, problems)
        structured = outcome.structured if outcome.has_structured else None
        return CallResult(
            CallState.FAILED if outcome.is_error else CallState.SUCCEEDED,
            outcome.is_error,
            content,
            structured,
            tokens=_tokens(content, structured),
            code="tool_error" if outcome.is_error else "",
            message=f"{plan.item.name} answered with an error." if outcome.is_error else "",
            written=outcome.written,
            large=outcome.size > LARGE_BYTES,
        )
    state = outcome.state
    if state == "not_sent":
        busy = outcome.code in ("busy", "stopping")
        state = CallState.REFUSED if busy else CallState.FAILED
    text = f"{outcome.message}\n{outcome.hint}" if outcome.hint else outcome.message
    return CallResult(
        state,
        True,
        [{"type": "text", "text": text}],
        tokens=count(text),
        code=outcome.code or state,
        message=outcome.message,
        hint=outcome.hint,
    )


def _is_compiled(item: CachedTool) -> bool:
    definition = item.approved
    if definition is None or definition.output_schema is None:
        return True
    return validators.has(definition.sha256, "output")


def _output_problems(item: CachedTool, outcome: CallOutcome) -> list[str]:
    definition = item.approved
    schema = definition.output_schema if definition else None
    if definition is None or schema is None:
        return []
    if not outcome.has_structured:
        return ["structured content is missing"]
    validator = validators.of(definition.sha256, "output", schema)
    # What would hold everybody up is passed on as the server sent it.
    return validator.problems(outcome.structured) if validator.can_check(outcome.structured) else []


def _bad_output(item: CachedTool, outcome: CallOutcome, problems: list[str]) -> CallResult:
    listed = "\n".join(f"- {problem}" for problem in problems)
    message = (
        f"{item.name} ran, but its result does not fit the output schema it declares:\n{listed}"
    )
    return CallResult(
        CallState.FAILED,
        True,
        [{"type": "text", "text": message}],
        tokens=count(message),
        code="output_invalid",
        message=message,
        hint="Do not repeat the call to mend this: it is a fault of the server.",
        raw={"content": outcome.content, "structuredContent": outcome.structured},
        large=outcome.size > LARGE_BYTES,
    )


def _tokens(content: list[Any], structured: object) -> int:
    """Count what a model reads of a result: its texts, or the structure where there are none."""
    texts = [
        item["text"]
        for item in content
        if isinstance(item, dict)
        and item.get("type") == "text"
        and isinstance(item.get("text"), str)
    ]
    text = "\n".join(texts) if texts else canonical(structured) if structured is not None else ""
    if len(text) <= EXACT_TOKEN_CHARACTERS:
        return count(text)
    size, step = EXACT_TOKEN_CHARACTERS // TOKEN_SAMPLES, len(text) // TOKEN_SAMPLES
    pieces = [text[at * step : at * step + size] for at in range(TOKEN_SAMPLES)]
    return round(sum(map(count, pieces)) * len(text) / EXACT_TOKEN_CHARACTERS)
