"""Add related rows to a seeded database, for tests that page queries do not grow with rows."""

import random
from typing import Any

from django.contrib.auth.models import User
from django.utils import timezone

from catalog.models import DefinitionChange, Group, Membership, Tool
from servers.models import Server, SyncRun
from sessions_app.models import Agent, AgentGroup, AgentSession, ApiKey
from tests.support.seeding import add_calls, add_golden, sync_run
from toolcrib.lib.json_codec import digest


def add_related_rows(examples: dict[str, Any]) -> None:
    """Add related rows of every kind to the objects on the example pages."""
    tool = Tool.objects.get(public_name=examples["public_name"])
    server = Server.objects.get(slug=examples["slug"])
    group = Group.objects.get(group_id=examples["group_id"])
    agent = Agent.objects.get(name=examples["name"])
    session = AgentSession.objects.get(session_id=examples["session_id"])
    members = Tool.objects.exclude(memberships__group=group)
    Membership.objects.bulk_create(Membership(group=group, tool=member) for member in members)
    others = Group.objects.exclude(agents=agent)
    AgentGroup.objects.bulk_create(AgentGroup(agent=agent, group=other) for other in others)
    for other in Group.objects.exclude(tools=tool):
        Membership.objects.create(group=other, tool=tool)
    now = timezone.now()
    SyncRun.objects.bulk_create(sync_run(server) for _ in range(9))
    DefinitionChange.objects.bulk_create(
        DefinitionChange(tool=tool, before=None, after=tool.latest, at=now, outcome="approved")
        for _ in range(9)
    )
    Tool.objects.filter(server__slug__startswith="server2").update(server=server)
    add_calls(40, [session], list(Tool.objects.select_related("server")), random.Random(3))  # noqa: S311
    _add_forks(session, list(AgentSession.objects.exclude(pk=session.pk)[:9]))
    ApiKey.objects.bulk_create(
        ApiKey(name=f"key {at}", prefix="tcb_", sha256=digest(f"{at}"), scope="agent", agent=agent)
        for at in range(9)
    )
    User.objects.bulk_create(User(username=f"person{at}@example.org") for at in range(9))
    add_golden([tool])


def _add_forks(session: AgentSession, others: list[AgentSession]) -> None:
    """Give a session a parent, a grandparent, and forks."""
    oldest, parent, *children = others
    parents = {
        parent: oldest,
        session: parent,
        **dict.fromkeys(children, session),
        children[0]: oldest,
    }
    for child, its_parent in parents.items():
        child.parent = its_parent
        child.save(update_fields=["parent"])
