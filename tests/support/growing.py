"""Give the things of a filled database more of everything that belongs to them."""

import random
from typing import Any

from django.contrib.auth.models import User
from django.utils import timezone

from catalog.models import DefinitionChange, Group, Membership, Tool
from servers.models import Server, SyncRun
from sessions_app.models import Agent, AgentGroup, AgentSession, ApiKey
from tests.support.seeding import add_calls, add_golden, sync_run
from toolcrib.lib.json_codec import digest


def grow(examples: dict[str, Any]) -> None:
    """Give the things on the example pages more of everything that belongs to them."""
    tool = Tool.objects.get(public_name=examples["public_name"])
    server = Server.objects.get(slug=examples["slug"])
    group = Group.objects.get(group_id=examples["group_id"])
    agent = Agent.objects.get(name=examples["name"])
    run = AgentSession.objects.get(session_id=examples["session_id"])
    members = Tool.objects.exclude(memberships__group=group)
    Membership.objects.bulk_create(Membership(group=group, tool=one) for one in members)
    others = Group.objects.exclude(agents=agent)
    AgentGroup.objects.bulk_create(AgentGroup(agent=agent, group=one) for one in others)
    for one in Group.objects.exclude(tools=tool):
        Membership.objects.create(group=one, tool=tool)
    now = timezone.now()
    SyncRun.objects.bulk_create(sync_run(server) for _ in range(9))
    DefinitionChange.objects.bulk_create(
        DefinitionChange(tool=tool, before=None, after=tool.latest, at=now, outcome="approved")
        for _ in range(9)
    )
    Tool.objects.filter(server__slug__startswith="server2").update(server=server)
    add_calls(40, [run], list(Tool.objects.select_related("server")), random.Random(3))  # noqa: S311
    _fork(run, list(AgentSession.objects.exclude(pk=run.pk)[:9]))
    ApiKey.objects.bulk_create(
        ApiKey(name=f"key {at}", prefix="tcb_", sha256=digest(f"{at}"), scope="agent", agent=agent)
        for at in range(9)
    )
    User.objects.bulk_create(User(username=f"person{at}@example.org") for at in range(9))
    add_golden([tool])


def _fork(run: AgentSession, others: list[AgentSession]) -> None:
    """Put a session under two generations, with forks of its own and of these."""
    oldest, parent, *children = others
    parents = {parent: oldest, run: parent, **dict.fromkeys(children, run), children[0]: oldest}
    for session, above in parents.items():
        session.parent = above
        session.save(update_fields=["parent"])
