"""Offline evaluation of search: hit rate, recall, MRR, nDCG, tokens and latency on sets. Pure.

A set is a folder with `tools.jsonl` (id, server, name, description, input_schema, at times hints)
and `queries.jsonl` (id, query, relevant ids, at times kind). The installation's own catalog is not
used. Tools get the requests of the bundled phrasebook as they do in an installation.
"""

import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import log2
from pathlib import Path
from statistics import fmean
from typing import Any

from catalog import rendering
from catalog.definitions.parsing import parameter_texts
from catalog.hints import phrasebook
from catalog.hints.phrasebook import DescribedTool, Encode
from catalog.hints.texts import clean_texts
from catalog.models.search import MAX_AUTOMATIC_HINTS
from catalog.rendering import NEXT_STEP
from catalog.search.engine import rank, search
from catalog.search.index import Index, Searchable
from toolcrib.lib.errors import Invalid
from toolcrib.lib.figures import percentile
from toolcrib.lib.json_codec import canonical
from toolcrib.lib.token_counter import count

EVALUATED_HITS = 15  # what an agent gets by default: five with a sentence, ten names
SHOWN_HITS = 5
MAX_TOKENS = 300  # of a default response


@dataclass(frozen=True)
class EvaluationQuery:
    text: str
    relevant: frozenset[str]
    server_hint: str
    kind: str = ""


@dataclass(frozen=True)
class EvaluationSet:
    name: str
    tools: tuple[Searchable, ...]
    queries: tuple[EvaluationQuery, ...]


@dataclass(frozen=True)
class EvaluationResult:
    """Metrics of one strategy on one set, or on its queries of one kind.

    Latencies are per search, in milliseconds; tokens are those of a default response to an agent.
    """

    set: str
    strategy: str
    kind: str
    queries: int
    hit_at_1: float
    recall_at_5: float
    recall_at_10: float
    recall_at_15: float
    mrr: float
    ndcg_at_5: float
    tokens: float
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
        phrases=tuple(clean_texts(line.get("hints") or ())[0]),
    )


def add_phrases(tools: Sequence[Searchable], encode: Encode | None) -> tuple[Searchable, ...]:
    """Add the requests of the bundled phrasebook to tools, after the hints they have."""
    described = [DescribedTool(tool.original_name, tool.description, tool.server) for tool in tools]
    found = phrasebook.bundled().find(described, encode)
    return tuple(
        replace(tool, phrases=(*tool.phrases, *requests)[:MAX_AUTOMATIC_HINTS])
        if requests
        else tool
        for tool, requests in zip(tools, found, strict=True)
    )


def passages(tools: Sequence[Searchable]) -> dict[str, str]:
    """Return the texts to encode, by key."""
    texts = {tool.key: tool.passage for tool in tools}
    return texts | {tool.phrase_key: tool.phrase_passage for tool in tools if tool.phrases}


def without_hints(tools: Sequence[Searchable]) -> tuple[Searchable, ...]:
    return tuple(replace(tool, phrases=()) for tool in tools)


def _parse_query(line: dict[str, Any], at: str) -> EvaluationQuery:
    relevant = line.get("relevant")
    if not isinstance(line.get("query"), str) or not isinstance(relevant, list) or not relevant:
        raise Invalid(f"{at} has no query or no relevant ids.")
    return EvaluationQuery(
        line["query"],
        frozenset(map(str, relevant)),
        str(line.get("server_hint") or ""),
        str(line.get("kind") or ""),
    )


@dataclass(frozen=True)
class _Answer:
    query: EvaluationQuery
    names: list[str]
    tokens: int
    milliseconds: float


