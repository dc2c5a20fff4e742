"""Rows of script runs: start, pause, continue, end, recover; and the answer to the agent."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import connection, transaction
from django.db.models import Q
from django.utils import timezone

from sessions_app.agents.api_keys import TRIAL_PREFIX
from sessions_app.dispatch.authorization import Authorization, Outdated
from sessions_app.held_calls import answers
from sessions_app.ledger.calls import THIS_PROCESS, CallResponse
from sessions_app.ledger.writer import LedgerCursor, write_event
from sessions_app.models import (
    UNFINISHED,
    Agent,
    AgentSession,
    ApiKey,
    Call,
    CallState,
    EventKind,
    HeldCall,
    RunState,
    ScriptRun,
)
from sessions_app.models.encryption import UNREADABLE
from sessions_app.scripts.engines import MAX_HELD_RUNS, MAX_RUNS, ScriptFailed
from sessions_app.scripts.output import join_logs
from sessions_app.sessions import lifecycle
from toolcrib.lib.errors import Conflict, Forbidden, NotFound, ToolcribError
from toolcrib.lib.json_codec import canonical, digest
from toolcrib.lib.payloads import redacted_json, strictest_storage
from toolcrib.lib.process_identity import is_dead
from toolcrib.lib.redaction.redactor import redact_text
from toolcrib.lib.token_counter import count

GRACE = timedelta(seconds=30)  # after the deadline, before a run of another process has failed
EXECUTION = timedelta(minutes=10)  # for calls that were allowed in the last moment
QUEUED = timedelta(minutes=10)  # after which a run that no process has started has failed
BATCH = 500
EXPIRED = "Nobody decided in time about a call of this script. It was not continued."
NOT_STARTED = "No web process started this script in time."
INTERRUPTED = (
    "The process that ran this script ended. Calls that it had made are listed; the script was not "
    "continued."
)
OTHER_ENGINE = "This installation has another version of the engine, which cannot continue it."


class TooManyRuns(ToolcribError):
    code = "too_many_runs"
    status = 429


@dataclass(frozen=True)
class NewRun:
    """A request to run a script."""

    code: str
    language: str
    timeout: float
    input: object
    engine: str  # name and version
    idempotency_key: str | None = None

    def digest(self, session: int) -> str:
        """Return a digest that identifies the request of an idempotency key; empty without one."""
        if self.idempotency_key is None:
            return ""
        return digest(canonical([session, self.code, self.language, self.timeout, self.input]))


@dataclass(frozen=True)
class Outcome:
    """What came of running a script until it ended or was paused."""

    logs: str
    used_seconds: float
    tokens_spared: int
    result: str = "null"  # JSON
    truncated: bool = False
    error: ScriptFailed | None = None


def check_permitted(agent: Agent) -> None:
    """Raise Forbidden unless the agent may run scripts."""
    if not agent.code_mode:
        raise Forbidden(
            f"{agent.name} may not run scripts.",
            hint="Call the tools one by one, or ask your operator to turn on “Run scripts”.",
            code="code_mode_off",
        )


@transaction.atomic
def start(authorization: Authorization, new: NewRun) -> tuple[ScriptRun, bool]:
    """Write the row of a new run; return it, or the run of its idempotency key and False.

    Raises TooManyRuns, Outdated, and Conflict for the key of another request.
    """
    agent, now = authorization.agent, timezone.now()
    Agent.objects.select_for_update(of=("self",)).get(pk=agent.pk)
    with connection.wrap_database_errors:
        if authorization.revalidate(LedgerCursor(connection), now) is None:
            raise Outdated
    request_digest = new.digest(authorization.session_pk)
    if (earlier := _find_repeated(agent, new.idempotency_key, request_digest)) is not None:
        return earlier, False
    _check_count(agent)
    run = _create(
        agent,
        new,
        now,
        session_id=authorization.session_pk,
        key_id=authorization.key_id,
        request_digest=request_digest,
        deadline=now + timedelta(seconds=new.timeout),
        holder=THIS_PROCESS,
    )
    return run, True


@transaction.atomic
def queue(session: AgentSession, key: ApiKey, new: NewRun) -> ScriptRun:
    """Write the row of a run that whichever web process notices it first starts.

    It is held without waiting for a call. Raises TooManyRuns.
    """
    agent = Agent.objects.select_for_update(of=("self",)).get(pk=session.agent_id)
    _check_count(agent)
    now = timezone.now()
    return _create(
        agent,
        new,
        now,
        session_id=session.pk,
        key_id=key.pk,
        deadline=now + QUEUED,
        state=RunState.HELD,
    )


def is_queued(run: ScriptRun) -> bool:
    """Return whether a run that is held, or was claimed as such, has not started."""
    return not run.waiting_for and not run.snapshot


def _create(agent: Agent, new: NewRun, now: datetime, **fields: Any) -> ScriptRun:
    storage = strictest_storage(agent.payload_storage)
    sent = canonical(new.input)
    return ScriptRun.objects.create(
        agent_id=agent.pk,
        language=new.language,
        engine=new.engine,
        storage=storage,
        code=_stored(new.code, storage),
        input=_stored_json(sent, storage),
        payload=canonical({"code": new.code, "input": sent}),
        idempotency_key=new.idempotency_key,
        started_at=now,
        timeout=new.timeout,
        **fields,
    )


def _find_repeated(agent: Agent, key: str | None, request_digest: str) -> ScriptRun | None:
    if key is None:
        return None
    run = ScriptRun.objects.filter(agent=agent.pk, idempotency_key=key).first()
    if run is not None and run.request_digest != request_digest:
        raise Conflict(
            "This Idempotency-Key was used for another script.",
            hint="Use a new key for a new script.",
            code="idempotency_conflict",
        )
    return run


def _check_count(agent: Agent) -> None:
    rows = ScriptRun.objects.filter(agent=agent.pk)
    running = rows.filter(state=RunState.RUNNING).count()
    if running >= MAX_RUNS:
        raise TooManyRuns(
            f"{agent.name} runs {running} scripts; at most {MAX_RUNS} run at once.",
            hint="Wait until one has ended.",
            details={"retry_after": 2},
        )
    held = rows.filter(state=RunState.HELD).count()
    if held >= MAX_HELD_RUNS:
        raise TooManyRuns(
            f"{agent.name} has {held} scripts that wait for a person; at most {MAX_HELD_RUNS} may.",
            hint="Wait for decisions before running more.",
            details={"retry_after": 60},
        )


# --- What is stored -------------------------------------------------------------------------------


def _stored(text: str, storage: str) -> str:
    if storage == "nothing":
        return ""
    return text if storage == "all" else redact_text(text)


def _stored_json(text: str, storage: str) -> str:
    if storage == "nothing":
        return "null"
    return text if storage == "all" else redacted_json(json.loads(text))


def payload_of(run: ScriptRun) -> dict[str, str]:
    """Return what a run was given, and what it gave back so far: source, input, logs, answer.

    Once that is deleted, what is stored for people.
    """
    stored = {name: getattr(run, name) for name in ("code", "input", "logs", "result", "error")}
    if not run.payload or run.payload == UNREADABLE:
        return stored
    whole: dict[str, str] = json.loads(run.payload)
    return stored | whole


@transaction.atomic
def pause(run: ScriptRun, sealed: str, held: Sequence[str], outcome: Outcome) -> bool:
    """Store a script that waits for a person; return False if it is no longer this process's."""
    row = _lock_own(run)
    if row is None:
        return False
    row.state, row.holder = RunState.HELD, ""
    row.snapshot, row.waiting_for = sealed, list(held)
    row.deadline = timezone.now() + timedelta(seconds=settings.HELD_CALL_SECONDS) + EXECUTION
    _set_outcome(row, outcome)
    row.save()
    return True


