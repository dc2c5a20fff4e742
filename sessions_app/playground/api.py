"""The API of search for people: try a query as an agent, golden queries, what was not found."""

from datetime import datetime
from typing import Any

from django.http import HttpRequest
from ninja import Router, Schema, Status

from catalog.models import GoldenQuery, GoldenRun, Revision
from catalog.search import golden_queries
from sessions_app.playground import golden_runs
from sessions_app.playground import search as playground_search
from sessions_app.usage import searches
from sessions_app.usage.filters import RANGES, UsageFilter
from toolcrib.lib.api_schemas import ERRORS, Strict
from toolcrib.lib.errors import Invalid
from toolcrib.lib.pagination import check_limit, cut_page
from toolcrib.lib.roles import key_actor

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
    origin: str
    marked_by: str
    created_at: datetime
    broke: bool
    results: list[ResultOut]


class GoldenPage(Schema):
    items: list[GoldenOut]
    next_cursor: str | None


class RunOut(Schema):
    revision: int
    finished_at: datetime | None
    scores: dict[str, Any]  # by strategy: queries, first, found, mrr, broke


class StandingOut(Schema):
    """How the golden queries stand: the newest runs, and the queries that broke."""

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


def shown(query: GoldenQuery) -> dict[str, Any]:
    results = list(query.results.all())
    return {
        "id": query.pk,
        "query": query.query,
        "tools": query.right,
        "origin": query.origin,
        "marked_by": query.marked_by,
        "created_at": query.created_at,
        "broke": any(row.broke for row in results),
        "results": results,
    }


@router.get("", response={200: dict[str, Any], **ERRORS})
def try_search(
    request: HttpRequest,
    query: str = "",
    pattern: str = "",
    agent: str = "",
    strategy: str = "",
    server: str = "",
    limit: int = 10,
) -> dict[str, Any]:
    """What a new session of this agent would be answered; without an agent, one with every group.

    Nothing is recorded. `why` says for each tool what it was found by.
    """
    asked = playground_search.PlaygroundQuery(
        query=pattern or query,
        mode="regex" if pattern else "words",
        agent=agent,
        strategy=strategy,
        server=server,
        limit=max(1, min(50, limit)),
    )
    tried = playground_search.run_query(asked)
    if tried.refused:
        raise tried.refused
    return {
        "answer": tried.answer,
        "ms": tried.ms,
        "why": [hit.as_json() for hit in tried.hits],
        "hidden": [{"name": one.name, "why": one.why} for one in tried.hidden],
    }


@router.get("/golden", response={200: GoldenPage, **ERRORS})
def list_golden(request: HttpRequest, limit: int = 50, cursor: int = 0) -> dict[str, Any]:
    rows = golden_queries.queries().order_by("pk").filter(pk__gt=cursor)
    items, following = cut_page(rows, limit, lambda row: str(row.pk))
    return {"items": [shown(row) for row in items], "next_cursor": following}


@router.post("/golden", response={201: GoldenOut, **ERRORS})
def mark_golden(request: HttpRequest, body: GoldenIn) -> Status[dict[str, Any]]:
    """Say which tools answer a query rightly, and measure it at once."""
    marked = golden_queries.mark(body.query, body.tools, origin="api", actor=key_actor(request))
    golden_runs.run_one(marked)
    return Status(201, shown(golden_queries.find(marked.pk)))


@router.get("/golden/standing", response={200: StandingOut, **ERRORS})
def standing(request: HttpRequest, limit: int = 10) -> dict[str, Any]:
    """The newest runs by strategy, and the queries that broke against their last good run."""
    return {
        "revision": Revision.current(),
        "runs": list(GoldenRun.objects.exclude(finished_at=None)[: check_limit(limit)]),
        "broke": [shown(query) for query in golden_queries.broken()],
    }


@router.post("/golden/run", response={200: RunOut, **ERRORS})
def run_golden(request: HttpRequest) -> GoldenRun:
    """Run all golden queries now, although the catalog did not change."""
    return golden_runs.run_now()


@router.post("/golden/{golden_id}/accept", response={200: GoldenOut, **ERRORS})
def accept_golden(request: HttpRequest, golden_id: int) -> dict[str, Any]:
    """Take how a query stands now for good."""
    golden_queries.accept(golden_queries.find(golden_id), actor=key_actor(request))
    return shown(golden_queries.find(golden_id))


@router.delete("/golden/{golden_id}", response={204: None, **ERRORS})
def remove_golden(request: HttpRequest, golden_id: int) -> Status[None]:
    golden_queries.remove(golden_queries.find(golden_id), actor=key_actor(request))
    return Status(204, None)


@router.get("/missed", response={200: MissedOut, **ERRORS})
def not_found(
    request: HttpRequest, within: str = "30d", agent: str = "", group: str = ""
) -> dict[str, Any]:
    """What agents could not find: no result, no load after a search, loads never called."""
    if within not in RANGES:
        raise Invalid(f"within is one of {', '.join(RANGES)}.")
    wanted = UsageFilter(
        within=within, agent=agent.replace("\0", ""), group=group.replace("\0", "")
    )
    return searches.report(wanted).as_json() | {"since": wanted.since}
