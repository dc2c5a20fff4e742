"""Call ledger: one row for each call, committed before anything is sent to a server.

States: accepted → sent → succeeded | failed | timed_out | cancelled | unknown. Calls that are
`refused` or `client` are never sent. Recovery marks the open rows of a dead process `unknown`,
accepted ones included: `sent` is written only for slow calls, so an accepted call may have run.
"""

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

from django.db import connection, transaction
from django.utils import timezone

from catalog import preferences
from sessions_app.ledger.writer import CallRow, LedgerCursor, WriteJob, commit, write_event
from sessions_app.models import IN_FLIGHT, AgentSession, Call, CallAnswer, CallState, EventKind
from toolcrib.lib.errors import Conflict, Invalid
from toolcrib.lib.json_codec import canonical, join_members
from toolcrib.lib.payloads import stored_copy
from toolcrib.lib.process_identity import is_dead, this_process

logger = logging.getLogger(__name__)

ANSWER_RETENTION = timedelta(days=1)
GRACE = timedelta(seconds=15)  # after the deadline, before an open call is marked unknown
OTHER_PROCESS_GRACE = timedelta(seconds=60)  # another process may still run it, on its own clock
THIS_PROCESS = this_process()
CHECK_BEFORE_RETRY = "Check whether the tool ran before retrying."
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
    if (answer := getattr(call, "answer", None)) is not None:
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
    entry: CallRow, check: Callable[[LedgerCursor], int | None], agent: int = 0
) -> int | None:
    """Commit a call's row if `check` returns None; otherwise return what it returns.

    The agent's row is locked, so concurrent requests cannot exceed its limit.
    """

    def work(cursor: LedgerCursor) -> tuple[int | None, bool]:
        obstacle = check(cursor)
        return obstacle, obstacle is None and not cursor.insert(entry)

    def close_if_accepted(outcome: tuple[int | None, bool]) -> None:
        if outcome == (None, False):
            close_abandoned(entry)

    order = entry.session_id or 0
    job = WriteJob(work, order=order, agent=agent, on_abandoned=close_if_accepted)
    obstacle, is_key_used = await commit(job)
    if is_key_used:
        raise KeyInProgress
    return obstacle


_abandoned_tasks: set["asyncio.Task[CallResponse]"] = set()


def close_abandoned(entry: CallRow) -> None:
    """Cancel a call whose caller disconnected while its row was being committed.

    Nothing was sent. An open row would count as in flight until after its deadline.
    """
    text = "The caller disconnected before the call was sent."
    result = CallResult.of_text(CallState.CANCELLED, text, code="cancelled", message=text)
    task = asyncio.ensure_future(finish(entry, result))
    _abandoned_tasks.add(task)
    task.add_done_callback(_on_abandoned_closed)


def _on_abandoned_closed(task: "asyncio.Task[CallResponse]") -> None:
    _abandoned_tasks.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("Closing an abandoned call failed: %s", error)


async def mark_sent(entry: CallRow) -> None:
    """Show a running call as sent. For display only."""
    await commit(WriteJob(lambda cursor: cursor.mark_sent(entry), order=entry.session_id or 0))


async def finish(entry: CallRow, result: CallResult) -> CallResponse:
    """Commit the result of a call and its timeline event, and return the response."""
    if result.large:
        response = await asyncio.to_thread(fill_in_result, entry, result)
    else:
        response = fill_in_result(entry, result)
    is_accepted = entry.pk is not None
    job = WriteJob(
        lambda cursor: write_result(cursor, entry, result, response, is_accepted=is_accepted),
        order=entry.session_id or 0,
        must_commit=is_accepted,
    )
    if not await commit(job):
        raise KeyInProgress
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
        members = {"content": response.content, "structuredContent": response.structured}
        if response.meta != "null":
            raw["_meta"], members["_meta"] = result.meta, response.meta
        text = join_members(members)
    else:
        text = canonical(raw)
    data = text.encode()
    entry.result_bytes, entry.result_sha256 = len(data), hashlib.sha256(data).hexdigest()
    if len(text) < 65_536:
        entry.result_copy = stored_copy(raw, text)
    else:
        entry.result_copy = stored_copy({"start": text[:8000], "bytes": len(data), "cut": True})
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
    if entry.session_id is not None and is_new:
        if entry.implicit_load:
            kind, at = EventKind.IMPLICIT_LOAD, entry.accepted_at
            cursor.insert_event(entry.session_id, kind, at, tool_name=entry.tool_name)
        refused = result.state == CallState.REFUSED
        write_event(
            cursor,
            entry.session_id,
            EventKind.REFUSED if refused else EventKind.CALLED,
            tokens=result.tokens,
            tool_name=entry.tool_name,
            call=entry.pk,
            details={"code": result.code} if refused else None,
            at=now,
            calls=1,
            errors=int(result.is_error),
        )
        if result.quoted_definition is not None and entry.tool_id is not None:
            cursor.set_shown_definition(entry.session_id, entry.tool_id, *result.quoted_definition)
    if entry.idempotency_key is not None and entry.pk is not None:
        cursor.store_answer(entry.pk, response.as_json(), now)
    return True


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
