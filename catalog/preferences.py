"""Installation-wide settings that admins change in the dashboard.

Environment variables take precedence: a variable that is set fixes its value. Everything else is
read from the database on each use and never cached, so a change applies in every process at once.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.db import connection, transaction

from catalog import audit
from catalog.models import Preference
from toolcrib.lib.errors import Conflict, Invalid
from toolcrib.lib.roles import Actor

Number = int | float
MAX_VALUE = 1_000_000_000


@dataclass(frozen=True)
class PreferenceSpec:
    name: str
    section: str
    label: str
    help_text: str
    minimum: Number
    maximum: Number
    setting: str = ""  # the Django setting that holds the default
    variable: str = ""  # the environment variable that fixes the value
    fallback: Number = 0  # the default if there is no Django setting
    scale: int = 1  # stored units per displayed unit, e.g. 60 for seconds shown as minutes
    unit: str = ""

    @property
    def default(self) -> Number:
        value: Number = getattr(settings, self.setting) if self.setting else self.fallback
        return value

    @property
    def is_fixed(self) -> bool:
        return self.variable in settings.FROM_ENVIRONMENT

    @property
    def is_integer(self) -> bool:
        return isinstance(self.minimum, int)

    def accepts(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(
            value, int if self.is_integer else int | float
        ):
            return False
        return math.isfinite(value) and self.minimum <= value <= self.maximum


def _agent(
    name: str, label: str, help_text: str, fallback: Number, unit: str = ""
) -> PreferenceSpec:
    minimum, maximum = (1, MAX_VALUE) if isinstance(fallback, int) else (0.01, 100.0)
    return PreferenceSpec(
        f"agent_{name}", "tokens", label, help_text, minimum, maximum, fallback=fallback, unit=unit
    )


def _retention(name: str, label: str, help_text: str) -> PreferenceSpec:
    days, names = (1, 36_500), (name.upper(), f"TOOLCRIB_{name.upper()}")
    return PreferenceSpec(name, "retention", label, help_text, *days, *names, unit="days")


def _alert(
    name: str, label: str, help_text: str, fallback: int, bounds: tuple[int, int], unit: str
) -> PreferenceSpec:
    name = f"alert_{name}"
    return PreferenceSpec(name, "alerts", label, help_text, *bounds, fallback=fallback, unit=unit)


PREFERENCES = {
    spec.name: spec
    for spec in (
        PreferenceSpec(
            "session_idle_seconds",
            "general",
            "Session idle timeout",
            "Sessions without activity for this long expire. A new session can resume the tools "
            "that were loaded. 1,440 minutes are one day.",
            60,
            365 * 86_400,
            setting="SESSION_IDLE_SECONDS",
            variable="TOOLCRIB_SESSION_IDLE",
            scale=60,
            unit="minutes",
        ),
        _agent(
            "tool_threshold",
            "Deferral threshold (tools)",
            "New agents with fewer tools receive every schema at the start of a session.",
            15,
            "tools",
        ),
        _agent(
            "threshold_tokens",
            "Deferral threshold (tokens)",
            "Tools are also deferred if their definitions together cost more than this.",
            10_000,
            "tokens",
        ),
        _agent(
            "threshold_percent",
            "Deferral threshold (% of context window)",
            "Tools are also deferred if their definitions take more than this share of the "
            "context window that the session reports.",
            5.0,
            "%",
        ),
        _agent(
            "catalog_budget",
            "Catalog budget",
            "Limit for the catalog text. Tool names of the largest groups are omitted first.",
            2_000,
            "tokens",
        ),
        _agent("calls_in_flight", "Concurrent calls", "Further calls are rejected.", 20),
        _agent("calls_per_minute", "Calls per minute", "Excess calls get status 429.", 600),
        _agent("searches_per_minute", "Searches per minute", "Excess gets status 429.", 120),
        _agent(
            "cost_per_minute",
            "Request cost per minute",
            "A call or search costs 1; a load 1, a catalog 2, and 1 more per 64 KB of the "
            "response. Excess gets status 429.",
            3_000,
        ),
        _agent(
            "max_sessions",
            "Open sessions",
            "At the limit, the longest-idle session ends if it was idle for 30 minutes.",
            100,
        ),
        PreferenceSpec(
            "sync_poll_seconds",
            "sync",
            "Sync interval of new servers",
            "Existing servers keep the interval in their own settings. Each sync starts up to "
            "20% early or late to spread the load.",
            60,
            30 * 86_400,
            setting="SYNC_POLL",
            variable="TOOLCRIB_SYNC_POLL",
            scale=60,
            unit="minutes",
        ),
        _retention(
            "keep_payloads_days",
            "Retention of arguments and results",
            "Older arguments and results are deleted permanently within ten minutes. Calls stay "
            "listed with their times and errors.",
        ),
        _retention(
            "keep_sessions_days",
            "Retention of ended sessions",
            "Counted from the end of the session. Older sessions are deleted permanently with "
            "their timelines and calls. The audit log is never deleted.",
        ),
        _alert(
            "failing_seconds",
            "Server failing",
            "Alert when a server has failed for this long.",
            60,
            (0, 86_400),
            "seconds",
        ),
        _alert(
            "error_percent",
            "Error rate",
            "Alert when a larger share of the calls of 15 minutes failed.",
            25,
            (1, 100),
            "%",
        ),
        _alert(
            "error_calls",
            "Error rate: minimum calls",
            "With fewer calls in 15 minutes the error rate is not judged.",
            20,
            (1, 1_000_000),
            "calls",
        ),
        _alert(
            "key_days",
            "Key expiring",
            "Alert when a key that is in use expires within this time.",
            7,
            (1, 365),
            "days",
        ),
    )
}


def value(name: str) -> Any:
    spec = PREFERENCES[name]
    if spec.is_fixed:
        return spec.default
    # Raw SQL: this runs during agents' requests, and the ORM costs more than the query itself.
    with connection.cursor() as cursor:
        cursor.execute("SELECT value FROM catalog_preference WHERE name = %s", [name])
        row = cursor.fetchone()
    return _parse(spec, row[0]) if row else spec.default


def values(section: str = "") -> dict[str, Any]:
    """Return the effective values of a section, or of all sections, in one query."""
    specs = [spec for spec in PREFERENCES.values() if section in ("", spec.section)]
    rows = Preference.objects.filter(name__in=[spec.name for spec in specs])
    stored = dict(rows.values_list("name", "value"))
    return {
        spec.name: spec.default
        if spec.is_fixed or spec.name not in stored
        else _parse(spec, stored[spec.name])
        for spec in specs
    }


def agent_defaults() -> dict[str, Any]:
    return {name.removeprefix("agent_"): number for name, number in values("tokens").items()}


def _parse(spec: PreferenceSpec, text: str) -> Any:
    stored = json.loads(text)
    return stored if spec.accepts(stored) else spec.default


@transaction.atomic
def change(new_values: Mapping[str, Number], *, actor: Actor) -> list[PreferenceSpec]:
    """Set preferences and return those whose value changed."""
    for name, new in new_values.items():
        _check(name, new)
    locked = Preference.objects.select_for_update().filter(name__in=new_values)
    rows = {row.name: row for row in locked}
    changed = []
    for name, new in new_values.items():
        spec, row = PREFERENCES[name], rows.get(name)
        before = _parse(spec, row.value) if row else spec.default
        if before == new:
            continue
        # A row that does not exist yet cannot be locked: of two concurrent inserts the last wins.
        row, _ = Preference.objects.update_or_create(name=name, defaults={"value": json.dumps(new)})
        audit.record(actor, "settings.change", row, before={"value": before}, after={"value": new})
        changed.append(spec)
    return changed


def _check(name: str, new: object) -> None:
    spec = PREFERENCES.get(name)
    if spec is None:
        raise Invalid(
            f"{name} is not a setting.", hint=f"Available settings: {', '.join(PREFERENCES)}."
        )
    if spec.is_fixed:
        raise Conflict(
            f"{spec.label} is fixed by {spec.variable}.",
            hint="Remove the variable and restart to change it here.",
        )
    if not spec.accepts(new):
        kind = "a whole number" if spec.is_integer else "a number"
        raise Invalid(f"{name} must be {kind} from {spec.minimum:,} to {spec.maximum:,}.")
