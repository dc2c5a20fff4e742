"""Search playground: run a query as an agent, explain the results and the unavailable tools.

The response is produced by the functions the API calls, as for a new session of the agent, and
nothing is recorded. People see more than agents: tools outside the agent's groups that match the
query, and why the agent does not get them.
"""

import re
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import re2
from django.conf import settings
from django.db import transaction
from django.db.models import Q
from django.http import QueryDict

from catalog import audit, cache, rendering
from catalog.audit import Actor
from catalog.cache import CachedTool, CatalogCache
from catalog.models import HintKind, HintSource, Tool, ToolHint
from catalog.search.embeddings import store as vector_store
from catalog.search.engine import MAX_HITS, MAX_QUERY_LENGTH, Hit, SearchResult
from catalog.search.rankers import RANKED_STRATEGIES
from catalog.search.tokenizer import normalize_name, tokenize
from catalog.tools import detail
from sessions_app.agents.queries import find_agent
from sessions_app.models import Agent, AgentSession, Mode
from sessions_app.playground.golden_runs import any_agent
from sessions_app.sessions import lifecycle, loading, scope
from sessions_app.sessions import search as session_search
from sessions_app.sessions.schemas import OpenIn, SearchIn
from sessions_app.sessions.scope import SessionScope
from sessions_app.sessions.search import SessionQuery
from sessions_app.usage.searches import TEST_SESSION_KEY
from toolcrib.lib.errors import NotFound, ToolcribError
from toolcrib.lib.request import text

MAX_HIDDEN_TOOLS = 5
MAX_EXAMPLES = 3
MAX_COMPARED_HITS = 5  # hits whose hints are compared with the query by the model
MAX_COMPARED_HINTS = 10  # of each
MIN_HINT_SIMILARITY = 0.45  # cosine
MIN_PART_LENGTH = 3  # characters of a query that is matched against parts of names
Parts = list[tuple[bool, str]]  # (highlighted, text)
WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True)
class PlaygroundQuery:
    """Parameters of a playground search, from the query string. Unknown values are ignored."""

    query: str = ""
    mode: str = "words"
    agent: str = ""  # empty: any agent, with all groups
    strategy: str = ""  # empty: the default strategy
    server: str = ""
    limit: int = 0  # 0: as for an agent that gives no limit

    @classmethod
    def read(cls, params: QueryDict) -> "PlaygroundQuery":
        limit, strategy = text(params, "limit"), text(params, "strategy")
        return cls(
            query=text(params, "q", 2 * MAX_QUERY_LENGTH),  # longer: rejected, not truncated
            mode="regex" if text(params, "mode") == "regex" else "words",
            agent=text(params, "agent"),
            strategy=strategy if strategy in RANKED_STRATEGIES else "",
            server=text(params, "server"),
            limit=min(int(limit), MAX_HITS) if limit.isdecimal() and len(limit) < 10 else 0,
        )

    @property
    def as_query(self) -> SessionQuery:
        field = "pattern" if self.mode == "regex" else "query"
        strategy = self.strategy if self.mode == "words" else ""
        values = {field: self.query, "strategy": strategy or None, "server": self.server}
        body = SearchIn.model_validate({**values, "limit": self.limit or None})
        return session_search.parse_body(body)


@dataclass(frozen=True)
class PlaygroundResult:
    answer: dict[str, Any] = field(default_factory=dict)
    hits: list[dict[str, Any]] = field(default_factory=list)  # with scores and reasons
    hidden: dict[str, str] = field(default_factory=dict)  # tools the agent does not get, and why
    similar_names: list[str] = field(default_factory=list)
    note: str = ""
    ms: float = 0.0
    tool_count: int = 0  # tools searched
    error: ToolcribError | None = None

    @property
    def total(self) -> int:
        return int(self.answer.get("total_matches", 0))


def run_query(params: PlaygroundQuery) -> PlaygroundResult:
    """Search as the agent would, and explain each result and each unavailable match."""
    try:
        agent = find_agent(params.agent, with_counts=False) if params.agent else any_agent()
        agent_scope, query = scope.scope_of_agent(agent), params.as_query
        index = agent_scope.index  # built before the timer starts: sessions reuse a cached index
        start = time.perf_counter()
        matches, _, missing = session_search.search_scope(agent_scope, query, explain=True)
        preloaded = _preloaded_names(agent, agent_scope)
        answer = session_search.search_response(
            agent_scope, query, matches, missing, pins={}, is_loaded=preloaded.__contains__
        )
        seconds = time.perf_counter() - start
    except ToolcribError as error:
        return PlaygroundResult(error=error)
    return PlaygroundResult(
        answer=answer,
        hits=_hits(agent_scope, params, matches, preloaded),
        hidden=_hidden_tools(agent_scope, params, matches),
        similar_names=[name for name in answer.get("suggestions", []) if name in agent_scope.tools],
        note=matches.note,
        ms=round(seconds * 1000, 1),
        tool_count=len(index),
    )


