"""Read agents for people: the list, one agent's groups and keys, an example to try.

Reads only, each page in a fixed number of queries however many agents there are.
"""

from datetime import datetime, timedelta
from typing import Any

from django.db.models import Count, IntegerField, Max, OuterRef, Q, QuerySet, Subquery
from django.db.models.functions import Coalesce
from django.forms import BaseForm
from django.utils import timezone

from catalog.groups import board
from catalog.models import CallPolicy, Membership, Tool
from sessions_app.agents import api_keys, snippets
from sessions_app.models import Agent, AgentSession, ApiKey, SessionState
from toolcrib.lib.pagination import Page, page_by_offset

DAY = timedelta(hours=24)
LOOKED_AT = 50  # tools among which an example is chosen


def rows() -> QuerySet[Agent]:
    """Agents with their good keys, last use, open sessions and sessions of 24 hours."""
    now = timezone.now()
    good = Q(revoked_at=None) & (Q(expires_at=None) | Q(expires_at__gt=now))
    its_keys = ApiKey.objects.filter(agent=OuterRef("pk")).order_by().values("agent")
    sessions = AgentSession.objects.filter(agent=OuterRef("pk")).order_by().values("agent")
    return Agent.objects.prefetch_related("group_links__group").annotate(
        key_count=_count(its_keys.filter(good)),
        last_seen_at=Subquery(its_keys.annotate(at=Max("last_used_at")).values("at")),
        open_count=_count(sessions.filter(state=SessionState.OPEN)),
        day_count=_count(sessions.filter(created_at__gte=now - DAY)),
    )


def _count(found: QuerySet[Any, Any]) -> Coalesce:
    number = Subquery(
        found.annotate(number=Count("pk")).values("number"), output_field=IntegerField()
    )
    return Coalesce(number, 0)


def page(offset: int) -> Page[Agent]:
    return page_by_offset(rows(), offset, total=Agent.objects.count())


def group_names(agent: Agent) -> list[str]:
    """Return the ids of the chosen groups from rows that were fetched with them."""
    return [link.group.group_id for link in agent.group_links.all()]


def groups_of(agent: Agent) -> dict[str, Any]:
    """Return the agent's groups in its order with what they cost, and those that could be added."""
    by_id = {group.pk: group for group in board.groups_with_costs()}
    links = [link.group_id for link in agent.group_links.all()]
    if agent.all_groups:
        links = list(by_id)
    chosen: list[Any] = [by_id.pop(one) for one in links if one in by_id]
    return {
        "groups": chosen,
        "others": list(by_id.values()),
        "preload": sum(group.preload_tokens for group in chosen),
        "rest": sum(group.rest_tokens for group in chosen),
        "dearest": max((group.all_tokens for group in chosen), default=0),
    }


def keys_of(agent: Agent) -> list[dict[str, Any]]:
    """List an agent's keys, good ones first, each with its state in a word."""
    now = timezone.now()
    listed = [{"key": key, "state": key_state(key, now)} for key in agent.keys.all()]
    return sorted(listed, key=lambda row: row["state"] != "active")


def key_state(key: ApiKey, now: datetime) -> str:
    if key.revoked_at:
        return "revoked"
    return "active" if api_keys.is_valid(key, now) else "expired"


def example_of(agent: Agent) -> snippets.Example | None:
    """Choose a tool of the agent's own to try, one that changes nothing where there is one."""
    members = Membership.objects.select_related("group", "tool__approved").filter(
        tool__in=Tool.objects.servable().filter(call_policy=CallPolicy.ALLOW)
    )
    if agent.all_groups:
        members = members.order_by("group__position", "group__group_id", "position", "tool__name")
    else:
        members = members.filter(group__agent_links__agent=agent)
        members = members.order_by("group__agent_links__position", "position", "tool__name")
    member = min(members[:LOOKED_AT], key=_risk, default=None)
    if member is None or member.tool.approved is None:
        return None
    return snippets.Example(
        query=member.tool.name.replace("_", " ").replace("-", " "),
        group_id=member.group.group_id,
        tool_name=member.tool.public_name,
        arguments=snippets.sample(member.tool.approved.input_schema),
    )


def _risk(member: Membership) -> int:
    """Rank a tool by what its server says of it: read-only, silent, destructive."""
    said = member.tool.approved.annotations if member.tool.approved else {}
    if said.get("readOnlyHint") is True:
        return 0
    return 2 if said.get("destructiveHint") is True else 1


def settings_rows(agent: Agent, form: BaseForm) -> list[dict[str, object]]:
    """List the settings as words, for those who may look and not change."""
    listed = []
    for bound in form.visible_fields():
        value = getattr(agent, bound.name)
        choices = dict(getattr(bound.field, "choices", ()))
        listed.append({"label": bound.label, "value": choices.get(value, value)})
    return listed
