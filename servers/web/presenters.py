"""What the servers' pages show: rows with counts and costs, how far a sync is, a run in words.

Reads only. The number of queries does not depend on the number of servers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Case, Count, F, Max, Q, QuerySet, Sum, When
from django.db.models.functions import Coalesce
from django.forms import BaseForm
from django.urls import reverse
from django.utils import timezone

from catalog.models import Tool, ToolState
from servers.models import Server, ServerState, SyncRun, Transport
from sessions_app.usage import call_stats
from toolcrib.lib.pagination import Page, offset_of, page_by_offset

PAGE = 100
TOOLS = 200
RUNS = 50
# Late enough to say so: a free worker takes a sync within a second.
QUEUED_LONG = timedelta(seconds=10)
SORTS: dict[str, list[Any]] = {
    "name": ["name", "slug"],
    "state": ["state", "slug"],
    "tools": ["tool_count", "slug"],
    "tokens": ["token_sum", "slug"],
    "synced": [F("last_synced_at").asc(nulls_first=True), "slug"],
    "-synced": [F("last_synced_at").desc(nulls_last=True), "slug"],
}
TRIGGERS = {
    "added": "after it was added",
    "manual": "asked for by a person",
    "list_changed": "the server said its list changed",
    "schedule": "on schedule",
}
Shown = dict[str, Any]


def with_costs(rows: QuerySet[Server]) -> QuerySet[Server]:
    """Annotate tools on offer and what it would cost to preload them all."""
    servable = Q(tools__state__in=[ToolState.AVAILABLE, ToolState.WAITING])
    return rows.annotate(
        tool_count=Count("tools", filter=~Q(tools__state=ToolState.MISSING)),
        token_sum=Coalesce(Sum("tools__approved__tokens", filter=servable), 0),
    )


# --- The list -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerFilter:
    """What the address asks for; unknown words are left out."""

    states: tuple[str, ...]
    transports: tuple[str, ...]
    query: str
    sort: str
    start: int

    @classmethod
    def of(cls, query: Any) -> "ServerFilter":
        sort = query.get("sort", "")
        return cls(
            states=tuple(s for s in query.getlist("state") if s in ServerState.values),
            transports=tuple(t for t in query.getlist("transport") if t in Transport.values),
            query=query.get("q", "").replace("\0", "").strip()[:200],
            sort=sort if sort.removeprefix("-") in SORTS else "name",
            start=offset_of(query, PAGE),
        )

    @property
    def filtered(self) -> bool:
        return bool(self.states or self.transports or self.query)

    def pick(self, rows: QuerySet[Server]) -> QuerySet[Server]:
        if self.states:
            rows = rows.filter(state__in=self.states)
        if self.transports:
            rows = rows.filter(transport__in=self.transports)
        if self.query:
            named = Q(name__icontains=self.query) | Q(slug__icontains=self.query)
            rows = rows.filter(named | Q(url__icontains=self.query))
        return rows

    def order(self, rows: QuerySet[Server]) -> QuerySet[Server]:
        if self.sort in SORTS:
            return rows.order_by(*SORTS[self.sort])
        return rows.order_by(*(f"-{key}" for key in SORTS[self.sort.removeprefix("-")]))


def listing(wanted: ServerFilter) -> Shown:
    """Fetch one page of servers with its facets and totals."""
    picked = wanted.pick(Server.objects.all())
    page: Page[Server] = page_by_offset(
        wanted.order(with_costs(picked)), wanted.start, PAGE, total=picked.count()
    )
    calls = call_stats.of_servers([server.pk for server in page.rows])
    rows: list[Shown] = [
        {"server": server, "busy": is_busy(server), "calls": calls.get(server.pk)}
        for server in page.rows
    ]
    return {
        "rows": rows,
        "dearest": max((row["server"].token_sum for row in rows), default=0),
        "busy": any(row["busy"] for row in rows),
        "found": page.total,
        "wanted": wanted,
        "shown": page.says("server"),
        "paged": page.total > PAGE,
        "next_cursor": page.next_cursor,
        "previous_cursor": page.previous_cursor,
    }


def facets(wanted: ServerFilter) -> list[Shown]:
    states = _counts("state")
    transports = _counts("transport")
    return [
        _facet("state", "State", ServerState.values, states, wanted.states),
        _facet("transport", "Transport", Transport.values, transports, wanted.transports),
    ]


def _counts(field: str) -> dict[str, int]:
    rows = Server.objects.order_by().values(field).annotate(count=Count("pk"))
    return {row[field]: row["count"] for row in rows}


def _facet(
    name: str, label: str, values: Iterable[str], counts: Mapping[str, int], chosen: Sequence[str]
) -> Shown:
    options = [
        {
            "value": value,
            "label": value if name == "transport" else value.capitalize(),
            "count": counts.get(value, 0),
            "selected": value in chosen,
        }
        for value in values
        if counts.get(value) or value in chosen
    ]
    return {"name": name, "label": label, "options": options}


def health() -> Shown:
    """Count servers by how they do, for the line under the title."""
    states = _counts("state")
    return {
        "total": sum(states.values()),
        "failing": states.get(ServerState.FAILING, 0),
        "connected": states.get(ServerState.CONNECTED, 0),
        "disabled": states.get(ServerState.DISABLED, 0),
    }


# --- Running syncs ------------------------------------------------------------------------------


def is_busy(server: Server, now: datetime | None = None) -> bool:
    """Say whether a sync of the server runs or is about to."""
    now = now or timezone.now()
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


def progress_of(server: Server, run: SyncRun | None) -> Shown:
    """Say how far a server's sync is. `server` comes from `with_costs`."""
    row: Shown = {"server": server, "stage": "connecting", "ended": "", "note": ""}
    if not server.enabled:
        return row | {"stage": "", "ended": "disabled", "note": "Added, and left disabled."}
    running = run is not None and run.outcome == SyncRun.Outcome.RUNNING
    if is_busy(server) or run is None or running:
        if run is not None and running:
            return row | {"stage": run.phase}
        asked = server.sync_due_at
        late = asked is not None and timezone.now() - asked > QUEUED_LONG
        return row | {"note": "Waiting for a free worker." if late else ""}
    if run.outcome in (SyncRun.Outcome.OK, SyncRun.Outcome.HELD):
        count, tokens = server.tool_count, server.token_sum  # type: ignore[attr-defined]
        note = f"{count:,} tool{'' if count == 1 else 's'} · ≈{tokens:,} tokens"
        return row | {"stage": "done", "ended": "done", "note": note}
    return row | {"stage": run.phase, "ended": "failed", "note": run.error, "detail": run.detail}


