"""Tool search over one index: hybrid, BM25, embedding and regex strategies, and name suggestions.

Pure. An index contains what its scope may see and nothing else, so no score, total or suggestion
depends on tools outside the scope.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import islice, zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from catalog.search import query as search_query
from catalog.search import rankers, ranking, weights
from catalog.search.bm25 import Floats
from catalog.search.index import Index, Searchable
from catalog.search.query import ParsedQuery
from catalog.search.rankers import RANKED_STRATEGIES
from catalog.search.ranking import KeywordScores
from catalog.search.regex import match_pattern
from catalog.search.tokenizer import normalize_name
from toolcrib.lib.errors import Invalid

MAX_QUERY_LENGTH = 500
MAX_SERVER_HINT_LENGTH = 200
MAX_HITS = 50
PARTITION_THRESHOLD = 300  # above this many candidates, partitioning is faster than sorting
MIN_PREFIX_LENGTH = 2  # a query must be longer than this to match a name by its prefix


class Hit(NamedTuple):
    """A tool that matched.

    `reasons` are for people: the name, fields or terms that matched; `matched` are those terms,
    for highlighting. `bm25` and `embedding` are the score of each part, 1 being the best of this
    search.
    """

    name: str
    score: float | None
    reasons: tuple[str, ...]
    matched: tuple[str, ...] = ()
    bm25: float | None = None
    embedding: float | None = None


class SearchResult(NamedTuple):
    """The first hits of a search; `total` counts all matches.

    `strategy` is the one that was used; `note` says why it is not the requested one, or what to
    try if a query in another language has no results. `coverage` is the share of the query's words,
    by weight, that the best tool contains; 1 where words do not count.
    """

    strategy: str
    total: int
    hits: tuple[Hit, ...]
    note: str = ""
    coverage: float = 1.0


def search(
    index: Index,
    *,
    query: str = "",
    pattern: str = "",
    strategy: str = "",
    server: str = "",
    server_hint: str = "",
    limit: int = 10,
    explain: bool = True,
) -> SearchResult:
    """Search tools by a query or a pattern; `server` restricts the search to one server.

    With `regex`, a query is used as the pattern; a pattern without a strategy implies `regex`.
    `server_hint` describes the server in words: its tools rank higher, none is excluded.
    Explaining the hits costs as much as finding them; pass `explain=False` for agents.
    """
    _check_strategy(strategy)
    limit = max(1, min(limit, MAX_HITS))
    if strategy == "regex" or (pattern and not strategy):
        return _search_by_pattern(index, pattern or query, server, limit)
    _check_query(query)
    hint = server_hint[:MAX_SERVER_HINT_LENGTH]
    return rank(index, query, strategy or "hybrid", server, hint, limit, explain=explain)


def search_many(
    index: Index,
    queries: Sequence[str],
    *,
    strategy: str = "",
    server: str = "",
    server_hint: str = "",
    limit: int = 10,
    explain: bool = True,
) -> tuple[SearchResult, tuple[SearchResult, ...]]:
    """Search by several queries; return their hits merged, the best of each first, and each."""
    _check_strategy(strategy)
    if strategy == "regex":
        raise Invalid("Several queries cannot be patterns.", hint="Use `pattern` for a pattern.")
    limit = max(1, min(limit, MAX_HITS))
    hint = server_hint[:MAX_SERVER_HINT_LENGTH]
    matching = np.zeros(len(index), np.bool_)
    results = []
    for query in queries:
        _check_query(query)
        result, scores = _rank(
            index, query, strategy or "hybrid", server, hint, limit, explain=explain
        )
        matching |= scores > 0
        results.append(result)
    merged: dict[str, Hit] = {}
    for hits in zip_longest(*(result.hits for result in results)):
        for hit in hits:
            if hit is not None:
                merged.setdefault(hit.name, hit)
    total, first = int(np.count_nonzero(matching)), results[0]
    coverage = min(result.coverage for result in results)
    merged_hits = tuple(islice(merged.values(), limit))
    return SearchResult(first.strategy, total, merged_hits, first.note, coverage), tuple(results)


def _check_strategy(strategy: str) -> None:
    if strategy and strategy not in (known := (*rankers.BUILT_IN, *rankers.names())):
        raise Invalid(
            f"Unknown search strategy {strategy[:40]!r}.",
            hint=f"Use one of {', '.join(known)}.",
        )


def _check_query(query: str) -> None:
    if not query.strip():
        raise Invalid(
            "The query is empty.",
            hint="Set `query` to some words, or `pattern` to a regular expression.",
        )
    if len(query) > MAX_QUERY_LENGTH:
        raise Invalid(
            f"The query has {len(query)} characters; at most {MAX_QUERY_LENGTH} are allowed.",
            hint="Describe in one sentence what the tool should do.",
        )


def suggest_names(index: Index, text: str, limit: int = 5) -> list[str]:
    return index.similar_names.find_similar(text, limit)


class ScoredQuery(NamedTuple):
    """The score of every tool of an index for one query, 0 for no match."""

    query: ParsedQuery
    scores: Floats
    max_score: float  # the best score, or the best possible one
    keyword: KeywordScores
    semantic: Floats | None
    strategy: str  # that was used
    note: str = ""


def rank(
    index: Index,
    query: str,
    strategy: str,
    server: str = "",
    server_hint: str = "",
    limit: int = 10,
    *,
    explain: bool = True,
) -> SearchResult:
    """Rank tools by keyword scores, semantic scores or both. Does not limit the query's length."""
    return _rank(index, query, strategy, server, server_hint, limit, explain=explain)[0]


