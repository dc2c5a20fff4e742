"""Lint warnings on definitions and their changes. Severe ones keep new tools from agents. Pure."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

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
# New tools with one of these wait for a review unless the server's trust is `auto`.
SEVERE = frozenset({"hidden_characters", "instructs_reader", "lookalike", "reserved_name"})
SIDE_EFFECTS = re.compile(
    r"""\b(?:add|append|archive|assign|cancel|change|charge|clear|commit|create|delete|deploy|disable
      |drop|edit|e?mail|enable|erase|execute|forward|grant|insert|install|invite|kill|merge|modif(?:y|ies)
      |move|overwrite|pay|post|publish|purchase|purge|push|remove|rename|replace|reset|restart|revoke
      |run|save|schedule|send|share|store|submit|terminate|transfer|update|upload|wipe|write)(?:e?s)?\b
    """,
    re.IGNORECASE | re.VERBOSE,
)
NEGATED = re.compile(r"\b(?:not|never|no|without|nothing|cannot|\w+n't)\b[^.;!?\n]*", re.IGNORECASE)
BASE64 = re.compile(r"[A-Za-z0-9+/]{120,}={0,2}")
WORDS = re.compile(r"[\w-]+")
ANNOTATIONS = ("readOnlyHint", "destructiveHint", "idempotentHint", "openWorldHint")
ANNOTATION_DEFAULTS = {"readOnlyHint": False, "destructiveHint": True, "openWorldHint": True}


class Finding(NamedTuple):
    code: str
    text: str


class KnownNames:
    """Names of other tools, indexed once for checking a whole list of tools."""

    def __init__(self, siblings: Iterable[str] = (), foreign: Iterable[str] = ()) -> None:
        self.by_skeleton: dict[str, list[str]] = {}
        for name in (*siblings, *foreign):
            self.by_skeleton.setdefault(skeleton(name), []).append(name)
        # Only names that are not ordinary words: `search` is a word, `search_issues` is a tool.
        self.foreign = {name for name in foreign if "_" in name or "-" in name}


def definition_findings(tool: dict[str, Any], known_names: KnownNames) -> Iterator[Finding]:
    name = tool["name"]
    text = "\n|\n".join(_texts(tool))
    if hidden := sorted(hidden_characters(text)):
        codes = ", ".join(f"U+{ord(char):04X}" for char in hidden[:6])
        yield Finding("hidden_characters", f"Contains invisible characters: {codes}.")
    if instruction := INSTRUCTIONS.search(text):
        quote = " ".join(instruction[0].split())
        yield Finding("instructs_reader", f"Contains an instruction to the model: “{quote}”.")
    if BASE64.search(text):
        yield Finding("encoded_text", "Contains a long run of encoded text.")
    if mentioned := sorted(known_names.foreign & set(WORDS.findall(text))):
        names = ", ".join(mentioned[:5])
        yield Finding("names_other_tools", f"Mentions tools of other servers: {names}.")
    if not name.isascii():
        yield Finding("unusual_name", "The name contains non-ASCII characters.")
    similar = known_names.by_skeleton.get(skeleton(name), ())
    if lookalikes := sorted({other for other in similar if other != name}):
        yield Finding("lookalike", f"The name looks like {', '.join(lookalikes[:3])}.")
    if name in META_TOOLS:
        yield Finding("reserved_name", "The name is also used by a built-in tool.")
    patterns = unenforceable_patterns(tool["inputSchema"]) if "pattern" in text else []
    if patterns:
        pattern = printable_name(patterns[0][:60])
        yield Finding("pattern_not_enforced", f"A pattern is not enforced: {pattern}")


def change_findings(before: dict[str, Any], after: dict[str, Any]) -> Iterator[Finding]:
    if new := required_names(after["inputSchema"]) - required_names(before["inputSchema"]):
        names = ", ".join(sorted(new)[:5])
        yield Finding("new_required_field", f"New required fields: {names}.")
    old, now = _annotations(before), _annotations(after)
    for key in ANNOTATIONS:
        default = ANNOTATION_DEFAULTS.get(key)
        if old.get(key, default) != now.get(key, default):
            change = f"{key} changed from {_value(old.get(key))} to {_value(now.get(key))}."
            yield Finding("annotation_turned", change)
    claimed = old.get("readOnlyHint") is True or now.get("readOnlyHint") is True
    if claimed and (effects := sorted(_side_effects(after) - _side_effects(before))):
        words = ", ".join(effects[:5])
        yield Finding(
            "side_effect_added",
            f"Claims to be read-only, and its description now mentions: {words}.",
        )


def instructs_reader(text: str) -> bool:
    """Return whether a text contains an instruction to the model."""
    return INSTRUCTIONS.search(text) is not None


def is_severe(findings: Iterable[Mapping[str, str]]) -> bool:
    return any(finding["code"] in SEVERE for finding in findings)


def _side_effects(tool: dict[str, Any]) -> set[str]:
    """Return the verbs in a tool's description that change something, except negated ones."""
    text = NEGATED.sub(" ", str(tool.get("description") or ""))
    return {match.lower() for match in SIDE_EFFECTS.findall(text)}


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


def _value(value: object) -> str:
    return "not set" if value is None else str(value).lower()[:40]


def _annotations(tool: dict[str, Any]) -> dict[str, Any]:
    annotations = tool.get("annotations")
    return annotations if isinstance(annotations, dict) else {}
