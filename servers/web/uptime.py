"""Uptime of a server by day, from the changes of its state. Pure, except for `read_uptime`."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from django.utils import timezone

from servers.models import Server, ServerState
from toolcrib.lib.text import plural

DAYS = 90
DAY = timedelta(days=1)
BAR, GAP = 6, 2  # widths in the drawing
HEIGHT = 28
UP, DOWN = ServerState.CONNECTED.value, ServerState.FAILING.value
Change = tuple[datetime, str]


@dataclass(frozen=True)
class UptimeDay:
    day: date
    up: timedelta = timedelta(0)
    down: timedelta = timedelta(0)  # the rest is unknown: not added yet, or disabled
    x: int = 0

    @property
    def percent(self) -> float | None:
        known = self.up + self.down
        return 100 * (self.up / known) if known else None

    @property
    def tone(self) -> str:
        percent = self.percent
        if percent is None:
            return "none"
        return "up" if percent >= 99.95 else "some" if percent >= 50 else "down"

    @property
    def label(self) -> str:
        when = f"{self.day:%Y-%m-%d}"
        if self.percent is None:
            return f"{when}: no data"
        minutes = round(self.down.total_seconds() / 60)
        failed = f", failing for {plural(minutes, 'minute')}" if self.down else ""
        return f"{when}: {_percent(self.percent)}{failed}"


@dataclass(frozen=True)
class Uptime:
    days: list[UptimeDay]
    failures: int
    height: int = HEIGHT
    bar: int = BAR

    @property
    def width(self) -> int:
        return len(self.days) * (BAR + GAP) - GAP

    @property
    def percent(self) -> float | None:
        total = UptimeDay(
            self.days[0].day,
            sum((day.up for day in self.days), timedelta(0)),
            sum((day.down for day in self.days), timedelta(0)),
        )
        return total.percent

    @property
    def summary(self) -> str:
        if self.percent is None:
            return f"No data in {DAYS} days."
        return f"{_percent(self.percent)} in {DAYS} days, {plural(self.failures, 'failure')}."


def _percent(value: float) -> str:
    # Never rounded up to 100: a server that failed at all was not always up.
    return "100%" if value == 100 else f"{min(value, 99.99):.2f}%"


def read_uptime(server: Server, now: datetime | None = None) -> Uptime:
    changes = list(server.state_changes.order_by("at", "pk").values_list("at", "state"))
    if not changes and server.state in (UP, DOWN):  # recorded by an older version
        changes = [(server.state_since or server.created_at, server.state)]
    return count_uptime(changes, now or timezone.now())


def count_uptime(changes: Sequence[Change], now: datetime) -> Uptime:
    """Return the uptime of the last 90 days (UTC); `changes` are in order of time."""
    midnight = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    start = midnight - DAY * (DAYS - 1)
    ends = [*(at for at, _ in changes[1:]), now]
    spans = [(at, end, state) for (at, state), end in zip(changes, ends, strict=False)]
    lengths = {state: [timedelta(0)] * DAYS for state in (UP, DOWN)}
    for begin, end, state in spans:
        at = max(begin, start)
        while state in lengths and at < end:
            number = (at - start) // DAY
            until = min(end, start + DAY * (number + 1))
            lengths[state][number] += until - at
            at = until
    days = [
        UptimeDay((start + DAY * number).date(), up, down, number * (BAR + GAP))
        for number, (up, down) in enumerate(zip(lengths[UP], lengths[DOWN], strict=True))
    ]
    # Two processes may record the same failure.
    before = [None, *(state for _, state in changes)]
    failures = sum(
        state == DOWN != previous and end > start
        for previous, (_, end, state) in zip(before, spans, strict=False)
    )
    return Uptime(days, failures)
