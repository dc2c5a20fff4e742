"""Measure search on sets of tools and queries, apart from the installation's own catalog."""

import argparse
import json
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from catalog.search.embeddings import encoder as sentence_encoder
from catalog.search.embeddings.encoder import ModelUnavailable
from catalog.search.embeddings.matrix import DetachedMatrix
from catalog.search.engine import STRATEGIES, RANKED_STRATEGIES
from catalog.search.evaluation import EvaluationResult, EvaluationSet, evaluate, read_set
from catalog.search.index import Index
from toolcrib.lib.errors import ToolcribError

COLUMNS = ("hit_at_1", "recall_at_5", "recall_at_10", "mrr", "ndcg_at_5", "p50_ms", "p95_ms")


class Command(BaseCommand):
    help = "Measure search on folders with tools.jsonl and queries.jsonl."
    requires_system_checks = []

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("folders", nargs="+", type=Path, metavar="DIR")
        parser.add_argument(
            "--strategy",
            action="append",
            choices=STRATEGIES,
            help="Measure this one; repeat for several. All that take words if not given.",
        )
        parser.add_argument("--limit", type=int, help="Ask only the first N queries of each set.")
        parser.add_argument("--json", action="store_true", help="Print one JSON document.")

    def handle(self, *args: Any, **options: Any) -> None:
        strategies = options["strategy"] or list(RANKED_STRATEGIES)
        if options["limit"] is not None and options["limit"] < 1:
            raise CommandError("--limit must be 1 or more.")
        try:
            sets = [read_set(folder, options["limit"]) for folder in options["folders"]]
            rows = [row for one in sets for row in self._rows(one, strategies)]
        except ToolcribError as error:
            raise CommandError(f"{error.sentence}") from error
        if options["json"]:
            self.stdout.write(json.dumps({"rows": [row.as_json() for row in rows]}))
        else:
            self._table(rows)

    def _rows(self, one: EvaluationSet, strategies: list[str]) -> list[EvaluationResult]:
        meanings = None
        if {"hybrid", "embedding"} & set(strategies):
            meanings = self._meanings(one)
        index = Index(one.tools, meanings)
        return [evaluate(index, one, strategy) for strategy in dict.fromkeys(strategies)]

    def _meanings(self, one: EvaluationSet) -> DetachedMatrix:
        self.stderr.write(f"Encoding {len(one.tools)} tools of {one.name}")
        try:
            encoder = sentence_encoder.load(settings.MODELS_DIR)
        except ModelUnavailable as error:
            raise CommandError(
                f"hybrid and embedding cannot be measured: {error}. Use --strategy bm25."
            ) from error
        return DetachedMatrix(encoder, {tool.key: tool.passage for tool in one.tools})

    def _table(self, rows: list[EvaluationResult]) -> None:
        wide = max(len(row.set) for row in rows)
        self.stdout.write(f"{'set':{wide}}  {'strategy':9}  " + "  ".join(COLUMNS))
        for row in rows:
            figures = row.as_json()
            shown = "  ".join(f"{figures[name]:{len(name)}.3f}" for name in COLUMNS)
            self.stdout.write(f"{row.set:{wide}}  {row.strategy:9}  {shown}")
