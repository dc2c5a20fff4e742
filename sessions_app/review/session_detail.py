"""Detail queries of one session: context meter, fork tree, adjacent sessions, selected step."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from django.db import connection
from django.db.models import Q

from sessions_app.models import AgentSession, EventKind
from sessions_app.review.queries import TimelineRow
from sessions_app.usage.filters import FAILED_STATES
from toolcrib.lib import charts

METER_STEPS = 5_000  # steps read for the meter
METER_POINTS = 320  # steps drawn
MAX_FORK_DEPTH = 6  # generations, up and down
MAX_FORKS = 100
FAILED_STATUSES = ("error", "rejected", "changed")  # pills of steps that did not succeed


def context_meter(session: AgentSession) -> dict[str, Any] | None:
    """Return the chart of the tokens in context after each step; None if no step added any."""
    added = list(session.events.order_by("pk").values_list("tokens", flat=True)[:METER_STEPS])
    if not any(added):
        return None
    context = list(accumulate(added))
    stride = -(-len(context) // METER_POINTS)
    points = [
        context[min(start + stride, len(context)) - 1] for start in range(0, len(context), stride)
    ]
    budget = session.agent.budget
    return {
        "chart": charts.step_line(points, limit=budget),
        "steps": len(context),
        "summary": _summarize(session, added, budget),
        "budget": budget,
    }


def _summarize(session: AgentSession, added: Sequence[int], budget: int | None) -> str:
    largest = max(added)
    step = added.index(largest) + 1
    summary = (
        f"≈{sum(added):,} tokens in context at the end; step {step} added the most (≈{largest:,})."
    )
    if budget is None:
        return summary
    loaded = session.tokens_loaded
    if loaded > budget:
        return f"{summary} Loaded definitions use ≈{loaded:,}, over the budget of ≈{budget:,}."
    return f"{summary} Loaded definitions use ≈{loaded:,} of the ≈{budget:,} budget."


@dataclass(frozen=True)
class Branch:
    """A session in the fork tree."""

    session: AgentSession
    is_current: bool
    forks: list["Branch"] = field(default_factory=list)


# The ancestors of a session, then the descendants of the oldest, level by level.
FORK_TREE_SQL = """
    WITH RECURSIVE up(id, parent_id, level) AS (
        SELECT id, parent_id, 0 FROM sessions_app_agentsession WHERE id = %s
        UNION ALL
        SELECT parent.id, parent.parent_id, up.level + 1
        FROM sessions_app_agentsession parent JOIN up ON parent.id = up.parent_id
        WHERE up.level < %s
    ),
    down(id, level) AS (
        SELECT id, 0 FROM up WHERE level = (SELECT MAX(level) FROM up)
        UNION ALL
        SELECT fork.id, down.level + 1
        FROM sessions_app_agentsession fork JOIN down ON fork.parent_id = down.id
        WHERE down.level < %s
    )
    SELECT id FROM down ORDER BY level, id LIMIT %s
"""


def fork_tree(session: AgentSession) -> Branch | None:
    """Return the fork tree from a session's oldest ancestor; None if it has no forks."""
    with connection.cursor() as cursor:
        cursor.execute(FORK_TREE_SQL, [session.pk, MAX_FORK_DEPTH, 2 * MAX_FORK_DEPTH, MAX_FORKS])
        keys = [pk for (pk,) in cursor.fetchall()]
    rows = AgentSession.objects.filter(pk__in=keys).select_related("agent").order_by("pk")
    branches = {row.pk: Branch(row, is_current=row.pk == session.pk) for row in rows}
    for pk, branch in branches.items():
        if pk != keys[0] and branch.session.parent_id in branches:
            branches[branch.session.parent_id].forks.append(branch)
    return branches[keys[0]] if len(branches) > 1 else None


def adjacent_sessions(session: AgentSession) -> tuple[AgentSession | None, AgentSession | None]:
    """Return the sessions opened before and after this one."""
    rows = AgentSession.objects.only("session_id")
    previous = rows.filter(pk__lt=session.pk).order_by("-pk").first()
    return previous, rows.filter(pk__gt=session.pk).order_by("pk").first()


def select_step(rows: Sequence[TimelineRow], number: int) -> TimelineRow | None:
    """Return the step with this number, else the first failed step, else the first step."""
    steps = [row for row in rows if row.step]
    requested = (row for row in steps if row.step and row.step.number == number)
    failed = (row for row in steps if row.status in FAILED_STATUSES)
    return next(requested, None) or next(failed, None) or next(iter(steps), None)


def next_failed_step(
    session: AgentSession, rows: Sequence[TimelineRow], after: TimelineRow | None
) -> int | None:
    """Return the number of the next failed step, on this page or a later one."""
    number = after.step.number if after and after.step else 0
    steps = [row.step for row in rows if row.step and row.status in FAILED_STATUSES]
    on_page = next((step.number for step in steps if step.number > number), None)
    last = next((row.step for row in reversed(rows) if row.step), None)
    if on_page is not None or last is None:
        return on_page
    failed = Q(call__is_error=True) | Q(call__state__in=FAILED_STATES)
    calls = session.events.filter(kind__in=[EventKind.CALLED, EventKind.REFUSED])
    later = calls.filter(failed, pk__gt=last.event.id).order_by("pk").first()
    return session.events.filter(pk__lte=later.pk).count() if later else None


def add_lanes(rows: Sequence[TimelineRow]) -> list[TimelineRow]:
    """Return the rows with each step's bar on the page's time axis, which skips idle gaps."""
    spans: list[tuple[float, float]] = []
    idle = 0.0
    for row in rows:
        if row.gap:
            idle += row.gap.seconds
        elif row.step:
            duration = (row.step.event.until - row.step.event.at).total_seconds()
            spans.append((row.offset - idle, row.offset - idle + max(duration, 0.0)))
    lanes = iter(charts.lanes(spans))
    return [row if row.gap else replace(row, lane=next(lanes)) for row in rows]
