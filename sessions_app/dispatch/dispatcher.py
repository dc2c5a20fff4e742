"""Call dispatch: plan a call, commit it to the ledger, send it to its server, record the result.

Meta-tools are resolved first, so validation, policy, ledger and timeline see the actual tool.
Errors that a model can correct are returned as results that explain the correction.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from django.db import DatabaseError
from django.utils import timezone

from catalog import cache
from catalog.audit import Actor
from catalog.cache import CachedTool
from catalog.definitions.validation import validators
from catalog.models import Tool
from servers.connections import calls as upstream_calls
from servers.connections.calls import CallOutcome
from servers.spec import OnProgress
from sessions_app.agents import rate_limits
from sessions_app.dispatch import authorization as authorizations
from sessions_app.dispatch import key_revocation, planner
from sessions_app.dispatch.authorization import Authorization, Caller, Outdated
from sessions_app.dispatch.planner import ON_LOOP_BYTES, CallFinishedLocally, CallPlan, CallRequest
from sessions_app.ledger import calls as call_ledger
from sessions_app.ledger import writer as ledger_writer
from sessions_app.ledger.calls import CHECK_BEFORE_RETRY, CallResponse, CallResult
from sessions_app.ledger.writer import LedgerCursor
from sessions_app.models import Call, CallState
from toolcrib.lib.db_threads import run_in_db_thread
from toolcrib.lib.errors import ToolcribError
from toolcrib.lib.json_codec import canonical
from toolcrib.lib.jsonrpc import LARGE_BYTES
from toolcrib.lib.payloads import check_value
from toolcrib.lib.token_counter import count

logger = logging.getLogger(__name__)

MARK_SENT_AFTER = 0.25  # seconds after which a running call is marked as sent in the ledger
OUTDATED = -1  # instead of a number of calls in flight


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
        key_revocation.running.discard(self)
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


async def call(
    caller: Caller, request: CallRequest, on_progress: OnProgress | None = None
) -> CallResponse:
    """Execute one call of a session. It is cancelled if its key is revoked."""
    counted_limit = None  # that the call was counted against

    async def plan_and_accept(authorization: Authorization) -> CallPlan | CallResponse:
        nonlocal counted_limit
        if request.size > ON_LOOP_BYTES:
            await asyncio.to_thread(request.check)
        else:
            request.check()
        if (key := request.idempotency_key) is not None:
            agent, digest = authorization.agent.pk, request.digest(authorization.session_id)
            find = call_ledger.stored_response
            if (stored := await ledger_writer.run_off_loop(find, agent, key, digest)) is not None:
                return stored
        counted_limit = await rate_limits.count_once(authorization.agent, "calls", counted_limit)
        plan = await _plan(authorization, request)
        if isinstance(plan, CallFinishedLocally):
            return await _record_local(authorization, plan)
        await _accept(authorization, plan)
        return plan

    plan = await authorizations.run_authorized(caller, plan_and_accept)
    return plan if isinstance(plan, CallResponse) else await _execute(plan, on_progress)


async def try_tool(tool: Tool, arguments: dict[str, Any], *, actor: Actor) -> CallResponse:
    """Call a tool as a user, outside any session, with the same checks and ledger."""
    check_value(arguments, "/arguments")
    cached = await ledger_writer.run_off_loop(cache.cached_tool, tool.pk)
    server_row = await authorizations.find_server(cached.server_id or 0, renew=True)
    plan = await asyncio.to_thread(planner.plan_try, cached, arguments, actor, server_row)
    if isinstance(plan, CallFinishedLocally):
        return await call_ledger.finish(plan.entry, plan.result)
    await call_ledger.accept(plan.entry, lambda _: None)
    plan.key = actor.id if actor.kind == "token" else None
    try:
        return await _execute(plan, None)
    finally:
        await upstream_calls.forget_session(plan.target.session)


# --- Plan and accept ------------------------------------------------------------------------------


async def _plan(
    authorization: Authorization, request: CallRequest
) -> CallPlan | CallFinishedLocally:
    tool = authorization.scope.lookup(request.tool_name)
    server = tool.server_id if tool is not None else None
    server_row = await authorizations.find_server(server) if server is not None else None
    if planner.is_cheap(tool, request):
        return planner.plan_call(authorization, request, server_row)
    return await asyncio.to_thread(planner.plan_call, authorization, request, server_row)


async def _record_local(authorization: Authorization, plan: CallFinishedLocally) -> CallResponse:
    """Record a call that needed no server."""
    entry, result = plan.entry, plan.result
    response = call_ledger.fill_in_result(entry, result)
    is_written = await authorization.commit(
        lambda cursor: call_ledger.write_result(cursor, entry, result, response, is_accepted=False)
    )
    if not is_written:
        raise call_ledger.KeyInProgress
    return response


async def _accept(authorization: Authorization, plan: CallPlan) -> None:
    """Commit the row of a call if its authorization is current and the agent's limit permits."""
    entry, agent = plan.entry, authorization.agent

    def check(cursor: LedgerCursor) -> int | None:
        at, server = entry.accepted_at, entry.server_id
        in_flight = authorization.revalidate(cursor, at, server, plan.server_row)
        if in_flight is None:
            return OUTDATED
        return in_flight if in_flight >= agent.calls_in_flight else None

    in_flight = await call_ledger.accept(entry, check, agent.pk)
    if in_flight == OUTDATED:
        raise Outdated
    if in_flight is not None:
        rate_limits.reject_concurrent_call(agent, in_flight)


