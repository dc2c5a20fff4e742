"""Call dispatch: plan a call, commit it to the ledger, send it to its server, record the result.

Meta-tools are resolved first, so validation, policy, ledger and timeline see the actual tool.
Errors that a model can correct are returned as results that explain the correction.
"""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from django.conf import settings
from django.db import DatabaseError, InterfaceError
from django.utils import timezone

from catalog import cache
from catalog.audit import Actor
from catalog.cache import CachedTool
from catalog.definitions.validation import validators
from catalog.models import Revision, Tool
from servers.connections import calls as upstream_calls
from servers.connections.asking import AskingClient
from servers.connections.calls import CallOutcome
from servers.spec import TOOLS_CALL, OnProgress
from sessions_app.agents import rate_limits
from sessions_app.dispatch import authorization as authorizations
from sessions_app.dispatch import feature_results, key_revocation, planner
from sessions_app.dispatch.authorization import Authorization, Caller, Outdated
from sessions_app.dispatch.planner import ON_LOOP_BYTES, CallFinishedLocally, CallPlan, CallRequest
from sessions_app.held_calls import actions as held_calls
from sessions_app.held_calls.grants import GrantCheck
from sessions_app.ledger import calls as call_ledger
from sessions_app.ledger import writer as ledger_writer
from sessions_app.ledger.calls import CHECK_BEFORE_RETRY, CallResponse, CallResult
from sessions_app.ledger.writer import LedgerCursor, WriteJob
from sessions_app.models import Call, CallState, RuleEffect
from sessions_app.rules import agent_rules
from sessions_app.rules.agent_rules import AgentRules
from sessions_app.rules.evaluation import Decision
from toolcrib.lib.db_threads import run_in_db_thread
from toolcrib.lib.errors import DatabaseUnavailable, ToolcribError
from toolcrib.lib.json_codec import canonical
from toolcrib.lib.payloads import check_value
from toolcrib.lib.protocols.jsonrpc import LARGE_BYTES
from toolcrib.lib.telemetry import tracing
from toolcrib.lib.token_counter import count

logger = logging.getLogger(__name__)

MARK_SENT_AFTER = 0.25  # seconds after which a running call is marked as sent in the ledger
RECORD_SECONDS = 2.0  # for recording a result, if the call's deadline is earlier
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
    if not tracing.enabled:
        return await _call(caller, request, on_progress)
    attributes = {
        "mcp.method.name": "tools/call",
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": request.tool_name,
    }
    with tracing.server_span(f"tools/call {request.tool_name}", attributes) as span:
        response = await _call(caller, request, on_progress)
        ids = {"toolcrib.call.id": response.call_id, "toolcrib.outcome": str(response.state)}
        span.set_attributes(ids)
        if response.is_error:
            tracing.set_error(span, (response.error or {}).get("code") or "tool_error")
        return response


async def _call(
    caller: Caller, request: CallRequest, on_progress: OnProgress | None
) -> CallResponse:
    counted_limit = None  # that the call was counted against

    async def plan_and_accept(authorization: Authorization) -> CallPlan | CallResponse:
        nonlocal counted_limit
        if tracing.enabled:
            tracing.annotate(authorization.trace_attributes)
        if request.size > ON_LOOP_BYTES:
            await asyncio.to_thread(request.check)
        else:
            request.check()
        if (key := request.idempotency_key) is not None:
            agent, digest = authorization.agent.pk, request.digest(authorization.session_id)
            find = call_ledger.stored_response
            if (stored := await ledger_writer.run_off_loop(find, agent, key, digest)) is not None:
                return stored
        counted_limit = await count_call(authorization, request.client, counted_limit)
        if authorization.held:
            repeated = await held_calls.find_repeated(authorization, request)
            if repeated is not None:
                return repeated
        plan = await plan_request(authorization, request)
        if isinstance(plan, CallFinishedLocally):
            return await record_local(authorization, plan)
        decision = await accept(authorization, plan)
        return plan if decision is None else await _refuse_or_hold(authorization, plan, decision)

    answer_by = asyncio.get_running_loop().time() + (request.timeout or settings.CALL_TIMEOUT)
    try:
        async with asyncio.timeout_at(answer_by):
            plan = await authorizations.run_authorized(caller, plan_and_accept)
    except TimeoutError:  # nothing was sent
        raise DatabaseUnavailable from None
    if isinstance(plan, CallResponse):
        return plan
    plan.answer_by = answer_by
    return await execute(plan, on_progress)