@transaction.atomic
def finish(run: ScriptRun, outcome: Outcome) -> bool:
    """Store how a script ended; return False if it is no longer this process's."""
    row = _lock_own(run)
    if row is None:
        return False
    _end(row, outcome)
    return True


def _lock_own(run: ScriptRun) -> ScriptRun | None:
    rows = ScriptRun.objects.select_for_update(of=("self",))
    return rows.filter(pk=run.pk, state=RunState.RUNNING, holder=THIS_PROCESS).first()


def _set_outcome(row: ScriptRun, outcome: Outcome) -> None:
    whole = payload_of(row)
    whole["logs"] = join_logs(whole["logs"], outcome.logs)
    row.logs = _stored(whole["logs"], row.storage)
    row.payload = canonical(whole)
    row.used_seconds += outcome.used_seconds
    row.tokens_spared = outcome.tokens_spared


def _end(row: ScriptRun, outcome: Outcome) -> None:
    _set_outcome(row, outcome)
    answer = {"logs": payload_of(row)["logs"], "result": outcome.result, "error": ""}
    row.truncated = outcome.truncated
    row.state, row.finished_at = RunState.COMPLETED, timezone.now()
    if (error := outcome.error) is not None:
        row.state, row.error_type = RunState.FAILED, error.kind[:80]
        answer["error"] = canonical(
            {
                "type": error.kind,
                "message": error.message,
                "line": error.line,
                "traceback": error.traceback,
            }
        )
    row.result = _stored_json(answer["result"], row.storage)
    row.error = answer["error"] and _stored_error(answer["error"], row.storage)
    row.payload = canonical(answer)
    row.snapshot, row.waiting_for, row.holder = "", [], ""
    row.tokens_given = count("\n".join((answer["result"], answer["error"], answer["logs"])))
    row.save()
    details = {
        "run_id": row.run_id,
        "state": str(row.state),
        "error": row.error_type,
        "calls": row.calls.count(),
        "spared": row.tokens_spared,
    }
    with connection.wrap_database_errors:
        cursor = LedgerCursor(connection)
        write_event(
            cursor, row.session_id, EventKind.SCRIPT, tokens=row.tokens_given, details=details
        )
    if row.key is not None and row.key.prefix == TRIAL_PREFIX:
        lifecycle.close_session(row.session)
        row.key.delete()


