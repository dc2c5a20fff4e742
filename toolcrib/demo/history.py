"""Backdate demo data over two weeks, so that charts have days and hours to show.

`manage.py demo` calls it once, on a data directory that it filled itself and that no process
serves. Order, tokens, errors and durations stay as recorded. Only timestamps move, with pauses
between two steps of a session for the model's thinking time.
"""

import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from itertools import accumulate

from django.db import models, transaction

from catalog import preferences
from catalog.audit import chain
from catalog.models import AuditEntry, Definition, DefinitionChange, Group, Tool
from servers.models import Server, SyncRun
from sessions_app.models import Agent, AgentSession, ApiKey, Call, Event, EventKind, SessionState

DAYS = 14
RECENT_MINUTES = (40, 26, 15, 7, 2)  # how long ago the last sessions started
HOUR = timedelta(hours=1)
LONG_PAUSE_SHARE = 0.04  # of the steps follow a pause of minutes
NO_PAUSE_AFTER = (EventKind.IMPLICIT_LOAD, EventKind.FORKED)  # same request as the next event
# Relative load by hour of the day: quiet nights, a dip at noon.
HOURLY_LOAD = (4, 3, 3, 3, 3, 4, 6, 9, 13, 15, 14, 11, 9, 12, 15, 14, 12, 9, 7, 6, 5, 5, 4, 4)
# Models with data from before the first session, and their timestamp fields.
SETUP_FIELDS: tuple[tuple[type[models.Model], tuple[str, ...]], ...] = (
    (Server, ("created_at",)),
    (Tool, ("created_at", "held_at")),
    (Definition, ("created_at",)),
    (DefinitionChange, ("at", "decided_at")),
    (Group, ("created_at",)),
    (Agent, ("created_at",)),
    (ApiKey, ("created_at",)),
    (SyncRun, ("started_at", "finished_at")),
    (AuditEntry, ("at",)),
)


@transaction.atomic
def backdate(now: datetime) -> None:
    """Move all recorded timestamps into the two weeks before `now`."""
    sessions = list(AgentSession.objects.order_by("pk").prefetch_related("events", "call_rows"))
    if not sessions:
        return
    first_recorded = min(session.created_at for session in sessions)
    roots = [session for session in sessions if session.parent_id is None]
    starts = dict(zip((root.pk for root in roots), _start_times(len(roots), now), strict=True))
    shifts: dict[int, Callable[[datetime], datetime]] = {}
    for session in sessions:
        if session.parent_id is not None:
            starts[session.pk] = shifts[session.parent_id](session.created_at)
        shifts[session.pk] = _time_shift(session, starts[session.pk], now)
        _move(session, starts[session.pk], shifts[session.pk], now)
    _save(sessions)
    first = min(session.created_at for session in sessions)
    _move_setup(first_recorded, first - first_recorded - HOUR)
    chain.sign_again()


def _start_times(count: int, now: datetime) -> Iterator[datetime]:
    """Yield start times for `count` sessions: more by day than by night, more recent than old."""
    weights = [
        HOURLY_LOAD[(now - ago * HOUR).hour]
        * (0.6 if (now - ago * HOUR).weekday() > 4 else 1)
        * (1 + 5 * (1 - ago / (24 * DAYS)) ** 8)
        * random.Random(ago).uniform(0.4, 1.6)  # noqa: S311 - reproducible
        for ago in range(24 * DAYS, 0, -1)
    ]
    sums = list(accumulate(weights))
    early = max(count - len(RECENT_MINUTES), 0)
    for index in range(early):
        target = sums[-1] * (index + 0.5) / early
        hour = bisect_left(sums, target)
        fraction = 1 - (sums[hour] - target) / weights[hour]
        # The current hour is reserved for the recent sessions.
        yield min(now - (24 * DAYS - hour - fraction) * HOUR, now - HOUR)
    for minutes in RECENT_MINUTES[len(RECENT_MINUTES) - (count - early) :]:
        yield now - timedelta(minutes=minutes)


def _time_shift(
    session: AgentSession, start: datetime, now: datetime
) -> Callable[[datetime], datetime]:
    """Return a function that maps a session's timestamps to its new start, with pauses added.

    Pauses are added only between events, so that calls keep their duration.
    """
    events = list(session.events.all())
    moments = list(accumulate((event.at for event in events), max))
    rng = random.Random(session.pk)  # noqa: S311 - reproducible
    pauses = [0.0 if event.kind in NO_PAUSE_AFTER else _pause(rng) for event in events]
    opened = session.created_at
    available = (now - start).total_seconds() - 30
    scale = min(1.0, max(available, 1) / max(sum(pauses), 1))
    offsets = [0.0, *accumulate(pause * scale for pause in pauses)]

    def shift(at: datetime) -> datetime:
        return start + (at - opened) + timedelta(seconds=offsets[bisect_left(moments, at)])

    return shift


def _pause(rng: random.Random) -> float:
    """Return the seconds until the model's next step."""
    return rng.uniform(360, 1500) if rng.random() < LONG_PAUSE_SHARE else rng.uniform(1.5, 14)


def _move(
    session: AgentSession, start: datetime, shift: Callable[[datetime], datetime], now: datetime
) -> None:
    for event in session.events.all():
        event.at = shift(event.at)
    for call in session.call_rows.all():
        delta = shift(call.accepted_at) - call.accepted_at
        call.accepted_at += delta
        call.deadline += delta
        call.sent_at = call.sent_at and call.sent_at + delta
        call.finished_at = call.finished_at and call.finished_at + delta
    last = max((event.at for event in session.events.all()), default=start)
    session.last_used_at = last
    session.ended_at = session.ended_at and last
    session.created_at = start
    expires = last + timedelta(seconds=preferences.value("session_idle_seconds"))
    if session.state == SessionState.OPEN and expires < now:
        session.state, session.ended_at = SessionState.EXPIRED, expires
        Event.objects.create(session=session, at=expires, kind=EventKind.EXPIRED)


def _save(sessions: Sequence[AgentSession]) -> None:
    events = [event for session in sessions for event in session.events.all()]
    calls = [call for session in sessions for call in session.call_rows.all()]
    Event.objects.bulk_update(events, ["at"], 500)
    moments = ["accepted_at", "sent_at", "finished_at", "deadline"]
    Call.objects.bulk_update(calls, moments, 200)
    moments = ["created_at", "last_used_at", "ended_at", "state"]
    AgentSession.objects.bulk_update(sessions, moments, 200)


def _move_setup(first_recorded: datetime, by: timedelta) -> None:
    """Move data from before the first session to before its new start."""
    for model, fields in SETUP_FIELDS:
        for field in fields:
            # The base manager, since the audit log's own manager rejects updates.
            rows = model._base_manager.filter(**{f"{field}__lt": first_recorded})
            rows.update(**{field: models.F(field) + by})