def _preloaded_names(agent: Agent, agent_scope: SessionScope) -> set[str]:
    """Return the tools a new session has without loading: the response marks them `loaded`."""
    decision = lifecycle.choose_mode(
        lifecycle.Thresholds.of(agent),
        agent.mode,
        len(agent_scope.offered),
        agent_scope.tokens_all,
        None,
    )
    if decision.mode == Mode.FULL:
        return {tool.name for tool in agent_scope.offered}
    members = (member for group in agent_scope.groups for member in group.offered)
    return {member.tool.name for member in members if member.preload}


def _hits(
    agent_scope: SessionScope,
    params: PlaygroundQuery,
    matches: SearchResult,
    preloaded: Collection[str],
) -> list[dict[str, Any]]:
    tools = [agent_scope.tools[hit.name] for hit in matches.hits]
    hints = _closest_hints(params, matches.hits, tools)
    return [
        {
            "rank": rank,
            "name": hit.name,
            "name_parts": _highlight(hit.name, params, hit),
            "stub": _highlight(rendering.summary(tool.description), params, hit),
            "tokens": tool.tokens,
            "loaded": hit.name in preloaded,
            "score": None if hit.score is None else round(hit.score, 3),
            "bm25": hit.bm25,
            "embedding": hit.embedding,
            "reasons": hit.reasons,
            "hint": hints.get(tool.tool_id),
        }
        for rank, (hit, tool) in enumerate(zip(matches.hits, tools, strict=True), 1)
    ]


def _closest_hints(
    params: PlaygroundQuery, hits: Sequence[Hit], tools: Sequence[CachedTool]
) -> dict[int, dict[str, str]]:
    """Return the hint that brought each hit, by tool: text and source.

    A hint counts if it has words of the query that name and description lack, or for the first
    hits, if it is similar to the query.
    """
    rows: dict[int, list[ToolHint]] = {}
    found = ToolHint.objects.active().filter(tool__in=[tool.tool_id for tool in tools])
    for row in found.filter(Q(agent=None) | Q(agent__name=params.agent)).order_by("pk"):
        rows.setdefault(row.tool_id, []).append(row)
    closest: dict[int, dict[str, str]] = {}
    for rank, (hit, tool) in enumerate(zip(hits, tools, strict=True)):
        known = {*tokenize(tool.name), *tokenize(tool.description)}
        words = {term for word in hit.matched for term in tokenize(word)} - known
        scored = [(len(words & {*tokenize(row.text)}), row) for row in rows.get(tool.tool_id, ())]
        shared = max((count for count, _ in scored), default=0)
        brought = next((row for count, row in scored if count == shared), None)
        if not shared:
            compared = [row for _, row in scored[:MAX_COMPARED_HINTS]]
            is_first = rank < MAX_COMPARED_HITS
            brought = _most_similar(params.query, compared) if is_first else None
        if brought is not None:
            closest[tool.tool_id] = {"text": brought.text, "source": brought.source}
    return closest


def _most_similar(query: str, hints: Sequence[ToolHint]) -> ToolHint | None:
    """Return the hint most similar to a query, if one is; None without a loaded model."""
    if not hints or vector_store.model.encoder is None:
        return None
    encode = vector_store.installation_vectors.encode
    vector = encode([query])[0]
    cosines = [float(encode([hint.text])[0] @ vector) for hint in hints]
    best = max(range(len(hints)), key=cosines.__getitem__)
    return hints[best] if cosines[best] >= MIN_HINT_SIMILARITY else None


def _highlight(text: str, params: PlaygroundQuery, hit: Hit) -> Parts:
    if params.mode == "regex":
        return highlight_pattern(text, params.query)
    return highlight_words(text, hit.matched)


# --- Unavailable tools --------------------------------------------------------------------------


def _hidden_tools(
    agent_scope: SessionScope, params: PlaygroundQuery, matches: SearchResult
) -> dict[str, str]:
    """Return unavailable tools with the queried name; without results, also likely matches."""
    key = normalize_name(params.query)
    by_name = _tools_by_name(cache.current())
    candidates = {tool.name: tool for tool in by_name.get(key, ())}
    if not matches.hits:
        if len(key) >= MIN_PART_LENGTH:
            partial = (tools for name, tools in by_name.items() if key in name)
            candidates |= {tool.name: tool for tools in partial for tool in tools}
        candidates |= {tool.name: tool for tool in _matches_in_all_groups(params)}
    hidden = [
        tool
        for name, tool in candidates.items()
        if not (tool.offered and name in agent_scope.tools)
    ]
    reasons = {
        tool.name: explain_unavailable(tool, params.agent) for tool in hidden[:MAX_HIDDEN_TOOLS]
    }
    if not matches.hits:
        reasons |= _never_approved(params.query)
    return dict(islice(reasons.items(), MAX_HIDDEN_TOOLS))


