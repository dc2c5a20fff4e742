"""Date a demonstration back over two weeks, so that its figures have days and hours to show.

`manage.py demo` calls it once, on a folder that it filled itself and that nothing serves. What
happened stays what the product recorded: order, tokens, errors and the time that each call took.
Only when it happened is moved, and between two steps of a session the model gets time to think.
"""

import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from itertools import accumulate

from django.db import models, transaction

from catalog import preferences
from catalog.models import AuditEntry, Definition, DefinitionChange, Group, Tool
from servers.models import Server, SyncRun
from sessions_app.models import (
    Agent,
    AgentSession,
    ApiKey,
    Call,
    Event,
    EventKind,
    SessionState,
)

DAYS = 14
LATELY = (40, 26, 15, 7, 2)  # minutes ago, of the last sessions
HOUR = timedelta(hours=1)
LONG_BREAK = 0.04  # of the steps follow a break of minutes
AT_ONCE = (EventKind.IMPLICIT_LOAD, EventKind.FORKED)  # what follows belongs to the same request
# Work by the hour of the day: quiet nights, a dip at noon.
BY_HOUR = (4, 3, 3, 3, 3, 4, 6, 9, 13, 15, 14, 11, 9, 12, 15, 14, 12, 9, 7, 6, 5, 5, 4, 4)
# What was set up before the first session, and the fields that say when.
SET_UP: tuple[tuple[type[models.Model], tuple[str, ...]], ...] = (
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
def spread(now: datetime) -> None:
    """Move all that was recorded so far into the two weeks before `now`."""
    sessions = list(AgentSession.objects.order_by("pk").prefetch_related("events", "call_rows"))
    if not sessions:
        return
    worked_from = min(session.created_at for session in sessions)
    roots = [session for session in sessions if session.parent_id is None]
    begins = dict(zip((one.pk for one in roots), _beginnings(len(roots), now), strict=True))
    warps: dict[int, Callable[[datetime], datetime]] = {}
    for session in sessions:
        if session.parent_id is not None:
            begins[session.pk] = warps[session.parent_id](session.created_at)
        warps[session.pk] = _warp(session, begins[session.pk], now)
        _move(session, begins[session.pk], warps[session.pk], now)
    _save(sessions)
    first = min(session.created_at for session in sessions)
    _move_setup(worked_from, first - worked_from - HOUR)


def _beginnings(count: int, now: datetime) -> Iterator[datetime]:
    """Say when so many sessions began: more by day than by night, more of late than at first."""
    weights = [
        BY_HOUR[(now - ago * HOUR).hour]
        * (0.6 if (now - ago * HOUR).weekday() > 4 else 1)
        * (1 + 5 * (1 - ago / (24 * DAYS)) ** 8)
        * random.Random(ago).uniform(0.4, 1.6)  # noqa: S311 - the same each time
        for ago in range(24 * DAYS, 0, -1)
    ]
    sums = list(accumulate(weights))
    early = max(count - len(LATELY), 0)
    for at in range(early):
        wanted = sums[-1] * (at + 0.5) / early
        hour = bisect_left(sums, wanted)
        part = 1 - (sums[hour] - wanted) / weights[hour]
        # The hour that runs belongs to the last few, which have times of their own.
        yield min(now - (24 * DAYS - hour - part) * HOUR, now - HOUR)
    for minutes in LATELY[len(LATELY) - (count - early) :]:
        yield now - timedelta(minutes=minutes)


def _warp(session: AgentSession, begin: datetime, now: datetime) -> Callable[[datetime], datetime]:
    """Return the move of a session's moments: to its beginning, and apart by what a model thinks.

    Time is added between an event and what follows it, so a call takes as long as it took.
    """
    events = list(session.events.all())
    moments = list(accumulate((event.at for event in events), max))
    dice = random.Random(session.pk)  # noqa: S311 - the same each time
    pauses = [_pause(dice) if event.kind not in AT_ONCE else 0.0 for event in events]
    opened = session.created_at
    room = (now - begin).total_seconds() - 30
    squeeze = min(1.0, max(room, 1) / max(sum(pauses), 1))
    waited = [0.0, *accumulate(pause * squeeze for pause in pauses)]

    def moved(at: datetime) -> datetime:
        return begin + (at - opened) + timedelta(seconds=waited[bisect_left(moments, at)])

    return moved


def _pause(dice: random.Random) -> float:
    """Seconds until the model's next step."""
    return dice.uniform(360, 1500) if dice.random() < LONG_BREAK else dice.uniform(1.5, 14)


def _move(
    session: AgentSession, begin: datetime, warp: Callable[[datetime], datetime], now: datetime
) -> None:
    for event in session.events.all():
        event.at = warp(event.at)
    for call in session.call_rows.all():
        moved = warp(call.accepted_at) - call.accepted_at
        call.accepted_at += moved
        call.deadline += moved
        call.sent_at = call.sent_at and call.sent_at + moved
        call.finished_at = call.finished_at and call.finished_at + moved
    last = max((event.at for event in session.events.all()), default=begin)
    session.last_used_at = last
    session.ended_at = session.ended_at and last
    session.created_at = begin
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


def _move_setup(worked_from: datetime, by: timedelta) -> None:
    """Let what was there before the first session be older than it."""
    for model, fields in SET_UP:
        for field in fields:
            # The plain manager: the log refuses changes, and here it is dated, not changed.
            rows = model._base_manager.filter(**{f"{field}__lt": worked_from})
            rows.update(**{field: models.F(field) + by})