def counted_words(run: SyncRun) -> str:
    """Say what a run did: +2 tools, 1 changed, 0 missing, 1 rejected."""
    return (
        f"+{run.added:,} tool{'' if run.added == 1 else 's'}, {run.changed:,} changed, "
        f"{run.removed:,} missing, {run.rejected:,} rejected"
    )


def run_row(run: SyncRun) -> Shown:
    """Lay out one run for the history: its sentence, and the names to open."""
    finished = run.outcome in (SyncRun.Outcome.OK, SyncRun.Outcome.HELD)
    names: Mapping[str, Any] = run.names if isinstance(run.names, dict) else {}
    sections = [
        ("Added", names.get("added") or []),
        ("Changed", names.get("changed") or []),
        ("Missing", names.get("removed") or []),
    ]
    stage = {"connecting": "Connecting", "listing": "Listing tools", "saving": "Saving"}
    words = counted_words(run) if finished else run.error or f"{stage.get(run.phase, run.phase)}…"
    return {
        "run": run,
        "words": words,
        "counted": finished,
        "trigger": TRIGGERS.get(run.trigger, run.trigger),
        "sections": [(label, listed) for label, listed in sections if listed],
        "rejections": names.get("rejected") or [],
    }


# --- One server ---------------------------------------------------------------------------------


