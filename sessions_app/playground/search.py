"""The search playground: what an agent would find, why, and what is kept from it.

The answer is the API's own, by the functions the API calls, as a new session of the agent would
get it. Nothing is recorded. People see more than agents: what a query would find for somebody
with every group, and why this agent does not have it.
"""

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import re2
from django.conf import settings
from django.db import transaction
from django.http import QueryDict

from catalog import audit, cache, rendering
from catalog.audit import Actor
from catalog.cache import CachedTool, CatalogCache
from catalog.models import HintKind, Tool, ToolHint
from catalog.search.embeddings import store as vector_store
from catalog.search.engine import MAX_HITS, MAX_QUERY_LENGTH, RANKED_STRATEGIES, Hit, SearchResult
from catalog.search.tokenizer import normalize_name, tokenize
from catalog.tools import detail
from sessions_app.agents import actions as agent_actions
from sessions_app.models import Agent, AgentSession, Mode
from sessions_app.playground.golden_runs import everyone
from sessions_app.sessions import lifecycle, loading, scope
from sessions_app.sessions import search as session_search
from sessions_app.sessions.lifecycle import OpenSessionRequest
from sessions_app.sessions.scope import SessionScope
from sessions_app.sessions.search import SessionQuery
from sessions_app.usage.searches import TEST
from toolcrib.lib.errors import NotFound, ToolcribError

MODES = ("words", "regex")
NEAR = 5  # tools that are named because they are hidden
EXAMPLES = 3
SHORTEST_PART = 3  # letters of a name that is looked for by a part of it
Parts = list[tuple[bool, str]]
RUN = re.compile(r"[^\W_]+")


@dataclass(frozen=True)
class PlaygroundQuery:
    """What a person asked for in the address. Unknown words are the default."""

    query: str = ""
    mode: str = "words"
    agent: str = ""  # empty: one with every group
    strategy: str = ""  # empty: the default
    server: str = ""
    limit: int = 10

    @classmethod
    def read(cls, given: QueryDict) -> "PlaygroundQuery":
        def text(name: str, most: int = 200) -> str:
            return given.get(name, "").replace("\0", "").strip()[:most]

        limit = text("limit")
        strategy = text("strategy")
        return cls(
            query=text(
                "q", 2 * MAX_QUERY_LENGTH
            ),  # what is too long is refused, not cut in silence
            mode="regex" if text("mode") == "regex" else "words",
            agent=text("agent"),
            strategy=strategy if strategy in RANKED_STRATEGIES else "",
            server=text("server"),
            limit=max(1, min(int(limit), MAX_HITS)) if limit.isdecimal() else 10,
        )

    @property
    def as_query(self) -> SessionQuery:
        if self.mode == "regex":
            return SessionQuery(pattern=self.query, server=self.server, limit=self.limit)
        return SessionQuery(
            query=self.query, strategy=self.strategy, server=self.server, limit=self.limit
        )


@dataclass(frozen=True)
class PlaygroundHit:
    """One tool that was found, with why."""

    rank: int
    name: str
    name_parts: Parts
    stub: Parts
    tokens: int
    loaded: bool
    score: float | None
    bm25: float | None
    embedding: float | None
    reasons: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "rank": self.rank,
            "reasons": list(self.reasons),
            "bm25": self.bm25,
            "embedding": self.embedding,
        }


@dataclass(frozen=True)
class HiddenTool:
    """A tool that is there and that this agent does not get, with why."""

    name: str
    why: str


@dataclass(frozen=True)
class PlaygroundResult:
    answer: dict[str, Any] = field(default_factory=dict)
    hits: list[PlaygroundHit] = field(default_factory=list)
    hidden: list[HiddenTool] = field(default_factory=list)
    near: list[str] = field(default_factory=list)
    note: str = ""
    ms: float = 0.0
    tools: int = 0  # that were searched
    refused: ToolcribError | None = None

    @property
    def total(self) -> int:
        return int(self.answer.get("total_matches", 0))


def agent_of(asked: PlaygroundQuery) -> Agent:
    return agent_actions.find_agent(asked.agent) if asked.agent else everyone()


