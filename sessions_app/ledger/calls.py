"""Call ledger: one row for each call, committed before anything is sent to a server.

States: accepted → sent → succeeded | failed | timed_out | cancelled | unknown. Calls that are
`refused` or `client` are never sent. A call that a rule holds starts earlier: held → approved →
accepted, or held → denied | expired (held_calls/). Recovery marks the open rows of a dead process
`unknown`, accepted ones included: `sent` is written only for slow calls, so an accepted call may
have run. Of calls that were held, `sent` is always written first, so accepted ones run again.
"""

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Self, TypeVar

from django.db import connection, transaction
from django.utils import timezone

from catalog import preferences
from sessions_app.ledger import content_erasure
from sessions_app.ledger.event_details import read_value
from sessions_app.ledger.writer import CALL, CallRow, LedgerCursor, WriteJob, commit, write_event
from sessions_app.models import (
    IN_FLIGHT,
    NOT_RUN,
    WAITING,
    AgentSession,
    Call,
    CallAnswer,
    CallState,
    DataKey,
    EventKind,
    HeldCall,
    ScriptRun,
    SessionRead,
    ToolUse,
)
from sessions_app.models.encryption import UNREADABLE
from toolcrib.lib.errors import Conflict, Invalid
from toolcrib.lib.json_codec import canonical, join_members
from toolcrib.lib.payloads import redacted_json, stored_copy
from toolcrib.lib.process_identity import is_dead, this_process
from toolcrib.lib.redaction.redactor import redact_text
from toolcrib.lib.telemetry import metrics
from toolcrib.lib.token_counter import count

logger = logging.getLogger(__name__)

T = TypeVar("T")
ANSWER_RETENTION = timedelta(days=1)
GRACE = timedelta(seconds=15)  # after the deadline, before an open call is marked unknown
OTHER_PROCESS_GRACE = timedelta(seconds=60)  # another process may still run it, on its own clock
THIS_PROCESS = this_process()
FIND_ACCEPTED = f"SELECT id FROM {CALL} WHERE call_id = %s AND state = 'accepted'"  # noqa: S608
CHECK_BEFORE_RETRY = "Check whether the tool ran before retrying."
READ_REFRESH = timedelta(minutes=1)  # how often the time of a session's read is written
MAX_RECORDED = 100_000
active_call_ids: set[str] = set()  # calls that this process is executing


@dataclass(frozen=True)
class CallResult:
    """Result of a call, as the ledger stores it and the caller receives it."""

    state: str
    is_error: bool
    content: list[Any]
    structured: Any = None
    meta: dict[str, Any] | None = None  # `_meta`
    tokens: int = 0
    code: str = ""
    message: str = ""
    hint: str = ""
    # Content, structured content and `_meta` as canonical JSON, if known.
    encoded: tuple[str, str, str] | None = None
    raw: object = None  # the server's response, if the caller receives something else
    large: bool = False  # too large to be processed on the event loop
    quoted_definition: tuple[int, str] | None = None  # newer definition in the message, override

    @classmethod
    def of_text(cls, state: str, text: str, *, is_error: bool = True, **fields: Any) -> Self:
        return cls(state, is_error, [{"type": "text", "text": text}], **fields)


@dataclass(frozen=True)
class CallResponse:
    """Response to the caller. Content, structured content and `_meta` are canonical JSON."""

    call_id: str
    tool_name: str
    state: str
    is_error: bool
    content: str
    structured: str
    meta: str
    error: dict[str, str] | None
    tokens: int
    duration_ms: int
    implicit_load: bool
    held_call: int | None = None  # whose answer this is; it counts as fetched when it has arrived
    # What the server asks the user of the client, and the server's own `requestState`.
    input_requests: dict[str, Any] | None = None
    request_state: str | None = None
    rpc_code: int = 0  # of the server's JSON-RPC error

    def as_json(self) -> str:
        """Return the body of the agent API's response."""
        members = {
            "call_id": canonical(self.call_id),
            "tool_name": canonical(self.tool_name),
            "state": canonical(self.state),
            "is_error": _boolean(self.is_error),
            "content": self.content,
            "structured_content": self.structured,
            "tokens": str(self.tokens),
            "duration_ms": str(self.duration_ms),
            "implicit_load": _boolean(self.implicit_load),
        }
        if self.meta != "null":
            members["_meta"] = self.meta
        if self.error:
            members["error"] = canonical(self.error)
        return join_members(members)

    @classmethod
    def from_json(cls, text: str) -> "CallResponse":
        body = json.loads(text)
        names = ("content", "structured_content", "_meta")
        content, structured, meta = (canonical(body.pop(name, None)) for name in names)
        error = body.pop("error", None)
        return cls(content=content, structured=structured, meta=meta, error=error, **body)


