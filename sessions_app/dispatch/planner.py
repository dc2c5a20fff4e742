"""Decide on a call: find the real tool, validate arguments, refuse what may not be.

Nothing is written here. The long way asks the database for everything; the short way (`at_hand`)
takes what is remembered of an earlier call, and leaves whatever is unusual to the long one.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from django.utils import timezone

from catalog import cache
from catalog.audit import Actor
from catalog.cache import CachedTool
from catalog.definitions.public_names import META_TOOLS
from catalog.definitions.validation import validators
from catalog.models import CallPolicy, JsonSchema, Tool, ToolState
from servers.connections.calls import CallTarget
from servers.models import Server
from sessions_app.agents import rate_limits
from sessions_app.dispatch.authorization_cache import CachedAuthorization
from sessions_app.ledger import calls as call_ledger
from sessions_app.ledger.calls import THIS_PROCESS, CallResult
from sessions_app.ledger.payloads import check_value, parse_arguments, stored_arguments
from sessions_app.ledger.sql import CallRow, new_call_id
from sessions_app.models import Agent, AgentSession, CallPath, CallState
from sessions_app.sessions import lifecycle, loading, scope, surface
from toolcrib.lib.errors import Invalid
from toolcrib.lib.json_codec import canonical
from toolcrib.lib.token_counter import count


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

    entry: CallRow
    item: CachedTool
    arguments: dict[str, Any]
    target: CallTarget
    timeout: float
    schema: JsonSchema
    sent: bool = False
    asking: bool = False  # the server is being asked, so the call can be given up
    key: int | None = None  # with which it was asked for
    left: bool = False  # its caller has left before it was begun
    stopping: bool = False  # it was given up since Toolcrib stops
    revoked: bool = False  # or since its key is no longer good


@dataclass(frozen=True)
class CallFinishedLocally:
    """A call that is answered without a server, and how."""

    entry: CallRow
    ending: CallResult


class CallRejected(Exception):
    """The call is refused with words for the model."""

    def __init__(
        self,
        code: str,
        message: str,
        hint: str = "",
        schema: str = "",
        shows: tuple[int, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.hint, self.schema = code, message, hint, schema
        self.shows = shows


def plan_from_database(
    agent: Agent,
    session_id: str,
    request: CallRequest,
    *,
    counted: int = 0,
) -> CallPlan | CallFinishedLocally | str:
    """Check everything, the long way; or return an answer's JSON that was given before."""
    session = lifecycle.find_session(agent, session_id)
    loading.check_open(session)
    key = call_ledger.check_idempotency_key(request.idempotency_key)
    check_value(request.arguments, "/arguments")
    check_value(request.tool_name, "/tool_name")
    asked = call_ledger.request_digest(
        key, session.session_id, request.tool_name, request.arguments
    )
    before = call_ledger.stored_answer(agent, key, asked)
    if before is not None:
        return before
    if counted != agent.calls_per_minute:
        rate_limits.check_rate(agent, "calls", agent.calls_per_minute)
    entry = _new_row(request, key, asked, session_id=session.pk, agent_id=agent.pk)
    return _plan_or_reject(entry, request, lambda: _find(session, request.tool_name), session)


def plan_try(tool: Tool, arguments: dict[str, Any], actor: Actor) -> CallPlan | CallFinishedLocally:
    """Plan a call that a person makes, outside any session."""
    check_value(arguments, "/arguments")
    request = CallRequest(tool.public_name, arguments, path=CallPath.TRY)
    entry = _new_row(request, None, "", actor=actor.label[:200])
    return _plan_or_reject(entry, request, lambda: cache.cached_tool(tool.pk), None)


def _new_row(
    request: CallRequest,
    key: str | None,
    asked: str,
    *,
    session_id: int | None = None,
    agent_id: int | None = None,
    actor: str = "",
) -> CallRow:
    now = timezone.now()
    return CallRow(
        call_id=new_call_id(),
        session_id=session_id,
        agent_id=agent_id,
        actor=actor,
        tool_name=request.tool_name[:200],
        path=str(request.path),
        idempotency_key=key,
        request_digest=asked,
        arguments=stored_arguments(request.arguments),
        accepted_at=now,
        deadline=now,
        holder=THIS_PROCESS,
    )


def plan_from_cache(ready: CachedAuthorization, request: CallRequest) -> CallPlan | None:
    """Plan a call from what is remembered; None where the long way has to look at it."""
    name = request.tool_name
    item = ready.seen.lookup(name) if name not in META_TOOLS else None
    facts = ready.servers.get(item.server_id or 0) if item is not None else None
    if item is None or facts is None:
        return None
    try:
        key = call_ledger.check_idempotency_key(request.idempotency_key)
        check_value(request.arguments, "/arguments")
        check_value(name, "/tool_name")
        asked = call_ledger.request_digest(key, ready.session_id, name, request.arguments)
        entry = _new_row(request, key, asked, session_id=ready.session_pk, agent_id=ready.agent.pk)
        arguments = parse_arguments(request.arguments)
        _check_usable(item)
        shown = ready.shown(item.name)
        entry.definition_id = _validate_arguments(item, shown, arguments)
    except (CallRejected, Invalid):
        return None
    _set_tool(entry, item)
    entry.implicit_load = shown is None
    _, generation, isolation, concurrency, call_timeout, slug = facts
    target = CallTarget(
        item.server_id or 0, slug, generation, isolation, ready.session_id, concurrency
    )
    plan = _plan(entry, item, arguments, target, request.timeout or call_timeout)
    plan.key = ready.key_id
    return plan


