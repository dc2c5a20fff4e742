"""Call ledger: one row for each call, committed before anything is sent to a server.

States: accepted → sent → succeeded | failed | timed_out | cancelled | unknown. Calls that are
`refused` or `client` are never sent. Recovery marks the open rows of a dead process `unknown`,
accepted ones included: `sent` is written only for slow calls, so an accepted call may have run.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

from django.db import connection, transaction
from django.utils import timezone

from catalog import preferences
from sessions_app.agents import rate_limits
from sessions_app.ledger.batch_writer import WriteJob, commit
from sessions_app.ledger.payloads import stored_copy
from sessions_app.ledger.sql import CallRow, LedgerCursor
from sessions_app.models import (
    IN_FLIGHT,
    Agent,
    AgentSession,
    Call,
    CallAnswer,
    CallState,
    EventKind,
)
from toolcrib.lib.errors import Conflict, Invalid
from toolcrib.lib.json_codec import canonical, digest, join_members
from toolcrib.lib.process_identity import is_dead, this_process

logger = logging.getLogger(__name__)

ANSWER_RETENTION = timedelta(days=1)
GRACE = timedelta(seconds=15)  # after the deadline, before an open call is marked unknown
OTHER_PROCESS_GRACE = timedelta(seconds=60)  # another process may still run it, on its own clock
THIS_PROCESS = this_process()
active_call_ids: set[str] = set()  # calls that this process is executing


@dataclass(frozen=True)
class CallResult:
    """Result of a call, as the ledger stores it and the caller receives it."""

    state: str
    is_error: bool
    content: list[Any]
    structured: Any = None
    tokens: int = 0
    code: str = ""
    message: str = ""
    hint: str = ""
    encoded: tuple[str, str] | None = None  # content and structured as canonical JSON, if known
    raw: object = None  # the server's response, if the caller receives something else
    large: bool = False  # too large to be processed on the event loop
    quoted_definition: tuple[int, str] | None = None  # newer definition in the message, override

    @property
    def error(self) -> dict[str, str] | None:
        if not self.code:
            return None
        return {"code": self.code, "message": self.message, "hint": self.hint}


@dataclass(frozen=True)
class CallResponse:
    """Response to the caller: the whole body as canonical JSON, and its large parts."""

    body: str
    content: str
    structured: str
    is_error: bool


def check_idempotency_key(key: str | None) -> str | None:
    if key is None:
        return None
    if not 0 < len(key) <= 255 or not key.isascii() or not key.isprintable() or key.isspace():
        raise Invalid(
            "An Idempotency-Key must have 1 to 255 printable ASCII characters.",
            hint="Use a new UUID for each call.",
        )
    return key


def request_digest(key: str | None, session_id: str, tool_name: str, arguments: object) -> str:
    """Return a digest that identifies the request of an idempotency key; empty without a key."""
    return digest(canonical([session_id, tool_name, arguments])) if key is not None else ""


def stored_answer(agent: Agent, key: str | None, request: str) -> str | None:
    """Return the stored response for an idempotency key, if any.

    Raises Conflict if the key belongs to another request, or if its call is still in progress.
    """
    if key is None:
        return None
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
        raise idempotency_in_progress()
    answer = CallAnswer.objects.filter(call=call).first()
    if answer is None:
        return _response(CallRow.from_model(call), _expired_answer(call)).body
    return answer.body


def idempotency_in_progress() -> Conflict:
    return Conflict(
        "The call with this Idempotency-Key is still in progress.",
        hint="Retry in a second to get its response.",
        code="idempotency_in_progress",
        details={"retry_after": 1},
    )


def _expired_answer(call: Call) -> CallResult:
    text = f"This call ended as {call.state}; its response is no longer stored."
    return CallResult(
        call.state, call.is_error, [{"type": "text", "text": text}], code="answer_gone",
        message=text, hint="See the session's timeline.",
    )  # fmt: skip


# --- Writing ------------------------------------------------------------------------------------


async def accept(entry: CallRow, agent: Agent | None) -> None:
    """Commit a call's row; raise if the agent's concurrency limit or the key forbids it."""

    def work(cursor: LedgerCursor) -> Callable[[], None] | None:
        if agent is not None:
            # The agent's row is locked, so concurrent requests cannot exceed the limit.
            in_flight = cursor.count_in_flight(agent.pk, entry.accepted_at)
            if in_flight >= agent.calls_in_flight:
                return lambda: rate_limits.reject_concurrent_call(agent, in_flight)
        if not insert_call(cursor, entry):
            return _reject_key
        return None

    def close_if_accepted(reject: Callable[[], None] | None) -> None:
        if reject is None:
            close_abandoned(entry)

    reject = await commit(
        WriteJob(
            work,
            order=entry.session_id or 0,
            agent=agent.pk if agent else 0,
            on_abandoned=close_if_accepted,
        )
    )
    if reject is not None:
        reject()


_abandoned_tasks: set["asyncio.Task[CallResponse]"] = set()


def close_abandoned(entry: CallRow) -> None:
    """Cancel a call whose caller disconnected while its row was being committed.

    Nothing was sent. An open row would count as in flight until after its deadline.
    """
    text = "The caller disconnected before the call was sent."
    content = [{"type": "text", "text": text}]
    result = CallResult(CallState.CANCELLED, True, content, code="cancelled", message=text)
    task = asyncio.ensure_future(finish(entry, result))
    _abandoned_tasks.add(task)
    task.add_done_callback(_on_abandoned_closed)


def _on_abandoned_closed(task: "asyncio.Task[CallResponse]") -> None:
    _abandoned_tasks.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("Closing an abandoned call failed: %s", error)


def insert_call(cursor: LedgerCursor, entry: CallRow) -> bool:
    """Insert a new row and its implicit load; return False if its idempotency key is used."""
    if not cursor.insert(entry):
        return False
    if entry.session_id is not None and entry.implicit_load:
        kind = EventKind.IMPLICIT_LOAD.value
        cursor.insert_event(entry.session_id, kind, entry.accepted_at, tool_name=entry.tool_name)
        cursor.touch_session(entry.session_id, entry.accepted_at)
    return True


def _reject_key() -> NoReturn:
    raise idempotency_in_progress()


async def mark_sent(entry: CallRow) -> None:
    """Show a running call as sent. For display only."""
    await commit(WriteJob(lambda cursor: cursor.mark_sent(entry), order=entry.session_id or 0))


async def finish(entry: CallRow, result: CallResult) -> CallResponse:
    """Commit a call's result and its timeline event, and return the response."""
    if result.large:
        response = await asyncio.to_thread(fill_in_result, entry, result)
    else:
        response = fill_in_result(entry, result)
    job = WriteJob(
        lambda cursor: _write_result(cursor, entry, result, response.body),
        order=entry.session_id or 0,
        must_commit=entry.pk is not None,
    )
    if not await commit(job):
        raise idempotency_in_progress()
    return response


