"""Management command: evaluate search quality on test sets of tools and queries."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import CommandError

from catalog.search.embeddings import encoder as sentence_encoder
from catalog.search.embeddings.encoder import ModelUnavailable
from catalog.search.embeddings.matrix import DetachedMatrix
from catalog.search.engine import RANKED_STRATEGIES, STRATEGIES
from catalog.search.evaluation import EvaluationResult, EvaluationSet, evaluate, read_set
from catalog.search.index import Index
from toolcrib.lib.errors import ToolcribError
from toolcrib.management.json_command import JsonCommand

COLUMNS = ("hit_at_1", "recall_at_5", "recall_at_10", "mrr", "ndcg_at_5", "p50_ms", "p95_ms")


class Command(JsonCommand):
    help = "Evaluate search on folders with tools.jsonl and queries.jsonl."
    requires_system_checks = []

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("folders", nargs="+", type=Path, metavar="DIR")
        parser.add_argument(
            "--strategy",
            action="append",
            choices=STRATEGIES,
            help="Strategy to evaluate; may be repeated. Default: all ranked strategies.",
        )
        parser.add_argument("--limit", type=int, help="Run only the first N queries of each set.")

    def handle(self, *args: Any, **options: Any) -> None:
        strategies = options["strategy"] or list(RANKED_STRATEGIES)
        if options["limit"] is not None and options["limit"] < 1:
            raise CommandError("--limit must be 1 or more.")
        try:
            sets = [read_set(folder, options["limit"]) for folder in options["folders"]]
            rows = [row for test_set in sets for row in self._evaluate(test_set, strategies)]
        except ToolcribError as error:
            raise CommandError(error.sentence) from error
        self.report({"rows": [asdict(row) for row in rows]}, _table(rows))

    def _evaluate(self, test_set: EvaluationSet, strategies: list[str]) -> list[EvaluationResult]:
        vectors = self._encode(test_set) if {"hybrid", "embedding"} & set(strategies) else None
        index = Index(test_set.tools, vectors)
        return [evaluate(index, test_set, strategy) for strategy in dict.fromkeys(strategies)]

    def _encode(self, test_set: EvaluationSet) -> DetachedMatrix:
        self.stderr.write(f"Encoding {len(test_set.tools)} tools of {test_set.name}")
        try:
            encoder = sentence_encoder.load(settings.MODELS_DIR)
        except ModelUnavailable as error:
            raise CommandError(
                f"hybrid and embedding cannot be evaluated: {error}. Use --strategy bm25."
            ) from error
        return DetachedMatrix(encoder, {tool.key: tool.passage for tool in test_set.tools})


def _table(rows: list[EvaluationResult]) -> str:
    width = max(len(row.set) for row in rows)
    lines = [f"{'set':{width}}  {'strategy':9}  " + "  ".join(COLUMNS)]
    for row in rows:
        cells = "  ".join(f"{getattr(row, name):{len(name)}.3f}" for name in COLUMNS)
        lines.append(f"{row.set:{width}}  {row.strategy:9}  {cells}")
    return "\n".join(lines)
