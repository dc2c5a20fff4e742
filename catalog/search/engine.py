"""Search over the tools one scope may see: by words, by meaning, by pattern, by a near name.

Pure. An index holds what its scope may see and nothing else, so no score, total or suggestion
knows of the rest. What a tool's words are is counted once, and shared by all indexes.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from catalog.search import query as search_query
from catalog.search import ranking, weights
from catalog.search.bm25 import Floats
from catalog.search.index import Index, Searchable
from catalog.search.query import ParsedQuery
from catalog.search.ranking import KeywordScores
from catalog.search.regex import MAX_PATTERN_LENGTH, matches
from catalog.search.tokenizer import joined
from toolcrib.lib.errors import Invalid

__all__ = [
    "MAX_PATTERN_LENGTH",
    "Hit",
    "Index",
    "SearchResult",
    "Searchable",
    "search",
    "suggest_names",
]

RANKED_STRATEGIES = ("hybrid", "bm25", "embedding")
STRATEGIES = (*RANKED_STRATEGIES, "regex")
MAX_QUERY_LENGTH = 500
LONGEST_HINT = 200
MAX_HITS = 50
MANY = 300  # from here on, sorting them all takes longer than finding the first
SHORTEST_START = 2  # letters of a name that is searched for by how it starts


class Hit(NamedTuple):
    """A tool that was found; `reasons` are for people: the name, fields or words that matched.

    `matched` are those words, for marking; `bm25` and `embedding` are what each part gave, 1
    being the best of this search.
    """

    name: str
    score: float | None
    reasons: tuple[str, ...]
    matched: tuple[str, ...] = ()
    bm25: float | None = None
    embedding: float | None = None


class SearchResult(NamedTuple):
    """What a search gave: `total` counts all matches, `hits` are the first of them.

    `strategy` is the one that answered; `note` says why, where it is not the one asked for, and
    what else to try where a query in another language found nothing.
    """

    strategy: str
    total: int
    hits: tuple[Hit, ...]
    note: str = ""


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
    """Find tools by the words of a query or by a pattern; `server` keeps to one server's.

    A query given to `regex` is its pattern; a pattern without a strategy is for `regex`.
    `server_hint` says in words what kind of server is meant: its tools rise, none is left out.
    Saying why a tool was found costs as much as finding it; agents are not told.
    """
    if strategy and strategy not in STRATEGIES:
        raise Invalid(
            f"There is no search strategy {strategy[:40]!r}.",
            hint=f"Use one of {', '.join(STRATEGIES)}.",
        )
    limit = max(1, min(limit, MAX_HITS))
    if strategy == "regex" or (pattern and not strategy):
        return _by_pattern(index, pattern or query, server, limit)
    if not query.strip():
        raise Invalid(
            "There is nothing to search for.",
            hint="Give `query` some words, or `pattern` a regular expression.",
        )
    if len(query) > MAX_QUERY_LENGTH:
        raise Invalid(
            f"The query has {len(query)} characters; at most {MAX_QUERY_LENGTH} are searched for.",
            hint="Say what the tool should do in a sentence.",
        )
    hint = server_hint[:LONGEST_HINT]
    return rank(index, query, strategy or "hybrid", server, hint, limit, explain=explain)


def suggest_names(index: Index, text: str, limit: int = 5) -> list[str]:
    """Suggest public names for one that is unknown."""
    return index.near.near(text, limit)


class ScoredQuery(NamedTuple):
    """How well every tool of an index fits a text, nothing being not at all; and why."""

    asked: ParsedQuery
    fit: Floats
    unit: float  # what the best has, or could have
    words: KeywordScores
    meaning: Floats | None
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
    """Rank by words, by meaning or by both, without a bound on the query's length."""
    judged = _score(index, query, strategy)
    score, unit = judged.fit, judged.unit
    if server_hint.strip():
        meant = _score(index, server_hint, strategy)
        lift = weights.SERVER_HINT * meant.fit / meant.unit
        score = np.where(score > 0, (1 - weights.SERVER_HINT) * score / unit + lift, 0)
        unit = 1.0
    named = _name_boosts(index, query)
    if named:
        score = score.copy()
        for position, tier in named.items():  # over everything else, whether or not it fitted
            score[position] += tier * unit
    if server:
        score = np.where(index.servers == server, score, 0)
    first = _top(score, limit, unit)
    own = zip(first.tolist(), (score[first] / unit).tolist(), strict=True)
    scores = [one - named.get(at, 0) for at, one in own]
    bare, told = (
        _plain_hits(index, first, scores),
        _explained_hits(index, judged, first, scores, named),
    )
    hits = tuple(told if explain else bare)
    answered = strategy if judged.meaning is not None or strategy == "bm25" else "bm25"
    note = judged.note if hits else f"{judged.note} {_advice(judged.asked, query)}".strip()
    return SearchResult(answered, int(np.count_nonzero(score > 0)), hits, note)


def _advice(asked: ParsedQuery, query: str) -> str:
    foreign = asked.translated or any(not one.isascii() and one.isalpha() for one in query)
    return "The tools are described in other words; English may find them." if foreign else ""