def run_query(asked: PlaygroundQuery) -> PlaygroundResult:
    """Search as the agent would, and find out why each tool is there or is not."""
    try:
        agent = agent_of(asked)
        seen, query = scope.scope_of_agent(agent), asked.as_query
        index = seen.index  # made before the clock starts: an agent's session has it
        start = time.perf_counter()
        found, missing = session_search.search_scope(seen, query, explain=True)
        at_once = _at_once(agent, seen)
        answer = session_search.search_answer(seen, query, found, missing, pins={}, at_once=at_once)
        took = time.perf_counter() - start
    except ToolcribError as error:
        return PlaygroundResult(refused=error)
    return PlaygroundResult(
        answer=answer,
        hits=_shown(seen, asked, found, answer["tools"]),
        hidden=_hidden(seen, asked, found),
        near=[name for name in answer.get("suggestions", []) if name in seen.items],
        note=found.note,
        ms=round(took * 1000, 1),
        tools=len(index),
    )


def _at_once(agent: Agent, seen: SessionScope) -> set[str]:
    """What a new session has without loading: it is `loaded` in the answer."""
    decided = lifecycle.choose_mode(agent, agent.mode, len(seen.offered), seen.tokens_all, None)
    if decided.mode == Mode.FULL:
        return {item.name for item in seen.offered}
    members = (member for group in seen.groups for member in group.members)
    return {member.tool.name for member in members if member.preload and member.tool.offered}


def _shown(
    seen: SessionScope, asked: PlaygroundQuery, found: SearchResult, tools: Sequence[dict[str, Any]]
) -> list[PlaygroundHit]:
    return [
        PlaygroundHit(
            rank=rank,
            name=hit.name,
            name_parts=_marked(hit.name, asked, hit),
            stub=_marked(rendering.summary(seen.items[hit.name].description), asked, hit),
            tokens=told["tokens"],
            loaded=told["loaded"],
            score=told.get("score"),
            bm25=hit.bm25,
            embedding=hit.embedding,
            reasons=hit.reasons,
        )
        for rank, (hit, told) in enumerate(zip(found.hits, tools, strict=True), 1)
    ]


def _marked(text: str, asked: PlaygroundQuery, hit: Hit) -> Parts:
    if asked.mode == "regex":
        return highlight_pattern(text, asked.query)
    return highlight_words(text, hit.matched)


# --- What is kept from the agent ----------------------------------------------------------------


def _hidden(seen: SessionScope, asked: PlaygroundQuery, found: SearchResult) -> list[HiddenTool]:
    """Tools of that name that the agent does not get; where it finds nothing, also the likely."""
    standing = cache.current()
    key = normalize_name(asked.query)
    by_key = _by_joined_name(standing)
    names = {item.name: item for item in by_key.get(key, ())}
    if not found.hits:
        names |= dict(_likely(by_key, key))
        names |= {hit.name: item for hit, item in _elsewhere(asked)}
    kept = [item for item in names.values() if not _has(seen, item)]
    told = {item.name: why(item, asked.agent) for item in kept[:NEAR]}
    if not found.hits:
        told |= _never_approved(asked.query)
    return [HiddenTool(*one) for one in list(told.items())[:NEAR]]


def _never_approved(query: str) -> dict[str, str]:
    """Tools that no agent has ever got, so that the catalog in memory may not know them."""
    part = "_".join(query.split())
    rows = Tool.objects.filter(approved=None, public_name__icontains=part).with_definitions()
    return {tool.public_name: detail.describe_availability(tool) for tool in rows[:NEAR]}


def _has(seen: SessionScope, item: CachedTool) -> bool:
    return item.offered and item.name in seen.items


@cache.memoize_per_revision
def _by_joined_name(standing: CatalogCache) -> dict[str, list[CachedTool]]:
    """All tools by their names as search compares them, public and the server's own."""
    found: dict[str, list[CachedTool]] = {}
    for item in standing.tools.values():
        for name in {normalize_name(item.name), normalize_name(item.original_name)} - {""}:
            found.setdefault(name, []).append(item)
    return found


