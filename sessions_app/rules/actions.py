"""Rule writes: create, edit, delete, order. Every change is audited and in effect at once."""

from collections.abc import Sequence
from typing import Any

from django.db import transaction

from catalog import audit
from catalog.audit import Actor
from catalog.models import Revision
from sessions_app.models import Rule
from sessions_app.rules.schemas import MAX_RULES, RuleEdit, RuleIn
from sessions_app.rules.validation import InvalidRule, check_match, check_name, check_reason
from toolcrib.lib.errors import Conflict, NotFound

FIELDS = ("name", "effect", "reason", "enabled", "match", "approver")


@transaction.atomic
def create(body: RuleIn, *, actor: Actor) -> Rule:
    """Create a rule at a position, by default the last."""
    rules = _lock_all()
    if len(rules) >= MAX_RULES:
        raise Conflict(f"There are {MAX_RULES} rules already.", hint="Delete one first.")
    rule = Rule(
        name=_free_name(body.name, rules),
        effect=body.effect,
        reason=check_reason(body.reason),
        enabled=body.enabled,
        match=check_match(body.match),
        approver=body.approver,
        position=len(rules),
    )
    rule.save()
    if body.position is not None and body.position < len(rules):
        rules.insert(body.position, rule)
        _renumber(rules)
    audit.record(actor, "rule.create", rule, after=_as_audited(rule))
    Revision.bump()
    return rule


@transaction.atomic
def edit(rule: Rule, body: RuleEdit, *, actor: Actor) -> Rule:
    """Change the fields that are set."""
    rules = _lock_all()
    rule = _find(rule, rules)
    before = _as_audited(rule)
    if body.name is not None and body.name.strip() != rule.name:
        rule.name = _free_name(body.name, rules)
    if body.match is not None:
        rule.match = check_match(body.match, stored=rule.match)
    if body.reason is not None:
        rule.reason = check_reason(body.reason)
    for name in ("effect", "enabled", "approver"):
        if (value := getattr(body, name)) is not None:
            setattr(rule, name, value)
    after = _as_audited(rule)
    changed = [name for name in FIELDS if before[name] != after[name]]
    if changed:
        rule.save(update_fields=[*changed, "updated_at"])
        audit.record(
            actor,
            "rule.update",
            rule,
            before={name: before[name] for name in changed},
            after={name: after[name] for name in changed},
        )
        Revision.bump()
    if body.position is not None:
        move(rule, body.position, actor=actor)
    return rule


@transaction.atomic
def delete(rule: Rule, *, actor: Actor) -> None:
    rules = _lock_all()
    rule = _find(rule, rules)
    audit.record(actor, "rule.delete", rule, before=_as_audited(rule))
    rules.remove(rule)
    rule.delete()
    _renumber(rules)
    Revision.bump()


@transaction.atomic
def move(rule: Rule, position: int, *, actor: Actor) -> None:
    """Move a rule to a position; past the end is the last."""
    names = [row.name for row in _lock_all() if row.pk != rule.pk]
    names.insert(max(position, 0), rule.name)
    reorder(names, actor=actor)


@transaction.atomic
def reorder(names: Sequence[str], *, actor: Actor) -> None:
    """Set the order of all rules."""
    rules = _lock_all()
    by_name = {rule.name: rule for rule in rules}
    problems = [
        (f"names.{position}", f"there is no rule {name[:80]!r}")
        for position, name in enumerate(names)
        if name not in by_name
    ]
    missing = by_name.keys() - set(names)
    if missing or len(names) != len(set(names)):
        problems.append(("names", "name every rule exactly once"))
    if problems:
        raise InvalidRule(problems)
    before = [rule.name for rule in rules]
    if list(names) != before:
        _renumber([by_name[name] for name in names])
        first = by_name[names[0]]
        audit.record(
            actor, "rule.reorder", first, before={"order": before}, after={"order": list(names)}
        )
        Revision.bump()


def _lock_all() -> list[Rule]:
    """Lock all rules, and return them in order."""
    rules = list(Rule.objects.select_for_update().order_by("pk"))
    return sorted(rules, key=lambda rule: (rule.position, rule.pk))


def _find(rule: Rule, rules: Sequence[Rule]) -> Rule:
    found = next((row for row in rules if row.pk == rule.pk), None)
    if found is None:
        raise NotFound(f"The rule {rule.name} no longer exists.", hint="It was deleted meanwhile.")
    return found


def _free_name(name: str, rules: Sequence[Rule]) -> str:
    name = check_name(name)
    if any(rule.name == name for rule in rules):
        raise Conflict(
            f"A rule named {name} already exists.",
            hint="Choose another name, or edit that rule.",
            code="name_taken",
        )
    return name


def _renumber(rules: Sequence[Rule]) -> None:
    for position, rule in enumerate(rules):
        rule.position = position
    Rule.objects.bulk_update(rules, ["position"])


def _as_audited(rule: Rule) -> dict[str, Any]:
    return {name: getattr(rule, name) for name in FIELDS}
