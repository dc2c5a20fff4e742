"""Template contexts of the server pages: list rows with costs, sync progress, sync history.

Reads only. The number of queries does not depend on the number of servers.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db.models import Case, Count, F, Max, Q, Sum, When
from django.db.models.functions import Coalesce
from django.forms import BaseForm
from django.http import QueryDict
from django.urls import reverse
from django.utils import timezone

from catalog.cache import features_of
from catalog.models import ASKS, Tool, ToolState
from servers.models import Server, ServerQuerySet, ServerState, SyncRun, Transport
from servers.web import remedies
from sessions_app.models import Call, CallPath
from sessions_app.usage import call_stats
from toolcrib.lib.pagination import Page, cut_page, offset_of, page_by_offset
from toolcrib.lib.request import facet
from toolcrib.lib.text import plural

SERVERS_PER_PAGE = 100
MAX_TOOLS = 200
RUNS_PER_PAGE = 50
# A free worker takes a sync within a second. After this delay the page reports the wait.
QUEUE_NOTICE_DELAY = timedelta(seconds=10)
SORTS: dict[str, list[Any]] = {
    "name": ["name", "slug"],
    "state": ["state", "slug"],
    "tools": ["tool_count", "slug"],
    "tokens": ["token_sum", "slug"],
    "synced": [F("last_synced_at").asc(nulls_first=True), "slug"],
    "-synced": [F("last_synced_at").desc(nulls_last=True), "slug"],
}
TRIGGER_LABELS = {
    "added": "Server added",
    "manual": "Started manually",
    "list_changed": "Tool list changed (reported by server)",
    "schedule": "Scheduled",
}
OUTCOME_LABELS = {
    "running": "Running",
    "ok": "Succeeded",
    "held": "Removals pending",
    "failed": "Failed",
    "superseded": "Superseded",
}
APPLIED = (SyncRun.Outcome.OK, SyncRun.Outcome.HELD)
PHASE_LABELS = {"connecting": "Connecting", "listing": "Listing tools", "saving": "Saving"}
TemplateContext = dict[str, Any]


def with_costs(servers: ServerQuerySet) -> ServerQuerySet:
    """Annotate the number of tools, and the tokens to preload all of them."""
    servable = Q(tools__state__in=[ToolState.AVAILABLE, ToolState.WAITING])
    return servers.annotate(
        tool_count=Count("tools", filter=~Q(tools__state=ToolState.MISSING)),
        token_sum=Coalesce(Sum("tools__approved__tokens", filter=servable), 0),
    )


@dataclass(frozen=True)
class ServerFilter:
    """Filters and sorting from the query string; unknown values are ignored."""

    states: tuple[str, ...]
    transports: tuple[str, ...]
    query: str
    sort: str
    start: int

    @classmethod
    def from_query(cls, query: QueryDict) -> "ServerFilter":
        sort = query.get("sort", "")
        return cls(
            states=tuple(s for s in query.getlist("state") if s in ServerState.values),
            transports=tuple(t for t in query.getlist("transport") if t in Transport.values),
            query=query.get("q", "").replace("\0", "").strip()[:200],
            sort=sort if sort.removeprefix("-") in SORTS else "name",
            start=offset_of(query, SERVERS_PER_PAGE),
        )

    @property
    def filtered(self) -> bool:
        return bool(self.states or self.transports or self.query)

    def apply(self, servers: ServerQuerySet) -> ServerQuerySet:
        if self.states:
            servers = servers.filter(state__in=self.states)
        if self.transports:
            servers = servers.filter(transport__in=self.transports)
        if self.query:
            by_name = Q(name__icontains=self.query) | Q(slug__icontains=self.query)
            servers = servers.filter(by_name | Q(url__icontains=self.query))
        return servers

    def order(self, servers: ServerQuerySet) -> ServerQuerySet:
        if self.sort in SORTS:
            return servers.order_by(*SORTS[self.sort])
        return servers.order_by(*(f"-{key}" for key in SORTS[self.sort.removeprefix("-")]))


def server_list(filters: ServerFilter) -> TemplateContext:
    servers = filters.apply(Server.objects.all())
    page: Page[Server] = page_by_offset(
        filters.order(with_costs(servers)), filters.start, SERVERS_PER_PAGE, total=servers.count()
    )
    calls = call_stats.count_server_calls({server.pk: server.slug for server in page.rows})
    found = remedies.find_remedies(page.rows)
    rows: list[TemplateContext] = [
        {
            "server": server,
            "busy": is_busy(server),
            "failing_label": remedies.failing_label(server),
            "remedy": found.get(server.pk),
            "calls": calls.get(server.pk),
        }
        for server in page.rows
    ]
    return {
        "rows": rows,
        "max_tokens": max((row["server"].token_sum for row in rows), default=0),
        "busy": any(row["busy"] for row in rows),
        "total": page.total,
        "filters": filters,
        "shown": page.describe("server"),
        "paged": page.total > SERVERS_PER_PAGE,
        "next_cursor": page.next_cursor,
        "previous_cursor": page.previous_cursor,
    }


def facets(filters: ServerFilter) -> list[TemplateContext]:
    states, transports = _count_by("state"), _count_by("transport")
    states = {value: states.get(value, 0) for value in ServerState.values}
    transports = {value: transports.get(value, 0) for value in Transport.values}
    return [
        facet("state", "State", states, filters.states, label_of=str.capitalize),
        facet("transport", "Transport", transports, filters.transports),
    ]


def _count_by(field: str) -> dict[str, int]:
    rows = Server.objects.order_by().values(field).annotate(count=Count("pk"))
    return {row[field]: row["count"] for row in rows}


def health() -> TemplateContext:
    states = _count_by("state")
    counts = {name: states.get(name, 0) for name in ("failing", "connected", "disabled")}
    return counts | {"total": sum(states.values())}


def is_busy(server: Server) -> bool:
    """Return whether a sync of the server is running or due."""
    now = timezone.now()
    due = server.sync_due_at is not None and server.sync_due_at <= now
    leased = server.sync_lease_until is not None and server.sync_lease_until > now
    return server.enabled and (due or leased)


def newest_runs(server_ids: Iterable[int]) -> dict[int, SyncRun]:
    """Fetch the newest run of each server, in two queries."""
    newest = (
        SyncRun.objects.filter(server_id__in=list(server_ids))
        .order_by()
        .values("server_id")
        .annotate(newest=Max("pk"))
        .values_list("newest", flat=True)
    )
    return {run.server_id: run for run in SyncRun.objects.filter(pk__in=list(newest))}


def progress_row(server: Server, run: SyncRun | None) -> TemplateContext:
    row: TemplateContext = {"server": server, "stage": "connecting", "ended": "", "note": ""}
    if not server.enabled:
        return row | {"stage": "", "ended": "disabled", "note": "Added as disabled."}
    running = run is not None and run.outcome == SyncRun.Outcome.RUNNING
    if is_busy(server) or run is None or running:
        if run is not None and running:
            return row | {"stage": run.phase}
        due = server.sync_due_at
        late = due is not None and timezone.now() - due > QUEUE_NOTICE_DELAY
        return row | {"note": "Waiting for a free worker." if late else ""}
    if run.outcome in APPLIED:
        count, tokens = server.tool_count, server.token_sum  # type: ignore[attr-defined]
        note = f"{plural(count, 'tool')} · ≈{plural(tokens, 'token')}"
        return row | {"stage": "done", "ended": "done", "note": note}
    cause = server.state_cause if server.state == ServerState.FAILING else run.error
    return row | {"stage": run.phase, "ended": "failed", "note": cause, "detail": run.detail}


def summarize_changes(run: SyncRun) -> str:
    """Summarize a run: "+2 tools, 1 changed, 0 missing, 1 rejected"."""
    return (
        f"+{plural(run.added, 'tool')}, {run.changed:,} changed, "
        f"{run.removed:,} missing, {run.rejected:,} rejected"
    )


def run_row(run: SyncRun) -> TemplateContext:
    finished = run.outcome in APPLIED
    sections = {"Added": "added", "Changed": "changed", "Missing": "removed"}
    phase = f"{PHASE_LABELS.get(run.phase, run.phase)}…"
    return {
        "run": run,
        "outcome_label": OUTCOME_LABELS.get(run.outcome, run.outcome),
        "summary": summarize_changes(run) if finished else run.error or phase,
        "finished": finished,
        "trigger": TRIGGER_LABELS.get(run.trigger, run.trigger),
        "sections": [
            (label, tools) for label, key in sections.items() if (tools := run.names.get(key))
        ],
        "rejections": run.names.get("rejected") or [],
    }


def format_server_info(server: Server) -> str:
    info = server.server_info
    name, version, title = (str(info.get(key) or "") for key in ("name", "version", "title"))
    name_and_version = f"{name} {version}".strip()
    return f"{name_and_version} ({title})" if title and title != name else name_and_version


def sum_costs(servers: Iterable[int]) -> TemplateContext:
    """Return the tool count of these servers, and the tokens to preload all their tools."""
    tools = Tool.objects.servable().filter(server_id__in=list(servers))
    return tools.aggregate(tools=Count("pk"), tokens=Coalesce(Sum("approved__tokens"), 0))


def overview_numbers(server: Server) -> list[TemplateContext]:
    tools = Tool.objects.filter(server=server)
    tools_url = reverse("tools") + f"?server={server.slug}"
    count, tokens = server.tool_count, server.token_sum  # type: ignore[attr-defined]
    numbers = [
        {"label": "Tools", "value": count, "url": tools_url},
        {"label": "Tokens (all preloaded)", "value": tokens, "approximate": True},
    ]
    if pending := tools.waiting().count():
        pending_url = f"{tools_url}&state=waiting"
        numbers.append({"label": "Pending review", "value": pending, "url": pending_url})
    return numbers


def tool_list(server: Server) -> TemplateContext:
    """Fetch a server's tools by descending cost, missing tools last."""
    rows = (
        Tool.objects.filter(server=server)
        .select_related("approved", "latest")
        .annotate(is_missing=Case(When(state=ToolState.MISSING, then=1), default=0))
        .order_by("is_missing", F("approved__tokens").desc(nulls_last=True), "public_name")
    )
    tools = list(rows[:MAX_TOOLS])
    return {
        "tools": tools,
        "max_tokens": max((tool.definition.tokens for tool in tools if tool.definition), default=0),
        "more": rows.count() - len(tools),
        # Of other transports it is assumed, since a connection there costs no process.
        "asks_users": ASKS in server.capabilities and server.transport == Transport.STDIO,
    }


