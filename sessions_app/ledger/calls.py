"""The call ledger: one row for each call, committed before a server is touched.

accepted → sent → succeeded | failed | timed_out | cancelled | unknown; refused and client calls
never leave. A row left open by a process that died becomes `unknown`, never anything better: an
accepted one too, since that it was sent is written only where a call takes long, or when it ends.
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
SLACK = timedelta(seconds=15)  # after its deadline, before a silent call is given up
OTHER_PROCESS_SLACK = timedelta(
    seconds=60
)  # where another process may be at it, by a clock of its own
THIS_PROCESS = this_process()
in_this_process: set[str] = set()  # calls that this process works on now, by id


@dataclass(frozen=True)
class CallResult:
    """How a call ended, as the ledger keeps it and the caller is told it."""

    state: str
    is_error: bool
    content: list[Any]
    structured: Any = None
    tokens: int = 0
    code: str = ""
    message: str = ""
    hint: str = ""
    written: tuple[str, str] | None = None  # content and structured as canonical JSON, if known
    raw: object = None  # what the server sent, where the caller is told something else
    large: bool = False  # not to be worked through on the event loop
    shows: tuple[int, str] | None = None  # a newer definition that the answer quotes, and override

    @property
    def error(self) -> dict[str, str] | None:
        if not self.code:
            return None
        return {"code": self.code, "message": self.message, "hint": self.hint}


@dataclass(frozen=True)
class CallResponse:
    """What a caller is told of a call, as canonical JSON, and what is large in it."""

    body: str
    content: str
    structured: str
    is_error: bool


def check_idempotency_key(key: str | None) -> str | None:
    if key is None:
        return None
    if not 0 < len(key) <= 255 or not key.isascii() or not key.isprintable() or key.isspace():
        raise Invalid(
            "An Idempotency-Key has 1 to 255 printable ASCII characters.",
            hint="Use a new UUID for each call.",
        )
    return key


def request_digest(key: str | None, session_id: str, tool_name: str, arguments: object) -> str:
    """Tell one request under an idempotency key from another. Without a key nobody asks."""
    return digest(canonical([session_id, tool_name, arguments])) if key is not None else ""


def stored_answer(agent: Agent, key: str | None, request: str) -> str | None:
    """Return the answer a key was given, or refuse a key that is taken or under way."""
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
        return _response(CallRow.of(call), _answer_expired(call)).body
    return answer.body


def idempotency_in_progress() -> Conflict:
    return Conflict(
        "The call with this Idempotency-Key is still under way.",
        hint="Ask again in a second for its answer.",
        code="idempotency_in_progress",
        details={"retry_after": 1},
    )


def _answer_expired(call: Call) -> CallResult:
    text = f"This call ended as {call.state}; its answer is no longer kept."
    return CallResult(
        call.state, call.is_error, [{"type": "text", "text": text}], code="answer_gone",
        message=text, hint="See the session's timeline.",
    )  # fmt: skip


# --- Writing ------------------------------------------------------------------------------------


async def accept(entry: CallRow, agent: Agent | None) -> None:
    """Commit a call's row. From here on it is known, whatever happens."""

    def work(cursor: LedgerCursor) -> Callable[[], None] | None:
        if agent is not None:
            # Agents' calls are counted one after another, so that the limit holds.
            under_way = cursor.in_flight(agent.pk, entry.accepted_at)
            if under_way >= agent.calls_in_flight:
                return lambda: rate_limits.reject_concurrent_call(agent, under_way)
        if not insert_call(cursor, entry):
            return _refuse_key
        return None

    def left(refuse: Callable[[], None] | None) -> None:
        if refuse is None:
            close_abandoned(entry)

    of = agent.pk if agent else 0
    refuse = await commit(WriteJob(work, order=entry.session_id or 0, agent=of, left=left))
    if refuse is not None:
        refuse()


_closing: set["asyncio.Task[CallResponse]"] = set()


def close_abandoned(entry: CallRow) -> None:
    """End a call whose caller left while its row was being committed: nothing was sent.

    Left open it would count as in flight until long after its deadline.
    """
    text = "The caller left before it was sent."
    content = [{"type": "text", "text": text}]
    ending = CallResult(CallState.CANCELLED, True, content, code="cancelled", message=text)
    task = asyncio.ensure_future(finish(entry, ending))
    _closing.add(task)
    task.add_done_callback(_closed_abandoned)


def _closed_abandoned(task: "asyncio.Task[CallResponse]") -> None:
    _closing.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("A call whose caller left could not be closed: %s", error)


def insert_call(cursor: LedgerCursor, entry: CallRow) -> bool:
    """Write a new row, and the implicit load it may be; False where its key is taken."""
    if not cursor.insert(entry):
        return False
    if entry.session_id is not None and entry.implicit_load:
        kind = EventKind.IMPLICIT_LOAD.value
        cursor.tell(entry.session_id, kind, entry.accepted_at, tool_name=entry.tool_name)
        cursor.use(entry.session_id, entry.accepted_at)
    return True


def _refuse_key() -> NoReturn:
    raise idempotency_in_progress()


async def mark_sent(entry: CallRow) -> None:
    """Tell those who look at the ledger meanwhile. Nothing depends on it."""
    await commit(WriteJob(lambda cursor: cursor.mark_sent(entry), order=entry.session_id or 0))


async def finish(entry: CallRow, ending: CallResult) -> CallResponse:
    """Write how a call ended, tell the timeline, and return the answer."""
    if ending.large:
        answer = await asyncio.to_thread(fill_in_result, entry, ending)
    else:
        answer = fill_in_result(entry, ending)
    job = WriteJob(lambda cursor: _write_result(cursor, entry, ending, answer.body),
              order=entry.session_id or 0, must=entry.pk is not None)  # fmt: skip
    if not await commit(job):
        raise idempotency_in_progress()
    return answer


