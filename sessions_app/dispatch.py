"""Dispatch a call: decide (database), send (network), record (database).

The real tool is known before anything else looks: validation, policy, ledger and timeline see
it, never the dispatcher. What a model can mend comes back as a result that says how.
"""

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

from asgiref.sync import sync_to_async
from django.utils import timezone

from catalog import shelf
from catalog.audit import Actor
from catalog.canonical import canonical
from catalog.models import CallPolicy, JsonSchema, Tool, ToolState
from catalog.naming import META_TOOLS
from catalog.shelf import Item, Kept
from catalog.tokens import count
from catalog.validation import validators
from servers import calling
from servers.calling import CallOutcome, Target
from servers.models import Server
from servers.threads import in_thread
from sessions_app import ledger, limiting, loading, opening, scope, surfaces
from sessions_app.ledger import Ending
from sessions_app.models import Agent, AgentSession, Call, CallPath, CallState
from sessions_app.payloads import arguments_of, check, kept, kept_arguments
from toolcrib.errors import Invalid, ToolcribError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
COUNTED = 1_000_000  # characters of a result that are counted exactly
_carried: set[asyncio.Task[str]] = set()  # calls whose caller has gone


class NotSent(ToolcribError):
    """Nothing reached the server, and trying again may work."""

    code = "busy"
    status = 503


@dataclass(frozen=True)
class CallRequest:
    tool_name: str
    arguments: object = None
    timeout: float | None = None
    idempotency_key: str | None = None
    path: str = CallPath.DISPATCH


@dataclass
class CallPlan:
    """A call that may be made: everything the network part needs to know."""

    call: Call
    item: Item
    arguments: dict[str, Any]
    target: Target
    timeout: float
    schema: JsonSchema
    sent: bool = False
    asked: "asyncio.Task[CallOutcome] | None" = field(default=None, repr=False)


class Refused(Exception):
    """The call is refused with words for the model."""

    def __init__(self, code: str, message: str, hint: str = "", schema: str = "") -> None:
        super().__init__(message)
        self.code, self.message, self.hint, self.schema = code, message, hint, schema


# --- Decide -------------------------------------------------------------------------------------


def plan_call(agent: Agent, session_id: str, request: CallRequest) -> CallPlan | str:
    """Check everything and commit the call; or return an answer's JSON where none is to be made."""
    session = opening.find(agent, session_id)
    loading.check_open(session)
    key = ledger.check_key(request.idempotency_key)
    check(request.arguments, "/arguments")
    check(request.tool_name, "/tool_name")
    asked = ledger.request_digest(session, request.tool_name, request.arguments)
    before = ledger.answered_before(agent, key, asked)
    if before is not None:
        return before
    limiting.check_rate(agent, "calls", agent.calls_per_minute)
    call = Call(
        session=session,
        agent=agent,
        tool_name=request.tool_name[:200],
        path=request.path,
        idempotency_key=key,
        request_digest=asked,
        arguments=kept_arguments(request.arguments),
    )
    return _planned(call, request, lambda: _find(session, request.tool_name), session)


def _find(session: AgentSession, name: str) -> Item:
    if name in META_TOOLS:
        raise Refused(
            "meta_tool",
            f"{name} is not run through a call: it is a tool of Toolcrib's own.",
            "Name the tool you want to run.",
        )
    return scope.of_session(session).find(name)


def _planned(
    call: Call, request: CallRequest, find: Callable[[], Item], session: AgentSession | None
) -> CallPlan | str:
    call.accepted_at = timezone.now()
    call.deadline = call.accepted_at
    try:
        item = find()
        _name(call, item)
        arguments = arguments_of(request.arguments)
        _check_usable(item)
        pin = surfaces.pinned(session, item.name) if session else None
        call.definition_id = _checked(item, pin, arguments)
        call.implicit_load = session is not None and pin is None
        if not item.server_id:
            return ledger.finish(call, _for_client(item, arguments))
        return _accepted(call, item, arguments, request)
    except Refused as refusal:
        ending = _refusal(refusal.code, refusal.message, refusal.hint, refusal.schema)
        return ledger.finish(call, ending)
    except (scope.NotAvailable, scope.Ambiguous, Invalid) as error:
        return ledger.finish(call, _refusal(error.code, error.message, error.hint))


def _name(call: Call, item: Item) -> None:
    call.tool_id, call.tool_name = item.tool_id, item.name
    call.server_id, call.server_slug = item.server_id, item.server


