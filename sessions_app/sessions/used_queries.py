"""Hints from use: a query that led to successful calls of a tool becomes a hint of that tool.

It takes two sessions of one agent on two days. The hint affects the searches of this agent only,
until an operator accepts it for all. A query in which anything is masked, or looks like a secret,
is never used.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import NamedTuple

from django.db import transaction
from django.utils import timezone

from catalog.hints.actions import MAX_HINTS_FROM_USE
from catalog.hints.texts import clean_texts
from catalog.models import HintKind, HintSource, Revision, Tool, ToolHint
from catalog.search.tokenizer import normalize_name
from sessions_app.ledger.event_details import read_names, read_object
from sessions_app.models import Call, CallPath, CallState, Event, EventKind
from toolcrib.lib.json_codec import canonical
from toolcrib.lib.payloads import stored_copy

MIN_SESSIONS = MIN_DAYS = 2
WINDOW = timedelta(days=30)
MAX_SEARCHES = 5_000  # newest searches read
SESSIONS_PER_QUERY = 500
MASK = "***"
# Stricter than what masks payloads: a hint that is not learned costs little. A word after "password
# is" or the like, one with digits after "password", and long words of letters and digits.
LIKELY_SECRET = re.compile(
    r"\b(?:pass(?:word|wd|phrase|code)?|pwd|pin|token|secret|credential|bearer"
    r"|(?:api|access)[ _-]?key)s?"
    r"(?:\s*[:=]|\s+(?:is|are)\b|\s+(?=\S*\d))\s*\S"
    r"|(?=[\w+/-]*[a-z])(?=[\w+/-]*\d)[\w+/-]{16,}",
    re.IGNORECASE,
)
_last_event = 0  # the newest event when this process last looked


class Use(NamedTuple):
    """A query of an agent that led to a tool."""

    agent: int
    tool: int
    query: str


class Search(NamedTuple):
    at: datetime
    agent: int
    ranks: Mapping[str, list[str]]  # the names found, by query


def learn() -> int:
    """Turn queries of the last month into hints, and return how many are new."""
    global _last_event
    newest = Event.objects.order_by("-pk").values_list("pk", flat=True).first() or 0
    if newest == _last_event:
        return 0
    count = _add_hints(_count_uses())
    _last_event = newest
    return count


def _count_uses() -> dict[Use, set[tuple[int, str]]]:
    """Return the sessions and days of each use."""
    searches = _read_searches()
    uses: defaultdict[Use, set[tuple[int, str]]] = defaultdict(set)
    for session, tool, name, at in _read_calls(list(searches)):
        # The last search before the call that found the tool is the one that led to it.
        for search in searches[session]:
            if search.at <= at and (query := _best_query(search, name)):
                uses[Use(search.agent, tool, query)].add((session, at.date().isoformat()))
                break
    return uses


def _read_searches() -> dict[int, list[Search]]:
    """Return the searches by session, newest first."""
    rows = Event.objects.filter(kind=EventKind.SEARCHED, at__gte=timezone.now() - WINDOW)
    fields = ("session_id", "session__agent_id", "at", "details")
    searches: defaultdict[int, list[Search]] = defaultdict(list)
    for session, agent, at, text in rows.order_by("-at").values_list(*fields)[:MAX_SEARCHES]:
        details = read_object(text)
        parts = details.get("queries")
        rows_of_query = parts if isinstance(parts, list) else [details]
        ranks = {
            str(row["query"]): read_names(row, "hits")
            for row in rows_of_query
            if isinstance(row, dict) and row.get("query")
        }
        if ranks:
            searches[session].append(Search(at, agent, ranks))
    return searches


def _read_calls(sessions: list[int]) -> Iterator[tuple[int, int, str, datetime]]:
    """Yield successful calls: session, tool, its name, time."""
    for start in range(0, len(sessions), SESSIONS_PER_QUERY):
        rows = Call.objects.filter(
            session__in=sessions[start : start + SESSIONS_PER_QUERY],
            state=CallState.SUCCEEDED,
            is_error=False,
            tool__isnull=False,
        ).exclude(path=CallPath.TRY)
        fields = ("session_id", "tool_id", "tool_name", "accepted_at")
        yield from rows.order_by("pk").values_list(*fields)


def _best_query(search: Search, name: str) -> str:
    """Return the query of a search that ranked the tool best, normalized; empty if none did."""
    ranks = [(names.index(name), query) for query, names in search.ranks.items() if name in names]
    return " ".join(min(ranks)[1].split()).casefold() if ranks else ""


@transaction.atomic
def _add_hints(uses: Mapping[Use, set[tuple[int, str]]]) -> int:
    frequent = {
        use: len({session for session, _ in found})
        for use, found in uses.items()
        if len({session for session, _ in found}) >= MIN_SESSIONS
        and len({day for _, day in found}) >= MIN_DAYS
        and _is_usable(use.query)
    }
    tools = Tool.objects.in_bulk({use.tool for use in frequent})
    known: defaultdict[int, list[ToolHint]] = defaultdict(list)
    for hint in ToolHint.objects.filter(tool__in=tools):
        known[hint.tool_id].append(hint)
    new = []
    for use in sorted(frequent, key=lambda use: (-frequent[use], use)):
        tool = tools.get(use.tool)
        if tool is None or normalize_name(use.query) in _names(tool):
            continue
        seen = [hint for hint in known[use.tool] if hint.agent_id in (None, use.agent)]
        in_use = [hint for hint in seen if hint.source == HintSource.USE and not hint.is_removed]
        is_known = any(hint.text.casefold() == use.query for hint in seen)
        if is_known or len(in_use) >= MAX_HINTS_FROM_USE:
            continue
        hint = ToolHint(
            tool=tool,
            kind=HintKind.EXAMPLE,
            text=use.query,
            source=HintSource.USE,
            agent_id=use.agent,
        )
        known[use.tool].append(hint)
        new.append(hint)
    if new:
        ToolHint.objects.bulk_create(new, ignore_conflicts=True)
        Revision.bump()
    return len(new)


def _names(tool: Tool) -> set[str]:
    return {normalize_name(tool.name), normalize_name(tool.public_name)}


def _is_usable(query: str) -> bool:
    """Return whether a query is short and printable, and nothing in it is a secret."""
    return (
        MASK not in query
        and not LIKELY_SECRET.search(query)
        and stored_copy(query) == canonical(query)
        and bool(clean_texts([query])[0])
    )
