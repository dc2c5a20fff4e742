"""The operators' API of use: what each tool did, and what agents looked for in vain."""

from datetime import datetime, timedelta
from typing import Any

from django.http import HttpRequest
from django.utils import timezone
from ninja import Router, Schema

from sessions_app.usage.filters import UsageFilter
from sessions_app.usage.searches import failed_searches
from sessions_app.usage.tool_usage import tool_usage
from toolcrib.lib.api_schemas import ERRORS
from toolcrib.lib.errors import Invalid
from toolcrib.lib.pagination import check_limit, cut_page

MOST_DAYS = 366

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
    if not 1 <= days <= MOST_DAYS:
        raise Invalid(f"days is a whole number from 1 to {MOST_DAYS}.")
    return timezone.now() - timedelta(days=days)


@router.get("/tools", response={200: ToolUsagePage, **ERRORS})
def tools(
    request: HttpRequest,
    days: int = 30,
    agent: str = "",
    tool: str = "",
    limit: int = 50,
    cursor: str = "",
) -> dict[str, Any]:
    """How each tool was used, by name. Calls that people tried are not counted."""
    since, most = _since(days), check_limit(limit)
    wanted = UsageFilter(agent=agent.replace("\0", ""), start=since)
    used = tool_usage(wanted, tool.replace("\0", ""))
    left = [one for one in used if one.tool_name > cursor]
    items, following = cut_page(left, most, lambda one: one.tool_name)
    return {"since": since, "items": [one.as_json() for one in items], "next_cursor": following}


@router.get("/searches", response={200: FailedSearchPage, **ERRORS})
def searches(
    request: HttpRequest, days: int = 30, agent: str = "", limit: int = 50, cursor: str = ""
) -> dict[str, Any]:
    """What agents searched for without a result, the most often asked first."""
    since, most = _since(days), check_limit(limit)
    if cursor and not (cursor.isdecimal() and len(cursor) < 10):
        raise Invalid("cursor is not one that this list gave.", hint="Start without one.")
    wanted = UsageFilter(agent=agent.replace("\0", ""), start=since)
    lost = failed_searches(wanted, most=None).without_results
    start = int(cursor or 0)
    more = start + most < len(lost)
    return {
        "since": since,
        "items": lost[start : start + most],
        "next_cursor": str(start + most) if more else None,
    }