def _boolean(value: bool) -> str:
    return "true" if value else "false"


def check_idempotency_key(key: str | None) -> None:
    if key is None:
        return
    if not 0 < len(key) <= 255 or not key.isascii() or not key.isprintable() or key.isspace():
        raise Invalid(
            "An Idempotency-Key must have 1 to 255 printable ASCII characters.",
            hint="Use a new UUID for each call.",
        )


def stored_response(agent: int, key: str, request: str) -> CallResponse | None:
    """Return the stored response for an idempotency key, if any.

    Raises Conflict if the key belongs to another request, or if its call is still in progress.
    """
    call = Call.objects.filter(agent=agent, idempotency_key=key).select_related("answer").first()
    if call is None:
        return None
    if call.request_digest != request:
        raise Conflict(
            "This Idempotency-Key was used for another call.",
            hint="Use a new key for a new call.",
            code="idempotency_conflict",
        )
    if call.state in IN_FLIGHT:
        raise KeyInProgress
    if call.state in WAITING:
        return waiting_response(call)
    answer = getattr(call, "answer", None)
    if answer is not None and answer.body != UNREADABLE:
        return CallResponse.from_json(answer.body)
    text = f"This call ended as {call.state}; its response is no longer stored."
    result = CallResult.of_text(
        call.state,
        text,
        is_error=call.is_error,
        code="answer_gone",
        message=text,
        hint="See the session's timeline.",
    )
    return _response(CallRow.from_model(call), result)


def waits_for_answer(call_id: str, session: int | None) -> bool:
    """Return whether a call of this session has asked its user, and was not continued yet."""
    rows = Call.objects.filter(call_id=call_id, session=session)
    return rows.filter(state=CallState.SUCCEEDED, error_code="input_required").exists()


def waiting_response(call: Call, *, has_check_call: bool = True) -> CallResponse:
    """Return the response to a call that waits for a person, or that is being executed."""
    how = (
        f"ask check_call with the call_id {call.call_id}"
        if has_check_call
        else f"call {call.tool_name} again with the same arguments; it does not run twice"
    )
    hold: HeldCall | None = getattr(call, "hold", None)
    what = "This call is being executed."
    if call.state == CallState.HELD and hold is not None:
        rule = f"The rule “{hold.rule_name}” holds this call until a person allows it."
        what = f"{rule} {hold.reason}".strip()
    text = f"{what}\nDo not make another call instead. To get its result, {how}."
    result = CallResult.of_text(call.state, text, is_error=False, tokens=count(text))
    return _response(CallRow.from_model(call), result)


def ended_response(call: Call) -> CallResponse:
    """Return the response to a call that has ended, as far as its row tells."""
    message = call.error_message
    text = message or f"This call ended as {call.state}; its response is no longer stored."
    result = CallResult.of_text(
        call.state,
        text,
        is_error=call.is_error,
        tokens=count(text),
        code=call.error_code or "answer_gone",
        message=text,
        hint="" if message else "See the session's timeline.",
    )
    return _response(CallRow.from_model(call), result)


class KeyInProgress(Conflict):
    code = "idempotency_in_progress"

    def __init__(self) -> None:
        super().__init__(
            "The call with this Idempotency-Key is still in progress.",
            hint="Retry in a second to get its response.",
            details={"retry_after": 1},
        )


# --- Writing ------------------------------------------------------------------------------------


async def accept(
    entry: CallRow, check: Callable[[LedgerCursor], T | None], agent: int = 0
) -> T | None:
    """Commit a call's row if `check` returns None; otherwise return what it returns.

    The agent's row is locked, so concurrent requests cannot exceed its limit.
    """

    def work(cursor: LedgerCursor) -> tuple[T | None, bool]:
        obstacle = check(cursor)
        is_refused = obstacle is not None
        return obstacle, not is_refused and not (cursor.reopen(entry) or cursor.insert(entry))

    def close_if_accepted(outcome: tuple[T | None, bool]) -> None:
        if outcome == (None, False):
            close_abandoned(entry)

    def close_if_committed() -> None:
        if entry.pk is not None:  # otherwise the row was not inserted
            close_doubtful(entry)

    order = entry.session_id or 0
    job = WriteJob(
        work,
        order=order,
        agent=agent,
        on_abandoned=close_if_accepted,
        on_unavailable=close_if_committed,
    )
    obstacle, is_key_used = await commit(job)
    if is_key_used:
        raise KeyInProgress
    return obstacle