def _check_usable(item: Item) -> None:
    """Refuse what an admin, the server or the lack of an approval stands against."""
    strict_wait = item.trust == "strict" and item.state == ToolState.WAITING
    if not item.offered or strict_wait:
        code = loading.why_not_code(item)
        raise Refused(code, loading.why_not(item), "Use another tool, or tell your operator.")
    if item.call_policy == CallPolicy.DENY:
        raise Refused(
            "denied",
            f"{item.name} may not be called here: an admin denies it.",
            "Use another tool, or tell your operator.",
        )


def _checked(item: Item, pin: surfaces.Pin | None, arguments: dict[str, Any]) -> int:
    """Hold arguments to what the session was shown, and to what is newer. Return the former."""
    approved = item.approved
    assert approved is not None  # noqa: S101 - _check_usable saw to it
    shown = shelf.definition(pin["definition"]) if pin else approved
    _validate(item, shown, arguments)
    newer = [approved]
    if item.state == ToolState.WAITING and item.latest is not None:
        newer.append(item.latest)
    for kept_ in newer:
        if kept_.pk != shown.pk:
            _validate(item, kept_, arguments, changed=True)
    return shown.pk


def _validate(
    item: Item, definition: Kept, arguments: dict[str, Any], *, changed: bool = False
) -> None:
    schema = definition.input_schema
    problems = validators.of(definition.sha256, "input", schema).problems(arguments)
    if not problems:
        return
    what = (
        f"{item.name} changed since you loaded it, and the arguments do not fit what it takes now"
        if changed
        else f"The arguments for {item.name} do not fit its schema"
    )
    listed = "\n".join(f"- {problem}" for problem in problems)
    raise Refused(
        "definition_changed" if changed else "invalid_arguments",
        f"{what}:\n{listed}",
        "Correct the arguments and call again.",
        schema=f"Input schema of {item.name}:\n{canonical(schema)}",
    )


def _accepted(
    call: Call, item: Item, arguments: dict[str, Any], request: CallRequest
) -> CallPlan | str:
    server = Server.objects.get(pk=item.server_id or 0)
    timeout = request.timeout or server.call_timeout
    call.state = CallState.ACCEPTED
    call.deadline = call.accepted_at + timedelta(seconds=timeout)
    ledger.accept(call)
    target = Target(
        server_id=server.pk,
        slug=server.slug,
        generation=server.generation,
        isolation=server.isolation,
        session=call.session.session_id if call.session else call.call_id,
        concurrency=server.concurrency,
    )
    schema = (item.latest or item.approved).input_schema  # type: ignore[union-attr]
    return CallPlan(call, item, arguments, target, timeout, schema)


def _refusal(code: str, message: str, hint: str, schema: str = "") -> Ending:
    text = "\n\n".join(part for part in (message, schema, hint) if part)
    return Ending(
        CallState.REFUSED,
        True,
        [{"type": "text", "text": text}],
        tokens=count(text),
        code=code,
        message=message,
        hint=hint,
    )


def _for_client(item: Item, arguments: dict[str, Any]) -> Ending:
    text = f"Run {item.name} yourself with these arguments: {canonical(arguments)}"
    return Ending(
        CallState.CLIENT,
        False,
        [{"type": "text", "text": text}],
        arguments,
        tokens=count(text),
        raw={"structuredContent": arguments},  # in which secrets can be masked
    )


# --- Send ---------------------------------------------------------------------------------------


def _on_database(function: Callable[P, R]) -> Callable[P, "asyncio.Future[R]"]:
    return sync_to_async(function)  # type: ignore[return-value]


async def dispatch(agent: Agent, session_id: str, request: CallRequest) -> str:
    """Carry out one call of a session; return the answer as canonical JSON."""
    plan = await _on_database(plan_call)(agent, session_id, request)
    return plan if isinstance(plan, str) else await _carry_out(plan)


async def try_tool(tool: Tool, arguments: dict[str, Any], *, actor: Actor) -> dict[str, Any]:
    """Call a tool as a person, outside any session, by the same checks and ledger."""
    plan = await _on_database(_plan_try)(tool, arguments, actor)
    try:
        answer = plan if isinstance(plan, str) else await _carry_out(plan)
    finally:
        if isinstance(plan, CallPlan):
            await calling.forget_session(plan.target.session)
    told: dict[str, Any] = json.loads(answer)
    return told


def _plan_try(tool: Tool, arguments: dict[str, Any], actor: Actor) -> CallPlan | str:
    check(arguments, "/arguments")
    call = Call(
        actor=actor.label[:200],
        tool_name=tool.public_name,
        path=CallPath.TRY,
        arguments=kept(arguments),
    )
    request = CallRequest(tool.public_name, arguments, path=CallPath.TRY)
    return _planned(call, request, lambda: shelf.item(tool.pk), None)