async def try_tool(
    tool: Tool, arguments: dict[str, Any], *, actor: Actor, is_confirmed: bool = False
) -> CallResponse:
    """Call a tool as a user, outside any session, with the same checks and ledger.

    Raises ConfirmationRequired if a rule holds the call and the user has not confirmed it.
    """
    check_value(arguments, "/arguments")
    cached, rules = await ledger_writer.run_off_loop(_load_for_try, tool.pk)
    server_row = await authorizations.find_server(cached.server_id or 0, renew=True)
    plan = await asyncio.to_thread(planner.plan_try, cached, arguments, actor, server_row, rules)
    if plan.matches and (decision := await _decide_try(plan, is_confirmed)) is not None:
        if decision.effect == RuleEffect.HOLD:
            raise ConfirmationRequired(decision)
        plan = planner.plan_denied(plan.entry, decision)
    if isinstance(plan, CallFinishedLocally):
        return await call_ledger.finish(plan.entry, plan.result)
    await call_ledger.accept(plan.entry, lambda _: None)
    plan.key = actor.id if actor.kind == "token" else None
    try:
        return await execute(plan)
    finally:
        await upstream_calls.forget_session(plan.target.session)


class ConfirmationRequired(ToolcribError):
    """A rule holds a user's own call until the user confirms it. Nothing was sent or recorded."""

    code = "confirmation_required"
    status = 409

    def __init__(self, decision: Decision) -> None:
        message = f"The rule “{decision.rule_name}” asks for a confirmation. {decision.reason}"
        super().__init__(message.strip(), hint="Confirm the call to send it.")


def _load_for_try(tool: int) -> tuple[CachedTool, AgentRules | None]:
    cached = cache.cached_tool(tool)
    return cached, agent_rules.load_rules(Revision.current(), agent=None)


async def _decide_try(plan: CallPlan | CallFinishedLocally, is_confirmed: bool) -> Decision | None:
    """Decide on a user's call: a confirmation lifts every hold, as a grant does for a session."""
    job = WriteJob(
        lambda cursor: agent_rules.decide(cursor, plan.matches, plan.entry, lambda *_: is_confirmed)
    )
    return await ledger_writer.commit(job)


# --- Plan and accept ------------------------------------------------------------------------------


async def count_call(
    authorization: Authorization, client: AskingClient | None, counted: int | None
) -> int:
    """Count a call against its limit, unless that was done; return the limit.

    A request that continues a call, with what its user answered, was counted with it.
    """
    agent, asked = authorization.agent, client.call_id if client is not None else ""
    if counted != agent.calls_per_minute and asked:
        find = call_ledger.waits_for_answer
        if await ledger_writer.run_off_loop(find, asked, authorization.session_pk):
            await rate_limits.check_request(agent)
            return agent.calls_per_minute
    return await rate_limits.count_once(agent, "calls", counted)


async def plan_request(
    authorization: Authorization, request: CallRequest
) -> CallPlan | CallFinishedLocally:
    """Plan a call of a session; off the event loop if that takes time."""
    tool = authorization.scope.lookup(request.tool_name)
    server = tool.server_id if tool is not None else None
    server_row = await authorizations.find_server(server) if server is not None else None
    if planner.is_cheap(tool, request):
        return planner.plan_call(authorization, request, server_row)
    return await asyncio.to_thread(planner.plan_call, authorization, request, server_row)


async def record_local(authorization: Authorization, plan: CallFinishedLocally) -> CallResponse:
    """Record a call that needed no server."""
    entry, result = plan.entry, plan.result

    def write(cursor: LedgerCursor) -> CallResponse | Decision | None:
        if plan.matches and (decision := _decide(cursor, plan)) is not None:
            return decision
        response = call_ledger.fill_in_result(entry, result)
        is_written = call_ledger.write_result(cursor, entry, result, response, is_accepted=False)
        return response if is_written else None

    outcome = await authorization.commit(write)
    if outcome is None:
        raise call_ledger.KeyInProgress
    if isinstance(outcome, Decision):
        return await _refuse_or_hold(authorization, plan, outcome)
    return outcome


