"""Choices for the whole installation that admins make in the dashboard.

The environment wins: a variable that is set fixes its value. All else is read from the database at
each use and never kept in memory, so that a change holds in every process at once.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.db import connection, transaction

from catalog import audit
from catalog.audit import Actor
from catalog.models import Preference
from toolcrib.lib.errors import Conflict, Invalid

Number = int | float
MOST = 1_000_000_000


@dataclass(frozen=True)
class PreferenceSpec:
    """One preference: where it stands, what it does, what it may be."""

    name: str
    section: str
    label: str
    effect: str
    low: Number
    high: Number
    setting: str = ""  # the attribute of settings that holds its default
    variable: str = ""  # what fixes it
    otherwise: Number = 0  # the default where there is no setting
    per: int = 1  # how many of what is kept make one of what people type
    unit: str = ""

    @property
    def default(self) -> Number:
        found: Number = getattr(settings, self.setting) if self.setting else self.otherwise
        return found

    @property
    def fixed(self) -> bool:
        return self.variable in settings.FROM_ENVIRONMENT

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int)

    def accepts(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        return math.isfinite(value) and self.low <= value <= self.high


def _agent(name: str, label: str, effect: str, otherwise: Number, unit: str = "") -> PreferenceSpec:
    low, high = (1, MOST) if isinstance(otherwise, int) else (0.01, 100.0)
    return PreferenceSpec(
        f"agent_{name}", "tokens", label, effect, low, high, otherwise=otherwise, unit=unit
    )


PREFERENCES = {
    one.name: one
    for one in (
        PreferenceSpec(
            "session_idle_seconds",
            "general",
            "Sessions expire when idle for",
            "An agent's session that nobody uses for this long ends. What it had loaded can be "
            "resumed in a new one. 1,440 minutes are a day.",
            60,
            365 * 86_400,
            setting="SESSION_IDLE_SECONDS",
            variable="TOOLCRIB_SESSION_IDLE",
            per=60,
            unit="minutes",
        ),
        _agent(
            "tool_threshold",
            "Defer from this many tools",
            "A new agent with fewer tools is given every schema at once.",
            15,
            "tools",
        ),
        _agent(
            "threshold_tokens",
            "Defer over this many tokens",
            "Or when all its definitions together cost more than this.",
            10_000,
            "tokens",
        ),
        _agent(
            "threshold_percent",
            "Defer over this share of the context",
            "Or when they take more than this much of a context window that the session states.",
            5.0,
            "%",
        ),
        _agent(
            "catalog_budget",
            "Catalog budget",
            "The catalog's text stays under it: names of the largest groups are left out first.",
            2_000,
            "tokens",
        ),
        _agent("calls_in_flight", "Calls in flight", "At once; more are refused.", 20),
        _agent("calls_per_minute", "Calls a minute", "More are told to wait.", 600),
        _agent("searches_per_minute", "Searches a minute", "More are told to wait.", 120),
        _agent(
            "max_sessions",
            "Open sessions",
            "At the limit, the one idle longest ends if it was idle for 30 minutes.",
            100,
        ),
        PreferenceSpec(
            "sync_poll_seconds",
            "sync",
            "Poll a new server every",
            "Servers that were added before keep their own interval, which their settings show. "
            "Each poll is up to 20 % early or late, so that they do not come together.",
            60,
            30 * 86_400,
            setting="SYNC_POLL",
            variable="TOOLCRIB_SYNC_POLL",
            per=60,
            unit="minutes",
        ),
        PreferenceSpec(
            "keep_payloads_days",
            "retention",
            "Keep arguments and results for",
            "Older ones are removed within ten minutes, for good. Calls stay listed with their "
            "times and errors.",
            1,
            36_500,
            setting="KEEP_PAYLOADS_DAYS",
            variable="TOOLCRIB_KEEP_PAYLOADS_DAYS",
            unit="days",
        ),
        PreferenceSpec(
            "keep_sessions_days",
            "retention",
            "Keep ended sessions for",
            "Counted from a session's end. Older ones are removed with their timelines and calls, "
            "for good. The audit log is kept for ever.",
            1,
            36_500,
            setting="KEEP_SESSIONS_DAYS",
            variable="TOOLCRIB_KEEP_SESSIONS_DAYS",
            unit="days",
        ),
    )
}
AGENT = tuple(name.removeprefix("agent_") for name in PREFERENCES if name.startswith("agent_"))


def value(name: str) -> Any:
    """Return what holds now."""
    known = PREFERENCES[name]
    if known.fixed:
        return known.default
    # By hand: asked on the way of an agent's request, and building a query costs more than it.
    with connection.cursor() as cursor:
        cursor.execute("SELECT value FROM catalog_preference WHERE name = %s", [name])
        row = cursor.fetchone()
    return _read(known, row[0]) if row else known.default


def values(section: str = "") -> dict[str, Any]:
    """Return what holds now in a section, or everywhere, in one query."""
    wanted = [one for one in PREFERENCES.values() if section in ("", one.section)]
    rows = Preference.objects.filter(name__in=[one.name for one in wanted])
    kept = dict(rows.values_list("name", "value"))
    return {
        one.name: one.default if one.fixed or one.name not in kept else _read(one, kept[one.name])
        for one in wanted
    }


def agent_defaults() -> dict[str, Any]:
    """Return the settings that an agent gets where nobody says otherwise."""
    return {name.removeprefix("agent_"): kept for name, kept in values("tokens").items()}


def _read(known: PreferenceSpec, text: str) -> Any:
    found = json.loads(text)
    return found if known.accepts(found) else known.default


@transaction.atomic
def change(wanted: Mapping[str, Number], *, actor: Actor) -> list[PreferenceSpec]:
    """Set some preferences, and return those that are different now."""
    for name, new in wanted.items():
        _check(name, new)
    rows = {row.name: row for row in Preference.objects.select_for_update().filter(name__in=wanted)}
    changed = []
    for name, new in wanted.items():
        known, row = PREFERENCES[name], rows.get(name)
        before = _read(known, row.value) if row else known.default
        if before == new:
            continue
        # Of two who set it first at once, the second writes over the first.
        row, _ = Preference.objects.update_or_create(name=name, defaults={"value": json.dumps(new)})
        audit.record(actor, "settings.change", row, before={"value": before}, after={"value": new})
        changed.append(known)
    return changed


def _check(name: str, new: object) -> None:
    known = PREFERENCES.get(name)
    if known is None:
        raise Invalid(f"{name} is not a setting.", hint=f"Known: {', '.join(PREFERENCES)}.")
    if known.fixed:
        raise Conflict(
            f"{known.label} is fixed by {known.variable}.",
            hint="Remove the variable and restart to change it here.",
        )
    if not known.accepts(new):
        kind = "a whole number" if known.whole else "a number"
        raise Invalid(f"{name} is {kind} from {known.low:,} to {known.high:,}.")