# --- Send ---------------------------------------------------------------------------------------


async def _execute(plan: CallPlan, on_progress: OnProgress | None) -> CallResponse:
    """Send a call and record its result, also if the caller disconnects and it is cancelled."""
    task = asyncio.create_task(_run(plan, on_progress))
    call = _InFlightCall(plan, task)
    _in_flight.add(call)
    call_ledger.active_call_ids.add(plan.entry.call_id)
    key_revocation.running.add(call)
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
        mark_timer = asyncio.get_running_loop().call_later(
            MARK_SENT_AFTER, lambda: _run_in_background(call_ledger.mark_sent(plan.entry))
        )

    def on_late(note: str) -> None:
        entries = Call.objects.filter(pk=plan.entry.pk or 0)
        _run_in_background(run_in_db_thread(entries.update, note=note))

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
        )
    finally:
        if mark_timer is not None:
            mark_timer.cancel()


def _run_in_background(work: Coroutine[Any, Any, object]) -> None:
    """Run what no caller waits for; its errors are ignored."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())


def _cancelled(plan: CallPlan) -> CallOutcome:
    state = "unknown" if plan.sent else "cancelled"
    effect = "Whether the tool ran is not known." if plan.sent else "It was not sent."
    if plan.revoked:
        message = f"The key of this call was revoked during the call. {effect}"
        return CallOutcome(state, code="key_revoked", message=message)
    if plan.stopping and not plan.sent:
        return CallOutcome("not_sent", code="stopping", message="Toolcrib is stopping.")
    if plan.stopping:
        message, hint = f"Toolcrib stopped during the call. {effect}", CHECK_BEFORE_RETRY
        return CallOutcome(state, code="stopping", message=message, hint=hint)
    message = "The caller disconnected before the call was sent."
    if plan.sent:
        message = f"The caller disconnected during the call. {effect}"
    return CallOutcome(state, code="cancelled", message=message)


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
        raise ToolcribError(
            "The call was sent, but its result could not be recorded.",
            hint=CHECK_BEFORE_RETRY,
            code="unknown_outcome",
            status=502,
        ) from None
    if outcome.code == "key_revoked":
        raise key_revocation.KeyRevoked
    if outcome.state == "not_sent" and outcome.code in ("busy", "stopping"):
        raise ToolcribError(
            outcome.message,
            hint=outcome.hint or "Try again.",
            code=outcome.code,
            status=503,
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
            outcome.meta,
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
    return CallResult.of_text(
        state,
        text,
        tokens=count(text),
        code=outcome.code or state,
        message=outcome.message,
        hint=outcome.hint,
    )


def _is_compiled(tool: CachedTool) -> bool:
    return tool.approved is None or validators.has(tool.approved, "output")


def _output_problems(tool: CachedTool, outcome: CallOutcome) -> list[str]:
    validator = validators.get(tool.approved, "output") if tool.approved else None
    if validator is None:
        return []
    if not outcome.has_structured:
        return ["structured content is missing"]
    # A result that is too expensive to validate is passed on unchecked.
    return validator.problems(outcome.structured) if validator.can_check(outcome.structured) else []


def _invalid_output(tool: CachedTool, outcome: CallOutcome, problems: list[str]) -> CallResult:
    lines = "\n".join(f"- {problem}" for problem in problems)
    message = f"{tool.name} ran, but its result does not match its output schema:\n{lines}"
    return CallResult.of_text(
        CallState.FAILED,
        message,
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
    if not texts and structured is not None:
        texts = [canonical(structured)]
    return count("\n".join(texts))
