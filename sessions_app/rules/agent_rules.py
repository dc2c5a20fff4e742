"""The rules of an agent, compiled once per catalog revision, and the history that they ask for.

Every change of a rule increments the revision. So a call that was planned with older rules is
outdated when its row is accepted, and is planned again. Flow and first use are read in that same
transaction: all processes decide alike.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from catalog import cache
from catalog.cache import CachedTool, CatalogCache, memoize_per_revision
from sessions_app.ledger.calls import READ, READ_REFRESH, USE
from sessions_app.ledger.writer import CallRow, LedgerCursor
from sessions_app.models import CallPath, Rule
from sessions_app.rules.evaluation import (
    CompiledRule,
    Decision,
    Match,
    Subject,
    compile_condition,
    compile_globs,
    effective_annotations,
    match_rules,
)

AGENT_FLOW = timedelta(hours=24)  # how long `after` looks back over all sessions of an agent

IsGranted = Callable[[LedgerCursor, CallRow, int], bool]  # the row of a call, and the rule's id


@dataclass
class AgentRules:
    """The enabled rules that concern an agent, or a person (None), at one revision."""

    rules: Sequence[CompiledRule]
    groups: dict[int, frozenset[int]]  # by tool
    _by_tool: dict[int, tuple[CompiledRule, ...]] = field(default_factory=dict)

    def for_tool(self, tool: CachedTool) -> tuple[CompiledRule, ...]:
        """Return the rules that concern a tool. Cached, since most rules concern few tools."""
        rules = self._by_tool.get(tool.tool_id)
        if rules is None:
            subject = subject_of(tool, self.groups)
            rules = tuple(rule for rule in self.rules if rule.concerns_tool(subject))
            self._by_tool[tool.tool_id] = rules
        return rules

    def match(self, tool: CachedTool, arguments: dict[str, Any], origin: str) -> list[Match]:
        rules = self.for_tool(tool)
        return match_rules(rules, arguments, origin) if rules else []

    def match_feature(
        self, name: str, server: str, groups: frozenset[int], arguments: dict[str, Any]
    ) -> list[Match]:
        """Match a prompt or a resource, which only reads, by its public name or URI."""
        annotations = effective_annotations({"readOnlyHint": True})
        subject = Subject(frozenset({name}), server, groups, annotations)
        rules = tuple(rule for rule in self.rules if rule.concerns_tool(subject))
        return match_rules(rules, arguments, "direct") if rules else []


def origin_of(path: str) -> str:
    """Return the origin of a call for rules."""
    return "script" if path == CallPath.SCRIPT else "direct"


def subject_of(tool: CachedTool, groups: dict[int, frozenset[int]]) -> Subject:
    names = {tool.name, tool.original_name, *tool.former_names}
    if tool.server:
        names.add(f"{tool.server}__{tool.original_name}")
    sent = tool.approved.tool.get("annotations") if tool.approved else None
    if tool.overruled is not None:
        sent = {**(sent if isinstance(sent, dict) else {}), "readOnlyHint": tool.overruled}
    return Subject(
        names=frozenset(names),
        server=tool.server,
        groups=groups.get(tool.tool_id, frozenset()),
        annotations=effective_annotations(sent),
    )


# --- Decisions that need the database -----------------------------------------------------------


def decide(
    cursor: LedgerCursor, matches: Iterable[Match], entry: CallRow, is_granted: IsGranted
) -> Decision | None:
    """Return the decision of the first rule that matches, also by history; None allows the call.

    Runs in the transaction that accepts the call. A grant lifts the hold of one rule only: the
    rules after it are still asked.
    """
    for match in matches:
        rule = match.rule
        if rule.first_use and not _is_first_use(cursor, entry):
            continue
        if rule.after and not _has_read(cursor, entry, rule):
            continue
        if match.effect == "allow":
            return None
        if match.effect == "hold" and is_granted(cursor, entry, rule.pk):
            continue
        return match.decision
    return None


def _is_first_use(cursor: LedgerCursor, entry: CallRow) -> bool:
    if entry.agent_id is None or entry.tool_id is None:  # a prompt or a resource is no tool
        return False
    sql = f"SELECT 1 FROM {USE} WHERE agent_id = %s AND tool_id = %s"  # noqa: S608
    return cursor.fetch_one(sql, (entry.agent_id, entry.tool_id)) is None


def _has_read(cursor: LedgerCursor, entry: CallRow, rule: CompiledRule) -> bool:
    """Return whether the session, or its agent lately, was given results of these servers."""
    if entry.session_id is None:
        return False
    values: list[object]
    if rule.after_scope == "agent":
        where, values = (
            "agent_id = %s AND last_at > %s",
            [entry.agent_id, _since(entry.accepted_at)],
        )
    else:
        where, values = "session_id = %s", [entry.session_id]
    slugs = ", ".join(["%s"] * len(rule.after))
    sql = f"SELECT 1 FROM {READ} WHERE {where} AND server_slug IN ({slugs}) LIMIT 1"  # noqa: S608
    return cursor.fetch_one(sql, (*values, *rule.after)) is not None


def _since(now: datetime) -> datetime:
    return now - AGENT_FLOW - READ_REFRESH  # the stored time may be older than the last read


# --- Cache --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _RevisionRules:
    """All enabled rules at one revision, and those of each agent."""

    revision: int
    rules: tuple[CompiledRule, ...]
    by_agent: dict[int | None, AgentRules] = field(default_factory=dict)


_cached: _RevisionRules | None = None


def load_rules(revision: int, agent: int | None) -> AgentRules | None:
    """Return the rules of an agent; None if there are none. The revision was read before.

    Rules that are read later can only be newer, and then the revision is outdated.
    """
    cached = _load(revision)
    if not cached.rules:
        return None
    found = cached.by_agent.get(agent)
    if found is None:
        own = tuple(rule for rule in cached.rules if rule.concerns_agent(agent))
        needs_groups = any(rule.groups for rule in own)
        groups = groups_by_tool(cache.current()) if needs_groups else {}
        found = cached.by_agent[agent] = AgentRules(own, groups)
    return found if found.rules else None


def can_hold(revision: int) -> bool:
    """Return whether an enabled rule holds calls."""
    return any(rule.effect == "hold" or rule.broken for rule in _load(revision).rules)


def _load(revision: int) -> _RevisionRules:
    global _cached
    cached = _cached
    if cached is None or cached.revision != revision:
        rules = tuple(compile_rule(rule) for rule in Rule.objects.filter(enabled=True))
        cached = _cached = _RevisionRules(revision, rules)
    return cached


def clear() -> None:
    """Empty the cache, in tests and after a restore."""
    global _cached
    _cached = None


@memoize_per_revision
def groups_by_tool(catalog: CatalogCache) -> dict[int, frozenset[int]]:
    groups: dict[int, set[int]] = {}
    for group in catalog.groups:
        for member in group.members:
            groups.setdefault(member.tool.tool_id, set()).add(group.pk)
    return {tool: frozenset(pks) for tool, pks in groups.items()}


def compile_rule(rule: Rule) -> CompiledRule:
    """Compile a stored rule. One that cannot be compiled holds every call."""
    head = rule.pk or 0, rule.name, rule.effect, rule.reason, rule.approver
    try:
        match = dict(rule.match)
        origin = match.get("origin", "any")
        return CompiledRule(
            *head,
            agents=frozenset(row["id"] for row in match.get("agents", ())),
            tools=compile_globs(match.get("tools", ())),
            not_tools=compile_globs(match.get("not_tools", ())),
            servers=frozenset(match.get("servers", ())),
            not_servers=frozenset(match.get("not_servers", ())),
            groups=frozenset(row["id"] for row in match.get("groups", ())),
            annotations=match.get("annotations", {}),
            origin="" if origin == "any" else origin,
            first_use=match.get("first_use", False),
            conditions=tuple(
                compile_condition(row["path"], row["op"], row.get("value"))
                for row in match.get("arguments", ())
            ),
            after=tuple(match.get("after", ())),
            after_scope=match.get("after_scope", "session"),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return CompiledRule(*head, broken=f"it is damaged ({type(error).__name__})")