def claims(server: Server) -> str:
    """Write on one line what the server says it is."""
    info = server.server_info if isinstance(server.server_info, dict) else {}
    name, version, title = (str(info.get(key) or "") for key in ("name", "version", "title"))
    named = f"{name} {version}".strip()
    return f"{named} ({title})" if title and title != name else named


def describe_cost(servers: Iterable[int]) -> Shown:
    """Sum what an agent would pay with every tool of these servers in its first catalog."""
    tools = Tool.objects.servable().filter(server_id__in=list(servers))
    found = tools.aggregate(tools=Count("pk"), tokens=Coalesce(Sum("approved__tokens"), 0))
    return {"tools": found["tools"], "tokens": found["tokens"]}


def numbers(server: Server) -> list[Shown]:
    tools = Tool.objects.filter(server=server)
    waiting = tools.waiting().count()
    listed = reverse("tools") + f"?server={server.slug}"
    found = [
        {"label": "Tools", "value": server.tool_count, "url": listed},  # type: ignore[attr-defined]
        {
            "label": "Tokens if all were preloaded",
            "value": server.token_sum,  # type: ignore[attr-defined]
            "approximate": True,
        },
    ]
    if waiting:
        link = f"{listed}&state=waiting"
        found.append({"label": "Waiting for approval", "value": waiting, "url": link})
    return found


def tools_of(server: Server) -> Shown:
    """Fetch a server's tools, dearest first, missing ones last."""
    rows = (
        Tool.objects.filter(server=server)
        .select_related("approved", "latest")
        .annotate(gone=Case(When(state=ToolState.MISSING, then=1), default=0))
        .order_by("gone", F("approved__tokens").desc(nulls_last=True), "public_name")
    )
    found = list(rows[:TOOLS])
    return {
        "found": found,
        "dearest": max((tool.definition.tokens for tool in found if tool.definition), default=0),
        "more": rows.count() - len(found),
    }


def history(server: Server, after: str) -> Shown:
    """Fetch one page of a server's runs, newest first."""
    runs = server.sync_runs.order_by("-pk")
    if after.isascii() and after.isdigit():
        runs = runs.filter(pk__lt=min(int(after), 2**62))
    found = list(runs[: RUNS + 1])
    return {
        "rows": [run_row(run) for run in found[:RUNS]],
        "next_cursor": str(found[RUNS - 1].pk) if len(found) > RUNS else None,
        "first_page": not after,
    }


def describe_outcome(server: Server, run: SyncRun | None) -> str:
    """Say the end of a sync, for those who hear the page."""
    if run is None or run.outcome == SyncRun.Outcome.RUNNING:
        return f"{server.name}: no sync runs."
    if run.outcome in (SyncRun.Outcome.OK, SyncRun.Outcome.HELD):
        return f"{server.name} is synced: {counted_words(run)}."
    return f"The sync of {server.name} failed: {run.error}"


def describe_seconds(row: Shown) -> str:
    end = "failed: " if row["ended"] == "failed" else ""
    return f"{row['server'].name} {end}{row['note'].rstrip('.')}."


def form_errors(form: BaseForm) -> list[str]:
    """List a form's errors as sentences that name their field."""
    found = [str(error) for error in form.non_field_errors()]
    for bound in form.visible_fields():
        found += [f"{bound.label}: {error}" for error in bound.errors]
    return found


def settings_rows(server: Server, form: BaseForm) -> list[Shown]:
    """List the settings as words, for those who may look and not change."""
    rows = []
    for bound in form.visible_fields():
        value = getattr(server, bound.name)
        choices = dict(getattr(bound.field, "choices", ()))
        rows.append({"label": bound.label, "value": choices.get(value, value)})
    return rows
