"""Figures of use: how often tools are called, loaded, looked for in vain, and what that costs.

Reads only. Percentiles, loads and searches are read from the newest `SAMPLE` rows of the time
asked for, so that a long ledger costs no more than a short one.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from django.db.models import CharField, Count, Max, Q, QuerySet, Sum
from django.db.models.functions import Cast

from sessions_app.models import Call, CallPath, CallState, Event, EventKind
from sessions_app.review import timeline
from sessions_app.review.queries import read_object
from toolcrib.lib.percentile import percentile

SAMPLE = 50_000
ENOUGH = 5_000  # calls for the percentiles of one tool
FAILED_STATES = (CallState.FAILED, CallState.REFUSED, CallState.TIMED_OUT, CallState.UNKNOWN)
FAILED = Q(is_error=True) | Q(state__in=FAILED_STATES)
# A name that no tool ever had is a refusal, not a tool in use.
OF_A_TOOL = Q(tool__isnull=False) | ~Q(state=CallState.REFUSED)


@dataclass(frozen=True)
class ToolUse:
    """How one tool was used since some moment."""

    tool_name: str
    calls: int = 0
    errors: int = 0
    p50_ms: int | None = None
    p95_ms: int | None = None
    tokens: int = 0  # of results
    loads: int = 0
    last_called: datetime | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class LostSearch:
    """Something agents looked for and did not find."""

    asked: str
    strategy: str
    times: int
    last_at: datetime


def tool_usage(since: datetime, *, agent: str = "", tool: str = "") -> list[ToolUse]:
    """Return how each tool was used since a moment, by name. Trying out a tool is no use of it."""
    calls = Call.objects.filter(OF_A_TOOL, accepted_at__gte=since).exclude(path=CallPath.TRY)
    loads = Event.objects.filter(kind=EventKind.LOADED, at__gte=since)
    if agent:
        calls = calls.filter(agent__name=agent)
        loads = loads.filter(session__agent__name=agent)
    if tool:
        calls = calls.filter(tool_name=tool)
        loads = loads.filter(details__contains=tool)
    counted: Mapping[str, Any] = {
        row["tool_name"]: row
        for row in calls.order_by()
        .values("tool_name")
        .annotate(
            calls=Count("pk"),
            errors=Count("pk", filter=FAILED),
            tokens=Sum("tokens"),
            last_called=Max("accepted_at"),
        )
    }
    times = _durations(calls, ENOUGH if tool else SAMPLE)
    loaded = _load_counts(loads, tool)
    return [
        ToolUse(
            **(counted.get(name) or {"tool_name": name}),
            p50_ms=percentile(times[name], 0.5),
            p95_ms=percentile(times[name], 0.95),
            loads=loaded[name],
        )
        for name in sorted({*counted, *loaded})
    ]


def answered(calls: QuerySet[Call], most: int) -> Iterator[tuple[str, datetime, int]]:
    """Yield name, start and milliseconds of what reached a server and came back, newest first."""
    rows = calls.filter(sent_at__isnull=False, finished_at__isnull=False).order_by("-accepted_at")
    # As text, which PostgreSQL ends with +00: Django takes ten times as long to read SQLite's.
    times = [Cast(name, CharField()) for name in ("accepted_at", "finished_at")]
    for name, *texts in rows.values_list("tool_name", *times)[:most]:
        start, end = (datetime.fromisoformat(text).replace(tzinfo=UTC) for text in texts)
        yield name, start, round((end - start).total_seconds() * 1000)


def _durations(calls: QuerySet[Call], most: int) -> defaultdict[str, list[int]]:
    """Return how long the calls of each tool took, shortest first."""
    times: defaultdict[str, list[int]] = defaultdict(list)
    for name, _, took in answered(calls, most):
        times[name].append(took)
    for values in times.values():
        values.sort()
    return times


def _load_counts(events: QuerySet[Event], tool: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    for details in events.order_by("-pk").values_list("details", flat=True)[:SAMPLE]:
        names = timeline.words(read_object(details), "names")
        counts.update(name for name in names if not tool or name == tool)
    return counts


def searches_without_result(since: datetime, *, agent: str = "") -> list[LostSearch]:
    """Return what was looked for in vain, the most often asked first."""
    events = Event.objects.filter(kind=EventKind.SEARCHED, at__gte=since)
    if agent:
        events = events.filter(session__agent__name=agent)
    times: Counter[tuple[str, str]] = Counter()
    last: dict[tuple[str, str], datetime] = {}
    for at, text in events.order_by("-pk").values_list("at", "details")[:SAMPLE]:
        details = read_object(text)
        if timeline.number(details, "total") or "total" not in details:
            continue
        key = (timeline.asked(details), str(details.get("strategy") or ""))
        times[key] += 1
        last.setdefault(key, at)
    return [
        LostSearch(asked, strategy, count, last[asked, strategy])
        for (asked, strategy), count in sorted(times.items(), key=lambda one: (-one[1], one[0]))
    ]