async def accept(authorization: Authorization, plan: CallPlan) -> Decision | None:
    """Commit the row of a call if its authorization is current and the agent's limit permits.

    Returns the decision of a rule that denies or holds the call; then no row is written.
    """
    entry, agent = plan.entry, authorization.agent
    entry.continues = plan.client.call_id if plan.client is not None else ""
    is_repeated = partial(held_calls.is_repeated, plan)

    def check(cursor: LedgerCursor) -> int | Decision | None:
        at, server = entry.accepted_at, entry.server_id
        in_flight = authorization.revalidate(cursor, at, server, plan.server_row, is_repeated)
        if in_flight is None:
            return OUTDATED
        is_full = in_flight >= agent.calls_in_flight
        if plan.matches and (decision := _decide(cursor, plan, is_full)) is not None:
            return decision
        return in_flight if is_full else None

    obstacle: int | Decision | None = await call_ledger.accept(entry, check, agent.pk)
    if obstacle is None or isinstance(obstacle, Decision):
        return obstacle
    if obstacle == OUTDATED:
        raise Outdated
    rate_limits.reject_concurrent_call(agent, obstacle)


def _decide(
    cursor: LedgerCursor, plan: CallPlan | CallFinishedLocally, is_full: bool = False
) -> Decision | None:
    """Return the decision of a rule that denies or holds a call; otherwise use up its grants."""
    if cursor.waits_for_answer(plan.entry):  # it was permitted before it asked its user
        return agent_rules.decide(cursor, plan.matches, plan.entry, lambda *_: True)
    grants = GrantCheck()
    decision = agent_rules.decide(cursor, plan.matches, plan.entry, grants.covers)
    if decision is None and not is_full:
        grants.use(cursor)
    return decision


async def _refuse_or_hold(
    authorization: Authorization, plan: CallPlan | CallFinishedLocally, decision: Decision
) -> CallResponse:
    if decision.effect == RuleEffect.HOLD:
        return await held_calls.hold_call(authorization, plan, decision)
    return await record_local(authorization, planner.plan_denied(plan.entry, decision))


# --- Send ---------------------------------------------------------------------------------------


async def execute(plan: CallPlan, on_progress: OnProgress | None = None) -> CallResponse:
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
        if plan.before_send is not None:
            await plan.before_send()
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
            method=plan.method,
            client=plan.client,
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
    if outcome.state in ("not_sent", "input_required"):
        plan.entry.idempotency_key = None  # the key may be used for a retry
    if outcome.state == "not_sent":
        plan.entry.sent_at = None
    if plan.tool.has_resources and outcome.mentions_resources:
        outcome = feature_results.rewrite_uris(plan.method, plan.tool.server, outcome)
    if outcome.size <= LARGE_BYTES and _is_compiled(plan.tool):
        result = _call_result(plan, outcome)
    else:
        result = await asyncio.to_thread(_call_result, plan, outcome)
    try:
        async with asyncio.timeout_at(_record_by(plan)):
            if plan.record is not None:
                response = await plan.record(result, outcome)
            else:
                response = await call_ledger.finish(plan.entry, result)
    except (DatabaseError, InterfaceError, TimeoutError) as error:
        logger.error("Recording the result of call %s failed: %s", plan.entry.call_id, error)  # noqa: TRY400
        if not plan.sent:
            raise DatabaseUnavailable(error) from None
        raise ToolcribError(
            "The call was sent, but its result could not be recorded.",
            hint=CHECK_BEFORE_RETRY,
            code="unknown_outcome",
            status=502,
        ) from None
    if outcome.code == "key_revoked":
        raise key_revocation.KeyRevoked
    if outcome.state == "input_required":
        return replace(
            response, input_requests=outcome.input_requests, request_state=outcome.request_state
        )
    if outcome.rpc_code:
        return replace(response, rpc_code=outcome.rpc_code)
    if outcome.state == "not_sent" and outcome.code in ("busy", "stopping"):
        raise ToolcribError(
            outcome.message,
            hint=outcome.hint or "Try again.",
            code=outcome.code,
            status=503,
            details={"retry_after": 1},
        )
    return response


def _record_by(plan: CallPlan) -> float | None:
    """Return when a caller is answered whether its result is recorded or not."""
    if plan.answer_by is None:
        return None
    return max(plan.answer_by, asyncio.get_running_loop().time() + RECORD_SECONDS)


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
            tokens=(
                _count_tokens(content, structured)
                if plan.method == TOOLS_CALL
                else feature_results.count_tokens(content)
            ),
            code="tool_error" if outcome.is_error else "",
            message=f"{plan.tool.name} returned an error." if outcome.is_error else "",
            encoded=outcome.serialized,
            large=outcome.size > LARGE_BYTES,
        )
    if outcome.state == "input_required":
        text = f"{plan.tool.name} asks the user of the client for input."
        return CallResult.of_text(
            CallState.SUCCEEDED, text, is_error=False, code="input_required", message=text
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
