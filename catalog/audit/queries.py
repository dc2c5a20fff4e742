"""Read the audit log for people: by filter, in pages, as a file. Reads only."""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

from django.db.models import QuerySet
from django.http import QueryDict

from catalog.audit import SENTENCES, sentence
from catalog.models import AuditEntry
from toolcrib.lib.pagination import PAGE, Page, page_by_id
from toolcrib.lib.request import number, text

EXPORTED = 20_000  # entries in one file
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # what spreadsheets run or skip to run
COLUMNS = ("id", "at", "actor_kind", "actor", "verb", "target_kind", "target", "sentence")
FACETS = {
    "actor": ("Who", "actor_label"),
    "verb": ("Did", "verb"),
    "target": ("To a", "target_kind"),
}


@dataclass(frozen=True)
class AuditFilter:
    """What a person asked for in the address. Days are days of UTC, both ends included."""

    actor: str = ""
    verb: str = ""
    target: str = ""  # the kind of thing
    query: str = ""  # words of the target's name
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
            _day(text(query, "since")),
            _day(text(query, "until")),
            number(query, "before"),
            number(query, "after"),
        )

    @property
    def narrows(self) -> bool:
        return bool(
            self.actor or self.verb or self.target or self.query or self.since or self.until
        )

    def entries(self) -> QuerySet[AuditEntry]:
        rows = AuditEntry.objects.all()
        if self.actor:
            rows = rows.filter(actor_label=self.actor)
        if self.verb:
            rows = rows.filter(verb=self.verb)
        if self.target:
            rows = rows.filter(target_kind=self.target)
        if self.query:
            rows = rows.filter(target_label__icontains=self.query)
        if self.since:
            rows = rows.filter(at__gte=_start(self.since))
        if self.until and self.until < date.max:
            rows = rows.filter(at__lt=_start(self.until + timedelta(days=1)))
        return rows


def _day(text: str) -> date | None:
    try:
        return date.fromisoformat(text) if len(text) == 10 else None
    except ValueError:
        return None


def _start(day: date) -> datetime:
    return datetime.combine(day, time(), tzinfo=UTC)


# --- On the page --------------------------------------------------------------------------------


@dataclass(frozen=True)
class AuditRow:
    """One entry as a sentence in three parts, so that the page can stress what was changed."""

    entry: AuditEntry
    words: str
    rest: str

    @classmethod
    def of(cls, entry: AuditEntry) -> "AuditRow":
        words, _, rest = SENTENCES[entry.verb].partition("{target}")
        return cls(entry, words.strip(), rest.strip())

    @property
    def changes(self) -> list[tuple[str, str, str]]:
        """List what was written down: (what, before, after), as people read it."""
        before, after = _mapping(self.entry.before), _mapping(self.entry.after)
        names = dict.fromkeys([*before, *after])
        return [(name, _shown(before, name), _shown(after, name)) for name in names]


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {"value": value} if value else {}


def _shown(facts: Mapping[str, object], name: str) -> str:
    if name not in facts:
        return "–"
    fact = facts[name]
    if isinstance(fact, str):
        return fact or "(empty)"
    if isinstance(fact, list) and all(isinstance(one, str) for one in fact):
        return ", ".join(fact) or "(none)"
    return json.dumps(fact, ensure_ascii=False)


def page_of(wanted: AuditFilter, size: int = PAGE) -> Page[AuditEntry]:
    """Return a page of the log, newest first. Its cursors are ids: new entries shift nothing."""
    return page_by_id(wanted.entries(), before=wanted.before, after=wanted.after, size=size)


def facets(wanted: AuditFilter) -> list[dict[str, object]]:
    """List who acted, how, on what kinds of things: for the filters."""
    entries = AuditEntry.objects.order_by()
    shown: list[dict[str, object]] = []
    for name, (label, column) in FACETS.items():
        chosen = getattr(wanted, name)
        options: Sequence[str] = sorted(
            {
                *entries.values_list(column, flat=True).distinct()[:200],
                *([chosen] if chosen else []),
            }
        )
        shown.append(
            {
                "name": name,
                "label": label,
                "options": [
                    {"value": one, "label": _word(name, one), "selected": one == chosen}
                    for one in options
                ],
            }
        )
    return shown


def _word(name: str, value: str) -> str:
    if name == "verb" and value in SENTENCES:
        return " ".join(SENTENCES[value].format(target="").split())
    return value


# --- As a file ----------------------------------------------------------------------------------


def left_out(total: int) -> str:
    """Say what a file of these entries lacks; nothing if it holds them all."""
    if total <= EXPORTED:
        return ""
    return (
        f"A file holds the newest {EXPORTED:,} of these {total:,} entries. "
        "Narrow the days for older ones."
    )


def as_json(wanted: AuditFilter) -> str:
    rows = wanted.entries()
    body: dict[str, Any] = {
        "entries": [
            _fields(entry) | {"before": entry.before, "after": entry.after}
            for entry in rows[:EXPORTED]
        ]
    }
    if note := left_out(rows.count()):
        body["note"] = note
    return json.dumps(body, ensure_ascii=False, indent=1)


def as_csv(wanted: AuditFilter) -> str:
    rows = wanted.entries()
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow([*COLUMNS, "before", "after"])
    writer.writerows(_lines(rows[:EXPORTED]))
    if note := left_out(rows.count()):
        writer.writerow([note])
    return file.getvalue()


def _lines(entries: Iterable[AuditEntry]) -> Iterator[list[str]]:
    for entry in entries:
        fields = _fields(entry)
        facts = (json.dumps(one, ensure_ascii=False) for one in (entry.before, entry.after))
        yield [escape_formula(str(cell)) for cell in (*(fields[name] for name in COLUMNS), *facts)]


def _fields(entry: AuditEntry) -> dict[str, object]:
    return {
        "id": entry.pk,
        "at": entry.at.isoformat(timespec="seconds"),
        "actor_kind": entry.actor_kind,
        "actor": entry.actor_label,
        "verb": entry.verb,
        "target_kind": entry.target_kind,
        "target": entry.target_label,
        "sentence": sentence(entry),
    }


def escape_formula(cell: str) -> str:
    """Quote a cell that a spreadsheet would run as a formula."""
    return f"'{cell}" if cell.startswith(FORMULA) else cell
