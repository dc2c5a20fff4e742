"""A change of one object, with its lines of the plan. Pure.

Plans read like a diff: `+` is added, `-` removed, `~` changed. Texts of a file and of servers are
escaped, since people decide by what they read.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from catalog.audit import Actor
from toolcrib.lib.json_codec import canonical
from toolcrib.lib.text import escape_ambiguous

MAX_VALUE_LENGTH = 300
ABSENT = object()


@dataclass(frozen=True)
class FieldChange:
    name: str
    before: Any
    after: Any

    def lines(self) -> list[str]:
        if isinstance(self.before, list) and isinstance(self.after, list):
            return self._list_lines(self.before, self.after)
        lines = []
        if self.before is not ABSENT:
            lines.append(f"-     {self.name}: {_format(self.before)}")
        if self.after is not ABSENT:
            lines.append(f"+     {self.name}: {_format(self.after)}")
        return lines

    def _list_lines(self, before: list[Any], after: list[Any]) -> list[str]:
        """Return what joined and left a list; only its new order if that is all."""
        old, new = [_format(item) for item in before], [_format(item) for item in after]
        removed = [f"-     {self.name}: {item}" for item in old if item not in set(new)]
        added = [f"+     {self.name}: {item}" for item in new if item not in set(old)]
        return removed + added or [f"~     {self.name}, in this order: {', '.join(new)}"]


@dataclass(frozen=True)
class Change:
    sign: str  # + - ~
    kind: str  # server, group, …
    name: str
    write: Callable[[Actor], None]
    fields: Sequence[FieldChange] = ()

    def lines(self) -> list[str]:
        head = f"{self.sign} {self.kind} {escape_ambiguous(self.name)}"
        return [head, *(line for item in self.fields for line in item.lines())]


@dataclass
class Plan:
    changes: list[Change] = field(default_factory=list)
    # Programs that need a confirmation: slug, command line, digest.
    programs: list[tuple[str, str, str]] = field(default_factory=list)
    # Variables of the file that have no value: server, names.
    missing: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)

    def text(self) -> str:
        lines = [line for change in self.changes for line in change.lines()]
        for slug, command, digest in self.programs:
            lines += [f"! server {slug} runs: {command}", f"!     --confirm {digest}"]
        for slug, names in self.missing:
            lines.append(f"! server {slug} needs values of {', '.join(names)} in the environment")
        counts = dict.fromkeys("+~-", 0)
        for change in self.changes:
            counts[change.sign] += 1
        if not self.changes:
            return "Nothing to change."
        total = f"{counts['+']} to add, {counts['~']} to change, {counts['-']} to remove."
        return "\n".join([*lines, total])

    def as_json(self) -> dict[str, Any]:
        return {
            "changes": [
                {
                    "action": {"+": "add", "~": "change", "-": "remove"}[change.sign],
                    "kind": change.kind,
                    "name": change.name,
                    "fields": [
                        {
                            "name": item.name,
                            "before": None if item.before is ABSENT else item.before,
                            "after": None if item.after is ABSENT else item.after,
                        }
                        for item in change.fields
                    ],
                }
                for change in self.changes
            ],
            "confirm": [
                {"server": slug, "command": command, "digest": digest}
                for slug, command, digest in self.programs
            ],
            "missing": [{"server": slug, "names": list(names)} for slug, names in self.missing],
        }


def compare(current: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[FieldChange]:
    """Return the fields that a file sets to something else."""
    return [
        FieldChange(name, current.get(name, ABSENT), value)
        for name, value in wanted.items()
        if current.get(name, ABSENT) != value
    ]


def added(wanted: Mapping[str, Any]) -> list[FieldChange]:
    return [FieldChange(name, ABSENT, value) for name, value in wanted.items()]


def _format(value: Any) -> str:
    if isinstance(value, dict) and set(value) == {"tool", "preload"}:
        flag = {None: "", True: " (preload)", False: " (no preload)"}[value["preload"]]
        return escape_ambiguous(value["tool"]) + flag
    text = value if isinstance(value, str) else canonical(value)
    text = escape_ambiguous(text).replace("\n", "⏎")
    return text if len(text) <= MAX_VALUE_LENGTH else text[:MAX_VALUE_LENGTH] + "…"
