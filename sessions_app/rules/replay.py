"""Replay: which recorded calls a rule would have held or denied.

Flow and first use are judged by what had happened before each call. A call is undecidable if the
rule depends on arguments that were not stored or are masked, or on a tool that was deleted.
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cache as memoize
from typing import Any, TypeVar

from django.db.models import Min, QuerySet
from django.utils import timezone

from catalog import cache
from sessions_app.models import AgentSession, Call, SessionRead, ToolUse
from sessions_app.rules.agent_rules import AGENT_FLOW, groups_by_tool, origin_of, subject_of
from sessions_app.rules.evaluation import (
    CompiledRule,
    Subject,
    effective_annotations,
    expand,
    match_rules,
)

T = TypeVar("T")
MAX_EXAMINED = 20_000
MAX_LISTED = 100
BATCH = 500
MASK = "***"
COLUMNS = (
    *("pk", "call_id", "tool_id", "tool_name", "server_slug", "agent_id", "session_id"),
    *("accepted_at", "path"),
)


@dataclass(frozen=True)
class RecordedCall:
    pk: int
    call_id: str
    tool_id: int | None
    tool_name: str
    server_slug: str
    agent_id: int | None
    session_id: int | None
    accepted_at: datetime
    path: str

    @property
    def origin(self) -> str:
        return origin_of(self.path)


@dataclass
class Replay:
    """What a rule would have done to the calls of the last days."""

    examined: int = 0
    held: int = 0
    denied: int = 0
    matched: int = 0
    undecidable: int = 0
    calls: list[dict[str, Any]] = field(default_factory=list)  # held or denied, the newest first


def replay(rule: CompiledRule, days: int) -> Replay:
    """Judge the newest calls of these days, at most 20,000, by one rule alone."""
    since = timezone.now() - timedelta(days=days)
    # Arguments of calls with a definition were valid: only those are decided by rules.
    rows = Call.objects.filter(accepted_at__gte=since, definition__isnull=False)
    recorded = rows.order_by("-accepted_at").values_list(*COLUMNS)[:MAX_EXAMINED]
    calls = [RecordedCall(*row) for row in recorded]
    found = Replay(examined=len(calls))
    concerned: list[RecordedCall] = []
    concerns = memoize(lambda tool, name, server: _concerns(rule, tool, name, server))
    for call in calls:
        if not rule.concerns_agent(call.agent_id):
            continue
        verdict = concerns(call.tool_id, call.tool_name, call.server_slug)
        if verdict is None:
            found.undecidable += 1
        elif verdict:
            concerned.append(call)
    by_history = _filter_by_history(rule, concerned, since)
    matching: list[tuple[RecordedCall, str]] = []
    for call, arguments in _with_arguments(rule, by_history):
        if arguments is None:
            found.undecidable += 1
        elif matches := match_rules([rule], arguments, call.origin):
            matching.append((call, matches[0].effect))
    found.matched = len(matching)
    found.held = sum(effect == "hold" for _, effect in matching)
    found.denied = sum(effect == "deny" for _, effect in matching)
    listed = [(call, effect) for call, effect in matching if effect != "allow"][:MAX_LISTED]
    found.calls = _describe(listed)
    return found


def _concerns(rule: CompiledRule, tool_id: int | None, name: str, server: str) -> bool | None:
    """Return whether a rule concerns a tool; None if that cannot be known of a deleted one."""
    catalog = cache.current()
    tool = catalog.tools.get(tool_id) if tool_id is not None else None
    if tool is not None:
        return rule.concerns_tool(subject_of(tool, groups_by_tool(catalog)))
    if rule.groups or rule.annotations:
        return None
    names = frozenset({name, name.partition("__")[2] or name})
    return rule.concerns_tool(Subject(names, server, frozenset(), effective_annotations(None)))


def _batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]


# --- Arguments ----------------------------------------------------------------------------------


def _with_arguments(
    rule: CompiledRule, calls: Iterable[RecordedCall]
) -> Iterator[tuple[RecordedCall, dict[str, Any] | None]]:
    """Yield calls with their arguments; None if the rule's conditions cannot be evaluated."""
    if not rule.conditions:
        yield from ((call, {}) for call in calls)
        return
    for batch in _batches(list(calls)):
        pks = [call.pk for call in batch]
        texts = dict(Call.objects.filter(pk__in=pks).values_list("pk", "arguments"))
        for call in batch:
            arguments = _parse(texts.get(call.pk, ""))
            if arguments is None or _is_masked(rule, arguments):
                yield call, None
            else:
                yield call, arguments


