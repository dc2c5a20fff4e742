"""Call planning: find the tool, check policy, validate arguments, choose server and timeout.

Writes nothing. `plan_from_database` reads everything from the database and reports every error;
`plan_from_cache` uses a cached authorization and leaves all other cases to it.
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
    """A permitted call: everything that sending and recording it needs."""

    entry: CallRow
    tool: CachedTool
    arguments: dict[str, Any]
    target: CallTarget
    timeout: float
    schema: JsonSchema
    sent: bool = False
    awaiting_server: bool = False  # the call can still be cancelled
    key: int | None = None  # id of the key that the caller used
    abandoned: bool = False  # cancelled: the caller disconnected
    stopping: bool = False  # cancelled: Toolcrib is stopping
    revoked: bool = False  # cancelled: the key was revoked


@dataclass(frozen=True)
class CallFinishedLocally:
    """A call that is answered without a server."""

    entry: CallRow
    result: CallResult


class CallRejected(Exception):
    """The call is rejected, with a message for the model."""

    def __init__(
        self,
        code: str,
        message: str,
        hint: str = "",
        schema: str = "",
        quoted_definition: tuple[int, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.hint, self.schema = code, message, hint, schema
        self.quoted_definition = quoted_definition


def plan_from_database(
    agent: Agent,
    session_id: str,
    request: CallRequest,
    *,
    checked_limit: int = 0,
) -> CallPlan | CallFinishedLocally | str:
    """Plan a call from the database, or return the stored response of its idempotency key."""
    session = lifecycle.find_session(agent, session_id)
    loading.check_open(session)
    key = call_ledger.check_idempotency_key(request.idempotency_key)
    check_value(request.arguments, "/arguments")
    check_value(request.tool_name, "/tool_name")
    digest = call_ledger.request_digest(
        key, session.session_id, request.tool_name, request.arguments
    )
    stored = call_ledger.stored_answer(agent, key, digest)
    if stored is not None:
        return stored
    if checked_limit != agent.calls_per_minute:
        rate_limits.check_rate(agent, "calls", agent.calls_per_minute)
    entry = _new_row(request, key, digest, session_id=session.pk, agent_id=agent.pk)
    return _plan_or_reject(entry, request, lambda: _find_tool(session, request.tool_name), session)


def plan_try(tool: Tool, arguments: dict[str, Any], actor: Actor) -> CallPlan | CallFinishedLocally:
    """Plan a call by a user, outside any session."""
    check_value(arguments, "/arguments")
    request = CallRequest(tool.public_name, arguments, path=CallPath.TRY)
    entry = _new_row(request, None, "", actor=actor.label[:200])
    return _plan_or_reject(entry, request, lambda: cache.cached_tool(tool.pk), None)


def _new_row(
    request: CallRequest,
    key: str | None,
    digest: str,
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
        request_digest=digest,
        arguments=stored_arguments(request.arguments),
        accepted_at=now,
        deadline=now,
        holder=THIS_PROCESS,
    )


def plan_from_cache(authorization: CachedAuthorization, request: CallRequest) -> CallPlan | None:
    """Plan a call with a cached authorization; None if it must be planned from the database."""
    name = request.tool_name
    tool = authorization.scope.lookup(name) if name not in META_TOOLS else None
    server_row = authorization.server_rows.get(tool.server_id or 0) if tool is not None else None
    if tool is None or server_row is None:
        return None
    try:
        key = call_ledger.check_idempotency_key(request.idempotency_key)
        check_value(request.arguments, "/arguments")
        check_value(name, "/tool_name")
        digest = call_ledger.request_digest(key, authorization.session_id, name, request.arguments)
        entry = _new_row(
            request,
            key,
            digest,
            session_id=authorization.session_pk,
            agent_id=authorization.agent.pk,
        )
        arguments = parse_arguments(request.arguments)
        _check_usable(tool)
        shown_definition = authorization.shown_definition(tool.name)
        entry.definition_id = _validate_arguments(tool, shown_definition, arguments)
    except (CallRejected, Invalid):
        return None
    _assign_tool(entry, tool)
    entry.implicit_load = shown_definition is None
    _, generation, isolation, concurrency, call_timeout, slug = server_row
    target = CallTarget(
        tool.server_id or 0, slug, generation, isolation, authorization.session_id, concurrency
    )
    plan = _build_plan(entry, tool, arguments, target, request.timeout or call_timeout)
    plan.key = authorization.key_id
    return plan


def is_cheap_to_plan(authorization: CachedAuthorization, request: CallRequest) -> bool:
    """Return whether the tool's schema is compiled, so that planning does not block the loop."""
    tool = authorization.scope.lookup(request.tool_name)
    if tool is None or tool.approved is None:
        return True
    return validators.has(tool.approved.sha256, "input")


def _find_tool(session: AgentSession, name: str) -> CachedTool:
    if name in META_TOOLS:
        raise CallRejected(
            "meta_tool",
            f"{name} is a meta-tool of Toolcrib and cannot be run through a call.",
            "Name the tool you want to run.",
        )
    return scope.scope_of_session(session).find_tool(name)