def fill_in_result(entry: CallRow, ending: CallResult) -> CallResponse:
    """Fill in how a call ended, and return the answer."""
    entry.state, entry.is_error = str(ending.state), ending.is_error
    entry.finished_at = timezone.now()
    entry.tokens = ending.tokens
    entry.error_code, entry.error_message = ending.code[:40], ending.message[:2000]
    answer = _response(entry, ending)
    raw = ending.raw
    if raw is None:
        raw = {"content": ending.content, "structuredContent": ending.structured}
        result = join_members({"content": answer.content, "structuredContent": answer.structured})
    else:
        result = canonical(raw)
    whole = result.encode()
    entry.result_bytes, entry.result_sha256 = len(whole), hashlib.sha256(whole).hexdigest()
    entry.result_copy = stored_copy(raw) if len(result) < 65_536 else _head(result, len(whole))
    return answer


def _write_result(cursor: LedgerCursor, entry: CallRow, ending: CallResult, body: str) -> bool:
    """Write all that a call's end changes; False where its key was taken meanwhile."""
    now = entry.finished_at
    assert now is not None  # noqa: S101 - end() saw to it
    is_new = True
    if entry.pk is not None:
        is_new = cursor.finish(entry)  # else it was told and counted when it was given up
    elif not insert_call(cursor, entry):
        return False
    if entry.session_id is not None and is_new:
        refused = ending.state == CallState.REFUSED
        cursor.tell(
            entry.session_id,
            EventKind.REFUSED.value if refused else EventKind.CALLED.value,
            now,
            tool_name=entry.tool_name,
            call=entry.pk,
            tokens=ending.tokens,
            details=canonical({"code": ending.code}) if refused else "{}",
        )
        cursor.use(entry.session_id, now, ending.tokens, 1, int(ending.is_error))
        if ending.shows is not None and entry.tool_id is not None:
            cursor.show_definition(entry.session_id, entry.tool_id, *ending.shows)
    if entry.idempotency_key is not None and entry.pk is not None:
        cursor.keep_answer(entry.pk, body, now)
    return True


def _head(result: str, size: int) -> str:
    return stored_copy({"start": result[:8000], "bytes": size, "cut": True})


def _response(entry: CallRow, ending: CallResult) -> CallResponse:
    content, structured = ending.written or (
        canonical(ending.content),
        canonical(ending.structured),
    )
    small: dict[str, Any] = {
        "call_id": entry.call_id,
        "tool_name": entry.tool_name,
        "state": ending.state,
        "is_error": ending.is_error,
        "tokens": ending.tokens,
        "duration_ms": entry.duration_ms,
        "implicit_load": entry.implicit_load,
    }
    if ending.error:
        small["error"] = ending.error
    texts = {name: canonical(value) for name, value in small.items()}
    body = join_members({**texts, "content": content, "structured_content": structured})
    return CallResponse(body, content, structured, ending.is_error)


def note_late(call_pk: int, what: str) -> None:
    Call.objects.filter(pk=call_pk).update(note=what)


# --- Recovery and keeping -----------------------------------------------------------------------


def recover_lost_calls() -> int:
    """Give up calls whose process died, or that are long past their deadline.

    Not those that are worked on right here: they end by a clock that does not jump. What others
    work on is judged by the database's clock, not by one that may be wrong here alone.
    """
    given_up = 0
    now = LedgerCursor(connection).now()
    for call in Call.objects.filter(state__in=IN_FLIGHT).select_related("session")[:1000]:
        ours = call.holder == THIS_PROCESS
        if ours and call.call_id in in_this_process:
            continue
        dead = not ours and is_dead(call.holder)
        if dead or call.deadline + (SLACK if ours else OTHER_PROCESS_SLACK) < now:
            given_up += _mark_unknown(call)
    return given_up


def _mark_unknown(call: Call) -> int:
    with transaction.atomic():
        row = Call.objects.select_for_update(of=("self",)).filter(pk=call.pk).first()
        if row is None or row.state not in IN_FLIGHT:
            return 0
        text = "Toolcrib stopped while this call was under way. Whether the tool ran is not known."
        entry = CallRow.of(row)
        ending = CallResult(
            CallState.UNKNOWN,
            True,
            [{"type": "text", "text": text}],
            code="unknown_outcome",
            message=text,
            hint="Check before you call it again.",
        )
        _write_result(LedgerCursor(connection), entry, ending, fill_in_result(entry, ending).body)
        return 1


def prune() -> Mapping[str, int]:
    """Forget what need not be kept any longer."""
    now, kept = timezone.now(), preferences.values("retention")
    old_answers = Call.objects.filter(
        idempotency_key__isnull=False, accepted_at__lt=now - ANSWER_RETENTION
    ).exclude(state__in=IN_FLIGHT)
    CallAnswer.objects.filter(call__in=old_answers.values("pk")).delete()
    keys = old_answers.update(idempotency_key=None)
    payloads = (
        Call.objects.filter(accepted_at__lt=now - timedelta(days=kept["keep_payloads_days"]))
        .exclude(arguments="")
        .update(arguments="", result_copy="")
    )
    sessions, _ = AgentSession.objects.filter(
        ended_at__lt=now - timedelta(days=kept["keep_sessions_days"])
    ).delete()
    return {"keys": keys, "payloads": payloads, "sessions": sessions}
