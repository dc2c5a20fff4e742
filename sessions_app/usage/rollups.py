"""Hourly figures of calls, sessions and tokens, counted from the ledger once an hour has ended.

Nothing is counted while a call runs, so a call costs nothing more, and the figures are those of the
ledger. Hours that are not counted yet, normally one or two, are counted when they are read.
"""

from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime, timedelta

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
    UsageHour,
    UsageKind,
)
from sessions_app.usage.filters import FAILED_STATES
from sessions_app.usage.latency import NO_ANSWER, bucket_of
from toolcrib.lib.figures import CODES_WITH_SCHEMA

HOUR = timedelta(hours=1)
MAX_HOURS = 240  # counted in one run of the task
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
        UsageHour.objects.filter(hour__lt=now - KEPT).delete()
    return counted


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
