"""Figures of calls, sessions and tokens by hour, counted from the ledger, and by day, summed.

An hour is counted once it has ended, a day summed once all of its hours are counted. Nothing is
counted while a call runs, so a call costs nothing more, and the figures are those of the ledger.
Hours that are not counted yet, normally one or two, are counted when they are read.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from datetime import UTC, date, datetime, time, timedelta

from django.db import IntegrityError, transaction
from django.utils import timezone

from sessions_app.ledger.writer import TOKEN_COLUMNS
from sessions_app.models import (
    IN_FLIGHT,
    AgentSession,
    Call,
    CallPath,
    CallState,
    Event,
    EventKind,
    UsageDay,
    UsageHour,
    UsageKind,
)
from sessions_app.usage.filters import FAILED_STATES
from sessions_app.usage.latency import NO_ANSWER, bucket_of, format_latencies
from toolcrib.lib.figures import CODES_WITH_SCHEMA

HOUR, DAY = timedelta(hours=1), timedelta(days=1)
MAX_HOURS = 240  # counted in one run of the task
MAX_DAYS = 10  # summed in one run
SUMS = (
    *("calls", "errors", "sessions", "searches", "loads"),
    *("tokens_call", "tokens_all", "tokens_catalog", "tokens_search", "tokens_load"),
)
KEPT = timedelta(days=400)
GIVEN_COLUMNS = ("tokens_catalog", "tokens_search", "tokens_load")

Key = tuple[datetime, str, str, int]  # hour, kind, key, latency


def hour_of(at: datetime) -> datetime:
    return at.replace(minute=0, second=0, microsecond=0)


def last_counted_hour() -> datetime | None:
    rows = UsageHour.objects.filter(kind=UsageKind.ALL, key="")
    return rows.order_by("-hour").values_list("hour", flat=True).first()


def first_uncounted_hour() -> datetime | None:
    """Return the first hour that is not counted; None if nothing ever happened."""
    if (last := last_counted_hour()) is not None:
        return last + HOUR
    calls = Call.objects.order_by("accepted_at").values_list("accepted_at", flat=True)
    sessions = AgentSession.objects.order_by("created_at").values_list("created_at", flat=True)
    times = [at for at in (calls.first(), sessions.first()) if at is not None]
    return hour_of(min(times)) if times else None


def count_ended_hours(now: datetime | None = None) -> int:
    """Count the hours that have ended, oldest first; return how many.

    An hour is counted once none of its calls is in flight.
    """
    now = now or timezone.now()
    hour, counted = first_uncounted_hour(), 0
    while hour is not None and hour + HOUR <= now and counted < MAX_HOURS:
        calls = Call.objects.filter(accepted_at__gte=hour, accepted_at__lt=hour + HOUR)
        if calls.filter(state__in=IN_FLIGHT).exists():
            break
        try:
            with transaction.atomic():
                UsageHour.objects.bulk_create(count_hours(hour, hour + HOUR), batch_size=500)
        except IntegrityError:  # another process has counted it
            break
        hour, counted = hour + HOUR, counted + 1
    if counted:
        UsageHour.objects.filter(kind__in=UsageKind.values, hour__lt=now - KEPT).delete()
    return counted


def summed_until() -> datetime | None:
    """Return the end of the last summed day; None if there is none."""
    days = UsageDay.objects.filter(kind=UsageKind.ALL, key="").order_by("-day")
    last = days.values_list("day", flat=True).first()
    return start_of(last) + DAY if last else None


def sum_ended_days(now: datetime | None = None) -> int:
    """Sum the days whose hours are all counted, oldest first; return how many."""
    start, last, summed = summed_until(), last_counted_hour(), 0
    if start is None:
        hours = UsageHour.objects.filter(kind=UsageKind.ALL, key="").order_by("hour")
        first = hours.values_list("hour", flat=True).first()
        start = start_of(first.date()) if first else None
    while start and last and start + DAY <= last + HOUR and summed < MAX_DAYS:
        try:
            with transaction.atomic():
                UsageDay.objects.bulk_create(_sum_day(start), batch_size=500)
        except IntegrityError:  # another process has summed it
            break
        start, summed = start + DAY, summed + 1
    if summed:
        oldest = (now or timezone.now()) - KEPT
        UsageDay.objects.filter(kind__in=UsageKind.values, day__lt=oldest.date()).delete()
    return summed


def _sum_day(start: datetime) -> list[UsageDay]:
    days: dict[tuple[str, str], UsageDay] = {}
    latencies: defaultdict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    hours = UsageHour.objects.filter(
        kind__in=UsageKind.values, hour__gte=start, hour__lt=start + DAY
    )
    for row in hours.order_by().iterator():
        of = row.kind, row.key
        if of not in days:
            days[of] = UsageDay(kind=row.kind, key=row.key, day=start.date())
        for name in SUMS:
            setattr(days[of], name, getattr(days[of], name) + getattr(row, name))
        latencies[of][row.latency] += row.calls
    if (UsageKind.ALL, "") not in days:  # no hour of this day was counted
        days[UsageKind.ALL, ""] = UsageDay(kind=UsageKind.ALL, key="", day=start.date())
    for of, day in days.items():
        day.latencies = format_latencies(latencies[of])
    return list(days.values())


def start_of(day: date) -> datetime:
    return datetime.combine(day, time(), tzinfo=UTC)


def count_hours(start: datetime, end: datetime) -> list[UsageHour]:
    """Count the hours of a period from the ledger; the result is not saved."""
    rows: defaultdict[Key, UsageHour] = defaultdict(UsageHour)
    hour = start
    while hour < end:
        rows[hour, UsageKind.ALL, "", NO_ANSWER].calls = 0
        hour += HOUR
    _count_calls(rows, start, end)
    _count_sessions(rows, start, end)
    for (hour, kind, key, latency), row in rows.items():
        row.hour, row.kind, row.key, row.latency = hour, kind, key, latency
    return list(rows.values())


def _count_calls(rows: dict[Key, UsageHour], start: datetime, end: datetime) -> None:
    calls = Call.objects.filter(accepted_at__gte=start, accepted_at__lt=end)
    columns = (
        *("agent_id", "server_slug", "tool_id", "tool_name", "session__model"),
        *("state", "is_error", "error_code", "tokens", "accepted_at", "sent_at", "finished_at"),
    )
    for (
        agent, server, tool, tool_name, model, state, is_error, code, tokens, at, sent, finished
    ) in calls.exclude(path=CallPath.TRY).order_by().values_list(*columns).iterator():  # fmt: skip
        latency = NO_ANSWER
        if sent is not None and finished is not None:
            latency = bucket_of((finished - at).total_seconds() * 1000)
        is_known = tool is not None or state != CallState.REFUSED
        for kind, key in _keys(agent, model, server, tool_name if is_known else ""):
            row = rows[hour_of(at), kind, key, latency]
            row.calls += 1
            row.errors += is_error or state in FAILED_STATES
            if state == CallState.REFUSED and code in CODES_WITH_SCHEMA:
                row.tokens_load += tokens
            else:
                row.tokens_call += tokens


def _count_sessions(rows: dict[Key, UsageHour], start: datetime, end: datetime) -> None:
    opened = AgentSession.objects.filter(created_at__gte=start, created_at__lt=end).order_by()
    columns = ("created_at", "agent_id", "model", "tokens_all")
    for at, agent, model, tokens in opened.values_list(*columns):
        for kind, key in _keys(agent, model):
            row = rows[hour_of(at), kind, key, NO_ANSWER]
            row.sessions += 1
            row.tokens_all += tokens
    given = {kind: name for kind, name in TOKEN_COLUMNS.items() if name in GIVEN_COLUMNS}
    events = Event.objects.filter(kind__in=given, at__gte=start, at__lt=end).order_by()
    read = events.values_list("at", "session__agent_id", "session__model", "kind", "tokens")
    for at, agent, model, kind, tokens in read.iterator():
        for usage_kind, key in _keys(agent, model):
            row = rows[hour_of(at), usage_kind, key, NO_ANSWER]
            name = given[EventKind(kind)]
            setattr(row, name, getattr(row, name) + tokens)
            row.searches += kind == EventKind.SEARCHED
            row.loads += kind == EventKind.LOADED


def _keys(
    agent: int | None, model: str | None, server: str = "", tool: str = ""
) -> Iterable[tuple[str, str]]:
    yield UsageKind.ALL, ""
    if agent is not None:
        yield UsageKind.AGENT, str(agent)
    if model:
        yield UsageKind.MODEL, model
    if server:
        yield UsageKind.SERVER, server
    if tool:
        yield UsageKind.TOOL, tool