def _rank(
    index: Index,
    query: str,
    strategy: str,
    server: str,
    server_hint: str,
    limit: int,
    *,
    explain: bool,
) -> tuple[SearchResult, Floats]:
    """Rank tools; also return the score of every tool."""
    scored = _score(index, query, strategy)
    scores, max_score = scored.scores, scored.max_score
    if server_hint.strip():
        hinted = _score(index, server_hint, strategy)
        boost = weights.SERVER_HINT * hinted.scores / hinted.max_score
        scores = np.where(scores > 0, (1 - weights.SERVER_HINT) * scores / max_score + boost, 0)
        max_score = 1.0
    name_boosts = _name_boosts(index, query)
    if name_boosts:
        scores = scores.copy()
        for position, tier in name_boosts.items():  # above all others, even without another match
            scores[position] += tier * max_score
    if server:
        scores = np.where(index.servers == server, scores, 0)
    top = _top(scores, limit, max_score)
    normalized = zip(top.tolist(), (scores[top] / max_score).tolist(), strict=True)
    top_scores = [score - name_boosts.get(at, 0) for at, score in normalized]
    if explain:
        hits = tuple(_explained_hits(index, scored, top, top_scores, name_boosts))
    else:
        ranked = zip(top.tolist(), top_scores, strict=True)
        hits = tuple(Hit(index.names[at], score, ()) for at, score in ranked)
    note = scored.note if hits else f"{scored.note} {_language_note(scored.query, query)}".strip()
    is_installed = scored.strategy not in RANKED_STRATEGIES
    coverage = 1.0 if name_boosts or is_installed else scored.keyword.coverage
    result = SearchResult(scored.strategy, int(np.count_nonzero(scores > 0)), hits, note, coverage)
    return result, scores


def _language_note(parsed: ParsedQuery, query: str) -> str:
    foreign = parsed.translated or any(not c.isascii() and c.isalpha() for c in query)
    return "Tool descriptions may be in English. Try an English query." if foreign else ""


def _top(scores: Floats, count: int, max_score: float) -> NDArray[np.intp]:
    """Return the positions of the highest scores, best first; ties in order of position."""
    # Most tools score near 0, so candidates with high scores are tried first.
    for threshold in (max_score / 4, max_score / 8, 0.0):
        candidates = (scores > threshold).nonzero()[0]
        if len(candidates) >= count:
            break
    values = scores[candidates]
    if len(candidates) > PARTITION_THRESHOLD:
        candidates = candidates[values >= np.partition(values, -count)[-count]]
        values = scores[candidates]
    return candidates[(-values).argsort(kind="stable")[:count]]


def _score(index: Index, text: str, strategy: str) -> ScoredQuery:
    if strategy in RANKED_STRATEGIES:
        return _score_built_in(index, text, strategy)
    scores = rankers.score(strategy, text, index.tools)
    if scores is None:
        found = _score_built_in(index, text, "hybrid")
        note = f"The ranker {strategy} failed; the built-in one was used. {found.note}"
        return found._replace(note=note.strip())
    query = search_query.parse_query(text, index.postings, by_clause=False)
    keyword = ranking.keyword_scores(index.postings, query)
    best = float(scores.max(initial=0)) or 1.0
    return ScoredQuery(query, scores, best, keyword, None, strategy)