def _top(score: Floats, count: int, unit: float) -> NDArray[np.intp]:
    """Where the highest stand, highest first; of equals the one that stands first.

    Most tools score next to nothing, so those not far below the unit are looked at first.
    """
    for least in (unit / 4, unit / 8, 0.0):
        likely = (score > least).nonzero()[0]
        if len(likely) >= count:
            break
    found = score[likely]
    if len(likely) > MANY:
        likely = likely[found >= np.partition(found, -count)[-count]]
        found = score[likely]
    return likely[(-found).argsort(kind="stable")[:count]]


def _score(index: Index, text: str, strategy: str) -> ScoredQuery:
    # BM25 alone is just that: clauses help it little, and cost it half of its time.
    asked = search_query.parse_query(text, index.postings, by_clause=strategy != "bm25")
    words = ranking.keyword_scores(index.postings, asked)
    if strategy == "bm25" or not len(index):
        return ScoredQuery(asked, words.scores, words.best, words, None)
    near, note = _similarities(index, asked)
    if near is None:
        return ScoredQuery(asked, words.scores, words.best, words, None, note)
    known = ~np.isnan(near[:, 0])
    score, fits = ranking.semantic_scores(near)
    if strategy == "embedding":
        # A tool whose vector is still to come is found by its words.
        score = np.where(known, score, words.fit)
        fits |= ~known & (words.scores > 0)
        return ScoredQuery(asked, ranking.mask_scores(score, fits), 1.0, words, score, note)
    fits |= words.scores > 0
    mixed = ranking.mix_scores(words, score, known)
    return ScoredQuery(asked, ranking.mask_scores(mixed, fits), 1.0, words, score, note)


def _similarities(index: Index, asked: ParsedQuery) -> tuple[NDArray[np.float32] | None, str]:
    """How near each tool is to the query and its clauses, or why that is not known."""
    if index.meanings is None or index.meanings.reason:
        reason = index.meanings.reason if index.meanings else "this index has no vectors"
        return None, f"Ranked by words only: {reason}."
    waiting = index.pending_vectors
    if waiting == len(index):
        return None, "Ranked by words only: the tools' vectors are still being computed."
    near = index.meanings.products(index.rows, index.meanings.encode(asked.texts))
    if not waiting:
        return near, ""
    return near, (
        f"{waiting} of {len(index)} tools are found by their words only, until their vectors"
        " are computed."
    )


def _plain_hits(index: Index, first: NDArray[np.intp], scores: Sequence[float]) -> Iterator[Hit]:
    for at, score in zip(first.tolist(), scores, strict=True):
        yield Hit(index.names[at], score, ())


def _explained_hits(
    index: Index,
    judged: ScoredQuery,
    first: NDArray[np.intp],
    scores: Sequence[float],
    named: Collection[int],
) -> Iterator[Hit]:
    """Say of each whether its name is meant, and which words it holds, as the query spells them."""
    terms, shown = judged.asked.terms, search_query.explain_terms(judged.asked)
    meant = judged.asked.replacing
    marked = {term: term if term in meant else spelling for term, spelling in terms.items()}
    holding = [(term, index.postings.holding(term, first)) for term in terms]
    by_words = (judged.words.scores[first] / judged.words.best).tolist()
    for row, at in enumerate(first.tolist()):
        held = [term for term, held_by in holding if held_by[row]]
        yield Hit(
            index.names[at],
            round(scores[row], 4),
            (*(("name",) if at in named else ()), *dict.fromkeys([shown[term] for term in held])),
            tuple(dict.fromkeys([marked[term] for term in held])),
            round(by_words[row], 4),
            round(float(judged.meaning[at]), 4) if judged.meaning is not None else None,
        )


def _name_boosts(index: Index, query: str) -> dict[int, int]:
    """Return what the score of each tool that the query names is raised by."""
    found: dict[int, int] = {}
    key, literal = joined(query), query.strip().casefold()
    if not key:
        return found
    for name, position in index.starting_with(key):
        tool = index.tools[position]
        if _is_named(tool, literal):
            tier = weights.EXACT_NAME
        else:
            tier = weights.SAME_NAME if name == key else weights.NAME_PREFIX
        if tier > weights.NAME_PREFIX or len(key) > SHORTEST_START:
            found[position] = max(found.get(position, 0), tier)
    return found


def _is_named(tool: Searchable, folded: str) -> bool:
    return folded in (tool.name.casefold(), tool.original_name.casefold())


def _by_pattern(index: Index, pattern: str, server: str, limit: int) -> SearchResult:
    literal = pattern.removeprefix("^").removesuffix("$").casefold()
    among = (at for at, tool in enumerate(index.tools) if not server or tool.server == server)
    found = matches(pattern, index.texts, among)
    order = sorted(found, key=lambda at: (not _is_named(index.tools[at], literal), at))
    hits = (Hit(index.tools[at].name, None, found[at]) for at in order[:limit])
    return SearchResult("regex", len(found), tuple(hits))
