"""How a reader wants pages to look: time zone, digit groups, density. Cookies of their browser.

`activate` sets them for the request that is handled; outside of one, times are UTC and digits are
grouped with commas.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import cache
from zoneinfo import ZoneInfo, available_timezones

from django.utils import timezone

DENSITIES = {"": "Automatic", "compact": "Compact", "regular": "Regular", "touch": "Large"}
# Name: (separator of thousands, decimal point).
NUMBER_FORMATS = {
    "": (",", "."),
    "space": ("\u202f", "."),
    "point": (".", ","),
    "apostrophe": ("’", "."),
}
NUMBER_LABELS = {"": "1,234.5", "space": "1 234.5", "point": "1.234,5", "apostrophe": "1’234.5"}
COOKIES = ("timezone", "numbers", "density")

_separators: ContextVar[tuple[str, str]] = ContextVar("separators", default=(",", "."))


@cache
def zone_names() -> tuple[str, ...]:
    """Return the names of time zones to choose from, UTC first."""
    names = (name for name in available_timezones() if "/" in name and not name.startswith("Etc/"))
    return ("UTC", *sorted(names))


def read(cookies: Mapping[str, str]) -> dict[str, str]:
    """Return the preferences of a browser; unknown values are the defaults."""
    zone, numbers, density = (cookies.get(name, "") for name in COOKIES)
    return {
        "timezone": zone if zone in zone_names() else "UTC",
        "numbers": numbers if numbers in NUMBER_FORMATS else "",
        "density": density if density in DENSITIES else "",
    }


@contextmanager
def activate(preferences: Mapping[str, str]) -> Iterator[None]:
    token = _separators.set(NUMBER_FORMATS[preferences["numbers"]])
    try:
        with timezone.override(ZoneInfo(preferences["timezone"])):
            yield
    finally:
        _separators.reset(token)


def group_digits(value: float, decimals: int | None = None) -> str:
    """Format 1940 as 1,940, or as the reader wants it, with a minus sign if it is negative."""
    text = f"{value:,}" if decimals is None else f"{value:,.{decimals}f}"
    separator, point = _separators.get()
    if (separator, point) != (",", "."):
        text = text.translate({ord(","): separator, ord("."): point})
    return text.replace("-", "−")


def local(moment: datetime) -> datetime:
    """Return the moment in the reader's time zone."""
    return timezone.localtime(moment)


def zone_label() -> str:
    """Return the short name of the reader's time zone: UTC, CET, -03."""
    return timezone.localtime().strftime("%Z")