def _stored_error(text: str, storage: str) -> str:
    error: dict[str, Any] = json.loads(text)
    if storage == "nothing":
        error |= {"message": "", "traceback": ""}
    return text if storage == "all" else redacted_json(error)


# --- Continue and recover -------------------------------------------------------------------------


def claim_decided(limit: int) -> list[ScriptRun]:
    """Claim held runs whose calls have all ended. Others are left for other processes."""
    held = ScriptRun.objects.filter(state=RunState.HELD)
    waiting = dict(held.order_by("id").values_list("pk", "waiting_for"))
    if not waiting:  # nearly always: this is asked twice a second
        return []
    unfinished = _unfinished({call_id for calls in waiting.values() for call_id in calls})
    claimed: list[ScriptRun] = []
    for pk in [pk for pk, calls in waiting.items() if unfinished.isdisjoint(calls)][:limit]:
        run = held.filter(pk=pk).first()
        if run is None:
            continue
        left = timedelta(seconds=max(1.0, run.timeout - run.used_seconds))
        deadline = timezone.now() + left
        own = held.filter(pk=pk)
        if own.update(state=RunState.RUNNING, holder=THIS_PROCESS, deadline=deadline):
            claimed.append(run)
    return claimed


def _unfinished(call_ids: set[str]) -> set[str]:
    ids, found = list(call_ids), set[str]()
    for start in range(0, len(ids), BATCH):
        rows = Call.objects.filter(call_id__in=ids[start : start + BATCH], state__in=UNFINISHED)
        found |= set(rows.values_list("call_id", flat=True))
    return found


