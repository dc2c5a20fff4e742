"""Advice about a definition, and about a change of one. Never a gate. Pure.

A finding says what was seen and lets a person decide; agents are protected by approval, not by
this list being complete.
"""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from catalog.definitions.json_schema import required_names, unenforceable_patterns
from catalog.definitions.parsing import printable_name
from catalog.definitions.public_names import META_TOOLS, skeleton
from toolcrib.lib.text import hidden_characters

INSTRUCTIONS = re.compile(
    r"""ignore\s+(?:all\s+|any\s+)?(?:previous|prior|above|earlier)
      | do\s+not\s+(?:tell|mention|inform|reveal|show)
      | don'?t\s+(?:tell|mention|inform)
      | without\s+(?:telling|informing|asking)\s+the\s+user
      | <\s*(?:/\s*)?(?:important|system|instructions?|secret)\b
      | you\s+must\s+(?:always|first|never|now)
      | (?:before|after)\s+(?:using|calling)\s+(?:this|any|other)\b
      | system\s+prompt
      | (?:~|/home/\w+|/root)/\.(?:ssh|aws|config|env|cursor|claude)
      | id_rsa | \.env\b | /etc/passwd
    """,
    re.IGNORECASE | re.VERBOSE,
)
BASE64 = re.compile(r"[A-Za-z0-9+/]{120,}={0,2}")
WORDS = re.compile(r"[\w-]+")
ANNOTATIONS = ("readOnlyHint", "destructiveHint", "idempotentHint", "openWorldHint")
DEFAULTS = {"readOnlyHint": False, "destructiveHint": True, "openWorldHint": True}


@dataclass(frozen=True)
class Finding:
    code: str
    text: str

    def as_json(self) -> dict[str, str]:
        return asdict(self)


class Neighbours:
    """The names around a tool, prepared once for a whole list of tools."""

    def __init__(self, siblings: Iterable[str] = (), foreign: Iterable[str] = ()) -> None:
        self.looks: dict[str, list[str]] = {}
        for name in (*siblings, *foreign):
            self.looks.setdefault(skeleton(name), []).append(name)
        # Only names no ordinary sentence holds: `search` is a word, `search_issues` is a tool.
        self.foreign = {name for name in foreign if "_" in name or "-" in name}


def findings_of(tool: dict[str, Any], neighbours: Neighbours) -> list[Finding]:
    """Look at one definition among its neighbours."""
    name = tool["name"]
    text = "\n|\n".join(_texts(tool))
    found: list[Finding] = []
    hidden = sorted(hidden_characters(text))
    if hidden:
        marks = ", ".join(f"U+{ord(mark):04X}" for mark in hidden[:6])
        found.append(Finding("hidden_characters", f"Holds characters nobody sees: {marks}."))
    quoted = INSTRUCTIONS.search(text)
    if quoted:
        words = " ".join(quoted[0].split())
        found.append(Finding("instructs_reader", f"Speaks to the model: “{words}”."))
    if BASE64.search(text):
        found.append(Finding("encoded_text", "Holds a long run of encoded text."))
    named = sorted(neighbours.foreign & set(WORDS.findall(text)))
    if named:
        found.append(
            Finding("names_other_tools", f"Names tools of other servers: {', '.join(named[:5])}.")
        )
    if not name.isascii():
        found.append(Finding("unusual_name", "Its name holds letters outside ASCII."))
    twins = sorted({other for other in neighbours.looks.get(skeleton(name), ()) if other != name})
    if twins:
        found.append(Finding("lookalike", f"Its name looks like {', '.join(twins[:3])}."))
    if name in META_TOOLS:
        found.append(Finding("reserved_name", "Toolcrib's own tools use this name too."))
    patterns = unenforceable_patterns(tool["inputSchema"]) if "pattern" in text else []
    if patterns:
        shown = printable_name(patterns[0][:60])
        found.append(Finding("pattern_not_enforced", f"A pattern is not enforced: {shown}"))
    return found


def change_findings(before: dict[str, Any], after: dict[str, Any]) -> list[Finding]:
    """Say what in a change deserves a second look."""
    found: list[Finding] = []
    new = required_names(after["inputSchema"]) - required_names(before["inputSchema"])
    if new:
        names = ", ".join(sorted(new)[:5])
        found.append(Finding("new_required_field", f"Now requires: {names}."))
    old, now = _annotations(before), _annotations(after)
    for key in ANNOTATIONS:
        if old.get(key, DEFAULTS.get(key)) != now.get(key, DEFAULTS.get(key)):
            found.append(
                Finding(
                    "annotation_turned",
                    f"{key} turned from {_said(old.get(key))} to {_said(now.get(key))}.",
                )
            )
    return found


def _texts(value: object) -> Iterable[str]:
    """Yield every text in a tool object: descriptions, enums, defaults, names, titles."""
    stack = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, str):
            yield node
        elif isinstance(node, dict):
            stack.extend(node.keys())
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)


def _said(value: object) -> str:
    return "unsaid" if value is None else str(value).lower()[:40]


def _annotations(tool: dict[str, Any]) -> dict[str, Any]:
    found = tool.get("annotations")
    return found if isinstance(found, dict) else {}
