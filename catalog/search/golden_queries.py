"""Golden queries: the right answer to a query, marked by a person and held ever after.

Owns the writes, and the measuring: a query broke when its right tool fell out of the first place,
the first five or the first ten, against the last run in which it stood well. What an index is
made of, and when to measure, is for others to say.
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
from catalog.tools.actions import UNKEEPABLE
from toolcrib.lib.errors import Conflict, Invalid, NotFound, ToolcribError

MOST = 500  # golden queries: every one is run by every strategy at every revision
MOST_RIGHT = 20
STRATEGIES = ("hybrid", "bm25", "embedding")
SEEN = 10  # what an agent is given where it does not say how many it wants
BANDS = (1, 5, SEEN)


# --- Writing ------------------------------------------------------------------------------------


@transaction.atomic
def set_expected_tools(
    query: str, names: Iterable[str], *, origin: str, actor: Actor
) -> GoldenQuery:
    """Say which tools answer a query rightly; said again, it counts from then on."""
    line, right = _one_line(query), _known(names)
    golden = GoldenQuery.objects.select_for_update().filter(query=line).first()
    if golden is None:
        if GoldenQuery.objects.count() >= MOST:
            raise Conflict(
                f"There are {MOST} golden queries, as many as there may be.",
                hint="Remove one that no longer tells anything.",
            )
        golden = GoldenQuery(query=line, origin=origin)
    elif golden.right == right:
        return golden
    else:
        golden.results.all().delete()  # they measured another answer
    before, golden.right, golden.marked_by = golden.right, right, actor.label[:200]
    golden.save()
    audit.record(actor, "golden.mark", golden, before={"right": before}, after={"right": right})
    return golden


@transaction.atomic
def remove(golden: GoldenQuery, *, actor: Actor) -> None:
    audit.record(actor, "golden.remove", golden, before={"right": golden.right})
    golden.delete()


@transaction.atomic
def accept(golden: GoldenQuery, *, actor: Actor) -> GoldenQuery:
    """Take how a query stands now for good; later drops count from here."""
    broken = list(golden.results.select_for_update().filter(broke=True))
    if broken:
        before = {row.strategy: row.good_rank for row in broken}
        for row in broken:
            row.broke, row.good_rank, row.good_revision = False, row.rank, row.revision
        GoldenResult.objects.bulk_update(broken, ["broke", "good_rank", "good_revision"])
        after = {row.strategy: row.rank for row in broken}
        audit.record(actor, "golden.accept", golden, before=before, after=after)
    return golden


def find_golden_query(golden_id: int) -> GoldenQuery:
    golden = GoldenQuery.objects.filter(pk=golden_id).prefetch_related("results").first()
    if golden is None:
        raise NotFound("There is no such golden query.", hint="It may have been removed meanwhile.")
    return golden


def _one_line(query: str) -> str:
    if UNKEEPABLE.search(query):
        raise Invalid("A query cannot hold NUL or broken Unicode characters.", hint="Remove them.")
    line = " ".join(query.split())
    if not line or len(line) > MAX_QUERY_LENGTH:
        raise Invalid(
            f"A golden query has 1 to {MAX_QUERY_LENGTH} characters.", hint="Write what agents ask."
        )
    return line


def _known(names: Iterable[str]) -> list[str]:
    wanted = sorted(set(names))
    if not wanted:
        raise Invalid("A golden query needs a right answer.", hint="Name at least one tool.")
    if len(wanted) > MOST_RIGHT:
        raise Invalid(f"A golden query has at most {MOST_RIGHT} right answers.", hint="Name fewer.")
    askable = [name for name in wanted if name.isascii() and "\0" not in name]
    rows = Tool.objects.filter(public_name__in=askable)
    known = set(rows.values_list("public_name", flat=True))
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise NotFound(
            f"There is no tool called {unknown[0][:80]}.", hint="The list of tools has them all."
        )
    return wanted


# --- Measuring ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """How one strategy does on all golden queries."""

    queries: int
    first: int
    found: int
    mrr: float
    broke: int


def run_queries(index: Index, queries: Sequence[GoldenQuery], revision: int) -> dict[str, Score]:
    """Run the queries by every strategy there is, keep how each stands, and add it up."""
    ranks = {
        (golden.pk, strategy): answered
        for golden in queries
        for strategy in STRATEGIES
        if (answered := _ranked(index, golden, strategy)) is not None
    }
    with transaction.atomic():
        rows = _keep(queries, ranks, revision, timezone.now())
    return {
        strategy: _score([row for row in rows if row.strategy == strategy])
        for strategy in STRATEGIES
        if any(row.strategy == strategy for row in rows)
    }


def _ranked(index: Index, golden: GoldenQuery, strategy: str) -> tuple[int | None, str] | None:
    """Return the rank of the right tool and what stands first; None where nobody can say."""
    try:
        found = search(index, query=golden.query, strategy=strategy, limit=SEEN)
    except ToolcribError:  # a query that is refused finds nothing, and stops no other
        return None, ""
    if strategy == "embedding" and found.strategy != strategy:
        return None
    names = [hit.name for hit in found.hits]
    rank = next((at for at, name in enumerate(names, 1) if name in golden.right), None)
    return rank, names[0] if names else ""


def _keep(
    queries: Sequence[GoldenQuery],
    ranks: dict[tuple[int, str], tuple[int | None, str]],
    revision: int,
    now: datetime,
) -> list[GoldenResult]:
    """Write how each query stands, but for those that were changed or removed meanwhile."""
    asked = {golden.pk: golden.right for golden in queries}
    standing = GoldenQuery.objects.select_for_update().filter(pk__in=asked)
    same = {row.pk for row in standing if row.right == asked[row.pk]}
    before = {
        (row.golden_id, row.strategy): row for row in GoldenResult.objects.filter(golden__in=same)
    }
    rows = []
    for (pk, strategy), (rank, first) in ranks.items():
        if pk not in same:
            continue
        row = before.get((pk, strategy)) or GoldenResult(
            golden_id=pk, strategy=strategy, good_rank=rank, good_revision=revision
        )
        row.revision, row.rank, row.first, row.at = revision, rank, first, now
        row.broke = band(rank) > band(row.good_rank)
        if not row.broke:
            row.good_rank, row.good_revision = rank, revision
        rows.append(row)
    known = [row for row in rows if not row._state.adding]
    GoldenResult.objects.bulk_create([row for row in rows if row._state.adding])
    changed = ["revision", "rank", "first", "at", "broke", "good_rank", "good_revision"]
    GoldenResult.objects.bulk_update(known, changed, batch_size=200)
    return rows


def band(rank: int | None) -> int:
    """Number what an agent makes of a rank: first, near the top, somewhere, not seen."""
    return next((at for at, last in enumerate(BANDS) if rank and rank <= last), len(BANDS))


def _score(rows: Sequence[GoldenResult]) -> Score:
    ranks = [row.rank for row in rows if row.rank]
    return Score(
        queries=len(rows),
        first=ranks.count(1),
        found=len(ranks),
        mrr=round(sum(1 / rank for rank in ranks) / len(rows), 4),
        broke=sum(row.broke for row in rows),
    )


# --- Reading ------------------------------------------------------------------------------------


def queries() -> QuerySet[GoldenQuery]:
    return GoldenQuery.objects.prefetch_related("results")


def count_regressions() -> int:
    return GoldenResult.objects.filter(broke=True).values("golden").distinct().count()


def list_regressions() -> list[GoldenQuery]:
    """The queries that stand worse than they did, under whichever strategy."""
    return list(queries().filter(results__broke=True).distinct())