FEATURE_LABELS = {"prompt": "Prompt", "resource": "Resource", "template": "Resource template"}


def feature_list(server: Server) -> TemplateContext:
    """Fetch a server's prompts and resources, with how often agents used each."""
    rows = server.features.order_by("kind", "position")
    features = list(rows[:MAX_TOOLS])
    cached = {feature.feature_id: feature.name for feature in features_of(server.slug, features)}
    used = Call.objects.filter(server=server, path__in=(CallPath.PROMPT, CallPath.RESOURCE))
    uses = dict(used.values_list("tool_name").annotate(number=Count("pk")).order_by())
    return {
        "features": [
            {
                "kind": FEATURE_LABELS[row.kind],
                "name": cached[row.pk],
                "key": row.key,
                "description": json.loads(row.body).get("description") or "",
                "uses": uses.get(cached[row.pk][:200], 0),
            }
            for row in features
        ],
        "more_features": rows.count() - len(features),
    }


def sync_history(server: Server, after: str) -> TemplateContext:
    runs = server.sync_runs.order_by("-pk")
    if after.isascii() and after.isdigit():
        runs = runs.filter(pk__lt=min(int(after), 2**62))
    page, next_cursor = cut_page(runs, RUNS_PER_PAGE, lambda run: str(run.pk))
    rows = [run_row(run) for run in page]
    return {"rows": rows, "next_cursor": next_cursor, "first_page": not after}


def describe_outcome(server: Server, run: SyncRun | None) -> str:
    """Return the screen reader announcement for the end of a sync."""
    if run is None or run.outcome == SyncRun.Outcome.RUNNING:
        return f"{server.name}: no sync is running."
    if run.outcome in APPLIED:
        return f"{server.name} synced: {summarize_changes(run)}."
    return f"Sync of {server.name} failed: {run.error}"


def describe_progress(row: TemplateContext) -> str:
    """Return the screen reader announcement for a finished row of the progress page."""
    outcome = "failed: " if row["ended"] == "failed" else ""
    return f"{row['server'].name} {outcome}{row['note'].rstrip('.')}."


def form_errors(form: BaseForm) -> list[str]:
    errors = [str(error) for error in form.non_field_errors()]
    for bound in form.visible_fields():
        errors += [f"{bound.label}: {error}" for error in bound.errors]
    return errors
