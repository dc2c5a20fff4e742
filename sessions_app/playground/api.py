"""Search API for people: test a query as an agent, golden queries, unmet searches."""

from datetime import datetime
from typing import Annotated, Any

from django.http import HttpRequest, HttpResponse
from ninja import Router, Schema, Status

from catalog.models import GoldenQuery, GoldenRun, Revision
from catalog.search import golden_queries
from sessions_app.playground import golden_runs
from sessions_app.playground import search as playground_search
from sessions_app.usage import searches
from sessions_app.usage.filters import UsageFilter
from toolcrib.lib.api_schemas import CONFLICTS, ERRORS, Cursor, Limit, Strict, choices, set_location
from toolcrib.lib.errors import Invalid, InvalidRequest, NotFound
from toolcrib.lib.pagination import check_limit, cut_page, parse_id
from toolcrib.lib.roles import key_actor
from toolcrib.lib.time_ranges import RANGES

EXPLANATION = ("name", "rank", "reasons", "bm25", "embedding", "score", "hint")

router = Router(tags=["search"])


class GoldenIn(Strict):
    query: str
    tools: list[str]


class ResultOut(Schema):
    strategy: str
    revision: int
    rank: int | None
    first: str
    good_rank: int | None
    good_revision: int
    broke: bool


class GoldenOut(Schema):
    id: int
    query: str
    tools: list[str]
    origin: Annotated[str, choices(GoldenQuery.Origin)]
    marked_by: str
    created_at: datetime
    broke: bool
    results: list[ResultOut]

    @staticmethod
    def resolve_tools(query: GoldenQuery) -> list[str]:
        return list(query.right)

    @staticmethod
    def resolve_broke(query: GoldenQuery) -> bool:
        return any(row.broke for row in query.results.all())


class GoldenPage(Schema):
    items: list[GoldenOut]
    next_cursor: str | None


class RunOut(Schema):
    revision: int
    finished_at: datetime | None
    scores: dict[str, Any]  # by strategy: queries, first, found, mrr, broke


class StandingOut(Schema):
    """Status of the golden queries: the newest runs and the regressions."""

    revision: int
    runs: list[RunOut]
    broke: list[GoldenOut]


class MissedOut(Schema):
    since: datetime
    lost: list[dict[str, Any]]
    astray: list[dict[str, Any]]
    uncalled: list[dict[str, Any]]
    agents: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    next_cursor: str | None


@router.get("", response={200: dict[str, Any], **ERRORS})
def try_search(
    request: HttpRequest,
    query: str = "",
    pattern: str = "",
    agent: str = "",
    strategy: str = "",
    server: str = "",
    limit: int | None = None,
) -> dict[str, Any]:
    """Return the search response for a new session of this agent, or of any agent (all groups).

    Nothing is recorded. `why` lists the reasons for each result, and the hint that brought it.
    """
    params = playground_search.PlaygroundQuery(
        query=pattern or query,
        mode="regex" if pattern else "words",
        agent=agent,
        strategy=strategy,
        server=server,
        limit=0 if limit is None else max(1, min(50, limit)),
    )
    result = playground_search.run_query(params)
    if isinstance(result.error, NotFound):
        raise InvalidRequest([{"loc": ("query", "agent"), "msg": "there is no such agent"}])
    if result.error:
        raise result.error
    return {
        "answer": result.answer,
        "ms": result.ms,
        "why": [{key: hit[key] for key in EXPLANATION} for hit in result.hits],
        "hidden": [{"name": name, "why": reason} for name, reason in result.hidden.items()],
    }


@router.get("/golden", response={200: GoldenPage, **ERRORS})
def list_golden_queries(
    request: HttpRequest, limit: Limit = 50, cursor: Cursor = ""
) -> dict[str, Any]:
    """List golden queries with their latest ranks, oldest first."""
    rows = golden_queries.queries().order_by("pk")
    if cursor:
        rows = rows.filter(pk__gt=parse_id(cursor))
    items, next_cursor = cut_page(rows, limit, lambda row: str(row.pk))
    return {"items": items, "next_cursor": next_cursor}


@router.post("/golden", response={201: GoldenOut, **ERRORS, **CONFLICTS})
def create_golden_query(
    request: HttpRequest, response: HttpResponse, body: GoldenIn
) -> Status[GoldenQuery]:
    """Set the expected tools of a query and run it."""
    golden = golden_queries.set_expected_tools(
        body.query, body.tools, origin="api", actor=key_actor(request)
    )
    golden_runs.run_one(golden)
    set_location(response, "search", "golden", golden.pk)
    return Status(201, golden_queries.find_golden_query(golden.pk))


@router.get("/golden/standing", response={200: StandingOut, **ERRORS})
def get_golden_standing(request: HttpRequest, limit: Limit = 10) -> dict[str, Any]:
    """List the newest runs, and the queries that regressed since their last good run."""
    return {
        "revision": Revision.current(),
        "runs": list(GoldenRun.objects.exclude(finished_at=None)[: check_limit(limit)]),
        "broke": golden_queries.list_regressions(),
    }


@router.post("/golden/run", response={200: RunOut, **ERRORS, **CONFLICTS})
def run_golden_queries(request: HttpRequest) -> GoldenRun:
    """Run all golden queries now, even if the catalog has not changed."""
    return golden_runs.run_now()


@router.get("/golden/{golden_id}", response={200: GoldenOut, **ERRORS})
def get_golden_query(request: HttpRequest, golden_id: int) -> GoldenQuery:
    """Get a golden query with its expected tools and latest ranks."""
    return golden_queries.find_golden_query(golden_id)


@router.post("/golden/{golden_id}/accept", response={200: GoldenOut, **ERRORS})
def accept_golden_query(request: HttpRequest, golden_id: int) -> GoldenQuery:
    """Accept the current ranks of a query as its new baseline."""
    golden_queries.accept(golden_queries.find_golden_query(golden_id), actor=key_actor(request))
    return golden_queries.find_golden_query(golden_id)


@router.delete("/golden/{golden_id}", response={204: None, **ERRORS})
def delete_golden_query(request: HttpRequest, golden_id: int) -> Status[None]:
    """Delete a golden query."""
    golden_queries.remove(golden_queries.find_golden_query(golden_id), actor=key_actor(request))
    return Status(204, None)


@router.get("/missed", response={200: MissedOut, **ERRORS})
def list_unmet_searches(
    request: HttpRequest,
    within: Annotated[str, choices(RANGES)] = "30d",
    agent: str = "",
    group: str = "",
    limit: Limit = searches.PAGE,
    cursor: Cursor = "",
) -> dict[str, Any]:
    """List unmet searches: no results, abandoned, and loads that were never called.

    `limit` and `cursor` apply to each of the lists; a list that ends before the others is empty.
    """
    if within not in RANGES:
        raise Invalid(f"within must be one of {', '.join(RANGES)}.")
    filters = UsageFilter(
        within=within, agent=agent.replace("\0", ""), group=group.replace("\0", "")
    )
    page = searches.report(filters, limit=None).page(limit, cursor)
    return page | {"since": filters.since}