def evaluate(index: Index, evaluation_set: EvaluationSet, strategy: str) -> list[EvaluationResult]:
    """Return the metrics of all queries, then of each kind where the set names kinds."""
    # Warm up: lazy initialization must not count as latency.
    for query in evaluation_set.queries[:3]:
        _search(index, query, strategy)
    tools = {tool.name: tool for tool in evaluation_set.tools}
    answers = []
    for query in evaluation_set.queries:
        started = time.perf_counter()
        names, total = _search(index, query, strategy)
        milliseconds = 1000 * (time.perf_counter() - started)
        tokens = _response_tokens([tools[name] for name in names], strategy, total)
        answers.append(_Answer(query, names, tokens, milliseconds))
    kinds = sorted({query.kind for query in evaluation_set.queries} - {""})
    results = [_summarize(evaluation_set.name, strategy, "", answers)]
    for kind in kinds:
        of_kind = [answer for answer in answers if answer.query.kind == kind]
        results.append(_summarize(evaluation_set.name, strategy, kind, of_kind))
    return results


def _summarize(name: str, strategy: str, kind: str, answers: list[_Answer]) -> EvaluationResult:
    def average(measure: Callable[[Sequence[str], Collection[str]], float]) -> float:
        values = (measure(answer.names, answer.query.relevant) for answer in answers)
        return round(fmean(values), 4)

    milliseconds = [answer.milliseconds for answer in answers]
    return EvaluationResult(
        set=name,
        strategy=strategy,
        kind=kind,
        queries=len(answers),
        hit_at_1=average(lambda names, relevant: recall(names[:1], relevant, of=1)),
        recall_at_5=average(lambda names, relevant: recall(names[:5], relevant)),
        recall_at_10=average(lambda names, relevant: recall(names[:10], relevant)),
        recall_at_15=average(lambda names, relevant: recall(names[:15], relevant)),
        mrr=average(lambda names, relevant: reciprocal_rank(names[:10], relevant)),
        ndcg_at_5=average(ndcg),
        tokens=round(fmean(answer.tokens for answer in answers), 1),
        p50_ms=round(percentile(milliseconds, 0.5) or 0.0, 3),
        p95_ms=round(percentile(milliseconds, 0.95) or 0.0, 3),
    )


def _response_tokens(hits: Sequence[Searchable], strategy: str, total: int) -> int:
    """Return what a response with these hits costs an agent that gives no limit."""
    response = {
        "status": "success" if hits else "no_matches",
        "strategy": strategy,
        "total_matches": total,
        "tools": [
            {
                "name": tool.name,
                "description": rendering.summary(tool.description),
                "group_id": f"mcp:{tool.server}",
            }
            for tool in hits[:SHOWN_HITS]
        ],
        "more": [tool.name for tool in hits[SHOWN_HITS:]],
        "newly_loaded": 0,
        "message": f"Best {len(hits)} of {total} tools. {NEXT_STEP}",
    }
    rendering.shorten_search_response(response, MAX_TOKENS)
    return count(canonical(response))


def _search(index: Index, query: EvaluationQuery, strategy: str) -> tuple[list[str], int]:
    """Search as an agent does, without the limit on the query's length: names and total."""
    if strategy == "regex":
        # A sentence is not a pattern: search for any of its words.
        words = dict.fromkeys("".join(c if c.isalnum() else " " for c in query.text).split())
        try:
            result = search(index, pattern="|".join(words)[:200].rstrip("|"), limit=EVALUATED_HITS)
        except Invalid:
            return [], 0
    else:
        result = rank(
            index, query.text, strategy, server_hint=query.server_hint, limit=EVALUATED_HITS
        )
        if result.strategy != strategy:
            raise Invalid(f"{strategy} is not available. {result.note}")
    return [hit.name for hit in result.hits], result.total


def recall(names: Sequence[str], relevant: Collection[str], of: int | None = None) -> float:
    return sum(name in relevant for name in names) / (of or len(relevant))


def reciprocal_rank(names: Sequence[str], relevant: Collection[str]) -> float:
    return next((1 / rank for rank, name in enumerate(names, 1) if name in relevant), 0.0)


def ndcg(names: Sequence[str], relevant: Collection[str], at: int = 5) -> float:
    """Return the discounted cumulative gain relative to the best possible order."""
    gains = [1 / log2(rank + 1) for rank in range(1, at + 1)]
    got = sum(gain for gain, name in zip(gains, names, strict=False) if name in relevant)
    return got / sum(gains[: len(relevant)])
