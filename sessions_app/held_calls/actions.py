"""Hold a call that a rule holds, and decide about it: allow once, allow for a session, or deny."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.db import connection, transaction
from django.db.models import F
from django.utils import timezone

from catalog import audit
from sessions_app.dispatch.authorization import Authorization, Outdated
from sessions_app.held_calls import answers
from sessions_app.held_calls.ending import audit_details, end_call
from sessions_app.ledger import calls as call_ledger
from sessions_app.ledger import writer as ledger_writer
from sessions_app.ledger.calls import CallResponse, KeyInProgress
from sessions_app.ledger.writer import LedgerCursor, write_event
from sessions_app.models import (
    WAITING,
    Agent,
    AgentSession,
    Call,
    CallState,
    EventKind,
    Grant,
    HeldCall,
    SessionState,
)
from sessions_app.models.encryption import encrypt_text
from sessions_app.rules.evaluation import Decision
from toolcrib.lib.errors import Conflict, Invalid, NotFound, ToolcribError
from toolcrib.lib.json_codec import canonical, digest
from toolcrib.lib.payloads import parse_arguments
from toolcrib.lib.roles import SYSTEM, Actor

if TYPE_CHECKING:
    from sessions_app.dispatch.planner import CallFinishedLocally, CallPlan, CallRequest

MAX_COMMENT = 2_000
FIND_UNFETCHED = (
    f"SELECT 1 FROM {HeldCall._meta.db_table} "  # noqa: S608 - the table's name
    "WHERE session_id = %s AND digest = %s AND fetched_at IS NULL"
)
MAX_PATTERNS = 50
MAX_BULK = 200


def request_digest(tool_name: str, arguments: dict[str, Any]) -> str:
    """Return what identifies the same call in a session."""
    return digest(canonical([tool_name, arguments]))


# --- Hold -----------------------------------------------------------------------------------------


class TooManyHeldCalls(ToolcribError):
    code = "too_many_held_calls"
    status = 429


async def hold_call(
    authorization: Authorization, plan: "CallPlan | CallFinishedLocally", decision: Decision
) -> CallResponse:
    """Commit a call as held, and return the response to the agent."""
    return await ledger_writer.run_off_loop(_hold, authorization, plan, decision)


@transaction.atomic
def _hold(
    authorization: Authorization, plan: "CallPlan | CallFinishedLocally", decision: Decision
) -> CallResponse:
    entry, session = plan.entry, authorization.session_pk
    arguments = plan.arguments or {}
    cursor, now = _lock(authorization), timezone.now()
    key = request_digest(entry.tool_name, arguments)
    if (earlier := _respond_to_repeated(authorization, key)) is not None:
        return earlier
    _check_count(authorization.agent)
    entry.state = CallState.HELD.value
    if not cursor.insert(entry):
        raise KeyInProgress
    call = Call.objects.get(call_id=entry.call_id)
    values = {
        "tool_name": entry.tool_name,
        "arguments": arguments,
        "timeout": getattr(plan, "timeout", None),
        "path": entry.path,
    }
    HeldCall.objects.create(
        call=call,
        session_id=session,
        digest=key,
        key_id=authorization.key_id,
        rule_pk=decision.rule_id,
        rule_name=decision.rule_name[:200],
        reason=decision.reason,
        approver=decision.approver,
        held_at=now,
        expires_at=now + timedelta(seconds=settings.HELD_CALL_SECONDS),
        request=encrypt_text(canonical(values)),
    )
    response = call_ledger.waiting_response(call, has_check_call=_has_check_call(authorization))
    write_event(
        cursor,
        session,
        EventKind.HELD,
        tokens=0 if entry.run_id is not None else response.tokens,
        tool_name=entry.tool_name,
        call=entry.pk,
        details={"rule": decision.rule_name, "reason": decision.reason},
        at=now,
    )
    AgentSession.objects.filter(pk=session).update(holds_version=F("holds_version") + 1)
    audit.record(SYSTEM, "call.hold", call, after=audit_details(call))
    return response


async def find_repeated(
    authorization: Authorization, request: "CallRequest"
) -> CallResponse | None:
    """Return the response to a call that repeats a held one whose result was not fetched."""
    tool = authorization.scope.lookup(request.tool_name)
    try:
        arguments = parse_arguments(request.arguments)
    except Invalid:
        return None
    if tool is None:
        return None
    key = request_digest(tool.name, tool.complete(arguments))
    if key not in authorization.held:
        return None
    return await ledger_writer.run_off_loop(_repeat, authorization, key)


@transaction.atomic
def _repeat(authorization: Authorization, key: str) -> CallResponse | None:
    _lock(authorization)
    return _respond_to_repeated(authorization, key)


def is_repeated(plan: "CallPlan", cursor: LedgerCursor) -> bool:
    """Return whether a call repeats a held one whose result was not fetched."""
    key = request_digest(plan.entry.tool_name, plan.arguments)
    return cursor.fetch_one(FIND_UNFETCHED, (plan.entry.session_id, key)) is not None


def _lock(authorization: Authorization) -> LedgerCursor:
    """Lock the session, and check that the authorization is current. Raises Outdated."""
    AgentSession.objects.select_for_update(of=("self",)).get(pk=authorization.session_pk)
    with connection.wrap_database_errors:
        cursor = LedgerCursor(connection)
        if authorization.revalidate(cursor, timezone.now()) is None:
            raise Outdated
    return cursor


def _respond_to_repeated(authorization: Authorization, key: str) -> CallResponse | None:
    call = _find_unfetched(authorization.session_pk, key)
    if call is None:
        return None
    return answers.respond(call, has_check_call=_has_check_call(authorization))


def _has_check_call(authorization: Authorization) -> bool:
    return any(tool["name"] == "check_call" for tool in authorization.surface.tools)


def _find_unfetched(session: int, key: str) -> Call | None:
    """Return the same call of this session whose result was not fetched yet, if any."""
    rows = Call.objects.select_related("hold", "session")
    unfetched = rows.filter(hold__session=session, hold__digest=key, hold__fetched_at=None)
    calls = (call for call in unfetched.order_by("-pk") if not answers.is_being_fetched(call.hold))
    return next(calls, None)


def _check_count(agent: Agent) -> None:
    held = Call.objects.filter(agent=agent.pk, state__in=WAITING).count()
    if held >= settings.MAX_HELD_CALLS:
        raise TooManyHeldCalls(
            f"{agent.name} has {held} calls that wait for a person.",
            hint="Wait for decisions before making more such calls. TOOLCRIB_MAX_HELD_CALLS sets "
            "the limit.",
            details={"retry_after": 60},
        )


# --- Decide ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GrantTerms:
    """What a decision for a session lets pass: tool patterns, number of calls, time."""

    tools: Sequence[str] = ()  # by default the tool of the call
    count: int | None = None
    expires_in: float | None = None  # seconds


def find_call(call_id: str) -> Call:
    """Return a call that is or was held. Raises NotFound."""
    rows = Call.objects.select_related("hold", "session", "agent")
    call = None if "\0" in call_id else rows.filter(call_id=call_id, hold__isnull=False).first()
    if call is None:
        raise NotFound("Held call not found.", hint="Check the id.", code="unknown_call")
    return call


@transaction.atomic
def allow(
    call_id: str, *, actor: Actor, comment: str = "", grant: GrantTerms | None = None
) -> Call:
    """Approve a held call, to be executed once; with `grant`, also let later calls pass."""
    call = _lock_held(call_id, comment)
    Call.objects.filter(pk=call.pk).update(state=CallState.APPROVED)
    call.state = CallState.APPROVED
    made = _create_grant(call, grant, actor) if grant is not None else None
    _record(call, "call.allow", comment, actor, made)
    return call


@transaction.atomic
def deny(call_id: str, *, actor: Actor, comment: str = "") -> Call:
    """Deny a held call. The agent gets the comment."""
    call = _lock_held(call_id, comment)
    _record(call, "call.deny", comment, actor)
    message = f"A person denied this call of {call.tool_name}. It was not run."
    if comment:
        message += f" Their words: {comment}"
    hint = "Do not call it again with these arguments."
    end_call(call, CallState.DENIED, message, code="call_denied", hint=hint)
    call.refresh_from_db()
    return call


def _lock_held(call_id: str, comment: str) -> Call:
    if len(comment) > MAX_COMMENT:
        raise Invalid(f"The comment is longer than {MAX_COMMENT:,} characters.")
    pk = find_call(call_id).pk
    rows = Call.objects.select_for_update(of=("self",)).select_related("hold", "session", "agent")
    call = rows.get(pk=pk)
    if call.state != CallState.HELD:
        raise _already_decided(call)
    if call.hold.expires_at <= timezone.now():
        raise Conflict(
            f"The call of {call.tool_name} has expired.",
            hint="The agent may call it again.",
            code="already_decided",
        )
    return call


def _already_decided(call: Call) -> Conflict:
    hold = call.hold
    message = f"The call of {call.tool_name} no longer waits: it is {call.state}."
    if hold.decided_by:
        message += f" {hold.decided_by} decided."
    return Conflict(message, hint="Reload to see its state.", code="already_decided")


def _record(call: Call, verb: str, comment: str, actor: Actor, grant: Grant | None = None) -> None:
    now = timezone.now()
    HeldCall.objects.filter(call=call).update(
        decided_at=now, decided_by=actor.label[:200], comment=comment
    )
    after = audit_details(call)
    after |= {"comment": comment} if comment else {}
    after |= {"grant": grant.grant_id, "tools": grant.tools} if grant else {}
    audit.record(actor, verb, call, before={"state": "held"}, after=after)
    if call.session_id is not None:
        decision = verb.removeprefix("call.")
        with connection.wrap_database_errors:
            cursor = LedgerCursor(connection)
            cursor.lock_session(call.session_id)
            cursor.insert_event(
                call.session_id,
                EventKind.DECIDED,
                now,
                tool_name=call.tool_name,
                call=call.pk,
                details=canonical({"decision": decision, "by": actor.label, "comment": comment}),
            )


# --- Grants ---------------------------------------------------------------------------------------


def _create_grant(call: Call, terms: GrantTerms, actor: Actor) -> Grant:
    if call.session is None or call.session.state != SessionState.OPEN:
        raise Conflict("The session has ended.", hint="Allow the call once.")
    tools = list(terms.tools) or [call.tool_name]
    if len(tools) > MAX_PATTERNS or not all(0 < len(pattern) <= 200 for pattern in tools):
        raise Invalid(f"Give 1 to {MAX_PATTERNS} patterns of at most 200 characters.")
    expires_in = terms.expires_in
    expires_at = timezone.now() + timedelta(seconds=expires_in) if expires_in else None
    return Grant.objects.create(
        session=call.session,
        rule_pk=call.hold.rule_pk,
        rule_name=call.hold.rule_name,
        tools=tools,
        count=terms.count,
        expires_at=expires_at,
        created_by=actor.label[:200],
    )


@transaction.atomic
def delete_grant(grant_id: str, *, actor: Actor) -> None:
    """End a grant: later calls are held again."""
    rows = Grant.objects.select_for_update(of=("self",)).select_related("session__agent")
    grant = None if "\0" in grant_id else rows.filter(grant_id=grant_id).first()
    if grant is None:
        raise NotFound("Grant not found.", hint="Check the id.", code="unknown_grant")
    before = {
        "session": grant.session.session_id,
        "agent": grant.session.agent.name,
        "tools": grant.tools,
        "used": grant.used,
    }
    audit.record(actor, "grant.delete", grant, before=before)
    grant.delete()