_abandoned_tasks: set["asyncio.Task[Any]"] = set()


def close_abandoned(entry: CallRow) -> None:
    """Cancel a call whose caller disconnected while its row was being committed.

    Nothing was sent. An open row would count as in flight until after its deadline.
    """
    text = "The caller disconnected before the call was sent."
    result = CallResult.of_text(CallState.CANCELLED, text, code="cancelled", message=text)
    _run_abandoned(finish(entry, result))


def close_doubtful(entry: CallRow) -> None:
    """Cancel a call if its row was committed although the database reported an error.

    The connection may break after the commit. Nothing was sent. The row is found by the call's id,
    since the primary key of a transaction that was rolled back may belong to another call.
    """
    text = "The database became unavailable before the call was sent."
    result = CallResult.of_text(CallState.CANCELLED, text, code="cancelled", message=text)

    def close(cursor: LedgerCursor) -> None:
        row = cursor.fetch_one(FIND_ACCEPTED, (entry.call_id,))
        if row is not None:
            doubtful = replace(entry, pk=row[0])
            response = fill_in_result(doubtful, result)
            write_result(cursor, doubtful, result, response, is_accepted=True)

    _run_abandoned(commit(WriteJob(close, order=entry.session_id or 0, must_commit=True)))


def _run_abandoned(work: Coroutine[Any, Any, Any]) -> None:
    task = asyncio.ensure_future(work)
    _abandoned_tasks.add(task)
    task.add_done_callback(_on_abandoned_closed)


def _on_abandoned_closed(task: "asyncio.Task[Any]") -> None:
    _abandoned_tasks.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("Closing an abandoned call failed: %s", error)


async def mark_sent(entry: CallRow) -> None:
    """Show a running call as sent. For display only."""
    await commit(WriteJob(lambda cursor: cursor.mark_sent(entry), order=entry.session_id or 0))


async def finish(entry: CallRow, result: CallResult) -> CallResponse:
    """Commit the result of a call and its timeline event, and return the response."""
    fill_in = partial(fill_in_result, entry, result)
    response = await asyncio.to_thread(fill_in) if result.large else fill_in()
    is_accepted = entry.pk is not None
    job = WriteJob(
        lambda cursor: write_result(cursor, entry, result, response, is_accepted=is_accepted),
        order=entry.session_id or 0,
        must_commit=is_accepted,
    )
    if not await commit(job):
        raise KeyInProgress
    if entry.sent_at is not None:
        _remember_use(entry)
    return response


def fill_in_result(entry: CallRow, result: CallResult) -> CallResponse:
    """Set the result columns of a row, and return the response."""
    entry.state, entry.is_error = str(result.state), result.is_error
    entry.finished_at = timezone.now()
    # What a script's call returns does not reach the model.
    entry.tokens = result.tokens if entry.run_id is None else 0
    entry.error_code = result.code[:40]
    is_stored = entry.storage != "nothing"  # a message may quote arguments or the result
    entry.error_message = redact_text(result.message[:2000]) if is_stored else ""
    response = _response(entry, result)
    raw = result.raw
    if raw is None:
        raw = {"content": result.content, "structuredContent": result.structured}
        members = {"content": response.content, "structuredContent": response.structured}
        if response.meta != "null":
            raw["_meta"], members["_meta"] = result.meta, response.meta
        text = join_members(members)
    else:
        text = canonical(raw)
    data = text.encode()
    entry.result_bytes, entry.result_sha256 = len(data), hashlib.sha256(data).hexdigest()
    entry.result_copy = stored_copy(raw, text, storage=entry.storage)
    return response


