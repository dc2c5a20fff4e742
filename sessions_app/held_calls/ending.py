"""End held calls that are not executed: denied, expired, or refused at execution."""

from datetime import datetime

from django.db import connection, transaction
from django.utils import timezone

from catalog import audit
from sessions_app.ledger import calls as call_ledger
from sessions_app.ledger.calls import CallResult
from sessions_app.ledger.writer import CallRow, LedgerCursor
from sessions_app.models import WAITING, AgentSession, Call, CallState, HeldCall
from toolcrib.lib.roles import SYSTEM
from toolcrib.lib.token_counter import count

BATCH = 500
VERBS = {CallState.EXPIRED: "call.expire", CallState.REFUSED: "call.refuse"}  # others: decisions
EXPIRED_HINT = "Ask your operator before calling it again."


def end_call(call: Call, state: CallState, message: str, *, code: str, hint: str = "") -> None:
    """Write the result of a call that is not executed. Its row is locked by the caller."""
    text = f"{message}\n{hint}".strip()
    result = CallResult.of_text(
        state, text, tokens=count(text), code=code, message=message, hint=hint
    )
    entry = CallRow.from_model(call)
    response = call_ledger.fill_in_result(entry, result)
    with connection.wrap_database_errors:
        cursor = LedgerCursor(connection)
        call_ledger.write_result(cursor, entry, result, response, is_accepted=True)
    HeldCall.objects.filter(call=call.pk).update(request="")
    if state in VERBS:
        audit.record(SYSTEM, VERBS[state], call, after=audit_details(call) | {"reason": message})


def audit_details(call: Call) -> dict[str, object]:
    """Return what the audit log says about a call that is or was held."""
    hold: HeldCall | None = getattr(call, "hold", None)  # a restored backup has none
    return {
        "tool": call.tool_name,
        "agent": call.agent.name if call.agent else "",
        "session": call.session.session_id if call.session else "",
        "rule": hold.rule_name if hold else "",
    }


def expire_session_calls(session: AgentSession) -> None:
    """Expire the calls of an ended session that wait for a person, and end its grants."""
    if not session.holds_version:
        return
    rows = Call.objects.select_for_update(of=("self",)).filter(session=session)
    for call in rows.filter(state=CallState.HELD):
        message = "The session ended before a person decided about this call. It was not run."
        end_call(call, CallState.EXPIRED, message, code="call_expired", hint=EXPIRED_HINT)
    session.grants.all().delete()


def unfetched_digests(session: AgentSession) -> frozenset[str]:
    """Return the digests of the held calls of a session whose results were not fetched."""
    if not session.holds_version:
        return frozenset()
    return frozenset(session.held_calls.filter(fetched_at=None).values_list("digest", flat=True))


def has_waiting_calls(session: AgentSession) -> bool:
    return session.call_rows.filter(state__in=WAITING).exists()


def expire_due(now: datetime | None = None) -> int:
    """Expire calls that nobody decided about in time; return how many."""
    now = now or timezone.now()
    due = Call.objects.held().filter(hold__expires_at__lte=now)
    # A restored backup has no requests of held calls: they can no longer be executed.
    lost = Call.objects.filter(state__in=WAITING, hold=None)
    expired = 0
    for pk in [*due.values_list("pk", flat=True)[:BATCH], *lost.values_list("pk", flat=True)]:
        with transaction.atomic():
            rows = Call.objects.select_for_update(of=("self",))
            call = rows.filter(pk=pk, state__in=WAITING).first()
            if call is None or (call.state == CallState.APPROVED and hasattr(call, "hold")):
                continue
            message = "Nobody decided about this call in time. It was not run."
            end_call(call, CallState.EXPIRED, message, code="call_expired", hint=EXPIRED_HINT)
            expired += 1
    return expired


def prune_payloads(now: datetime | None = None) -> None:
    """Delete answers that were not fetched within a day."""
    before = (now or timezone.now()) - call_ledger.ANSWER_RETENTION
    ended = HeldCall.objects.filter(call__finished_at__lt=before, fetched_at=None)
    ended.update(answer="", request="", fetched_at=now or timezone.now())
