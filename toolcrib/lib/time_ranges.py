"""Time ranges of charts, reports and lists: their labels, buckets and the choices of the picker."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.http import QueryDict


@dataclass(frozen=True)
class Range:
    """A time range and its bucket size."""

    label: str
    buckets: int
    bucket: str = "day"
    step: timedelta = timedelta(days=1)
    digits: int = 10  # characters of an ISO timestamp that identify its bucket

    def starts(self, now: datetime) -> list[datetime]:
        """Return the start of each bucket; the last one is still running. Days are in UTC."""
        last = now.replace(minute=0, second=0, microsecond=0)
        if self.bucket == "day":
            last = last.replace(hour=0)
        return [last - self.step * back for back in reversed(range(self.buckets))]


RANGES = {
    "24h": Range("24 hours", 24, "hour", timedelta(hours=1), 13),
    "7d": Range("7 days", 7),
    "30d": Range("30 days", 30),
    "90d": Range("90 days", 90),
}
DEFAULT_RANGE = "24h"


def read_range(query: QueryDict, default: str = DEFAULT_RANGE) -> str:
    """Return the range in a query string, or the default."""
    within = query.get("range", "")
    return within if within in RANGES else default


def range_choices(within: str) -> list[tuple[str, str, bool]]:
    """Return the choices of the range picker: key, label and whether it is chosen."""
    return [(key, span.label, key == within) for key, span in RANGES.items()]


def range_context(within: str) -> dict[str, Any]:
    """Return the context of the range picker."""
    return {"range": RANGES[within], "ranges": range_choices(within)}
