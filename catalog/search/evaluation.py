"""Offline evaluation of search: hit rate, recall, MRR, nDCG and latency on evaluation sets. Pure.

A set is a folder with `tools.jsonl` (id, server, name, description, input_schema) and
`queries.jsonl` (id, query, relevant ids). The installation's own catalog is not used.
"""

import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path
from statistics import fmean
from typing import Any

from catalog.definitions.parsing import parameter_texts
from catalog.search.engine import rank, search
from catalog.search.index import Index, Searchable
from toolcrib.lib.errors import Invalid
from toolcrib.lib.percentile import percentile

EVALUATED_HITS = 10  # hits


@dataclass(frozen=True)
class EvaluationQuery:
    text: str
    relevant: frozenset[str]
    server_hint: str


@dataclass(frozen=True)
class EvaluationSet:
    name: str
    tools: tuple[Searchable, ...]
    queries: tuple[EvaluationQuery, ...]


@dataclass(frozen=True)
class EvaluationResult:
    """Metrics of one strategy on one set. Latencies are per search, in milliseconds."""

    set: str
    strategy: str
    hit_at_1: float
    recall_at_5: float
    recall_at_10: float
    mrr: float
    ndcg_at_5: float
    p50_ms: float
    p95_ms: float


def read_set(folder: Path, limit: int | None = None) -> EvaluationSet:
    """Read a set from a folder; a limit keeps the first queries, over all tools."""
    tools = tuple(_parse_tool(line, at) for at, line in _lines(folder / "tools.jsonl"))
    if len({tool.name for tool in tools}) < len(tools):
        raise Invalid(f"{folder / 'tools.jsonl'} has a duplicate tool id.")
    queries = tuple(_parse_query(line, at) for at, line in _lines(folder / "queries.jsonl"))
    if not tools or not queries:
        raise Invalid(f"{folder} has no tools or no queries.")
    return EvaluationSet(folder.resolve().name, tools, queries[:limit])


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
                parsed = json.loads(line)
            except ValueError as error:
                raise Invalid(f"{path}, line {number} is not JSON: {error}.") from error
            if not isinstance(parsed, dict):
                raise Invalid(f"{path}, line {number} is not an object.")
            yield f"{path}, line {number}", parsed


def _parse_tool(line: dict[str, Any], at: str) -> Searchable:
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


def _parse_query(line: dict[str, Any], at: str) -> EvaluationQuery:
    relevant = line.get("relevant")
    if not isinstance(line.get("query"), str) or not isinstance(relevant, list) or not relevant:
        raise Invalid(f"{at} has no query or no relevant ids.")
    return EvaluationQuery(
        line["query"], frozenset(map(str, relevant)), str(line.get("server_hint") or "")
    )


def evaluate(index: Index, evaluation_set: EvaluationSet, strategy: str) -> EvaluationResult:
    # Warm up: lazy initialization must not count as latency.
    for query in evaluation_set.queries[:3]:
        _search_names(index, query, strategy)
    milliseconds: list[float] = []
    results = []
    for query in evaluation_set.queries:
        started = time.perf_counter()
        names = _search_names(index, query, strategy)
        milliseconds.append(1000 * (time.perf_counter() - started))
        results.append((names, query.relevant))

    def average(measure: Callable[[Sequence[str], Collection[str]], float]) -> float:
        return round(fmean(measure(names, relevant) for names, relevant in results), 4)

    return EvaluationResult(
        set=evaluation_set.name,
        strategy=strategy,
        hit_at_1=average(lambda names, relevant: recall(names[:1], relevant, of=1)),
        recall_at_5=average(lambda names, relevant: recall(names[:5], relevant)),
        recall_at_10=average(lambda names, relevant: recall(names[:10], relevant)),
        mrr=average(reciprocal_rank),
        ndcg_at_5=average(ndcg),
        p50_ms=round(percentile(milliseconds, 0.5) or 0.0, 3),
        p95_ms=round(percentile(milliseconds, 0.95) or 0.0, 3),
    )


def _search_names(index: Index, query: EvaluationQuery, strategy: str) -> list[str]:
    """Search as an agent does, without the limit on the query's length."""
    if strategy == "regex":
        # A sentence is not a pattern: search for any of its words.
        words = dict.fromkeys("".join(c if c.isalnum() else " " for c in query.text).split())
        try:
            result = search(index, pattern="|".join(words)[:200].rstrip("|"), limit=EVALUATED_HITS)
        except Invalid:
            return []
    else:
        result = rank(
            index, query.text, strategy, server_hint=query.server_hint, limit=EVALUATED_HITS
        )
        if result.strategy != strategy:
            raise Invalid(f"{strategy} is not available. {result.note}")
    return [hit.name for hit in result.hits]


def recall(names: Sequence[str], relevant: Collection[str], of: int | None = None) -> float:
    return sum(name in relevant for name in names) / (of or len(relevant))


def reciprocal_rank(names: Sequence[str], relevant: Collection[str]) -> float:
    return next((1 / rank for rank, name in enumerate(names, 1) if name in relevant), 0.0)


def ndcg(names: Sequence[str], relevant: Collection[str], at: int = 5) -> float:
    """Return the discounted cumulative gain relative to the best possible order."""
    gains = [1 / log2(rank + 1) for rank in range(1, at + 1)]
    got = sum(gain for gain, name in zip(gains, names, strict=False) if name in relevant)
    return got / sum(gains[: len(relevant)])
