"""Call dispatch: plan a call, commit it to the ledger, send it to its server, record the result.

Meta-tools are resolved first, so validation, policy, ledger and timeline see the actual tool.
Errors that a model can correct are returned as results that explain the correction.
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
from sessions_app.dispatch.authorization_cache import Acceptance, CallerId
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
# Results up to this many characters are counted exactly; larger ones are estimated from samples,
# since counting a megabyte takes 30 ms, half the time of such a call.
EXACT_TOKEN_CHARACTERS, TOKEN_SAMPLES = 100_000, 10
MARK_SENT_AFTER = 0.25  # seconds after which a running call is marked as sent in the ledger
ON_LOOP_BYTES = 64 * 1024  # larger requests are planned off the event loop


class CallNotSent(ToolcribError):
    """Nothing was sent to the server; a retry may succeed."""

    code = "busy"
    status = 503


class OutcomeNotRecorded(ToolcribError):
    """The call was sent, but its result could not be recorded."""

    code = "unknown_outcome"
    status = 502


class _InFlightCall:
    """A running call. It is cancelled when Toolcrib stops or its key is revoked."""

    def __init__(self, plan: CallPlan, task: "asyncio.Task[CallResponse]") -> None:
        self.plan, self.task = plan, task
        self.key = plan.key

    def end(self, reason: ToolcribError) -> None:
        self.plan.revoked = True
        self.cancel()

    def on_done(self, task: "asyncio.Task[CallResponse]") -> None:
        _in_flight.discard(self)
        call_ledger.active_call_ids.discard(self.plan.entry.call_id)
        key_revocation.unregister(self)
        # If the caller has disconnected, nothing else retrieves the exception.
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ToolcribError | DatabaseError):
            logger.error("Call failed", exc_info=error)

    def cancel(self) -> None:
        """Cancel the call, from any thread: a call made on a page has an event loop of its own."""
        self.task.get_loop().call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self.plan.awaiting_server:  # otherwise its result is being recorded
            self.task.cancel()


_in_flight: set[_InFlightCall] = set()


def _in_database_thread(function: Callable[P, R]) -> Callable[P, "asyncio.Future[R]"]:
    return sync_to_async(function)  # type: ignore[return-value]


async def dispatch(
    agent: Agent,
    session_id: str,
    request: CallRequest,
    on_progress: OnProgress | None = None,
    *,
    key: int | None = None,
    token: CallerId | None = None,
    checked_limit: int = 0,
) -> str:
    """Execute one call of a session, and return the response as canonical JSON.

    The call is cancelled if `key` is revoked. `token` is the key's digest, given if the fast path
    has already been tried with it. `checked_limit` is the rate limit, in calls per minute, that
    the call has already been counted against.
    """
    if token is None:
        fast_plan, checked_limit = await try_fast_path(
            agent.pk, session_id, request, checked_limit=checked_limit
        )
        if fast_plan is not None:
            fast_plan.key = key
            return (await _execute(fast_plan, on_progress)).body
    plan = await _in_database_thread(planner.plan_from_database)(
        agent, session_id, request, checked_limit=checked_limit
    )
    if isinstance(plan, str):
        return plan
    if isinstance(plan, CallFinishedLocally):
        return (await call_ledger.finish(plan.entry, plan.result)).body
    await call_ledger.accept(plan.entry, agent)
    plan.key = key
    return (await _execute(plan, on_progress)).body


async def try_fast_path(
    caller: CallerId, session_id: str, request: CallRequest, size: int = 0, checked_limit: int = 0
) -> tuple[CallPlan | None, int]:
    """Plan and accept a call with its cached authorization, in one ledger transaction.

    A missing or outdated authorization is loaded first. Return the plan, or None if the call has
    to take the ordinary path, and the rate limit that the call was counted against.
    """
    for _ in range(2 if batch_writer.is_running() else 0):
        authorization = authorization_cache.get(caller, session_id)
        if authorization is None or not authorization.can_plan(request.tool_name):
            authorization = await run_in_db_thread(
                authorization_cache.load, caller, session_id, request.tool_name
            )
        if authorization is None:
            break
        if size > ON_LOOP_BYTES or not planner.is_cheap_to_plan(authorization, request):
            plan = await asyncio.to_thread(planner.plan_from_cache, authorization, request)
        else:
            plan = planner.plan_from_cache(authorization, request)
        if plan is None:
            break
        if checked_limit != authorization.agent.calls_per_minute:
            try:
                await _check_rate(authorization.agent)
            except rate_limits.RateLimited:
                break  # not counted; the cached authorization may be outdated
            checked_limit = authorization.agent.calls_per_minute
        verdict = await authorization_cache.accept_call(plan.entry, authorization)
        if verdict is Acceptance.ACCEPTED:
            return plan, checked_limit
        authorization_cache.invalidate(caller, session_id)
        if verdict is Acceptance.REFUSED:
            break
    return None, checked_limit


async def _check_rate(agent: Agent) -> None:
    if settings.REDIS_URL:
        await asyncio.to_thread(rate_limits.check_rate, agent, "calls", agent.calls_per_minute)
    else:
        rate_limits.check_rate(agent, "calls", agent.calls_per_minute)


async def dispatch_fast(
    caller: CallerId, session_id: str, request: CallRequest, size: int
) -> CallResponse | int:
    """Execute a call on the fast path, or return the rate limit it was counted against."""
    plan, checked_limit = await try_fast_path(caller, session_id, request, size)
    return checked_limit if plan is None else await _execute(plan, None)


async def try_tool(tool: Tool, arguments: dict[str, Any], *, actor: Actor) -> dict[str, Any]:
    """Call a tool as a user, outside any session, with the same checks and ledger."""
    plan = await _in_database_thread(planner.plan_try)(tool, arguments, actor)
    if isinstance(plan, CallFinishedLocally):
        response = await call_ledger.finish(plan.entry, plan.result)
    else:
        await call_ledger.accept(plan.entry, None)
        plan.key = actor.id if actor.kind == "token" else None
        try:
            response = await _execute(plan, None)
        finally:
            await upstream_calls.forget_session(plan.target.session)
    body: dict[str, Any] = json.loads(response.body)
    return body


# --- Send ---------------------------------------------------------------------------------------


async def _execute(plan: CallPlan, on_progress: OnProgress | None) -> CallResponse:
    """Send a call and record its result, also if the caller disconnects and it is cancelled."""
    task = asyncio.create_task(_run(plan, on_progress))
    call = _InFlightCall(plan, task)
    _in_flight.add(call)
    call_ledger.active_call_ids.add(plan.entry.call_id)
    key_revocation.register(call)
    task.add_done_callback(call.on_done)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        plan.abandoned = True
        if plan.awaiting_server:
            task.cancel()
        raise


def cancel_all_calls() -> None:
    """Cancel all running calls because Toolcrib is stopping. Each is recorded and answered."""
    for call in list(_in_flight):
        call.plan.stopping = True
        call.cancel()


async def _run(plan: CallPlan, on_progress: OnProgress | None) -> CallResponse:
    plan.awaiting_server = True
    try:
        cancelled = plan.abandoned or plan.stopping or plan.revoked  # before the task started
        outcome = _cancelled(plan) if cancelled else await _send(plan, on_progress)
    except asyncio.CancelledError:
        outcome = _cancelled(plan)
    finally:
        plan.awaiting_server = False
    return await _record(plan, outcome)


async def _send(plan: CallPlan, on_progress: OnProgress | None) -> CallOutcome:
    mark_timer: asyncio.TimerHandle | None = None

    async def on_sent() -> None:
        nonlocal mark_timer
        plan.entry.sent_at, plan.sent = timezone.now(), True
        mark_timer = asyncio.get_running_loop().call_later(MARK_SENT_AFTER, _mark_sent, plan)

    def on_late(note: str) -> None:
        task = asyncio.ensure_future(
            run_in_db_thread(call_ledger.record_late_answer, plan.entry.pk or 0, note)
        )
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    try:
        return await upstream_calls.call(
            plan.target,
            plan.tool.original_name,
            plan.arguments,
            timeout=plan.timeout,
            schema=plan.schema,
            on_sent=on_sent,
            on_late=on_late,
            on_progress=on_progress,
            checked=True,  # by the planner
        )
    finally:
        if mark_timer is not None:
            mark_timer.cancel()


def _mark_sent(plan: CallPlan) -> None:
    task = asyncio.ensure_future(call_ledger.mark_sent(plan.entry))
    task.add_done_callback(lambda done: done.cancelled() or done.exception())


def _cancelled(plan: CallPlan) -> CallOutcome:
    if plan.revoked:
        effect = "Whether the tool ran is not known." if plan.sent else "It was not sent."
        return CallOutcome(
            "unknown" if plan.sent else "cancelled",
            code="key_revoked",
            message=f"The key of this call was revoked during the call. {effect}",
        )
    if plan.stopping and not plan.sent:
        return CallOutcome("not_sent", code="stopping", message="Toolcrib is stopping.")
    if plan.stopping:
        return CallOutcome(
            "unknown",
            code="stopping",
            message="Toolcrib stopped during the call. Whether the tool ran is not known.",
            hint="Check whether the tool ran before retrying.",
        )
    if plan.sent:
        return CallOutcome(
            "unknown",
            code="cancelled",
            message="The caller disconnected during the call. Whether the tool ran is not known.",
        )
    return CallOutcome(
        "cancelled", code="cancelled", message="The caller disconnected before the call was sent."
    )


# --- Record -------------------------------------------------------------------------------------


async def _record(plan: CallPlan, outcome: CallOutcome) -> CallResponse:
    if outcome.state == "not_sent":
        plan.entry.idempotency_key = None  # the key may be used for a retry
        plan.entry.sent_at = None
    if outcome.size <= LARGE_BYTES and _is_compiled(plan.tool):
        result = _call_result(plan, outcome)
    else:
        result = await asyncio.to_thread(_call_result, plan, outcome)
    try:
        response = await call_ledger.finish(plan.entry, result)
    except DatabaseError:
        logger.exception("Recording the result of call %s failed", plan.entry.call_id)
        if not plan.sent:
            raise
        raise OutcomeNotRecorded(
            "The call was sent, but its result could not be recorded.",
            hint="Check whether the tool ran before retrying.",
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
    return response


def _call_result(plan: CallPlan, outcome: CallOutcome) -> CallResult:
    if outcome.state == "succeeded":
        content = outcome.content or []
        problems = [] if outcome.is_error else _output_problems(plan.tool, outcome)
        if problems:
            return _invalid_output(plan.tool, outcome, problems)
        structured = outcome.structured if outcome.has_structured else None
        return CallResult(
            CallState.FAILED if outcome.is_error else CallState.SUCCEEDED,
            outcome.is_error,
            content,
            structured,
            tokens=_count_tokens(content, structured),
            code="tool_error" if outcome.is_error else "",
            message=f"{plan.tool.name} returned an error." if outcome.is_error else "",
            encoded=outcome.serialized,
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


def _is_compiled(tool: CachedTool) -> bool:
    definition = tool.approved
    if definition is None or definition.output_schema is None:
        return True
    return validators.has(definition.sha256, "output")


def _output_problems(tool: CachedTool, outcome: CallOutcome) -> list[str]:
    definition = tool.approved
    schema = definition.output_schema if definition else None
    if definition is None or schema is None:
        return []
    if not outcome.has_structured:
        return ["structured content is missing"]
    validator = validators.get_or_compile(definition.sha256, "output", schema)
    # A result that is too expensive to validate is passed on unchecked.
    return validator.problems(outcome.structured) if validator.can_check(outcome.structured) else []


def _invalid_output(tool: CachedTool, outcome: CallOutcome, problems: list[str]) -> CallResult:
    lines = "\n".join(f"- {problem}" for problem in problems)
    message = f"{tool.name} ran, but its result does not match its output schema:\n{lines}"
    return CallResult(
        CallState.FAILED,
        True,
        [{"type": "text", "text": message}],
        tokens=count(message),
        code="output_invalid",
        message=message,
        hint="Do not retry: this is an error of the server.",
        raw={"content": outcome.content, "structuredContent": outcome.structured},
        large=outcome.size > LARGE_BYTES,
    )


def _count_tokens(content: list[Any], structured: object) -> int:
    """Count the tokens of a result's text blocks, or of its structured content if it has none."""
    texts = [
        block["text"]
        for block in content
        if isinstance(block, dict)
        and block.get("type") == "text"
        and isinstance(block.get("text"), str)
    ]
    text = "\n".join(texts) if texts else canonical(structured) if structured is not None else ""
    if len(text) <= EXACT_TOKEN_CHARACTERS:
        return count(text)
    size, step = EXACT_TOKEN_CHARACTERS // TOKEN_SAMPLES, len(text) // TOKEN_SAMPLES
    starts = [number * step for number in range(TOKEN_SAMPLES)]
    samples = [text[start : start + size] for start in starts]
    return round(sum(map(count, samples)) * len(text) / EXACT_TOKEN_CHARACTERS)