def _never_approved(query: str) -> dict[str, str]:
    """Return matching tools that were never approved, which the catalog cache may not contain."""
    part = "_".join(query.split())
    rows = Tool.objects.filter(approved=None, public_name__icontains=part).with_definitions()
    return {
        tool.public_name: detail.describe_availability(tool) for tool in rows[:MAX_HIDDEN_TOOLS]
    }


@cache.memoize_per_revision
def _tools_by_name(catalog: CatalogCache) -> dict[str, list[CachedTool]]:
    """Return all tools by normalized name, both public and original."""
    by_name: dict[str, list[CachedTool]] = {}
    for tool in catalog.tools.values():
        for name in {normalize_name(tool.name), normalize_name(tool.original_name)} - {""}:
            by_name.setdefault(name, []).append(tool)
    return by_name


def _matches_in_all_groups(params: PlaygroundQuery) -> list[CachedTool]:
    """Return the results for an agent with all groups."""
    full_scope = scope.scope_of_agent(any_agent())
    matches, _, _ = session_search.search_scope(full_scope, params.as_query)
    return [full_scope.tools[hit.name] for hit in matches.hits]


def explain_unavailable(tool: CachedTool, agent: str) -> str:
    """Return why an agent does not get a tool."""
    if not tool.offered:
        return loading.unavailable_reason(tool)
    group_ids = [
        group.group_id
        for group in cache.current().groups
        if any(member.tool is tool for member in group.members)
    ]
    if not group_ids:
        return "Not in any group, so not available to agents."
    return f"Not in the groups of {agent or 'any agent'}. Member of {', '.join(group_ids[:5])}."


def embedding_progress() -> dict[str, int] | None:
    """Count the embedded tools in groups; None if complete, or if embeddings are off."""
    if not settings.EMBEDDINGS or vector_store.unavailable_reason():
        return None
    index = scope.scope_of_agent(any_agent()).index
    pending = index.pending_vectors
    return {"done": len(index) - pending, "total": len(index)} if pending else None


# --- Examples and highlighting ------------------------------------------------------------------


def example_queries() -> list[str]:
    """Return example queries: those of admins first, then summaries of tools."""
    hints = ToolHint.objects.active().filter(kind=HintKind.EXAMPLE, source=HintSource.ADMIN)
    queries = list(hints.order_by("pk").values_list("text", flat=True)[:MAX_EXAMPLES])
    for group in cache.current().groups:
        for member in group.offered[:1]:
            words = rendering.summary(member.tool.description).rstrip(".…").split()
            queries.append(" ".join(words[:8])[:80].lower())
    return list(dict.fromkeys(filter(None, queries)))[:MAX_EXAMPLES]


def highlight_words(text: str, matched: Iterable[str]) -> Parts:
    """Highlight the words of a text that search treats as equal to the matched ones."""
    terms = {term for word in matched for term in tokenize(word)}
    spans = [
        word.span() for word in WORD.finditer(text) if terms.intersection(tokenize(word.group()))
    ]
    return list(_split(text, spans))


def highlight_pattern(text: str, pattern: str) -> Parts:
    """Highlight the matches of a pattern that search has already validated."""
    options = re2.Options()
    options.case_sensitive, options.log_errors = False, False
    try:
        spans = [match.span() for match in re2.compile(pattern, options).finditer(text)]
    except re2.error:
        spans = []
    return list(_split(text, spans))


def _split(text: str, spans: Iterable[tuple[int, int]]) -> Iterator[tuple[bool, str]]:
    position = 0
    for start, end in spans:
        if end <= start or start < position:
            continue
        if start > position:
            yield False, text[position:start]
        yield True, text[start:end]
        position = end
    if position < len(text):
        yield False, text[position:]


@transaction.atomic
def open_test_session(agent: Agent, name: str, *, actor: Actor) -> AgentSession:
    """Open a session of the agent, load one tool and close the session, for inspection.

    A closed session does not count against the agent's limits and cannot be continued.
    """
    tool = scope.scope_of_agent(agent).lookup(name)
    if tool is None or not tool.offered:
        raise NotFound(
            f"{name[:80]!r} is not available to {agent.name}.",
            hint="Search as this agent to see why.",
        )
    metadata = {TEST_SESSION_KEY: actor.label}
    session, _ = lifecycle.open_session(agent, OpenIn(mode="deferred", metadata=metadata))
    loading.preload(session, [tool.name])
    audit.record(actor, "agent.test", agent, after={"session": session.session_id, "tool": name})
    return lifecycle.close_session(session)
