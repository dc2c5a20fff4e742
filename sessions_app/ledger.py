"""The call ledger: one row for each call, committed before a server is touched.

accepted → sent → succeeded | failed | timed_out | cancelled | unknown; refused and client calls
never leave. A row left open by a process that died becomes `unknown`, never anything better.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import IntegrityError, transaction
from django.utils import timezone

from catalog import preferences
from catalog.canonical import canonical, digest
from servers.holder import is_dead, this_process
from sessions_app import journal, limiting
from sessions_app.models import (
    IN_FLIGHT,
    Agent,
    AgentSession,
    Call,
    CallAnswer,
    CallState,
    EventKind,
)
from sessions_app.payloads import kept
from toolcrib.errors import Conflict, Invalid

ANSWERS_KEPT = timedelta(days=1)
SLACK = timedelta(seconds=15)  # after its deadline, before a silent call is given up
HOLDER = this_process()


@dataclass(frozen=True)
class Ending:
    """How a call ended, as the ledger keeps it and the caller is told it."""

    state: str
    is_error: bool
    content: list[Any]
    structured: Any = None
    tokens: int = 0
    code: str = ""
    message: str = ""
    hint: str = ""
    raw: object = None  # what the server sent, where the caller is told something else

    @property
    def error(self) -> dict[str, str] | None:
        if not self.code:
            return None
        return {"code": self.code, "message": self.message, "hint": self.hint}


def check_key(key: str | None) -> str | None:
    if key is None:
        return None
    if not 0 < len(key) <= 255 or not key.isascii() or not key.isprintable() or key.isspace():
        raise Invalid(
            "An Idempotency-Key has 1 to 255 printable ASCII characters.",
            hint="Use a new UUID for each call.",
        )
    return key


def request_digest(session: AgentSession, tool_name: str, arguments: object) -> str:
    return digest(canonical([session.session_id, tool_name, arguments]))


def answered_before(agent: Agent, key: str | None, request: str) -> str | None:
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
        raise in_progress()
    answer = CallAnswer.objects.filter(call=call).first()
    if answer is None:
        return canonical(_answer(call, _forgotten(call)))
    return answer.body


def in_progress() -> Conflict:
    return Conflict(
        "The call with this Idempotency-Key is still under way.",
        hint="Ask again in a second for its answer.",
        code="idempotency_in_progress",
        details={"retry_after": 1},
    )


def _forgotten(call: Call) -> Ending:
    text = f"This call ended as {call.state}; its answer is no longer kept."
    return Ending(
        call.state, call.is_error, [{"type": "text", "text": text}], code="answer_gone",
        message=text, hint="See the session's timeline.",
    )  # fmt: skip


def accept(call: Call, *, limited: bool = True) -> Call:
    """Commit a call's row. From here on it is known, whatever happens."""
    try:
        with transaction.atomic():
            if call.agent is not None and limited:
                # Agents' calls are counted one after another, so that the limit holds.
                Agent.objects.select_for_update(no_key=True).get(pk=call.agent.pk)
                limiting.check_in_flight(call.agent)
            call.holder = HOLDER
            call.save()
            _tell_implicit_load(call)
    except IntegrityError:
        if call.idempotency_key is None:
            raise
        raise in_progress() from None
    return call


def _tell_implicit_load(call: Call) -> None:
    if call.session is not None and call.implicit_load:
        journal.note(call.session, EventKind.IMPLICIT_LOAD, tool_name=call.tool_name)


def mark_sent(call: Call) -> None:
    call.sent_at = timezone.now()
    Call.objects.filter(pk=call.pk, state=CallState.ACCEPTED).update(
        state=CallState.SENT, sent_at=call.sent_at
    )


@transaction.atomic
def finish(call: Call, ending: Ending) -> str:
    """Write how a call ended, tell the timeline, and return the answer's JSON."""
    now = timezone.now()
    fresh = call.pk is None
    call.state, call.is_error, call.finished_at = ending.state, ending.is_error, now
    call.tokens = ending.tokens
    call.error_code, call.error_message = ending.code[:40], ending.message[:2000]
    result = canonical(
        {"content": ending.content, "structuredContent": ending.structured}
        if ending.raw is None
        else ending.raw
    )
    call.result_bytes, call.result_sha256 = len(result.encode()), digest(result)
    call.result_copy = kept(json.loads(result)) if len(result) < 65_536 else _head(result)
    if fresh:
        call.holder = HOLDER
        try:
            with transaction.atomic():
                call.save()
                _tell_implicit_load(call)
        except IntegrityError:
            if call.idempotency_key is None:
                raise
            raise in_progress() from None
    else:
        _update(call)
    _tell(call, ending, now)
    body = canonical(_answer(call, ending))
    if call.idempotency_key is not None:
        CallAnswer.objects.get_or_create(call=call, defaults={"body": body})
    return body


def _head(result: str) -> str:
    return kept({"start": result[:8000], "bytes": len(result.encode()), "cut": True})


def _update(call: Call) -> None:
    # A call that recovery gave up meanwhile gets its true end after all.
    call.save(
        update_fields=[
            "state",
            "is_error",
            "finished_at",
            "tokens",
            "error_code",
            "error_message",
            "result_bytes",
            "result_sha256",
            "result_copy",
            "idempotency_key",
            "note",
        ]
    )


def _tell(call: Call, ending: Ending, now: datetime) -> None:
    if call.session is None:
        return
    refused = ending.state == CallState.REFUSED
    journal.note(
        call.session,
        EventKind.REFUSED if refused else EventKind.CALLED,
        tokens=ending.tokens,
        tool_name=call.tool_name,
        details={"code": ending.code} if refused else {},
        call=call,
        at=now,
        calls=1,
        errors=int(ending.is_error),
    )


def _answer(call: Call, ending: Ending) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "call_id": call.call_id,
        "tool_name": call.tool_name,
        "state": ending.state,
        "is_error": ending.is_error,
        "content": ending.content,
        "structured_content": ending.structured,
        "tokens": ending.tokens,
        "duration_ms": call.duration_ms or 0,
        "implicit_load": call.implicit_load,
    }
    return answer | {"error": ending.error} if ending.error else answer


def note_late(call_pk: int, what: str) -> None:
    Call.objects.filter(pk=call_pk).update(note=what)


# --- Recovery and keeping -----------------------------------------------------------------------


def recover() -> int:
    """Give up calls whose process died, or that are long past their deadline."""
    now = timezone.now()
    given_up = 0
    for call in Call.objects.filter(state__in=IN_FLIGHT).select_related("session")[:1000]:
        dead = call.holder != HOLDER and is_dead(call.holder)
        if dead or call.deadline + SLACK < now:
            given_up += _give_up(call)
    return given_up


def _give_up(call: Call) -> int:
    with transaction.atomic():
        row = Call.objects.select_for_update(of=("self",)).get(pk=call.pk)
        if row.state not in IN_FLIGHT:
            return 0
        text = "Toolcrib stopped while this call was under way. Whether the tool ran is not known."
        finish(
            row,
            Ending(
                CallState.UNKNOWN,
                True,
                [{"type": "text", "text": text}],
                code="unknown_outcome",
                message=text,
                hint="Check before you call it again.",
            ),
        )
        return 1


def prune() -> Mapping[str, int]:
    """Forget what need not be kept any longer."""
    now, kept = timezone.now(), preferences.values("retention")
    old_answers = Call.objects.filter(
        idempotency_key__isnull=False, accepted_at__lt=now - ANSWERS_KEPT
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
