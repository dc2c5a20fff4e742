"""Call counts and latency of tools and servers, usage of scripts. Trials are not counted."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Count, Exists, Max, OuterRef, Q, QuerySet, Sum
from django.utils import timezone

from sessions_app.models import Call, CallPath, RunState, ScriptRun, UsageKind
from sessions_app.usage import series
from sessions_app.usage.filters import FAILED, UsageFilter
from sessions_app.usage.searches import TEST_SESSION_KEY
from toolcrib.lib.figures import ScriptFigures

DAYS = 30


@dataclass(frozen=True)
class ToolCalls:
    """Calls and errors of a tool in the last 30 days."""

    calls: int = 0
    errors: int = 0

    @property
    def error_rate(self) -> float:
        return 100 * self.errors / self.calls if self.calls else 0.0


@dataclass(frozen=True)
class ServerCalls:
    """Calls of a server in the last 24 hours, per hour, oldest first."""

    hours: list[int]
    p95_ms: int | None

    @property
    def calls(self) -> int:
        return sum(self.hours)


def _calls() -> QuerySet[Call]:
    return Call.objects.exclude(path=CallPath.TRY).order_by()


def never_called() -> Q:
    """Return a condition for tools that no agent has ever called."""
    return Q(~Exists(_calls().filter(tool=OuterRef("pk"))))


def count_tool_calls(tools: Collection[int]) -> dict[int, ToolCalls]:
    """Return the calls of these tools by primary key; tools without calls are omitted."""
    if not tools:
        return {}
    since = timezone.now() - timedelta(days=DAYS)
    rows = _calls().filter(tool__in=tools, accepted_at__gte=since).values_list("tool")
    counts = rows.annotate(calls=Count("pk"), errors=Count("pk", filter=FAILED))
    return {pk: ToolCalls(calls, errors) for pk, calls, errors in counts}


def count_server_calls(slugs: Mapping[int, str]) -> dict[int, ServerCalls]:
    """Return the calls of servers, whose slugs these are; servers without calls are omitted."""
    if not slugs:
        return {}
    recent = series.read_uncounted()
    of = ("24h", UsageKind.SERVER)
    totals = series.read_totals(*of, uncounted=recent, keys=slugs.values())
    hours = series.read_calls(*of, list(totals), uncounted=recent)
    return {
        pk: ServerCalls(hours[slug], totals[slug].p95)
        for pk, slug in slugs.items()
        if slug in totals and totals[slug].calls
    }


def recent_failures(limit: int = 10, **of: Any) -> list[Call]:
    """Return the newest failed calls of the last week, by columns of the index on usage."""
    return _newest(_last_week(**of).filter(FAILED), limit)


def recent_calls(limit: int = 20, **of: Any) -> list[Call]:
    """Return the newest calls of the last week, by columns of the index on usage."""
    return _newest(_last_week(**of), limit)


@dataclass(frozen=True)
class TopError:
    """How often a tool failed in one way in the last week, and how a server put it last."""

    code: str
    count: int
    last_at: datetime
    message: str


def top_errors(limit: int = 5, **of: Any) -> list[TopError]:
    failed = _last_week(**of).filter(FAILED)
    rows = failed.values_list("error_code").annotate(n=Count("pk"), last=Max("accepted_at"))
    errors = []
    for code, count, last in rows.order_by("-n", "error_code")[:limit]:
        newest = failed.filter(error_code=code, accepted_at=last).order_by("-pk")
        message = newest.values_list("error_message", flat=True).first()
        errors.append(TopError(code, count, last, message or ""))
    return errors


def _last_week(**of: Any) -> QuerySet[Call]:
    return _calls().filter(accepted_at__gte=timezone.now() - timedelta(days=7), **of)


def _newest(calls: QuerySet[Call], limit: int) -> list[Call]:
    newest = calls.order_by("-accepted_at").values("pk")[:limit]
    rows = Call.objects.filter(pk__in=newest).select_related("session", "agent")
    return list(rows.defer("arguments", "result_copy").order_by("-accepted_at"))


@dataclass(frozen=True)
class ScriptUsage:
    """The scripts of one agent in a time range."""

    agent: str
    figures: ScriptFigures


def scripts_by_agent(filters: UsageFilter) -> list[ScriptUsage]:
    """Return the agents that started scripts in the range, the most tokens spared first.

    The group does not apply: most scripts call tools of several groups.
    """
    runs = ScriptRun.objects.filter(started_at__gte=filters.since)
    runs = runs.exclude(session__metadata__contains=f'"{TEST_SESSION_KEY}":')
    if filters.agent:
        runs = runs.filter(agent__name=filters.agent)
    made = Call.objects.filter(path=CallPath.SCRIPT, run__in=runs.values("pk")).order_by()
    calls = dict(made.values_list("agent__name").annotate(Count("pk")))
    rows = (
        runs.order_by()
        .values_list("agent__name")
        .annotate(
            number=Count("pk"),
            failed=Count("pk", filter=Q(state=RunState.FAILED)),
            held=Count("pk", filter=Q(state=RunState.HELD)),
            given=Sum("tokens_given"),
            spared=Sum("tokens_spared"),
        )
    )
    found = [
        ScriptUsage(agent, ScriptFigures(count, failed, held, calls.get(agent, 0), given, spared))
        for agent, count, failed, held, given, spared in rows
    ]
    return sorted(found, key=lambda row: (-row.figures.spared, row.agent))


def total_scripts(rows: list[ScriptUsage]) -> ScriptFigures:
    return sum((row.figures for row in rows), ScriptFigures())
