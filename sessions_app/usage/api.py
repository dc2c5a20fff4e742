"""Usage API for operators: calls and errors per tool, searches without results."""

from datetime import datetime, timedelta
from typing import Annotated, Any

from django.http import HttpRequest
from django.utils import timezone
from ninja import Router, Schema
from pydantic import Field

from sessions_app.usage.call_stats import scripts_by_agent
from sessions_app.usage.filters import UsageFilter
from sessions_app.usage.model_costs import list_models
from sessions_app.usage.searches import failed_searches
from sessions_app.usage.tool_usage import tool_usage
from toolcrib.lib.api_schemas import ERRORS, Cursor, Limit, bounds, choices
from toolcrib.lib.errors import Invalid
from toolcrib.lib.figures import SCRIPT_GIVEN, SPARED
from toolcrib.lib.pagination import check_limit, cut_list, cut_page
from toolcrib.lib.time_ranges import RANGES

MAX_DAYS = 366

router = Router(tags=["usage"])


class ToolUsageOut(Schema):
    tool_name: str
    calls: int
    errors: int
    p50_ms: int | None
    p95_ms: int | None
    tokens: int
    loads: int
    last_called: datetime | None


class ToolUsagePage(Schema):
    since: datetime
    items: list[ToolUsageOut]
    next_cursor: str | None


class ModelCostOut(Schema):
    """Tokens of the sessions of one model. Money is null if the model has no price."""

    model: str
    sessions: int
    calls: int
    baseline: int = Field(alias="tokens.baseline")
    given: int = Field(alias="tokens.given")
    saved: int = Field(alias="tokens.saved")
    results: int = Field(alias="tokens.results")
    currency: str
    cost: float | None
    saving: float | None


class ModelCostList(Schema):
    items: list[ModelCostOut]
    next_cursor: str | None


class ScriptUsageOut(Schema):
    """Scripts that an agent started."""

    agent: str
    runs: int = Field(alias="figures.runs")
    failed: int = Field(alias="figures.failed")
    held: int = Field(alias="figures.held", description="Paused now, until a person decides")
    calls: int = Field(alias="figures.calls")
    tokens_given: int = Field(alias="figures.given", description=SCRIPT_GIVEN)
    tokens_spared: int = Field(alias="figures.spared", description=SPARED)


class ScriptUsagePage(Schema):
    since: datetime
    items: list[ScriptUsageOut]
    next_cursor: str | None


class FailedSearchOut(Schema):
    asked: str
    strategy: str
    times: int
    last_at: datetime


class FailedSearchPage(Schema):
    since: datetime
    items: list[FailedSearchOut]
    next_cursor: str | None


def _since(days: int) -> datetime:
    if not 1 <= days <= MAX_DAYS:
        raise Invalid(f"days must be an integer from 1 to {MAX_DAYS}.")
    return timezone.now() - timedelta(days=days)


@router.get("/tools", response={200: ToolUsagePage, **ERRORS})
def list_tool_usage(
    request: HttpRequest,
    days: Annotated[int, bounds(1, MAX_DAYS)] = 30,
    agent: str = "",
    tool: str = "",
    limit: Limit = 50,
    cursor: Cursor = "",
) -> dict[str, Any]:
    """List the usage of each tool by name. Trial calls are not counted."""
    since, limit = _since(days), check_limit(limit)
    filters = UsageFilter(agent=agent.replace("\0", ""), start=since)
    rows = [row for row in tool_usage(filters, tool.replace("\0", "")) if row.tool_name > cursor]
    items, next_cursor = cut_page(rows, limit, lambda row: row.tool_name)
    return {"since": since, "items": items, "next_cursor": next_cursor}


@router.get("/models", response={200: ModelCostList, **ERRORS})
def list_model_costs(
    request: HttpRequest,
    range: Annotated[str, choices(RANGES)] = "30d",
    limit: Limit = 50,
    cursor: Cursor = "",
) -> dict[str, Any]:
    """List tokens, cost and saving by model, over 24h, 7d, 30d or 90d."""
    if range not in RANGES:
        raise Invalid(f"range must be one of: {', '.join(RANGES)}.")
    items, next_cursor = cut_list(list_models(range), limit, cursor)
    return {"items": items, "next_cursor": next_cursor}


@router.get("/scripts", response={200: ScriptUsagePage, **ERRORS})
def list_script_usage(
    request: HttpRequest,
    days: Annotated[int, bounds(1, MAX_DAYS)] = 30,
    agent: str = "",
    limit: Limit = 50,
    cursor: Cursor = "",
) -> dict[str, Any]:
    """List the scripts of each agent by name: runs, calls, tokens given and spared."""
    since, limit = _since(days), check_limit(limit)
    rows = scripts_by_agent(UsageFilter(agent=agent.replace("\0", ""), start=since))
    after = sorted((row for row in rows if row.agent > cursor), key=lambda row: row.agent)
    items, next_cursor = cut_page(after, limit, lambda row: row.agent)
    return {"since": since, "items": items, "next_cursor": next_cursor}


@router.get("/searches", response={200: FailedSearchPage, **ERRORS})
def list_failed_searches(
    request: HttpRequest,
    days: Annotated[int, bounds(1, MAX_DAYS)] = 30,
    agent: str = "",
    limit: Limit = 50,
    cursor: Cursor = "",
) -> dict[str, Any]:
    """List searches without results, most frequent first."""
    since = _since(days)
    filters = UsageFilter(agent=agent.replace("\0", ""), start=since)
    rows = failed_searches(filters, limit=None).without_results
    items, next_cursor = cut_list(rows, limit, cursor)
    return {"since": since, "items": items, "next_cursor": next_cursor}
