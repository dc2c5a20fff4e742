"""Rule queries: one rule, and a rule as the API and pages show it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sessions_app.models import Rule
from sessions_app.rules.validation import NAME_FIELDS, current_names
from toolcrib.lib.errors import NotFound
from toolcrib.lib.json_codec import canonical

LABELS = {
    "agents": "Agents",
    "tools": "Tools",
    "not_tools": "Except tools",
    "servers": "Servers",
    "not_servers": "Except servers",
    "groups": "Groups",
}
HINTS = {
    "readOnlyHint": "read-only",
    "destructiveHint": "destructive",
    "idempotentHint": "idempotent",
    "openWorldHint": "open world",
}


def find_rule(name: str) -> Rule:
    rule = Rule.objects.filter(name=name).first() if name.isprintable() else None
    if rule is None:
        raise NotFound("Rule not found.", hint="Check the name in the list of rules.")
    return rule


@dataclass(frozen=True)
class ShownRule:
    """A rule with its match as people wrote it: agents and groups by their current names."""

    rule: Rule
    match: dict[str, Any]

    @property
    def body(self) -> dict[str, Any]:
        fields = ("name", "effect", "reason", "enabled", "position", "approver")
        body = {name: getattr(self.rule, name) for name in fields}
        times = {"created_at": self.rule.created_at, "updated_at": self.rule.updated_at}
        return body | {"match": self.match} | times

    @property
    def parts(self) -> list[tuple[str, list[str]]]:
        """Return the parts of the match that are set: a label, and the values."""
        return describe_match(self.match)


def show_rules(rules: Iterable[Rule]) -> list[ShownRule]:
    """Return rules as people see them. Two queries, however many."""
    rules = list(rules)
    names = {part: current_names(part, [rule.match for rule in rules]) for part in NAME_FIELDS}

    def match_of(rule: Rule) -> dict[str, Any]:
        named = {
            part: [names[part].get(row["id"], row["name"]) for row in rule.match[part]]
            for part in NAME_FIELDS
            if part in rule.match
        }
        return {**rule.match, **named}

    return [ShownRule(rule, match_of(rule)) for rule in rules]


def show_rule(rule: Rule) -> ShownRule:
    return show_rules([rule])[0]


def describe_match(match: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    parts = [(label, list(match.get(part, ()))) for part, label in LABELS.items()]
    hints = match.get("annotations", {})
    claims = [f"{'' if value else 'not '}{HINTS[hint]}" for hint, value in hints.items()]
    parts.append(("Annotations", claims))
    if match.get("origin", "any") != "any":
        parts.append(("Origin", [match["origin"]]))
    if match.get("first_use"):
        parts.append(("First use", ["of the tool by the agent"]))
    conditions = [
        f"{row['path']} {row['op']} {canonical(row['value']) if 'value' in row else ''}".strip()
        for row in match.get("arguments", ())
    ]
    parts.append(("Arguments", conditions))
    scope = ", in any session of the agent" if match.get("after_scope") == "agent" else ""
    parts.append((f"After results from{scope}", list(match.get("after", ()))))
    return [(label, values) for label, values in parts if values]