def fill_in_result(entry: CallRow, result: CallResult) -> CallResponse:
    """Set the result columns of a row, and return the response."""
    entry.state, entry.is_error = str(result.state), result.is_error
    entry.finished_at = timezone.now()
    entry.tokens = result.tokens
    entry.error_code, entry.error_message = result.code[:40], result.message[:2000]
    response = _response(entry, result)
    raw = result.raw
    if raw is None:
        raw = {"content": result.content, "structuredContent": result.structured}
        text = join_members({"content": response.content, "structuredContent": response.structured})
    else:
        text = canonical(raw)
    data = text.encode()
    entry.result_bytes, entry.result_sha256 = len(data), hashlib.sha256(data).hexdigest()
    entry.result_copy = stored_copy(raw) if len(text) < 65_536 else _truncated_copy(text, len(data))
    return response


def _write_result(cursor: LedgerCursor, entry: CallRow, result: CallResult, body: str) -> bool:
    """Write everything that a call's result changes; return False if its key is used."""
    now = entry.finished_at
    assert now is not None  # noqa: S101 - set by fill_in_result
    is_new = True
    if entry.pk is not None:
        is_new = cursor.finish(entry)  # if not, recovery has written the event and the counters
    elif not insert_call(cursor, entry):
        return False
    if entry.session_id is not None and is_new:
        refused = result.state == CallState.REFUSED
        cursor.insert_event(
            entry.session_id,
            EventKind.REFUSED.value if refused else EventKind.CALLED.value,
            now,
            tool_name=entry.tool_name,
            call=entry.pk,
            tokens=result.tokens,
            details=canonical({"code": result.code}) if refused else "{}",
        )
        cursor.touch_session(entry.session_id, now, result.tokens, 1, int(result.is_error))
        if result.quoted_definition is not None and entry.tool_id is not None:
            cursor.set_shown_definition(entry.session_id, entry.tool_id, *result.quoted_definition)
    if entry.idempotency_key is not None and entry.pk is not None:
        cursor.store_answer(entry.pk, body, now)
    return True


def _truncated_copy(text: str, size: int) -> str:
    return stored_copy({"start": text[:8000], "bytes": size, "cut": True})


def _response(entry: CallRow, result: CallResult) -> CallResponse:
    content, structured = result.encoded or (
        canonical(result.content),
        canonical(result.structured),
    )
    fields: dict[str, Any] = {
        "call_id": entry.call_id,
        "tool_name": entry.tool_name,
        "state": result.state,
        "is_error": result.is_error,
        "tokens": result.tokens,
        "duration_ms": entry.duration_ms,
        "implicit_load": entry.implicit_load,
    }
    if result.error:
        fields["error"] = result.error
    encoded = {name: canonical(value) for name, value in fields.items()}
    body = join_members({**encoded, "content": content, "structured_content": structured})
    return CallResponse(body, content, structured, result.is_error)


def record_late_answer(call_pk: int, note: str) -> None:
    Call.objects.filter(pk=call_pk).update(note=note)


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
        text = "Toolcrib stopped during this call. Whether the tool ran is not known."
        entry = CallRow.from_model(row)
        result = CallResult(
            CallState.UNKNOWN,
            True,
            [{"type": "text", "text": text}],
            code="unknown_outcome",
            message=text,
            hint="Check whether the tool ran before retrying.",
        )
        _write_result(LedgerCursor(connection), entry, result, fill_in_result(entry, result).body)
        return 1


def prune() -> Mapping[str, int]:
    """Delete data whose retention period is over, and return the counts."""
    now, retention = timezone.now(), preferences.values("retention")
    old_answers = Call.objects.filter(
        idempotency_key__isnull=False, accepted_at__lt=now - ANSWER_RETENTION
    ).exclude(state__in=IN_FLIGHT)
    CallAnswer.objects.filter(call__in=old_answers.values("pk")).delete()
    keys = old_answers.update(idempotency_key=None)
    payloads = (
        Call.objects.filter(accepted_at__lt=now - timedelta(days=retention["keep_payloads_days"]))
        .exclude(arguments="")
        .update(arguments="", result_copy="")
    )
    sessions, _ = AgentSession.objects.filter(
        ended_at__lt=now - timedelta(days=retention["keep_sessions_days"])
    ).delete()
    return {"keys": keys, "payloads": payloads, "sessions": sessions}