def _score_built_in(index: Index, text: str, strategy: str) -> ScoredQuery:
    # For BM25 alone, clauses gain little and cost half of its time.
    query = search_query.parse_query(text, index.postings, by_clause=strategy != "bm25")
    keyword = ranking.keyword_scores(index.postings, query)
    by_keywords = strategy == "bm25" or not len(index)
    cosines, note = (None, "") if by_keywords else _similarities(index, query)
    if cosines is None:
        return ScoredQuery(query, keyword.scores, keyword.best, keyword, None, "bm25", note)
    known = ~np.isnan(cosines[:, 0])
    semantic, matches = ranking.semantic_scores(cosines)
    if strategy == "embedding":
        # A tool without a vector falls back to its keyword score.
        scores = semantic = np.where(known, semantic, keyword.normalized)
        matches |= ~known & (keyword.scores > 0)
    else:
        scores = ranking.mix_scores(keyword, semantic, known)
        matches |= keyword.scores > 0
    masked = ranking.mask_scores(scores, matches)
    return ScoredQuery(query, masked, 1.0, keyword, semantic, strategy, note)


def _similarities(index: Index, query: ParsedQuery) -> tuple[NDArray[np.float32] | None, str]:
    """Return the cosine of each tool to the query and its clauses, or None and the reason."""
    reason = "this index has no vectors" if index.vectors is None else index.vectors.reason
    if index.vectors is None or reason:
        return None, f"Ranked by keywords only: {reason}."
    pending = index.pending_vectors
    if pending == len(index):
        return None, "Ranked by keywords only: the tools' vectors are still being computed."
    cosines = index.similarities(index.vectors.encode(query.texts))
    if not pending:
        return cosines, ""
    return cosines, (
        f"{pending} of {len(index)} tools are ranked by keywords only until their vectors"
        " are computed."
    )


def _explained_hits(
    index: Index,
    scored: ScoredQuery,
    top: NDArray[np.intp],
    scores: Sequence[float],
    named: Collection[int],
) -> Iterator[Hit]:
    """Yield hits with reasons: a matching name, and the matching terms as the query spells them."""
    terms, labels, highlighted = scored.query.terms, dict[str, str](), dict[str, str]()
    for term, spelling in terms.items():
        is_substituted = term in scored.query.substituted
        labels[term] = f"“{spelling}” → “{term}”" if is_substituted else f"“{spelling}”"
        highlighted[term] = term if is_substituted else spelling
    contained = [(term, index.postings.contain(term, top)) for term in terms]
    keyword = (scored.keyword.scores[top] / scored.keyword.best).tolist()
    for row, at in enumerate(top.tolist()):
        matched = [term for term, rows in contained if rows[row]]
        yield Hit(
            index.names[at],
            round(scores[row], 4),
            (
                *(("name",) if at in named else ()),
                *dict.fromkeys([labels[term] for term in matched]),
            ),
            tuple(dict.fromkeys([highlighted[term] for term in matched])),
            round(keyword[row], 4),
            round(float(scored.semantic[at]), 4) if scored.semantic is not None else None,
        )


def _name_boosts(index: Index, query: str) -> dict[int, int]:
    """Return the score boost of each tool whose name the query matches, by position."""
    boosts: dict[int, int] = {}
    prefix, literal = normalize_name(query), query.strip().casefold()
    if not prefix:
        return boosts
    for name, position in index.names_starting_with(prefix):
        tool = index.tools[position]
        if _is_named(tool, literal):
            tier = weights.EXACT_NAME
        else:
            tier = weights.SAME_NAME if name == prefix else weights.NAME_PREFIX
        if tier > weights.NAME_PREFIX or len(prefix) > MIN_PREFIX_LENGTH:
            boosts[position] = max(boosts.get(position, 0), tier)
    return boosts


def _is_named(tool: Searchable, folded: str) -> bool:
    return folded in (tool.name.casefold(), tool.original_name.casefold())


def _search_by_pattern(index: Index, pattern: str, server: str, limit: int) -> SearchResult:
    literal = pattern.removeprefix("^").removesuffix("$").casefold()
    positions = (at for at, tool in enumerate(index.tools) if not server or tool.server == server)
    matches = match_pattern(pattern, index.texts, positions)
    order = sorted(matches, key=lambda at: (not _is_named(index.tools[at], literal), at))
    hits = (Hit(index.tools[at].name, None, matches[at]) for at in order[:limit])
    return SearchResult("regex", len(matches), tuple(hits))
