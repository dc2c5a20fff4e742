"""Queries on runs of scripts for session, run and approvals pages."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from django.db.models import Count, Q, QuerySet

from sessions_app.ledger.event_details import read_value
from sessions_app.models import AgentSession, Call, RunState, ScriptRun
from sessions_app.models.encryption import UNREADABLE
from sessions_app.review import content, source_code, timeline
from sessions_app.review.source_code import SourceLine
from sessions_app.review.timeline import TimelineEvent
from toolcrib.lib.errors import NotFound
from toolcrib.lib.figures import ScriptFigures
from toolcrib.lib.redaction.redactor import redact, redact_text

# Encrypted texts, which lists do not need.
PAYLOADS = ("code", "input", "snapshot", "result", "error", "logs")
MAX_LISTED = 50  # on a session's page
# state: (status of the pill, label)
RUN_STATES = {
    RunState.RUNNING: ("running", "Running"),
    RunState.HELD: ("waiting", "Held"),
    RunState.COMPLETED: ("ok", "Completed"),
    RunState.FAILED: ("failed", "Failed"),
}


@dataclass(frozen=True)
class RunSummary:
    """A run of a script in a list, without code and payloads."""

    run: ScriptRun
    calls: int

    @property
    def is_queued(self) -> bool:
        return self.run.state == RunState.HELD and not self.run.waiting_for

    @property
    def status(self) -> str:
        return "running" if self.is_queued else RUN_STATES[RunState(self.run.state)][0]

    @property
    def label(self) -> str:
        return "Queued" if self.is_queued else RUN_STATES[RunState(self.run.state)][1]

    @property
    def seconds(self) -> float | None:
        """Return how long it took, pauses included; None while it has not ended."""
        ended = self.run.finished_at
        return (ended - self.run.started_at).total_seconds() if ended else None


@dataclass(frozen=True)
class CallOfRun:
    """A call that a script made, with its outcome."""

    number: int
    call: Call

    @property
    def status(self) -> str:
        return timeline.call_outcome(self.call.state, self.call.is_error)[0]

    @property
    def label(self) -> str:
        return timeline.call_outcome(self.call.state, self.call.is_error)[1]


@dataclass(frozen=True)
class RunDetail(RunSummary):
    """A run with its code, result and calls, secrets masked."""

    calls_made: list[CallOfRun]

    @property
    def figures(self) -> ScriptFigures:
        run = self.run
        return ScriptFigures(
            runs=1,
            failed=run.state == RunState.FAILED,
            held=run.state == RunState.HELD,
            calls=self.calls,
            given=run.tokens_given,
            spared=run.tokens_spared,
        )

    @cached_property
    def error(self) -> dict[str, Any] | None:
        """Return type, message, line and traceback of the error that ended the script."""
        error = redact(read_value(self.run.error)) if self.run.error else None
        return error if isinstance(error, dict) else None

    @property
    def failing_line(self) -> int | None:
        line = self.error.get("line") if self.error else None
        return line if isinstance(line, int) else None

    @property
    def lines(self) -> list[SourceLine]:
        return highlighted(self.run, self.failing_line)

    @property
    def result(self) -> str:
        """Return the result as indented JSON; empty if there is none."""
        if self.run.state != RunState.COMPLETED:
            return ""
        return content.pretty_json(redact(read_value(self.run.result)))

    @property
    def input(self) -> str:
        value = read_value(self.run.input)
        return "" if value is None else content.pretty_json(redact(value))

    @property
    def logs(self) -> str:
        return redact_text(self.run.logs)

    @property
    def held_calls(self) -> list[CallOfRun]:
        """Return the calls that a paused run waits for."""
        waiting = set(self.run.waiting_for)
        return [row for row in self.calls_made if row.call.call_id in waiting]


def highlighted(run: ScriptRun, failing_line: int | None = None) -> list[SourceLine]:
    """Return the lines of a script with secrets masked; none if its code is not stored."""
    if run.code in ("", UNREADABLE):
        return []
    return source_code.highlight(redact_text(run.code), run.language, failing_line)


def without_payloads() -> "QuerySet[ScriptRun]":
    return ScriptRun.objects.defer(*PAYLOADS)


def list_runs(session: AgentSession) -> list[RunSummary]:
    """Return the newest runs of a session, oldest first."""
    rows = without_payloads().filter(session=session).annotate(made=Count("calls"))
    return [RunSummary(run, run.made) for run in rows.order_by("-pk")[:MAX_LISTED]][::-1]


def runs_of_events(session: AgentSession, events: Sequence[TimelineEvent]) -> dict[int, ScriptRun]:
    """Return the run of each event that belongs to one, by the event's id."""
    of_calls = {event.id: event.call.run_id for event in events if event.call is not None}
    keys = {key for key in of_calls.values() if key is not None}
    ids = {event.id: str(event.details.get("run_id")) for event in events if event.kind == "script"}
    if not keys and not ids:
        return {}
    rows = without_payloads().filter(session=session)
    runs = list(rows.filter(Q(pk__in=keys) | Q(run_id__in=ids.values())))
    by_key, by_id = {run.pk: run for run in runs}, {run.run_id: run for run in runs}
    found = {event: by_key.get(key) for event, key in of_calls.items() if key is not None}
    found |= {event: by_id.get(run_id) for event, run_id in ids.items()}
    for event, following in pairwise(events):  # called without loading: said just before the call
        if event.kind == "implicit_load" and event.tool_name == following.tool_name:
            found[event.id] = found.get(following.id)
    return {event: run for event, run in found.items() if run is not None}


def find_run(session_id: str, run_id: str) -> RunDetail:
    """Return a run of a session. Raises NotFound."""
    rows = ScriptRun.objects.select_related("session__agent", "key")
    texts = (text.replace("\0", "") for text in (session_id, run_id))
    run = rows.filter(**dict(zip(("session__session_id", "run_id"), texts, strict=True))).first()
    if run is None:
        raise NotFound("Script run not found.", hint="Check the id in the URL.")
    calls = run.calls.defer("arguments", "result_copy").select_related("hold").order_by("pk")
    made = [CallOfRun(number, call) for number, call in enumerate(calls, 1)]
    return RunDetail(run, len(made), made)