def _parse(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:  # empty: pruned or never stored
        return None
    is_cut = isinstance(value, dict) and value.get("cut") is True and "start" in value
    return value if isinstance(value, dict) and not is_cut else None


def _is_masked(rule: CompiledRule, arguments: dict[str, Any]) -> bool:
    """Return whether a value on the path of a condition is masked, as a whole or in part."""
    for condition in rule.conditions:
        for length in range(len(condition.segments) + 1):
            is_end = length == len(condition.segments)
            for value in expand(arguments, condition.segments[:length]):
                if isinstance(value, str) and MASK in value:
                    return True
                if is_end and isinstance(value, dict | list) and MASK in json.dumps(value):
                    return True
    return False


# --- History ------------------------------------------------------------------------------------


def _filter_by_history(
    rule: CompiledRule, calls: Sequence[RecordedCall], since: datetime
) -> Sequence[RecordedCall]:
    if rule.first_use:
        agents = {call.agent_id for call in calls if call.agent_id is not None}
        uses = ToolUse.objects.filter(agent__in=agents)
        first = {
            (agent, tool): at
            for agent, tool, at in uses.values_list("agent_id", "tool_id", "first_at")
        }

        def is_first(call: RecordedCall) -> bool:
            at = first.get((call.agent_id or 0, call.tool_id or 0))
            return call.agent_id is not None and (at is None or call.accepted_at <= at)

        calls = [call for call in calls if is_first(call)]
    if rule.after and rule.after_scope == "agent":
        calls = _after_in_agent(rule, calls, since)
    elif rule.after:
        calls = _after_in_session(rule, calls)
    return calls


def _results(rule: CompiledRule) -> QuerySet[Call]:
    return Call.objects.filter(
        server_slug__in=rule.after, sent_at__isnull=False, finished_at__isnull=False
    )


def _after_in_agent(
    rule: CompiledRule, calls: Sequence[RecordedCall], since: datetime
) -> list[RecordedCall]:
    times: dict[int, list[datetime]] = {}
    agents = {call.agent_id for call in calls if call.agent_id is not None}
    rows = _results(rule).filter(agent__in=agents, accepted_at__gte=since - AGENT_FLOW)
    for agent, at in rows.order_by("finished_at").values_list("agent_id", "finished_at"):
        if at is not None:
            times.setdefault(agent or 0, []).append(at)

    def has_read(call: RecordedCall) -> bool:
        own = times.get(call.agent_id or 0, [])
        oldest = bisect_right(own, call.accepted_at - AGENT_FLOW)
        return oldest < bisect_left(own, call.accepted_at)

    return [call for call in calls if has_read(call)]


def _after_in_session(rule: CompiledRule, calls: Sequence[RecordedCall]) -> list[RecordedCall]:
    """Keep calls of sessions that had read before; forks had read what their parents had read."""
    sessions = {call.session_id for call in calls if call.session_id is not None}
    first: dict[int, datetime] = {}
    for batch in _batches(sorted(sessions)):
        rows = _results(rule).filter(session__in=batch).order_by().values_list("session_id")
        first |= {pk: at for pk, at in rows.annotate(at=Min("finished_at")) if pk is not None}
        # Carried over from a parent or a resumed session, before the session's own calls.
        opened = dict(AgentSession.objects.filter(pk__in=batch).values_list("pk", "created_at"))
        reads = SessionRead.objects.filter(session__in=batch, server_slug__in=rule.after)
        for pk, at in reads.values_list("session_id", "last_at"):
            if pk not in first or at <= opened[pk]:
                first[pk] = opened[pk]
    return [
        call
        for call in calls
        if call.session_id in first and first[call.session_id] <= call.accepted_at
    ]


# --- Listing ------------------------------------------------------------------------------------


def _describe(listed: Sequence[tuple[RecordedCall, str]]) -> list[dict[str, Any]]:
    pks = [call.pk for call, _ in listed]
    rows = Call.objects.filter(pk__in=pks).select_related("agent", "session")
    by_pk: Mapping[int, Call] = {row.pk: row for row in rows.defer("arguments", "result_copy")}
    described = []
    for call, effect in listed:
        row = by_pk.get(call.pk)
        described.append(
            {
                "call_id": call.call_id,
                "tool_name": call.tool_name,
                "agent": row.agent.name if row and row.agent else None,
                "session_id": row.session.session_id if row and row.session else None,
                "accepted_at": call.accepted_at,
                "effect": effect,
            }
        )
    return described