def write_result(
    cursor: LedgerCursor,
    entry: CallRow,
    result: CallResult,
    response: CallResponse,
    *,
    is_accepted: bool,
) -> bool:
    """Write everything that a call's result changes; return False if its key is used.

    Inserts the row of a call that was not accepted, since it needed no server. `entry.pk` does not
    tell: a transaction that was rolled back may have set it.
    """
    now = entry.finished_at
    assert now is not None  # noqa: S101 - set by fill_in_result
    is_new = True
    if is_accepted:
        is_new = cursor.finish(entry)  # if not, recovery has written the event and the counters
    elif not cursor.insert(entry):
        return False
    if metrics.enabled and is_new and result.code != "input_required":
        _count(cursor, entry)
    if entry.session_id is not None and is_new:
        if entry.implicit_load:
            kind, at = EventKind.IMPLICIT_LOAD, entry.accepted_at
            cursor.lock_session(entry.session_id)
            cursor.insert_event(entry.session_id, kind, at, tool_name=entry.tool_name)
        refused = result.state in NOT_RUN
        write_event(
            cursor,
            entry.session_id,
            EventKind.REFUSED if refused else EventKind.CALLED,
            tokens=entry.tokens,
            tool_name=entry.tool_name,
            call=entry.pk,
            details={"code": result.code} if refused else None,
            at=now,
            calls=1,
            errors=int(result.is_error),
        )
        if result.quoted_definition is not None and entry.tool_id is not None:
            cursor.set_shown_definition(entry.session_id, entry.tool_id, *result.quoted_definition)
    if entry.sent_at is not None or result.state == CallState.CLIENT:
        record_use(cursor, entry, now)
    if entry.idempotency_key is not None and entry.pk is not None:
        cursor.store_answer(entry.pk, response.as_json(), now)
    return True


def _count(cursor: LedgerCursor, entry: CallRow) -> None:
    cursor.count(metrics.counted("toolcrib_calls", entry.server_slug, entry.state))
    if entry.sent_at is not None:
        seconds = entry.duration_ms / 1000
        cursor.count(
            *metrics.observed("toolcrib_call_duration_seconds", seconds, entry.server_slug)
        )


# What this process has written: (session, server) → time of the read, (agent, tool) → first use.
_recorded: dict[tuple[object, ...], datetime] = {}
READ, USE = SessionRead._meta.db_table, ToolUse._meta.db_table
RECORD_READ = (
    f"INSERT INTO {READ} (session_id, agent_id, server_slug, last_at) "  # noqa: S608
    "VALUES (%s, %s, %s, %s) ON CONFLICT (session_id, server_slug) "
    "DO UPDATE SET last_at = excluded.last_at"
)
RECORD_USE = (
    f"INSERT INTO {USE} (agent_id, tool_id, first_at) VALUES (%s, %s, %s) "  # noqa: S608
    "ON CONFLICT (agent_id, tool_id) DO NOTHING"
)


def record_use(cursor: LedgerCursor, entry: CallRow, now: datetime) -> None:
    """Record for rules what a session has read and an agent has used, unless it is known."""
    agent, session, server = entry.agent_id, entry.session_id, entry.server_slug
    if agent is None or session is None:
        return
    if server:
        last = _recorded.get((session, server))
        if last is None or now - last > READ_REFRESH:
            cursor.execute(RECORD_READ, (session, agent, server, now))
    if entry.tool_id is not None and ("use", agent, entry.tool_id) not in _recorded:
        cursor.execute(RECORD_USE, (agent, entry.tool_id, now))


def _remember_use(entry: CallRow) -> None:
    """Note that the use of a call is committed."""
    if len(_recorded) > MAX_RECORDED:
        _recorded.clear()
    now = entry.finished_at or entry.accepted_at
    read = entry.session_id, entry.server_slug
    last = _recorded.get(read)
    if last is None or now - last > READ_REFRESH:
        _recorded[read] = now
    _recorded["use", entry.agent_id, entry.tool_id] = now


def clear() -> None:
    """Forget what was written, in tests and after a restore."""
    _recorded.clear()


def _response(entry: CallRow, result: CallResult) -> CallResponse:
    values = (result.content, result.structured, result.meta)
    content, structured, meta = result.encoded or map(canonical, values)
    error = {"code": result.code, "message": result.message, "hint": result.hint}
    return CallResponse(
        call_id=entry.call_id,
        tool_name=entry.tool_name,
        state=str(result.state),
        is_error=result.is_error,
        content=content,
        structured=structured,
        meta=meta,
        error=error if result.code else None,
        tokens=result.tokens,
        duration_ms=entry.duration_ms,
        implicit_load=entry.implicit_load,
    )


