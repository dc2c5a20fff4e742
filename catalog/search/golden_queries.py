"""Golden queries: regression tests of search, each a query with its expected tools.

A query regresses when its expected tool drops out of the first place, the first five or the first
ten, compared with the last good run.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from catalog import audit
from catalog.audit import Actor
from catalog.models import GoldenQuery, GoldenResult, Tool
from catalog.search.engine import MAX_QUERY_LENGTH, search
from catalog.search.index import Index
from catalog.search.rankers import RANKED_STRATEGIES
from catalog.tools.actions import check_storable
from toolcrib.lib.errors import Conflict, Invalid, NotFound, ToolcribError

MAX_GOLDEN_QUERIES = 500  # every query runs with every strategy at every revision
MAX_EXPECTED_TOOLS = 20
STRATEGIES = RANKED_STRATEGIES
DEFAULT_LIMIT = 10  # hits an agent gets by default
BANDS = (1, 5, DEFAULT_LIMIT)


@transaction.atomic
def set_expected_tools(
    query: str, names: Iterable[str], *, origin: str, actor: Actor, allow_unknown: bool = False
) -> GoldenQuery:
    """Set the expected tools of a query, new or existing. A change deletes its results.

    `allow_unknown` accepts names of tools that no sync has brought yet.
    """
    text, expected = _normalize_query(query), _check_tools(names, allow_unknown)
    golden = GoldenQuery.objects.select_for_update().filter(query=text).first()
    if golden is None:
        if GoldenQuery.objects.count() >= MAX_GOLDEN_QUERIES:
            raise Conflict(
                f"There are already {MAX_GOLDEN_QUERIES} golden queries, the maximum.",
                hint="Remove one that is no longer useful.",
            )
        golden = GoldenQuery(query=text, origin=origin)
    elif golden.right == expected:
        return golden
    else:
        golden.results.all().delete()  # they are for other expected tools
    before, golden.right, golden.marked_by = golden.right, expected, actor.label[:200]
    golden.save()
    audit.record(actor, "golden.mark", golden, before={"right": before}, after={"right": expected})
    return golden


def import_rows(rows: Iterable[Sequence[str]], *, origin: str, actor: Actor) -> list[GoldenQuery]:
    """Set the expected tools of many queries: all of them or, after an error, none."""
    imported = []
    with transaction.atomic():
        for number, (query, *names) in enumerate(rows, 1):
            try:
                golden = set_expected_tools(query, filter(None, names), origin=origin, actor=actor)
            except ToolcribError as error:
                message = f"Line {number}: {error.message}"
                raise Invalid(message, hint=error.hint, code="golden_line") from error
            imported.append(golden)
    return imported


@transaction.atomic
def remove(golden: GoldenQuery, *, actor: Actor) -> None:
    audit.record(actor, "golden.remove", golden, before={"right": golden.right})
    golden.delete()


@transaction.atomic
def accept(golden: GoldenQuery, *, actor: Actor) -> GoldenQuery:
    """Accept the current ranks of a query as good; later runs are compared with them."""
    regressed = list(golden.results.select_for_update().filter(broke=True))
    if regressed:
        before = {row.strategy: row.good_rank for row in regressed}
        for row in regressed:
            row.broke, row.good_rank, row.good_revision = False, row.rank, row.revision
        GoldenResult.objects.bulk_update(regressed, ["broke", "good_rank", "good_revision"])
        after = {row.strategy: row.rank for row in regressed}
        audit.record(actor, "golden.accept", golden, before=before, after=after)
    return golden


def find_golden_query(golden_id: int) -> GoldenQuery:
    golden = queries().filter(pk=golden_id).first()
    if golden is None:
        raise NotFound("Golden query not found.", hint="It may have been removed.")
    return golden


def _normalize_query(query: str) -> str:
    text = " ".join(check_storable(query, "A query").split())
    if not text or len(text) > MAX_QUERY_LENGTH:
        raise Invalid(
            f"A golden query has 1 to {MAX_QUERY_LENGTH} characters.",
            hint="Use a query that agents send.",
        )
    return text


def _check_tools(names: Iterable[str], allow_unknown: bool) -> list[str]:
    """Return the current names, sorted; refuse unknown tools, unless those are allowed."""
    expected = sorted(set(names))
    if not expected:
        raise Invalid("A golden query needs an expected tool.", hint="Name at least one tool.")
    if len(expected) > MAX_EXPECTED_TOOLS:
        raise Invalid(
            f"A golden query has at most {MAX_EXPECTED_TOOLS} expected tools.", hint="Name fewer."
        )
    known = Tool.objects.by_name(expected)
    valid = {name for name in expected if name.isascii() and "\0" not in name}
    unknown = [name for name in expected if name not in (valid if allow_unknown else known)]
    if unknown:
        raise Invalid(
            f"Tool not found: {unknown[0][:80]}.",
            hint="Check the name in the list of tools.",
            code="unknown_tool",
        )
    return sorted({known[name].public_name if name in known else name for name in expected})


@dataclass(frozen=True)
class Score:
    """Metrics of one strategy over all golden queries. Stored as JSON under these names."""

    queries: int
    first: int
    found: int
    mrr: float
    broke: int


def run_queries(index: Index, queries: Sequence[GoldenQuery], revision: int) -> dict[str, Score]:
    """Run the queries with every available strategy, save the results and return the metrics."""
    ranks = {
        (golden.pk, strategy): rank
        for golden in queries
        for strategy in STRATEGIES
        if (rank := _find_rank(index, golden, strategy)) is not None
    }
    with transaction.atomic():
        rows = _save_results(queries, ranks, revision, timezone.now())
    return {
        strategy: _summarize([row for row in rows if row.strategy == strategy])
        for strategy in STRATEGIES
        if any(row.strategy == strategy for row in rows)
    }


def _find_rank(index: Index, golden: GoldenQuery, strategy: str) -> tuple[int | None, str] | None:
    """Return the rank of the expected tool and the first hit; None without the strategy."""
    try:
        result = search(index, query=golden.query, strategy=strategy, limit=DEFAULT_LIMIT)
    except ToolcribError:  # a rejected query has no results, and must not stop the others
        return None, ""
    if strategy == "embedding" and result.strategy != strategy:
        return None
    names = [hit.name for hit in result.hits]
    rank = next((at for at, name in enumerate(names, 1) if name in golden.right), None)
    return rank, names[0] if names else ""


def _save_results(
    queries: Sequence[GoldenQuery],
    ranks: dict[tuple[int, str], tuple[int | None, str]],
    revision: int,
    now: datetime,
) -> list[GoldenResult]:
    """Save the results, except of queries that were changed or removed during the run."""
    expected = {golden.pk: golden.right for golden in queries}
    current = GoldenQuery.objects.select_for_update().filter(pk__in=expected)
    unchanged = {row.pk for row in current if row.right == expected[row.pk]}
    before = {
        (row.golden_id, row.strategy): row
        for row in GoldenResult.objects.filter(golden__in=unchanged)
    }
    rows = []
    for (pk, strategy), (rank, first) in ranks.items():
        if pk not in unchanged:
            continue
        row = before.get((pk, strategy)) or GoldenResult(
            golden_id=pk, strategy=strategy, good_rank=rank, good_revision=revision
        )
        row.revision, row.rank, row.first, row.at = revision, rank, first, now
        row.broke = rank_band(rank) > rank_band(row.good_rank)
        if not row.broke:
            row.good_rank, row.good_revision = rank, revision
        rows.append(row)
    existing = [row for row in rows if not row._state.adding]
    GoldenResult.objects.bulk_create([row for row in rows if row._state.adding])
    changed = ["revision", "rank", "first", "at", "broke", "good_rank", "good_revision"]
    GoldenResult.objects.bulk_update(existing, changed, batch_size=200)
    return rows


def rank_band(rank: int | None) -> int:
    """Return the band of a rank: first place, first five, first ten, or none of them."""
    return next((at for at, last in enumerate(BANDS) if rank and rank <= last), len(BANDS))


def _summarize(rows: Sequence[GoldenResult]) -> Score:
    ranks = [row.rank for row in rows if row.rank]
    return Score(
        queries=len(rows),
        first=ranks.count(1),
        found=len(ranks),
        mrr=round(sum(1 / rank for rank in ranks) / len(rows), 4),
        broke=sum(row.broke for row in rows),
    )


def queries() -> QuerySet[GoldenQuery]:
    return GoldenQuery.objects.prefetch_related("results")


def count_regressions() -> int:
    return GoldenResult.objects.filter(broke=True).values("golden").distinct().count()


def list_regressions() -> list[GoldenQuery]:
    return list(queries().filter(results__broke=True).distinct())