def _plan_or_reject(
    entry: CallRow,
    request: CallRequest,
    find: Callable[[], CachedTool],
    session: AgentSession | None,
) -> CallPlan | CallFinishedLocally:
    try:
        tool = find()
        _assign_tool(entry, tool)
        arguments = parse_arguments(request.arguments)
        _check_usable(tool)
        pin = surface.last_shown(session, tool.name) if session else None
        shown_definition = pin["definition"] if pin else None
        entry.definition_id = _validate_arguments(tool, shown_definition, arguments)
        entry.implicit_load = session is not None and pin is None
        if not tool.server_id:
            return CallFinishedLocally(entry, _client_result(tool, arguments))
        return _plan_for_server(entry, tool, arguments, request, session)
    except CallRejected as rejected:
        result = _rejection(rejected.code, rejected.message, rejected.hint, rejected.schema)
        result = replace(result, quoted_definition=rejected.quoted_definition)
        return CallFinishedLocally(entry, result)
    except (scope.NotAvailable, scope.Ambiguous, Invalid) as error:
        return CallFinishedLocally(entry, _rejection(error.code, error.message, error.hint))


def _assign_tool(entry: CallRow, tool: CachedTool) -> None:
    entry.tool_id, entry.tool_name = tool.tool_id, tool.name
    entry.server_id, entry.server_slug = tool.server_id, tool.server


def _check_usable(tool: CachedTool) -> None:
    """Reject a tool that is unavailable, pending review on a strict server, or denied."""
    strict_pending = tool.trust == "strict" and tool.state == ToolState.WAITING
    if not tool.offered or strict_pending:
        code = loading.unavailable_code(tool)
        raise CallRejected(
            code, loading.unavailable_reason(tool), "Use another tool, or tell your operator."
        )
    if tool.call_policy == CallPolicy.DENY:
        raise CallRejected(
            "denied",
            f"{tool.name} may not be called: an admin has denied calls of it.",
            "Use another tool, or tell your operator.",
        )


def _validate_arguments(
    tool: CachedTool, shown_definition: int | None, arguments: dict[str, Any]
) -> int:
    """Validate arguments against the approved definition, and return its primary key.

    A definition that is pending review is neither used nor quoted. `shown_definition` is what the
    session was last shown: if it is an older one, the error says that the tool changed and quotes
    the approved schema, so that one correction is enough.
    """
    approved = tool.approved
    assert approved is not None  # noqa: S101 - ensured by _check_usable
    validator = validators.get_or_compile(approved.sha256, "input", approved.input_schema)
    if not validator.can_check(arguments):
        raise CallRejected(
            "invalid_arguments",
            f"The arguments for {tool.name} have too many values to be validated by its schema.",
            "Send fewer values in one call.",
        )
    problems = validator.problems(arguments)
    if not problems:
        return approved.pk
    changed = shown_definition is not None and shown_definition != approved.pk
    problem = (
        f"The definition of {tool.name} has changed since this session received it, and the "
        "arguments do not match the new schema"
        if changed
        else f"The arguments for {tool.name} do not match its schema"
    )
    lines = "\n".join(f"- {line}" for line in problems)
    raise CallRejected(
        "definition_changed" if changed else "invalid_arguments",
        f"{problem}:\n{lines}",
        "Correct the arguments and call again.",
        schema=f"Input schema of {tool.name}:\n{canonical(approved.input_schema)}",
        quoted_definition=(approved.pk, tool.description_override) if changed else None,
    )


def _plan_for_server(
    entry: CallRow,
    tool: CachedTool,
    arguments: dict[str, Any],
    request: CallRequest,
    session: AgentSession | None,
) -> CallPlan:
    server = Server.objects.get(pk=tool.server_id or 0)
    target = CallTarget(
        server_id=server.pk,
        slug=server.slug,
        generation=server.generation,
        isolation=server.isolation,
        session=session.session_id if session else entry.call_id,
        concurrency=server.concurrency,
    )
    return _build_plan(entry, tool, arguments, target, request.timeout or server.call_timeout)


def _build_plan(
    entry: CallRow, tool: CachedTool, arguments: dict[str, Any], target: CallTarget, timeout: float
) -> CallPlan:
    entry.deadline = entry.accepted_at + timedelta(seconds=timeout)
    assert tool.approved is not None  # noqa: S101 - ensured by _check_usable
    return CallPlan(entry, tool, arguments, target, timeout, tool.approved.input_schema)


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


def _client_result(tool: CachedTool, arguments: dict[str, Any]) -> CallResult:
    text = f"Run {tool.name} yourself with these arguments: {canonical(arguments)}"
    return CallResult(
        CallState.CLIENT,
        False,
        [{"type": "text", "text": text}],
        arguments,
        tokens=count(text),
        raw={"structuredContent": arguments},  # as an object, in which secrets are redacted
    )
