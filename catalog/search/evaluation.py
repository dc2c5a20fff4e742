"""How well and how fast search finds what is right, on sets of tools and queries. Pure.

A set is a folder: `tools.jsonl` with id, server, name, description and input_schema, and
`queries.jsonl` with id, query and the ids that are relevant. Nothing of the installation counts.
"""

import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import log2
from pathlib import Path
from statistics import fmean
from typing import Any

from catalog.definitions.parsing import parameter_texts
from catalog.search.engine import rank, search
from catalog.search.index import Index, Searchable
from toolcrib.lib.errors import Invalid
from toolcrib.lib.percentile import percentile

LOOKED_AT = 10  # hits


@dataclass(frozen=True)
class Question:
    query: str
    relevant: frozenset[str]
    server_hint: str


@dataclass(frozen=True)
class Set:
    name: str
    tools: tuple[Searchable, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Row:
    """What one strategy did on one set. Times are of one search, in milliseconds."""

    set: str
    strategy: str
    hit_at_1: float
    recall_at_5: float
    recall_at_10: float
    mrr: float
    ndcg_at_5: float
    p50_ms: float
    p95_ms: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def read_set(folder: Path, limit: int | None = None) -> Set:
    """Read a folder; with a limit, its first queries only, over all of its tools."""
    tools = tuple(_tool(line, at) for at, line in _lines(folder / "tools.jsonl"))
    if len({tool.name for tool in tools}) < len(tools):
        raise Invalid(f"{folder / 'tools.jsonl'} holds two tools of one id.")
    questions = tuple(_question(line, at) for at, line in _lines(folder / "queries.jsonl"))
    if not tools or not questions:
        raise Invalid(f"{folder} holds no tools or no queries.")
    return Set(folder.resolve().name, tools, questions[:limit])


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(
            f"{path} cannot be read: {error}.",
            hint="A set is a folder with tools.jsonl and queries.jsonl.",
        ) from error
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                found = json.loads(line)
            except ValueError as error:
                raise Invalid(f"{path}, line {number} is not JSON: {error}.") from error
            if not isinstance(found, dict):
                raise Invalid(f"{path}, line {number} is not an object.")
            yield f"{path}, line {number}", found


def _tool(line: dict[str, Any], at: str) -> Searchable:
    if not line.get("id") or not line.get("name"):
        raise Invalid(f"{at} has no id or no name.")
    return Searchable(
        name=str(line["id"]),
        original_name=str(line["name"]),
        server=str(line.get("server") or ""),
        title=str(line.get("title") or ""),
        description=str(line.get("description") or ""),
        parameters="\n".join(parameter_texts(line.get("input_schema"), depth=3)),
        groups=(),
    )


def _question(line: dict[str, Any], at: str) -> Question:
    relevant = line.get("relevant")
    if not isinstance(line.get("query"), str) or not isinstance(relevant, list) or not relevant:
        raise Invalid(f"{at} has no query or nothing relevant.")
    return Question(
        line["query"], frozenset(map(str, relevant)), str(line.get("server_hint") or "")
    )


def evaluate(index: Index, one: Set, strategy: str) -> Row:
    """Ask every query and average."""
    for question in one.questions[:3]:
        _names(index, question, strategy)  # what is made at the first search is not the query's
    seconds: list[float] = []
    answers = []
    for question in one.questions:
        started = time.perf_counter()
        names = _names(index, question, strategy)
        seconds.append(time.perf_counter() - started)
        answers.append((names, question.relevant))

    def average(measure: Callable[[Sequence[str], Collection[str]], float]) -> float:
        return round(fmean(measure(names, relevant) for names, relevant in answers), 4)

    return Row(
        set=one.name,
        strategy=strategy,
        hit_at_1=average(lambda names, relevant: recall(names[:1], relevant, of=1)),
        recall_at_5=average(lambda names, relevant: recall(names[:5], relevant)),
        recall_at_10=average(lambda names, relevant: recall(names[:10], relevant)),
        mrr=average(reciprocal_rank),
        ndcg_at_5=average(ndcg),
        p50_ms=_milliseconds(seconds, 0.5),
        p95_ms=_milliseconds(seconds, 0.95),
    )


def _names(index: Index, question: Question, strategy: str) -> list[str]:
    """Search as an agent would, though a query may be longer than an agent's."""
    if strategy == "regex":
        # A sentence is no pattern: any of its words is looked for.
        words = dict.fromkeys("".join(c if c.isalnum() else " " for c in question.query).split())
        try:
            found = search(index, pattern="|".join(words)[:200].rstrip("|"), limit=LOOKED_AT)
        except Invalid:
            return []
    else:
        found = rank(
            index, question.query, strategy, server_hint=question.server_hint, limit=LOOKED_AT
        )
        if found.strategy != strategy:
            raise Invalid(f"{strategy} cannot be evaluated here. {found.note}")
    return [hit.name for hit in found.hits]


def recall(names: Sequence[str], relevant: Collection[str], of: int | None = None) -> float:
    """The share of what is relevant that was found."""
    return sum(name in relevant for name in names) / (of or len(relevant))


def reciprocal_rank(names: Sequence[str], relevant: Collection[str]) -> float:
    return next((1 / rank for rank, name in enumerate(names, 1) if name in relevant), 0.0)


def ndcg(names: Sequence[str], relevant: Collection[str], at: int = 5) -> float:
    """The gain of what was found, later places counting less, against the best order there is."""
    gains = [1 / log2(rank + 1) for rank in range(1, at + 1)]
    got = sum(gain for gain, name in zip(gains, names, strict=False) if name in relevant)
    return got / sum(gains[: len(relevant)])


def _milliseconds(seconds: Sequence[float], share: float) -> float:
    return round(1000 * (percentile(seconds, share) or 0.0), 3)
