"""Call planning: find the tool, check policy, validate arguments, choose server and timeout.

Writes nothing. A call that cannot be made is planned too: as finished, with a result that says why.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.utils import timezone

from catalog.audit import Actor
from catalog.cache import CachedTool
from catalog.definitions.public_names import META_TOOLS
from catalog.definitions.validation import validators
from catalog.models import CallPolicy, JsonSchema, ToolState
from servers.connections.calls import CallTarget
from sessions_app.dispatch.authorization import SERVER_COLUMNS, Authorization, Outdated
from sessions_app.ledger import calls as call_ledger
from sessions_app.ledger.calls import THIS_PROCESS, CallResult
from sessions_app.ledger.writer import CallRow, Row
from sessions_app.models import CallPath, CallState, new_call_id
from sessions_app.sessions import loading, scope
from toolcrib.lib.errors import Invalid, ToolcribError
from toolcrib.lib.json_codec import canonical, digest
from toolcrib.lib.payloads import check_value, parse_arguments, stored_arguments
from toolcrib.lib.token_counter import count

ON_LOOP_BYTES = 64 * 1024  # larger requests are parsed and planned off the event loop


@dataclass(frozen=True)
class CallRequest:
    tool_name: str
    arguments: object = None
    timeout: float | None = None
    idempotency_key: str | None = None
    path: str = CallPath.DISPATCH
    size: int = 0  # bytes
    # Checks the request against a schema that maps arguments to HTTP headers; raises.
    check_headers: Callable[[JsonSchema], None] | None = None

    def check(self) -> None:
        """Raise Invalid for what cannot be stored or sent on."""
        call_ledger.check_idempotency_key(self.idempotency_key)
        check_value(self.arguments, "/arguments")
        check_value(self.tool_name, "/tool_name")

    def digest(self, session_id: str) -> str:
        """Return a digest that identifies the request of an idempotency key; empty without one."""
        if self.idempotency_key is None:
            return ""
        return digest(canonical([session_id, self.tool_name, self.arguments]))


@dataclass
class CallPlan:
    """A permitted call: everything that sending and recording it needs."""

    entry: CallRow
    tool: CachedTool
    arguments: dict[str, Any]
    target: CallTarget
    server_row: Row
    timeout: float
    schema: JsonSchema | None  # if it maps arguments to HTTP headers
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


class CallRejected(ToolcribError):
    """The call is rejected, with a message for the model."""

    schema = ""  # quoted in the message
    quoted_definition: tuple[int, str] | None = None


def plan_call(
    authorization: Authorization, request: CallRequest, server_row: Row | None
) -> CallPlan | CallFinishedLocally:
    """Plan a call of a session. `server_row` is that of the tool's server."""
    entry, session_id = _new_row(request), authorization.session_id
    entry.session_id, entry.agent_id = authorization.session_pk, authorization.agent.pk
    entry.request_digest = request.digest(session_id)
    try:
        if request.tool_name in META_TOOLS:
            raise CallRejected(
                f"{request.tool_name} is a meta-tool of Toolcrib and cannot be run through a call.",
                hint="Name the tool you want to run.",
                code="meta_tool",
            )
        tool = authorization.scope.find_tool(request.tool_name)
        if request.check_headers and tool.approved and tool.approved.has_header_mapping:
            request.check_headers(tool.approved.input_schema)
        shown = authorization.shown_definition(tool.name)
        plan = _plan(entry, tool, request, server_row, session_id=session_id, shown=shown)
    except _REJECTIONS as error:
        return _rejected(entry, error)
    entry.implicit_load = shown is None
    if isinstance(plan, CallPlan):
        plan.key = authorization.key_id
    return plan


def plan_try(
    tool: CachedTool, arguments: dict[str, Any], actor: Actor, server_row: Row | None
) -> CallPlan | CallFinishedLocally:
    """Plan a call by a user, outside any session."""
    request = CallRequest(tool.name, arguments, path=CallPath.TRY)
    entry = _new_row(request)
    entry.actor = actor.label[:200]
    try:
        return _plan(entry, tool, request, server_row, session_id=entry.call_id, shown=None)
    except _REJECTIONS as error:
        return _rejected(entry, error)