def is_cheap_to_plan(ready: CachedAuthorization, request: CallRequest) -> bool:
    """Tell whether planning this takes no time to speak of: its schema is compiled."""
    item = ready.seen.lookup(request.tool_name)
    if item is None or item.approved is None:
        return True
    return validators.has(item.approved.sha256, "input")


def _find(session: AgentSession, name: str) -> CachedTool:
    if name in META_TOOLS:
        raise CallRejected(
            "meta_tool",
            f"{name} is not run through a call: it is a tool of Toolcrib's own.",
            "Name the tool you want to run.",
        )
    return scope.scope_of_session(session).find(name)


def _plan_or_reject(
    entry: CallRow,
    request: CallRequest,
    find: Callable[[], CachedTool],
    session: AgentSession | None,
) -> CallPlan | CallFinishedLocally:
    try:
        item = find()
        _set_tool(entry, item)
        arguments = parse_arguments(request.arguments)
        _check_usable(item)
        pin = surface.last_shown(session, item.name) if session else None
        shown = pin["definition"] if pin else None
        entry.definition_id = _validate_arguments(item, shown, arguments)
        entry.implicit_load = session is not None and pin is None
        if not item.server_id:
            return CallFinishedLocally(entry, _for_client(item, arguments))
        return _to_server(entry, item, arguments, request, session)
    except CallRejected as refusal:
        ending = _rejection(refusal.code, refusal.message, refusal.hint, refusal.schema)
        return CallFinishedLocally(entry, replace(ending, shows=refusal.shows))
    except (scope.NotAvailable, scope.Ambiguous, Invalid) as error:
        return CallFinishedLocally(entry, _rejection(error.code, error.message, error.hint))


def _set_tool(entry: CallRow, item: CachedTool) -> None:
    entry.tool_id, entry.tool_name = item.tool_id, item.name
    entry.server_id, entry.server_slug = item.server_id, item.server


def _check_usable(item: CachedTool) -> None:
    """Refuse what an admin, the server or the lack of an approval stands against."""
    strict_wait = item.trust == "strict" and item.state == ToolState.WAITING
    if not item.offered or strict_wait:
        code = loading.unavailable_code(item)
        raise CallRejected(
            code, loading.unavailable_reason(item), "Use another tool, or tell your operator."
        )
    if item.call_policy == CallPolicy.DENY:
        raise CallRejected(
            "denied",
            f"{item.name} may not be called here: an admin denies it.",
            "Use another tool, or tell your operator.",
        )


def _validate_arguments(item: CachedTool, shown: int | None, arguments: dict[str, Any]) -> int:
    """Validate arguments by the approved definition, and return its key.

    Nothing of a definition that is pending review is used or quoted. `shown` is the definition
    that the session was last shown: where it is an older one, the refusal says that the tool
    changed and quotes the approved schema, so that one correction suffices.
    """
    approved = item.approved
    assert approved is not None  # noqa: S101 - _check_usable saw to it
    validator = validators.of(approved.sha256, "input", approved.input_schema)
    if not validator.can_check(arguments):
        raise CallRejected(
            "invalid_arguments",
            f"The arguments for {item.name} have too many values to be validated by its schema.",
            "Send fewer values in one call.",
        )
    problems = validator.problems(arguments)
    if not problems:
        return approved.pk
    changed = shown is not None and shown != approved.pk
    what = (
        f"The definition of {item.name} has changed since this session received it, and the "
        "arguments do not match the new schema"
        if changed
        else f"The arguments for {item.name} do not match its schema"
    )
    listed = "\n".join(f"- {problem}" for problem in problems)
    raise CallRejected(
        "definition_changed" if changed else "invalid_arguments",
        f"{what}:\n{listed}",
        "Correct the arguments and call again.",
        schema=f"Input schema of {item.name}:\n{canonical(approved.input_schema)}",
        shows=(approved.pk, item.description_override) if changed else None,
    )


def _to_server(
    entry: CallRow,
    item: CachedTool,
    arguments: dict[str, Any],
    request: CallRequest,
    session: AgentSession | None,
) -> CallPlan:
    server = Server.objects.get(pk=item.server_id or 0)
    target = CallTarget(
        server_id=server.pk,
        slug=server.slug,
        generation=server.generation,
        isolation=server.isolation,
        session=session.session_id if session else entry.call_id,
        concurrency=server.concurrency,
    )
    return _plan(entry, item, arguments, target, request.timeout or server.call_timeout)


def _plan(
    entry: CallRow, item: CachedTool, arguments: dict[str, Any], target: CallTarget, timeout: float
) -> CallPlan:
    entry.deadline = entry.accepted_at + timedelta(seconds=timeout)
    assert item.approved is not None  # noqa: S101 - _check_usable saw to it
    return CallPlan(entry, item, arguments, target, timeout, item.approved.input_schema)


def _rejection(code: str, message: str, hint: str, schema: str = "") -> CallResult:
    text = "\n\n".join(part for part in (message, schema, hint) if part)
    return CallResult(
        CallState.REFUSED,
        True,
        [{"type": "text", "text": text}],
        tokens=count(text),
        code=code,
        message=message,
        hint=hint,
    )


def _for_client(item: CachedTool, arguments: dict[str, Any]) -> CallResult:
    text = f"Run {item.name} yourself with these arguments: {canonical(arguments)}"
    return CallResult(
        CallState.CLIENT,
        False,
        [{"type": "text", "text": text}],
        arguments,
        tokens=count(text),
        raw={"structuredContent": arguments},  # in which secrets can be masked
    )
