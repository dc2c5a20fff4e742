"""Management command: evaluate search quality on test sets of tools and queries."""

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import CommandError

from catalog.search import rankers
from catalog.search.embeddings import encoder as sentence_encoder
from catalog.search.embeddings.encoder import ModelUnavailable
from catalog.search.embeddings.matrix import DetachedMatrix
from catalog.search.evaluation import (
    EvaluationResult,
    EvaluationSet,
    add_phrases,
    evaluate,
    passages,
    read_set,
    without_hints,
)
from catalog.search.index import Index
from catalog.search.rankers import RANKED_STRATEGIES
from toolcrib.lib.errors import ToolcribError
from toolcrib.management.json_command import JsonCommand

GOLD = Path(__file__).resolve().parent.parent.parent / "search" / "gold"
COLUMNS = (
    *("hit_at_1", "recall_at_5", "recall_at_10", "recall_at_15", "mrr", "ndcg_at_5", "tokens"),
    *("p50_ms", "p95_ms"),
)


class Command(JsonCommand):
    help = (
        "Evaluate search on folders with tools.jsonl and queries.jsonl; without one, on the small "
        "gold set of Toolcrib. Tools get the hints of the set and of the bundled phrasebook."
    )
    requires_system_checks = []

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("folders", nargs="*", type=Path, metavar="DIR", default=[GOLD])
        parser.add_argument(
            "--strategy",
            action="append",
            choices=(*rankers.BUILT_IN, *rankers.names()),
            help="Strategy to evaluate; may be repeated. Default: all ranked strategies.",
        )
        parser.add_argument("--limit", type=int, help="Run only the first N queries of each set.")
        parser.add_argument(
            "--without-hints", action="store_true", help="Leave out hints and the phrasebook."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        strategies = options["strategy"] or list(RANKED_STRATEGIES)
        if options["limit"] is not None and options["limit"] < 1:
            raise CommandError("--limit must be 1 or more.")
        try:
            sets = [read_set(folder, options["limit"]) for folder in options["folders"] or [GOLD]]
            rows = [
                row
                for test_set in sets
                for row in self._evaluate(test_set, strategies, hints=not options["without_hints"])
            ]
        except ToolcribError as error:
            raise CommandError(error.sentence) from error
        self.report({"rows": [asdict(row) for row in rows]}, _table(rows))

    def _evaluate(
        self, test_set: EvaluationSet, strategies: list[str], *, hints: bool
    ) -> list[EvaluationResult]:
        encoder = self._load_encoder() if {"hybrid", "embedding"} & set(strategies) else None
        if hints:
            encode = encoder.encode_queries if encoder else None
            test_set = replace(test_set, tools=add_phrases(test_set.tools, encode))
        else:
            test_set = replace(test_set, tools=without_hints(test_set.tools))
        vectors = None
        if encoder is not None:
            self.stderr.write(f"Encoding {len(test_set.tools)} tools of {test_set.name}")
            vectors = DetachedMatrix(encoder, passages(test_set.tools))
        index = Index(test_set.tools, vectors)
        names = dict.fromkeys(strategies)
        return [row for strategy in names for row in evaluate(index, test_set, strategy)]

    def _load_encoder(self) -> sentence_encoder.Encoder:
        try:
            return sentence_encoder.load(settings.MODELS_DIR)
        except ModelUnavailable as error:
            raise CommandError(
                f"hybrid and embedding cannot be evaluated: {error}. Use --strategy bm25."
            ) from error


def _table(rows: list[EvaluationResult]) -> str:
    labels = [f"{row.set} · {row.kind}" if row.kind else row.set for row in rows]
    width = max(map(len, labels))
    lines = [f"{'set':{width}}  {'strategy':9}  queries  " + "  ".join(COLUMNS)]
    for label, row in zip(labels, rows, strict=True):
        cells = "  ".join(f"{getattr(row, name):{max(6, len(name))}.3f}" for name in COLUMNS)
        lines.append(f"{label:{width}}  {row.strategy:9}  {row.queries:7}  {cells}")
    return "\n".join(lines)
