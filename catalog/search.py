"""Search over the tools one scope may see: by words, by pattern, by a name that is nearly right.

Pure. An index holds what its scope may see and nothing else, so no score, total or suggestion
knows of the rest. Words are ranked by `catalog.ranking`; patterns are RE2, never `re`. RE2 never
backtracks, yet a pattern with many states can cost a million steps a text: patterns are bounded
by length, by size once compiled, and by the processor time one search may take.
"""

import difflib
import re
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, takewhile
from typing import Any

import numpy as np
import re2
from numpy.typing import NDArray

from catalog.ranking import LONGEST_NAME, LONGEST_TEXT, Postings, joined, query_words, words
from toolcrib.errors import Invalid

WORD_STRATEGIES = ("hybrid", "bm25", "embedding")
STRATEGIES = (*WORD_STRATEGIES, "regex")
LONGEST_QUERY = 500
LONGEST_PATTERN = 200
MOST_HITS = 50
PATTERN_MEMORY = 1 << 20
LARGEST_PATTERN = 1_000
# A plain pattern takes 6 µs a tool; these end one that takes ten times as long.
SECONDS_PER_SEARCH = 0.25
SECONDS_PER_TOOL = 0.000_06
NEAR = 0.6


@dataclass(frozen=True)
class Searchable:
    """One tool as search sees it."""

    name: str
    own_name: str
    server: str
    title: str
    description: str
    parameters: str
    groups: tuple[str, ...]


@dataclass(frozen=True)
class Hit:
    """A tool that was found; `reasons` are for people: the name, fields or words that matched."""

    name: str
    score: float | None
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Found:
    """What a search gave: `total` counts all matches, `hits` are the first of them."""

    strategy: str
    total: int
    hits: tuple[Hit, ...]


class Index:
    """Everything one scope may see, ready to be searched.

    Immutable: build once a scope and revision, share between threads. Tools stand by name, so
    the order they came in changes nothing, and a position breaks a tie by name.
    """

    def __init__(self, tools: Sequence[Searchable]) -> None:
        self.tools = tuple(sorted(tools, key=lambda tool: tool.name))
        self.postings = Postings([_words_of(tool) for tool in self.tools])
        self._names = sorted(
            (joined(name[:LONGEST_NAME]), position)
            for position, tool in enumerate(self.tools)
            for name in {tool.name, tool.own_name}
        )

    def __len__(self) -> int:
        return len(self.tools)

    def starting_with(self, key: str) -> Iterable[tuple[str, int]]:
        """Yield joined names that start with the key, and whose they are."""
        start = bisect_left(self._names, (key, -1))
        yield from takewhile(
            lambda named: named[0].startswith(key), islice(self._names, start, None)
        )

    @cached_property
    def texts(self) -> tuple[tuple[bytes, bytes, bytes], ...]:
        """Each tool's public name, own name and description as RE2 reads them."""
        return tuple(
            (_utf8(tool.name), _utf8(tool.own_name), _utf8(tool.description)) for tool in self.tools
        )

    @cached_property
    def trigrams(self) -> dict[str, list[int]]:
        """Positions of the tools whose public name holds three letters in a row."""
        found: dict[str, list[int]] = {}
        for position, tool in enumerate(self.tools):
            for trigram in _trigrams(tool.name):
                found.setdefault(trigram, []).append(position)
        return found


def search(
    index: Index,
    *,
    query: str = "",
    pattern: str = "",
    strategy: str = "",
    server: str = "",
    limit: int = 10,
) -> Found:
    """Find tools by the words of a query or by a pattern; `server` keeps to one server's.

    A query given to `regex` is its pattern; a pattern without a strategy is for `regex`.
    Until vectors exist, `hybrid` and `embedding` are answered by BM25, and the answer says so.
    """
    if strategy and strategy not in STRATEGIES:
        raise Invalid(
            f"There is no search strategy {strategy[:40]!r}.",
            hint=f"Use one of {', '.join(STRATEGIES)}.",
        )
    limit = max(1, min(limit, MOST_HITS))
    if strategy == "regex" or (pattern and not strategy):
        return _by_pattern(index, pattern or query, server, limit)
    return _by_words(index, query, server, limit)


def near_names(index: Index, text: str, limit: int = 5) -> list[str]:
    """Suggest public names for one that is unknown, nearest first; none if none is near."""
    text = text[:LONGEST_NAME].casefold()
    shared: Counter[int] = Counter()
    for trigram in _trigrams(text):
        shared.update(index.trigrams.get(trigram, ()))
    likely = sorted(shared, key=lambda position: (-shared[position], position))[:50]
    near = []
    for tool in (index.tools[position] for position in likely):
        nearness = max(_likeness(text, tool.name), _likeness(text, tool.own_name))
        if nearness >= NEAR:
            near.append((-nearness, tool.name))
    return [name for _, name in sorted(near)[: max(0, limit)]]


def _by_words(index: Index, query: str, server: str, limit: int) -> Found:
    if not query.strip():
        raise Invalid(
            "There is nothing to search for.",
            hint="Give `query` some words, or `pattern` a regular expression.",
        )
    if len(query) > LONGEST_QUERY:
        raise Invalid(
            f"The query has {len(query)} characters; at most {LONGEST_QUERY} are searched for.",
            hint="Say what the tool should do in a sentence.",
        )
    terms = query_words(query)
    matching, scores = index.postings.scores(terms)
    if server:
        theirs = (index.tools[position].server == server for position in matching)
        kept = np.fromiter(theirs, bool, len(matching))
        matching, scores = matching[kept], scores[kept]
    tiers = _tiers(index, query)[matching]
    first = np.lexsort((-scores, -tiers))[:limit]  # stable, so a tie stays by name
    hits = tuple(
        Hit(
            index.tools[int(matching[at])].name,
            float(f"{scores[at]:.4g}"),
            _reasons(index, int(matching[at]), int(tiers[at]), terms),
        )
        for at in first
    )
    return Found("bm25", len(matching), hits)