async def _carry_out(plan: CallPlan) -> str:
    """Send and record. Where the caller leaves, the call is cancelled and still recorded."""
    task = asyncio.create_task(_run(plan))
    _carried.add(task)
    task.add_done_callback(_carried.discard)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if plan.asked is not None:
            plan.asked.cancel()
        raise


async def _run(plan: CallPlan) -> str:
    plan.asked = asyncio.create_task(_ask(plan))
    try:
        outcome = await plan.asked
    except asyncio.CancelledError:
        outcome = _cancelled(plan)
    except Exception:
        # Ours, such as a database that is away: what was sent is in doubt, what was not is not.
        logger.exception("Call %s could not be carried out", plan.call.call_id)
        if plan.sent:
            raise
        outcome = CallOutcome("not_sent", code="busy", message="The call could not be recorded.")
    return await _on_database(_record)(plan, outcome)


async def _ask(plan: CallPlan) -> CallOutcome:
    async def sent() -> None:
        await _on_database(ledger.mark_sent)(plan.call)
        plan.sent = True

    def late(what: str) -> None:
        noting = asyncio.ensure_future(in_thread(ledger.note_late, plan.call.pk, what))
        noting.add_done_callback(lambda done: done.cancelled() or done.exception())

    return await calling.call(
        plan.target,
        plan.item.own_name,
        plan.arguments,
        timeout=plan.timeout,
        schema=plan.schema,
        on_sent=sent,
        on_late=late,
    )


def _cancelled(plan: CallPlan) -> CallOutcome:
    if plan.sent:
        return CallOutcome(
            "unknown",
            code="cancelled",
            message="The caller left while the call was under way. Whether the tool ran is not "
            "known.",
        )
    return CallOutcome("cancelled", code="cancelled", message="The caller left before it was sent.")


# --- Record -------------------------------------------------------------------------------------


def _record(plan: CallPlan, outcome: CallOutcome) -> str:
    call = plan.call
    if outcome.state == "not_sent":
        call.idempotency_key = None  # nothing happened under it
    body = ledger.finish(call, _ending(plan, outcome))
    if outcome.state == "not_sent" and outcome.code in ("busy", "stopping"):
        raise NotSent(
            outcome.message,
            hint=outcome.hint or "Try again.",
            code=outcome.code,
            details={"retry_after": 1},
        )
    return body


def _ending(plan: CallPlan, outcome: CallOutcome) -> Ending:
    if outcome.state == "succeeded":
        content = outcome.content or []
        problems = [] if outcome.is_error else _output_problems(plan.item, outcome)
        if problems:
            return _bad_output(plan.item, outcome, problems)
        structured = outcome.structured if outcome.has_structured else None
        return Ending(
            CallState.FAILED if outcome.is_error else CallState.SUCCEEDED,
            outcome.is_error,
            content,
            structured,
            tokens=_tokens(content, structured),
            code="tool_error" if outcome.is_error else "",
            message=f"{plan.item.name} answered with an error." if outcome.is_error else "",
        )
    state = outcome.state
    if state == "not_sent":
        busy = outcome.code in ("busy", "stopping")
        state = CallState.REFUSED if busy else CallState.FAILED
    text = f"{outcome.message}\n{outcome.hint}" if outcome.hint else outcome.message
    return Ending(
        state,
        True,
        [{"type": "text", "text": text}],
        tokens=count(text),
        code=outcome.code or state,
        message=outcome.message,
        hint=outcome.hint,
    )


def _output_problems(item: Item, outcome: CallOutcome) -> list[str]:
    definition = item.latest or item.approved
    schema = definition.output_schema if definition else None
    if definition is None or schema is None:
        return []
    if not outcome.has_structured:
        return ["structured content is missing"]
    return validators.of(definition.sha256, "output", schema).problems(outcome.structured)


def _bad_output(item: Item, outcome: CallOutcome, problems: list[str]) -> Ending:
    listed = "\n".join(f"- {problem}" for problem in problems)
    message = (
        f"{item.name} ran, but its result does not fit the output schema it declares:\n{listed}"
    )
    return Ending(
        CallState.FAILED,
        True,
        [{"type": "text", "text": message}],
        tokens=count(message),
        code="output_invalid",
        message=message,
        hint="Do not repeat the call to mend this: it is a fault of the server.",
        raw={"content": outcome.content, "structuredContent": outcome.structured},
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
    if len(text) <= COUNTED:
        return count(text)
    return round(count(text[:COUNTED]) * len(text) / COUNTED)