def _likely(by_key: Mapping[str, list[CachedTool]], key: str) -> Iterator[tuple[str, CachedTool]]:
    if len(key) >= SHORTEST_PART:
        for name, items in by_key.items():
            if key in name:
                yield from ((item.name, item) for item in items)


def _elsewhere(asked: PlaygroundQuery) -> list[tuple[Hit, CachedTool]]:
    """What somebody with every group would find."""
    whole = scope.scope_of_agent(everyone())
    found, _ = session_search.search_scope(whole, asked.as_query)
    return [(hit, whole.items[hit.name]) for hit in found.hits]


def why(item: CachedTool, agent: str) -> str:
    """Say why an agent does not get a tool."""
    if not item.offered:
        return loading.unavailable_reason(item)
    homes = [
        group.group_id
        for group in cache.current().groups
        if any(member.tool is item for member in group.members)
    ]
    if not homes:
        return "It is in no group, so no agent gets it."
    return f"It is not in {agent or 'these'}’s groups. It is in {', '.join(homes[:5])}."


@dataclass(frozen=True)
class Progress:
    """How far the vectors are of what is in groups, while they are being computed."""

    done: int
    total: int


def progress() -> Progress | None:
    """Say how far the vectors are; nothing where they are all there, or where there are none."""
    if not settings.EMBEDDINGS or vector_store.unavailable_reason():
        return None
    index = scope.scope_of_agent(everyone()).index
    waiting = index.pending_vectors
    return Progress(len(index) - waiting, len(index)) if waiting else None


# --- Before anything is asked -------------------------------------------------------------------


def examples() -> list[str]:
    """Queries made of the tools there are: an admin's own examples first, then what tools do."""
    told = ToolHint.objects.filter(kind=HintKind.EXAMPLE).order_by("pk")
    firsts = (
        next((member.tool for member in group.members if member.tool.offered), None)
        for group in cache.current().groups
    )
    said = (rendering.summary(item.description) for item in firsts if item is not None)
    wanted = [*told.values_list("text", flat=True)[:EXAMPLES], *map(_as_query, filter(None, said))]
    return list(dict.fromkeys(filter(None, wanted)))[:EXAMPLES]


def _as_query(summary: str) -> str:
    words = summary.rstrip(".…").split()[:8]
    return " ".join(words)[:80].lower() if words else ""


def highlight_words(text: str, matched: Iterable[str]) -> Parts:
    """Mark the words of a text that are the same, to search, as those matched."""
    wanted = {term for word in matched for term in tokenize(word)}
    found = [run.span() for run in RUN.finditer(text) if wanted.intersection(tokenize(run.group()))]
    return list(_cut(text, found))


def highlight_pattern(text: str, pattern: str) -> Parts:
    """Mark what a pattern matched, which search has taken already."""
    options = re2.Options()
    options.case_sensitive, options.log_errors = False, False
    try:
        found = [one.span() for one in re2.compile(pattern, options).finditer(text)]
    except re2.error:
        found = []
    return list(_cut(text, found))


def _cut(text: str, found: Iterable[tuple[int, int]]) -> Iterator[tuple[bool, str]]:
    at = 0
    for start, end in found:
        if end <= start or start < at:
            continue
        if start > at:
            yield False, text[at:start]
        yield True, text[start:end]
        at = end
    if at < len(text):
        yield False, text[at:]


@transaction.atomic
def open_trial_session(agent: Agent, name: str, *, actor: Actor) -> AgentSession:
    """Open a session of the agent, load one tool and close it: it is there to be looked at.

    Closed at once, it takes none of the agent's places and nobody can go on with it.
    """
    item = scope.scope_of_agent(agent).lookup(name)
    if item is None or not item.offered:
        raise NotFound(
            f"{agent.name} does not get {name[:80]!r}.", hint="Search as this agent to see why."
        )
    metadata = {TEST: actor.label}
    session = lifecycle.open_session(
        agent, OpenSessionRequest(mode="deferred", metadata=metadata)
    ).session
    loading.preload(session, [item.name])
    audit.record(actor, "agent.test", agent, after={"session": session.session_id, "tool": name})
    return lifecycle.close_session(session)