def _tiers(index: Index, query: str) -> NDArray[np.int8]:
    """Rank what the query names: 3 is its name, 2 is it written otherwise, 1 starts with it."""
    tiers = np.zeros(len(index), np.int8)
    key, literal = joined(query), query.strip().casefold()
    if not key:
        return tiers
    for name, position in index.starting_with(key):
        tool = index.tools[position]
        tier = 3 if _is_named(tool, literal) else 2 if name == key else 1
        tiers[position] = max(tiers[position], tier)
    return tiers


def _is_named(tool: Searchable, folded: str) -> bool:
    return folded in (tool.name.casefold(), tool.own_name.casefold())


def _reasons(index: Index, position: int, tier: int, terms: Mapping[str, str]) -> tuple[str, ...]:
    """Say that its name is meant, and which words of the query it holds, as spelled there."""
    held = (f"“{terms[term]}”" for term in terms if index.postings.holds(term, position))
    return (*(["name"] if tier else []), *dict.fromkeys(held))


def _by_pattern(index: Index, pattern: str, server: str, limit: int) -> Found:
    compiled = _compile(pattern)
    literal = pattern.removeprefix("^").removesuffix("$").casefold()
    deadline = time.thread_time() + SECONDS_PER_SEARCH + SECONDS_PER_TOOL * len(index)
    found = []
    for position, tool in enumerate(index.tools):
        if server and tool.server != server:
            continue
        if any(map(compiled.search, index.texts[position])):
            found.append((not _is_named(tool, literal), position))
        if time.thread_time() > deadline:
            raise _bad_pattern("The pattern takes too long to match the descriptions here.")
    found.sort()
    hits = (
        Hit(index.tools[position].name, None, _fields(compiled, index.texts[position]))
        for _, position in found[:limit]
    )
    return Found("regex", len(found), tuple(hits))


def _fields(compiled: Any, texts: tuple[bytes, bytes, bytes]) -> tuple[str, ...]:
    name, own_name, description = (compiled.search(text) is not None for text in texts)
    return (
        *(["name"] if name or own_name else []),
        *(["description"] if description else []),
    )


def _compile(pattern: str) -> Any:
    """Compile with RE2, or say which part of the pattern it cannot take."""
    if not pattern:
        raise Invalid(
            "There is no pattern to search for.",
            hint="Give `pattern` a regular expression, for example `create_.*`.",
        )
    if len(pattern) > LONGEST_PATTERN:
        raise _bad_pattern(
            f"The pattern has {len(pattern)} characters; at most {LONGEST_PATTERN} are allowed."
        )
    options = re2.Options()
    options.max_mem = PATTERN_MEMORY
    options.case_sensitive = False
    options.never_capture = True
    options.log_errors = False
    try:
        compiled = re2.compile(pattern.encode(), options)
    except UnicodeEncodeError:
        raise _bad_pattern("The pattern is not valid Unicode: it holds half a character.") from None
    except re2.error as error:
        said = error.args[0]
        reason = said.decode(errors="replace") if isinstance(said, bytes) else str(said)
        raise _bad_pattern(_explain(reason, pattern)) from None
    if compiled.programsize > LARGEST_PATTERN:
        raise _bad_pattern(
            "The pattern repeats too much: written out it has"
            f" {compiled.programsize} steps, and at most {LARGEST_PATTERN} are allowed."
        )
    return compiled


def _explain(reason: str, pattern: str) -> str:
    """Turn what RE2 said into a sentence that names the feature."""
    what, _, part = reason.partition(": ")
    if part in ("(?=", "(?!"):
        return f"Look-ahead, {part}…), is not supported."
    if part in ("(?<=", "(?<!"):
        return f"Look-behind, {part}…), is not supported."
    if re.fullmatch(r"\\[1-9k]", part) or (part == "(?P" and "(?P=" in pattern):
        return "Back-references are not supported."
    if what == "invalid perl operator":
        return f"A group that starts with {part} is not supported."
    if what == "invalid escape sequence":
        return f"The escape {part} is not supported."
    if what == "invalid repetition size":
        return f"The repetition {part} is too large: at most 1000 in all."
    if what == "bad repetition operator":
        return f"A repetition of a repetition, {part}, is not supported."
    if what.startswith("pattern too large"):
        return "The pattern repeats too much: written out it is too large."
    return f"The pattern is not a regular expression: {reason}."


def _bad_pattern(message: str) -> Invalid:
    return Invalid(
        message,
        code="invalid_pattern",
        status=400,
        hint="Patterns are RE2: simplify it, or search with the words of a query instead.",
    )


def _words_of(tool: Searchable) -> list[str]:
    texts = (tool.name, tool.own_name, tool.server, tool.title, tool.description, tool.parameters)
    return [word for text in (*texts, " ".join(tool.groups)) for word in words(text)]


def _utf8(text: str) -> bytes:
    return text[:LONGEST_TEXT].encode(errors="replace")


def _trigrams(name: str) -> set[str]:
    padded = f" {name.casefold()} "
    return {padded[at : at + 3] for at in range(len(padded) - 2)}


def _likeness(text: str, name: str) -> float:
    return difflib.SequenceMatcher(None, text, name[:LONGEST_NAME].casefold()).ratio()