# --- Recovery and retention ---------------------------------------------------------------------


def recover_lost_calls() -> int:
    """Mark calls `unknown` whose process died or whose deadline is long past; return how many.

    Calls that this process is executing are skipped: they time out by the monotonic clock. Other
    calls are compared with the database's clock, since this machine's clock may be wrong.
    """
    recovered = 0
    now = LedgerCursor(connection).now()
    for call in Call.objects.filter(state__in=IN_FLIGHT).select_related("session")[:1000]:
        ours = call.holder == THIS_PROCESS
        if ours and call.call_id in active_call_ids:
            continue
        dead = not ours and is_dead(call.holder)
        if dead or call.deadline + (GRACE if ours else OTHER_PROCESS_GRACE) < now:
            recovered += _mark_unknown(call)
    return recovered


def _mark_unknown(call: Call) -> int:
    with transaction.atomic():
        row = Call.objects.select_for_update(of=("self",)).filter(pk=call.pk).first()
        if row is None or row.state not in IN_FLIGHT:
            return 0
        if row.state == CallState.ACCEPTED and hasattr(row, "hold"):  # nothing was sent
            Call.objects.filter(pk=row.pk).update(state=CallState.APPROVED, holder="")
            HeldCall.objects.filter(call=row.pk).update(holder="", lease_until=None)
            return 0
        text = "Toolcrib stopped during this call. Whether the tool ran is not known."
        entry = CallRow.from_model(row)
        result = CallResult.of_text(
            CallState.UNKNOWN,
            text,
            code="unknown_outcome",
            message=text,
            hint=CHECK_BEFORE_RETRY,
        )
        response = fill_in_result(entry, result)
        write_result(LedgerCursor(connection), entry, result, response, is_accepted=True)
        return 1


def encrypt_clear_calls(limit: int = 200) -> int:
    """Redact and encrypt the newest calls that an older version stored in clear; return how many.

    Called periodically until all are done. A call whose result is written meanwhile is skipped.
    """
    key = DataKey.objects.filter(clear_calls_up_to__gt=0).first()
    if key is None:
        return 0
    rows = Call.objects.filter(pk__lte=key.clear_calls_up_to).exclude(state__in=IN_FLIGHT)
    batch = list(rows.order_by("-pk").only("arguments", "result_copy", "error_message")[:limit])
    for call in batch:
        Call.objects.filter(pk=call.pk).exclude(arguments="", result_copy="").update(
            arguments=_redact_again(call.arguments),
            result_copy=_redact_again(call.result_copy),
            error_message=redact_text(call.error_message),
        )
    key.clear_calls_up_to = batch[-1].pk - 1 if len(batch) == limit else 0
    key.save(update_fields=["clear_calls_up_to"])
    return len(batch)


def _redact_again(stored: str) -> str:
    """Redact a payload by the current rules. Longer ones were stored as a truncated text."""
    if not stored or stored == UNREADABLE:
        return stored
    return redacted_json(read_value(stored))


def prune() -> Mapping[str, int]:
    """Delete data whose retention period is over, and return the counts."""
    now, retention = timezone.now(), preferences.values("retention")
    old_answers = Call.objects.filter(
        idempotency_key__isnull=False, accepted_at__lt=now - ANSWER_RETENTION
    ).exclude(state__in=IN_FLIGHT)
    CallAnswer.objects.filter(call__in=old_answers.values("pk")).delete()
    keys = old_answers.update(idempotency_key=None)
    ended_runs = ScriptRun.objects.filter(finished_at__lt=now - ANSWER_RETENTION)
    content_erasure.forget_answers_of_runs(ended_runs)
    keep_payloads = now - timedelta(days=retention["keep_payloads_days"])
    old = Call.objects.filter(accepted_at__lt=keep_payloads)
    # A call of a deleted agent may have finished after the deletion.
    late = Call.objects.filter(
        accepted_at__gt=now - timedelta(hours=1), agent__deleted_at__isnull=False
    )
    payloads = content_erasure.erase_calls(old) + content_erasure.erase_calls(late)
    content_erasure.erase_runs(ScriptRun.objects.filter(finished_at__lt=keep_payloads))
    sessions, _ = AgentSession.objects.filter(
        ended_at__lt=now - timedelta(days=retention["keep_sessions_days"])
    ).delete()
    return {"keys": keys, "payloads": payloads, "sessions": sessions}
