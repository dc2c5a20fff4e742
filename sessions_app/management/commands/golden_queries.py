"""Run all golden queries against the current catalog, for continuous integration."""

import argparse
from typing import Any

from django.core.management.base import CommandError

from catalog.search import golden_queries
from sessions_app.playground import golden_runs
from sessions_app.sessions import scope
from toolcrib.management.json_command import JsonCommand


class Command(JsonCommand):
    help = "Run all golden queries; exit with 1 if one regressed or misses the top 10."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--strategy", choices=golden_queries.STRATEGIES, default="bm25")

    def handle(self, *args: Any, **options: Any) -> None:
        strategy = options["strategy"]
        everything = scope.scope_of_agent(golden_runs.any_agent())
        queries = list(golden_queries.queries())
        golden_queries.run_queries(everything.index, queries, everything.revision)
        failed = []
        for golden in golden_queries.queries():
            result = golden.results.filter(strategy=strategy).first()
            if result is None or result.rank is None or result.broke:
                rank = result.rank if result else None
                failed.append({"query": golden.query, "tools": golden.right, "rank": rank})
        body = {"queries": len(queries), "strategy": strategy, "failed": failed}
        lines = [f"{row['query']}: rank {row['rank'] or 'none'}" for row in failed]
        lines.append(f"{len(queries) - len(failed)} of {len(queries)} golden queries pass.")
        self.report(body, "\n".join(lines))
        if failed:
            raise CommandError(f"{len(failed)} golden queries fail.")
