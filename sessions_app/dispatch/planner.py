"""Call planning: find the tool, check policy, validate arguments, choose server and timeout.

Writes nothing. A call that cannot be made is planned too: as finished, with a result that says why.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.utils import timezone

from catalog.audit import Actor
from catalog.cache import CachedTool
from catalog.definitions.public_names import META_TOOLS
from catalog.definitions.validation import validators
from catalog.models import CallPolicy, JsonSchema, ToolState
from servers.connections.asking import AskingClient
from servers.connections.calls import CallOutcome, CallTarget
from servers.spec import TOOLS_CALL
from sessions_app.dispatch.authorization import SERVER_COLUMNS, Authorization, Outdated
from sessions_app.ledger import calls as call_ledger
from sessions_app.ledger.calls import THIS_PROCESS, CallResponse, CallResult
from sessions_app.ledger.writer import CallRow, Row
from sessions_app.models import CallPath, CallState, RuleEffect, new_call_id
from sessions_app.rules.agent_rules import AgentRules, origin_of
from sessions_app.rules.evaluation import Decision, Match
from sessions_app.sessions import loading, scope
from toolcrib.lib.errors import Invalid, ToolcribError
from toolcrib.lib.json_codec import canonical, digest
from toolcrib.lib.payloads import check_value, parse_arguments, stored_arguments, strictest_storage
from toolcrib.lib.redaction.redactor import redact_text
from toolcrib.lib.token_counter import count

ASKING_SECONDS = 300.0  # for the answers of a user, beside the timeout of the call
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
    read_only: bool = False  # refuse a tool that may change something
    client: AskingClient | None = None  # if the calling client can ask its user
    run: int | None = None  # primary key of the script that makes the call
    is_complete: bool = False  # the arguments have the fixed values: of a call that was held

    @property
    def origin(self) -> str:
        """What rules see: `direct` or `script`."""
        return origin_of(self.path)

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
    method: str = TOOLS_CALL  # another one for prompts and resources
    client: AskingClient | None = None  # if the calling client can ask its user
    # Rules that match the call as far as it alone shows; decided when it is accepted.
    matches: Sequence[Match] = ()
    before_send: Callable[[], Awaitable[None]] | None = None  # of a call that was held
    record: Callable[[CallResult, CallOutcome], Awaitable[CallResponse]] | None = None  # likewise
    sent: bool = False
    awaiting_server: bool = False  # the call can still be cancelled
    key: int | None = None  # id of the key that the caller used
    abandoned: bool = False  # cancelled: the caller disconnected
    stopping: bool = False  # cancelled: Toolcrib is stopping
    revoked: bool = False  # cancelled: the key was revoked
    answer_by: float | None = None  # time of the event loop; None if no caller waits


@dataclass(frozen=True)
class CallFinishedLocally:
    """A call that is answered without a server."""

    entry: CallRow
    result: CallResult
    # Of a custom tool, which rules may hold:
    tool: CachedTool | None = None
    arguments: dict[str, Any] | None = None
    matches: Sequence[Match] = ()


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
    entry.storage = authorization.agent.payload_storage
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
        rules = authorization.rules
        plan = _plan(entry, tool, request, server_row, rules, session_id=session_id, shown=shown)
    except _REJECTIONS as error:
        return rejected(entry, error)
    finally:
        if not entry.arguments:
            _store_arguments(entry, request.arguments)
    entry.implicit_load = not authorization.is_loaded(plan.entry.tool_name)
    if isinstance(plan, CallPlan):
        plan.key = authorization.key_id
    return plan


def plan_try(
    tool: CachedTool,
    arguments: dict[str, Any],
    actor: Actor,
    server_row: Row | None,
    rules: AgentRules | None,
) -> CallPlan | CallFinishedLocally:
    """Plan a call by a user, outside any session."""
    request = CallRequest(tool.name, arguments, path=CallPath.TRY)
    entry = _new_row(request)
    entry.actor = actor.label[:200]
    try:
        return _plan(entry, tool, request, server_row, rules, session_id=entry.call_id, shown=None)
    except _REJECTIONS as error:
        return rejected(entry, error)
    finally:
        if not entry.arguments:
            _store_arguments(entry, request.arguments)


def is_cheap(tool: CachedTool | None, request: CallRequest) -> bool:
    """Return whether planning does not block the event loop: a small call, a compiled schema."""
    if tool is None:
        return False  # suggestions for an unknown name take time
    is_compiled = tool.approved is None or validators.has(tool.approved, "input")
    if tool.overrides is not None:
        is_compiled = is_compiled and validators.has(tool.overrides.approved, "input")
    return is_compiled and request.size <= ON_LOOP_BYTES


def _new_row(request: CallRequest) -> CallRow:
    return new_row(request.tool_name, str(request.path), request.idempotency_key, request.run)


def new_row(
    name: str, path: str, idempotency_key: str | None = None, run: int | None = None
) -> CallRow:
    now = timezone.now()
    return CallRow(
        call_id=new_call_id(),
        tool_name=name[:200],
        path=path,
        idempotency_key=idempotency_key,
        run_id=run,
        arguments="",  # stored when it is known how
        accepted_at=now,
        deadline=now,
        holder=THIS_PROCESS,
    )


def _store_arguments(entry: CallRow, arguments: object) -> None:
    entry.storage = strictest_storage(entry.storage)
    entry.arguments = stored_arguments(arguments, entry.storage)


def _plan(
    entry: CallRow,
    tool: CachedTool,
    request: CallRequest,
    server_row: Row | None,
    rules: AgentRules | None,
    *,
    session_id: str,
    shown: int | None,
) -> CallPlan | CallFinishedLocally:
    entry.tool_id, entry.tool_name = tool.tool_id, tool.name
    entry.server_id, entry.server_slug = tool.server_id, tool.server
    entry.storage = strictest_storage(entry.storage, tool.payload_storage)
    _check_usable(tool)
    arguments = _parse_arguments(tool, shown, request.arguments)
    if request.read_only and not tool.only_reads:
        raise CallRejected(
            f"{tool.name} may change something, so call_read_only_tool does not run it.",
            hint="Run it with deferred_tool_call.",
            code="not_read_only",
        )
    if request.path == CallPath.SCRIPT and not tool.server_id:
        raise CallRejected(
            f"{tool.name} is a custom tool, which an agent runs itself. A script cannot run it.",
            hint="Run it outside the script, and give the script its result as input.",
            code="custom_tool",
        )
    if tool.overrides is None:
        entry.definition_id = _validate_arguments(tool, shown, arguments)
    else:
        arguments = _complete(entry, tool, shown, arguments, is_complete=request.is_complete)
    matches = rules.match(tool, arguments, request.origin) if rules is not None else ()
    if matches and matches[0].is_final:
        if matches[0].effect == RuleEffect.DENY:
            raise denial(tool.name, matches[0].decision)
        matches = ()
    if not tool.server_id:
        return CallFinishedLocally(entry, _client_result(tool, arguments), tool, arguments, matches)
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
        elicits=request.client is not None
        and (tool.asks_users or server["isolation"] == "per_session"),
    )
    timeout = request.timeout or server["call_timeout"]
    asking = 0.0 if request.client is None else ASKING_SECONDS
    entry.deadline = entry.accepted_at + timedelta(seconds=timeout + asking)
    approved = tool.overrides.approved if tool.overrides else tool.approved
    schema = approved.input_schema if approved and approved.has_header_mapping else None
    plan = CallPlan(entry, tool, arguments, target, server_row, timeout, schema)
    plan.matches, plan.client = matches, request.client
    return plan


def denial(tool_name: str, decision: Decision) -> CallRejected:
    """Return the error of a call that a rule denies."""
    message = f"The rule “{decision.rule_name}” denies this call of {tool_name}."
    hint = "Do not repeat it. Use another tool, or tell your operator."
    return CallRejected(f"{message} {decision.reason}".strip(), hint=hint, code="denied_by_rule")


def plan_denied(entry: CallRow, decision: Decision) -> CallFinishedLocally:
    """Plan the answer to a call that a rule denies for what happened before."""
    return rejected(entry, denial(entry.tool_name, decision))


_REJECTIONS = (CallRejected, scope.NotAvailable, scope.Ambiguous, Invalid)


def rejected(entry: CallRow, error: Any) -> CallFinishedLocally:
    entry.tool_name = redact_text(entry.tool_name)  # of an unknown tool it is any text
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


def _complete(
    entry: CallRow,
    tool: CachedTool,
    shown: int | None,
    arguments: dict[str, Any],
    *,
    is_complete: bool,
) -> dict[str, Any]:
    """Validate arguments, and return them with the values that an admin fixed.

    The complete arguments are validated by the approved definition, and are what the ledger stores.
    """
    overrides = tool.overrides
    assert overrides is not None  # noqa: S101 - ensured by the caller
    if is_complete:  # the values that were allowed are the values that are sent
        if tool.complete(arguments) != arguments:
            raise CallRejected(
                f"The fixed values of {tool.name} have changed since this call was held.",
                hint="Call again.",
                code="definition_changed",
            )
        arguments = {
            name: value for name, value in arguments.items() if name not in overrides.fixed
        }
    entry.definition_id = _validate_arguments(tool, shown, arguments)
    complete = tool.complete(arguments)
    _store_arguments(entry, complete)
    validator = validators.get(overrides.approved, "input")
    assert validator is not None  # noqa: S101 - every definition has an input schema
    if not validator.can_check(complete) or validator.problems(complete):
        raise CallRejected(
            f"The arguments for {tool.name} do not fit the values that an admin has fixed.",
            hint="Use other arguments or another tool, or tell your operator.",
            code="invalid_arguments",
        )
    return complete


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
    if not problems and tool.overrides is not None:
        problems = tool.overrides.problems(arguments)
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
    code = "definition_changed" if changed else "invalid_arguments"
    raise _with_schema(tool, shown_definition, f"{problem}:\n{lines}", code)


def _parse_arguments(
    tool: CachedTool, shown_definition: int | None, arguments: object
) -> dict[str, Any]:
    """Return the arguments as an object; what is none is rejected with the tool's schema."""
    try:
        return parse_arguments(arguments)
    except Invalid as error:
        if error.code != "invalid_arguments":
            raise
        raise _with_schema(tool, shown_definition, error.message, error.code) from None


def _with_schema(
    tool: CachedTool, shown_definition: int | None, message: str, code: str
) -> CallRejected:
    """Return the rejection of arguments. It quotes the approved schema, which is then shown."""
    approved = tool.approved
    assert approved is not None  # noqa: S101 - ensured by _check_usable
    hint = "Correct the arguments and call again."
    rejected = CallRejected(message, hint=hint, code=code)
    rejected.schema = f"Input schema of {tool.name}:\n{canonical(approved.input_schema)}"
    if shown_definition is not None and shown_definition != approved.pk:
        rejected.quoted_definition = approved.pk, ""
    return rejected


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