def is_cheap(tool: CachedTool | None, request: CallRequest) -> bool:
    """Return whether planning does not block the event loop: a small call, a compiled schema."""
    if tool is None:
        return False  # suggestions for an unknown name take time
    is_compiled = tool.approved is None or validators.has(tool.approved, "input")
    return is_compiled and request.size <= ON_LOOP_BYTES


def _new_row(request: CallRequest) -> CallRow:
    now = timezone.now()
    return CallRow(
        call_id=new_call_id(),
        tool_name=request.tool_name[:200],
        path=str(request.path),
        idempotency_key=request.idempotency_key,
        arguments=stored_arguments(request.arguments),
        accepted_at=now,
        deadline=now,
        holder=THIS_PROCESS,
    )


def _plan(
    entry: CallRow,
    tool: CachedTool,
    request: CallRequest,
    server_row: Row | None,
    *,
    session_id: str,
    shown: int | None,
) -> CallPlan | CallFinishedLocally:
    entry.tool_id, entry.tool_name = tool.tool_id, tool.name
    entry.server_id, entry.server_slug = tool.server_id, tool.server
    arguments = parse_arguments(request.arguments)
    _check_usable(tool)
    entry.definition_id = _validate_arguments(tool, shown, arguments)
    if not tool.server_id:
        return CallFinishedLocally(entry, _client_result(tool, arguments))
    if server_row is None:  # deleted in between
        raise Outdated
    server = dict(zip(SERVER_COLUMNS, server_row, strict=True))
    target = CallTarget(
        server_id=tool.server_id,
        slug=server["slug"],
        generation=server["generation"],
        isolation=server["isolation"],
        session=session_id,
        concurrency=server["concurrency"],
    )
    timeout = request.timeout or server["call_timeout"]
    entry.deadline = entry.accepted_at + timedelta(seconds=timeout)
    approved = tool.approved
    schema = approved.input_schema if approved and approved.has_header_mapping else None
    return CallPlan(entry, tool, arguments, target, server_row, timeout, schema)


_REJECTIONS = (CallRejected, scope.NotAvailable, scope.Ambiguous, Invalid)


def _rejected(entry: CallRow, error: Any) -> CallFinishedLocally:
    schema = getattr(error, "schema", "")
    text = "\n\n".join(part for part in (error.message, schema, error.hint) if part)
    result = CallResult.of_text(
        CallState.REFUSED,
        text,
        tokens=count(text),
        code=error.code,
        message=error.message,
        hint=error.hint,
        quoted_definition=getattr(error, "quoted_definition", None),
    )
    return CallFinishedLocally(entry, result)


def _check_usable(tool: CachedTool) -> None:
    """Reject a tool that is unavailable, pending review on a strict server, or denied."""
    strict_pending = tool.trust == "strict" and tool.state == ToolState.WAITING
    hint = "Use another tool, or tell your operator."
    if not tool.offered or strict_pending:
        code = loading.unavailable_code(tool)
        raise CallRejected(loading.unavailable_reason(tool), hint=hint, code=code)
    if tool.call_policy == CallPolicy.DENY:
        message = f"{tool.name} may not be called: an admin has denied calls of it."
        raise CallRejected(message, hint=hint, code="denied")


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
    validator = validators.get(approved, "input")
    assert validator is not None  # noqa: S101 - every definition has an input schema
    if not validator.can_check(arguments):
        raise CallRejected(
            f"The arguments for {tool.name} have too many values to be validated by its schema.",
            hint="Send fewer values in one call.",
            code="invalid_arguments",
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
    rejected = CallRejected(
        f"{problem}:\n{lines}",
        hint="Correct the arguments and call again.",
        code="definition_changed" if changed else "invalid_arguments",
    )
    rejected.schema = f"Input schema of {tool.name}:\n{canonical(approved.input_schema)}"
    if changed:
        rejected.quoted_definition = approved.pk, tool.description_override
    raise rejected


def _client_result(tool: CachedTool, arguments: dict[str, Any]) -> CallResult:
    text = f"Run {tool.name} yourself with these arguments: {canonical(arguments)}"
    return CallResult.of_text(
        CallState.CLIENT,
        text,
        is_error=False,
        structured=arguments,
        tokens=count(text),
        raw={"structuredContent": arguments},  # as an object, in which secrets are redacted
    )
