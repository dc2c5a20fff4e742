"""Agent queries: the list, one agent's groups and keys, an example tool for snippets."""

from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db.models import Count, IntegerField, Max, OuterRef, Q, QuerySet, Subquery, Sum
from django.db.models.functions import Coalesce
from django.utils import timezone

from catalog.groups import board
from catalog.models import CallPolicy, Membership, Tool
from sessions_app.agents import api_keys, snippets
from sessions_app.models import Agent, AgentSession, ApiKey, SessionState
from toolcrib.lib.errors import NotFound

DAY = timedelta(hours=24)
EXAMPLE_CANDIDATES = 50


def find_agent(name: str, *, with_counts: bool = True) -> Agent:
    """Return the agent of this name. Raises NotFound."""
    agents = agents_with_counts() if with_counts else Agent.objects.all()
    agent = agents.filter(name=name).first() if name.isprintable() else None
    if agent is None:
        raise NotFound("Agent not found.", hint="Check the name in the list of agents.")
    return agent


def agents_with_counts() -> QuerySet[Agent]:
    """Agents with valid keys, last use, open sessions and sessions of the last 24 hours."""
    now = timezone.now()
    valid = Q(revoked_at=None) & (Q(expires_at=None) | Q(expires_at__gt=now))
    keys = ApiKey.objects.filter(agent=OuterRef("pk")).order_by().values("agent")
    sessions = AgentSession.objects.filter(agent=OuterRef("pk")).order_by().values("agent")
    return Agent.objects.prefetch_related("group_links__group").annotate(
        key_count=_count(keys.filter(valid)),
        last_seen_at=Subquery(keys.annotate(at=Max("last_used_at")).values("at")),
        open_count=_count(sessions.filter(state=SessionState.OPEN)),
        day_count=_count(sessions.filter(created_at__gte=now - DAY)),
    )


def deleted_agents(limit: int = 100) -> list[Agent]:
    """List the deleted agents, newest first, with the calls of their stored sessions."""
    rows = Agent.with_deleted.exclude(deleted_at=None).order_by("-deleted_at")
    return list(rows.annotate(call_count=Coalesce(Sum("sessions__calls"), 0))[:limit])


def _count(rows: QuerySet[Any, Any]) -> Coalesce:
    number = Subquery(
        rows.annotate(number=Count("pk")).values("number"), output_field=IntegerField()
    )
    return Coalesce(number, 0)


def groups_of(agent: Agent) -> dict[str, Any]:
    """Return the agent's groups in order with their token costs, and the groups it lacks."""
    by_id = {group.pk: (group, cost) for group, cost in board.list_groups_with_costs()}
    links = [link.group_id for link in agent.group_links.all()]
    if agent.all_groups:
        links = list(by_id)
    groups = [by_id.pop(pk) for pk in links if pk in by_id]
    return {
        "groups": groups,
        "other_groups": list(by_id.values()),
        "start_tokens": sum(cost.at_start for _, cost in groups),
        "preload_tokens": sum(cost.preload for _, cost in groups),
        "loadable_tokens": sum(cost.rest for _, cost in groups),
        "max_group_tokens": max((cost.at_start + cost.rest for _, cost in groups), default=0),
    }


def keys_of(agent: Agent) -> list[dict[str, Any]]:
    """List an agent's keys with their state, active keys first."""
    now = timezone.now()
    rows = [{"key": key, "state": key_state(key, now)} for key in agent.keys.all()]
    return sorted(rows, key=lambda row: row["state"] != "active")


def key_state(key: ApiKey, now: datetime) -> str:
    if key.revoked_at:
        return "revoked"
    return "active" if api_keys.is_valid(key, now) else "expired"


def connection_snippets(agent: Agent, key: str = snippets.KEY_PLACEHOLDER) -> dict[str, Any]:
    """Return the snippets, and whether they use a placeholder because the agent has no tools."""
    example = _example_of(agent)
    return {
        "snippets": snippets.for_agent(settings.PUBLIC_URL, key, example=example),
        "placeholder_tool": example is None,
    }


def _example_of(agent: Agent) -> snippets.Example | None:
    """Choose one of the agent's tools for the snippets, preferably a read-only one."""
    members = Membership.objects.select_related("group", "tool__approved").filter(
        tool__in=Tool.objects.servable().filter(call_policy=CallPolicy.ALLOW)
    )
    if agent.all_groups:
        members = members.order_by("group__position", "group__group_id", "position", "tool__name")
    else:
        members = members.filter(group__agent_links__agent=agent)
        members = members.order_by("group__agent_links__position", "position", "tool__name")
    member = min(members[:EXAMPLE_CANDIDATES], key=_risk, default=None)
    if member is None or member.tool.approved is None:
        return None
    return snippets.Example(
        query=member.tool.name.replace("_", " ").replace("-", " "),
        group_id=member.group.group_id,
        tool_name=member.tool.public_name,
        arguments=snippets.sample_arguments(member.tool.approved.input_schema),
    )


def _risk(member: Membership) -> int:
    """Rank a tool by its annotations: read-only, not annotated, destructive."""
    annotations = member.tool.approved.annotations if member.tool.approved else {}
    if annotations.get("readOnlyHint") is True:
        return 0
    return 2 if annotations.get("destructiveHint") is True else 1


def find_session_at(agent: Agent, moment: datetime) -> AgentSession | None:
    """Return the newest session that the agent had opened by then: it has what the agent saw."""
    rows = AgentSession.objects.with_catalog().filter(agent=agent, created_at__lte=moment)
    return rows.order_by("-pk").first()
