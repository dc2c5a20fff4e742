"""Audit log queries: filters, pagination and CSV/JSON export."""

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from functools import partial
from typing import Any

from django.db.models import Q, QuerySet
from django.http import QueryDict
from django.utils import timezone

from catalog.audit import SENTENCES
from catalog.audit.log import as_record, wording
from catalog.models import AuditEntry
from toolcrib.lib.request import facet, number, text
from toolcrib.lib.text import escape_formula
from toolcrib.lib.time_ranges import RANGES, read_range

MAX_EXPORTED = 20_000  # entries per file
STATES = ("before", "after")
COLUMNS = ("id", "at", "actor_kind", "actor", "verb", "target_kind", "target", "sentence", *STATES)
MAX_WORDS = 8
MAX_NAMES = 3  # of the tools that a sentence names
FACETS = {
    "actor": ("Actor", "actor_label"),
    "verb": ("Action", "verb"),
    "target": ("Object", "target_kind"),
}


@dataclass(frozen=True)
class AuditFilter:
    """Filter from the query string. Dates are in UTC and inclusive; `since` replaces the range."""

    actor: str = ""
    verb: str = ""
    target: str = ""  # kind of object
    query: str = ""  # words of the sentence: actor, action or object
    within: str = ""  # a range that ends now
    since: date | None = None
    until: date | None = None
    before: int = 0
    after: int = 0

    @classmethod
    def read(cls, query: QueryDict) -> "AuditFilter":
        return cls(
            text(query, "actor"),
            text(query, "verb"),
            text(query, "target"),
            text(query, "q"),
            read_range(query, ""),
            _parse_date(text(query, "since")),
            _parse_date(text(query, "until")),
            number(query, "before"),
            number(query, "after"),
        )

    @property
    def narrows(self) -> bool:
        return self != AuditFilter(before=self.before, after=self.after)

    @property
    def start(self) -> datetime | None:
        """Return the start of the time range, the same as that of charts."""
        if self.since:
            return _start_of_day(self.since)
        return RANGES[self.within].starts(timezone.now())[0] if self.within else None

    def entries(self) -> QuerySet[AuditEntry]:
        conditions = {
            "actor_label": self.actor,
            "verb": self.verb,
            "target_kind": self.target,
            "at__gte": self.start,
            "at__lt": _start_of_day(self.until + timedelta(days=1))
            if self.until and self.until < date.max
            else None,
        }
        used = {name: value for name, value in conditions.items() if value}
        return AuditEntry.objects.filter(_sentence_contains(self.query), **used)


def _sentence_contains(query: str) -> Q:
    """Return the condition of entries whose sentence contains every word of the query."""
    condition = Q()
    for word in query.split()[:MAX_WORDS]:
        verbs = [verb for verb, text in SENTENCES.items() if word.lower() in text.lower()]
        condition &= (
            Q(target_label__icontains=word) | Q(actor_label__icontains=word) | Q(verb__in=verbs)
        )
    return condition


def _parse_date(text: str) -> date | None:
    try:
        return date.fromisoformat(text) if len(text) == 10 else None
    except ValueError:
        return None


def _start_of_day(day: date) -> datetime:
    return datetime.combine(day, time(), tzinfo=UTC)


@dataclass(frozen=True)
class AuditRow:
    """One entry as a sentence in parts, so that the page can emphasize the object."""

    entry: AuditEntry
    action: str  # with the space before the object, if there is one
    suffix: str  # the text after the object

    @classmethod
    def from_entry(cls, entry: AuditEntry) -> "AuditRow":
        action, target, suffix = wording(entry.verb).partition("{target}")
        return cls(entry, action if target else f"{action} ", suffix)

    @property
    def objects(self) -> str:
        """Return the names of the tools that a change of a group concerned, the first few."""
        parts = (self.entry.after, self.entry.before)
        values = [part.get(name) for part in parts for name in ("members", "preload")]
        names = sorted({name for value in values if isinstance(value, dict) for name in value})
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        return ", ".join(names[:MAX_NAMES]) + more

    @property
    def changes(self) -> list[tuple[str, str, str]]:
        """Return the recorded values as (field, before, after), formatted for display."""
        before, after = self.entry.before, self.entry.after
        names = dict.fromkeys([*before, *after])
        return [(name, _format(before, name), _format(after, name)) for name in names]


def _format(values: Mapping[str, object], name: str) -> str:
    if name not in values:
        return "–"
    value = values[name]
    if isinstance(value, str):
        return value or "(empty)"
    if value is None or isinstance(value, bool):
        return {None: "not set", True: "yes", False: "no"}[value]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ", ".join(value) or "(none)"
    return json.dumps(value, ensure_ascii=False)


def facets(filters: AuditFilter) -> list[dict[str, object]]:
    entries = AuditEntry.objects.order_by()
    rows: list[dict[str, object]] = []
    for name, (label, column) in FACETS.items():
        chosen = getattr(filters, name)
        values = {*entries.values_list(column, flat=True).distinct()[:200], chosen} - {""}
        counts, label_of = dict.fromkeys(sorted(values)), partial(_label, name)
        rows.append(facet(name, label, counts, [chosen], label_of=label_of))
    return rows


def _label(name: str, value: str) -> str:
    if name == "verb" and value in SENTENCES:
        return " ".join(SENTENCES[value].format(target="").split())
    return value


def truncation_note(total: int) -> str:
    """Return a note on the entries an export omits, or an empty string if it has all."""
    if total <= MAX_EXPORTED:
        return ""
    return (
        f"An export contains the newest {MAX_EXPORTED:,} of these {total:,} entries. "
        "Select an earlier date range for older ones."
    )


def export_json(filters: AuditFilter) -> str:
    rows = filters.entries()
    body: dict[str, Any] = {"entries": [_exported(entry) for entry in rows[:MAX_EXPORTED]]}
    if note := truncation_note(rows.count()):
        body["note"] = note
    return json.dumps(body, ensure_ascii=False, indent=1)


def export_csv(filters: AuditFilter) -> str:
    rows = filters.entries()
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(COLUMNS)
    for entry in rows[:MAX_EXPORTED]:
        fields = _exported(entry)
        for name in STATES:
            fields[name] = json.dumps(fields[name], ensure_ascii=False)
        writer.writerow([escape_formula(str(fields[name])) for name in COLUMNS])
    if note := truncation_note(rows.count()):
        writer.writerow([note])
    return file.getvalue()


def _exported(entry: AuditEntry) -> dict[str, object]:
    return as_record(entry) | {"at": entry.at.isoformat(timespec="seconds")}