@transaction.atomic
def take_responses(run: ScriptRun, agent: Agent) -> dict[str, CallResponse]:
    """Return the outcomes of the calls that a run waited for, by their ids.

    The script is the one that fetches them. Several may wait for the same call; then the last one
    does, so that it is still there for the others.
    """
    responses: dict[str, CallResponse] = {}
    holds: list[int] = []
    for call_id in dict.fromkeys(run.waiting_for):
        call = answers.find_own_call(agent, call_id)
        responses[call_id] = answers.respond(call)
        if (hold := getattr(call, "hold", None)) is not None:
            holds.append(hold.pk)
    # Of two scripts that take the same answer now, the second one sees what the first has done.
    locked = HeldCall.objects.select_for_update(of=("self",)).filter(pk__in=sorted(holds))
    fetched = {hold.call.call_id: hold.pk for hold in locked.select_related("call")}
    ScriptRun.objects.filter(pk=run.pk).update(waiting_for=[])
    others = ScriptRun.objects.filter(agent=agent.pk, state__in=(RunState.RUNNING, RunState.HELD))
    for calls in others.exclude(pk=run.pk).values_list("waiting_for", flat=True):
        for call_id in calls:
            fetched.pop(call_id, None)
    for hold_id in fetched.values():
        answers.confirm_arrival(hold_id)
    return responses


def has_expired_call(run: ScriptRun) -> bool:
    """Return whether a call that a run waited for has expired, or is gone."""
    ended = Call.objects.filter(call_id__in=run.waiting_for)
    expired = ended.filter(state=CallState.EXPIRED).exists()
    return expired or ended.count() < len(set(run.waiting_for))


def recover(now: datetime | None = None) -> int:
    """End runs whose process died, and held ones that are too old; return how many."""
    now, ended = now or timezone.now(), 0
    old = Q(state=RunState.HELD, deadline__lt=now)
    rows = ScriptRun.objects.filter(old | Q(state=RunState.RUNNING)).order_by("id")
    for run in rows.only("state", "holder", "deadline")[:BATCH]:
        is_lost = run.state == RunState.RUNNING and (
            (run.holder != THIS_PROCESS and is_dead(run.holder)) or run.deadline + GRACE < now
        )
        is_old = run.state == RunState.HELD and run.deadline < now
        if is_lost or is_old:
            ended += _end_lost(run, "interrupted" if is_lost else "expired")
    return ended


@transaction.atomic
def _end_lost(run: ScriptRun, kind: str) -> int:
    rows = ScriptRun.objects.select_for_update(of=("self",))
    row = rows.filter(pk=run.pk, state=run.state, holder=run.holder).first()
    if row is None:
        return 0
    words = INTERRUPTED if kind == "interrupted" else EXPIRED
    error = ScriptFailed(kind, NOT_STARTED if is_queued(row) and kind == "expired" else words)
    _end(row, Outcome("", 0.0, row.tokens_spared, error=error))
    return 1


# --- Answer ---------------------------------------------------------------------------------------


def find_own_run(agent: Agent, run_id: str) -> ScriptRun:
    """Return a run of this agent. Raises NotFound, also for another agent's run."""
    rows = ScriptRun.objects.filter(agent=agent.pk)
    run = None if "\0" in run_id else rows.filter(run_id=run_id).first()
    if run is None:
        raise NotFound("Script run not found.", hint="Check the run_id.", code="unknown_run")
    return run


def run_body(run: ScriptRun) -> dict[str, Any]:
    """Return how a run stands, as the agent gets it."""
    calls = run.calls.order_by("id").values_list("call_id", "tool_name", "state", "is_error")
    whole = payload_of(run)
    error: Mapping[str, Any] | None = json.loads(whole["error"]) if whole["error"] else None
    return {
        "run_id": run.run_id,
        "status": str(run.state),
        "language": str(run.language),
        "is_error": run.state == RunState.FAILED,
        "result": json.loads(whole["result"]),
        "error": error,
        "logs": whole["logs"],
        "calls": [
            {"seq": seq, "call_id": call_id, "tool": tool, "state": state, "is_error": is_error}
            for seq, (call_id, tool, state, is_error) in enumerate(calls, 1)
        ],
        "tokens": {"given": run.tokens_given, "spared": run.tokens_spared},
        "truncated": run.truncated,
    }
