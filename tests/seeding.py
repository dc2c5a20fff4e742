"""Fill a database with made-up rows in bulk, for measures of pages. Same rows in every run."""

import random
from datetime import timedelta
from typing import Any

from django.contrib.auth.models import User
from django.utils import timezone

from catalog.canonical import canonical, digest
from catalog.models import (
    AuditEntry,
    CatalogSnapshot,
    Definition,
    DefinitionChange,
    Group,
    Membership,
    Tool,
    ToolState,
)
from catalog.people import Role, give_role
from servers.models import Server, SyncRun
from sessions_app.models import Agent, AgentGroup, AgentSession, ApiKey, Call, Event

BATCH = 500
VERBS = ("get", "list", "create", "update", "delete", "search", "export", "send")
NOUNS = ("issue", "forecast", "ticket", "invoice", "file", "page", "message", "report")
WORDS = ("newest", "entries", "project", "filtered", "label", "person", "day", "team", "region")


def admin() -> User:
    user, _ = User.objects.get_or_create(username="ada@example.org")
    give_role(user, Role.ADMIN)
    user.save()
    return user


def seed(*, tools: int, groups: int, calls: int, sessions: int, mark: str = "") -> dict[str, Any]:
    """Fill the database and return example ids for the addresses of its pages.

    `mark` tells the names of one filling from those of another.
    """
    dice = random.Random(7)  # noqa: S311 - made-up rows
    servers = _servers(max(1, min(100, tools // 100)), mark)
    rows = _tools(tools, servers, dice)
    Tool.objects.get_or_create(
        public_name="house_rules",
        defaults={"name": "house_rules", "approved": rows[0].approved, "latest": rows[0].approved},
    )
    made = _groups(groups, rows, dice, mark)
    agents = _agents(12, made, mark)
    runs = _sessions(sessions, agents, dice)
    _calls(calls, runs, rows, dice)
    _audit(min(calls, 2000), rows)
    return {
        "public_name": rows[0].public_name,
        "group_id": made[0].group_id,
        "slug": servers[0].slug,
        "name": agents[0].name,
        "session_id": runs[len(runs) // 2].session_id,
    }


def _servers(number: int, mark: str) -> list[Server]:
    now = timezone.now()
    servers = Server.objects.bulk_create(
        Server(
            slug=f"server{mark}-{at}",
            name=f"Server {at}",
            transport="http",
            url="http://127.0.0.1:9/mcp",
            state="failing" if at % 20 == 3 else "connected",
            state_reason="It refused the connection." if at % 20 == 3 else "",
            last_synced_at=now - timedelta(minutes=at),
        )
        for at in range(number)
    )
    SyncRun.objects.bulk_create(_sync(server) for server in servers for _ in range(3))
    return servers


def _sync(server: Server) -> SyncRun:
    now = timezone.now()
    return SyncRun(
        server=server,
        trigger="manual",
        outcome=SyncRun.Outcome.OK,
        fence=1,
        started_at=now,
        finished_at=now,
    )


def _tools(number: int, servers: list[Server], dice: random.Random) -> list[Tool]:
    definitions = []
    for at in range(number):
        name = f"{dice.choice(VERBS)}_{dice.choice(NOUNS)}_{at}_{servers[0].slug}"
        text = " ".join(dice.sample(WORDS, 8)) + "."
        fields = {word: {"type": "string", "description": text} for word in ("query", "limit")}
        body = canonical(
            {
                "name": name,
                "description": text,
                "inputSchema": {"type": "object", "properties": fields},
                "annotations": {"readOnlyHint": at % 3 == 0, "destructiveHint": at % 7 == 0},
            }
        )
        definitions.append(
            Definition(
                sha256=digest(body),
                name=name,
                body=body,
                tokens=len(body) // 4,
                search_text=f"{name} {text}",
            )
        )
    kept = Definition.objects.bulk_create(definitions, batch_size=BATCH)
    now = timezone.now()
    rows = Tool.objects.bulk_create(
        (
            Tool(
                server=servers[at % len(servers)],
                name=one.name,
                public_name=f"{servers[at % len(servers)].slug}__{one.name}"[:64],
                approved=one,
                latest=kept[at - 1] if at % 100 == 99 else one,
                state=ToolState.WAITING if at % 100 == 99 else ToolState.AVAILABLE,
                changed_at=now,
            )
            for at, one in enumerate(kept)
        ),
        batch_size=BATCH,
    )
    DefinitionChange.objects.bulk_create(
        (
            DefinitionChange(
                tool=tool, before=tool.approved, after=tool.latest, at=now, outcome="waiting"
            )
            for tool in rows
            if tool.state == ToolState.WAITING
        ),
        batch_size=BATCH,
    )
    return rows


def _groups(number: int, tools: list[Tool], dice: random.Random, mark: str) -> list[Group]:
    groups = Group.objects.bulk_create(
        Group(group_id=f"group{mark}-{at}", display_name=f"Group {at}", position=at)
        for at in range(number)
    )
    Membership.objects.bulk_create(
        (
            Membership(group=group, tool=tool, position=at, preload=at < 5 or None)
            for group in groups
            for at, tool in enumerate(dice.sample(tools, min(60, len(tools))))
        ),
        batch_size=BATCH,
    )
    return groups


def _agents(number: int, groups: list[Group], mark: str) -> list[Agent]:
    agents = Agent.objects.bulk_create(
        Agent(name=f"agent{mark}-{at}", all_groups=at == 1) for at in range(number)
    )
    AgentGroup.objects.bulk_create(
        AgentGroup(agent=agent, group=group, position=at)
        for agent in agents
        for at, group in enumerate(groups[:5])
    )
    ApiKey.objects.bulk_create(
        ApiKey(
            name="first",
            prefix=f"tcb_{agent.pk:04}",
            sha256=digest(agent.name),
            scope="agent",
            agent=agent,
        )
        for agent in agents
    )
    return agents


def _sessions(number: int, agents: list[Agent], dice: random.Random) -> list[AgentSession]:
    text = "Tools are in groups."
    snapshot, _ = CatalogSnapshot.objects.get_or_create(
        sha256=digest(text), defaults={"text": text, "body": "{}", "tokens": 5}
    )
    now = timezone.now()
    runs = []
    for at in range(number):
        started = now - timedelta(minutes=8 * (number - at))
        run = AgentSession(
            agent=agents[at % len(agents)],
            strategy="dispatch",
            mode="deferred",
            decided_by="count",
            snapshot=snapshot,
            revision=1,
            state="open" if at % 50 == 0 else "closed",
            last_used_at=started + timedelta(minutes=5),
            ended_at=None if at % 50 == 0 else started + timedelta(minutes=5),
            tokens_all=dice.randint(20_000, 90_000),
            tokens_catalog=900,
            tokens_load=dice.randint(100, 3000),
            calls=20,
            errors=dice.randint(0, 2),
        )
        runs.append(run)
    made = AgentSession.objects.bulk_create(runs, batch_size=BATCH)
    for run in made:
        run.created_at = run.last_used_at - timedelta(minutes=5)
    AgentSession.objects.bulk_update(made, ["created_at"], batch_size=BATCH)
    return made


def _calls(number: int, runs: list[AgentSession], tools: list[Tool], dice: random.Random) -> None:
    used = tools[: max(1, len(tools) // 4)]  # most tools are never called
    rows = []
    for at in range(number):
        run = runs[at % len(runs)]
        tool = used[int(len(used) * dice.random() ** 3)]
        moment = run.last_used_at - timedelta(seconds=dice.randint(0, 280))
        failed = dice.random() < 0.04
        rows.append(
            Call(
                session=run,
                agent_id=run.agent_id,
                tool=tool,
                tool_name=tool.public_name,
                server_id=tool.server_id,
                server_slug=tool.server.slug if tool.server else "",
                definition_id=tool.approved_id,
                arguments='{"query":"x"}',
                state="failed" if failed else "succeeded",
                is_error=failed,
                accepted_at=moment,
                sent_at=moment,
                finished_at=moment + timedelta(milliseconds=dice.randint(5, 2000)),
                deadline=moment + timedelta(minutes=1),
                tokens=dice.randint(20, 600),
                result_copy='{"content":[]}',
            )
        )
    calls = Call.objects.bulk_create(rows, batch_size=BATCH)
    _events(runs, calls)


def _events(runs: list[AgentSession], calls: list[Call]) -> None:
    def rows() -> Any:
        for at, run in enumerate(runs):
            yield Event(session=run, at=run.created_at, kind="opened", tokens=900)
            found = "[]" if at % 9 == 0 else '["a"]'
            words = f'{{"query":"find {at % 40}","hits":{found}}}'
            yield Event(session=run, at=run.created_at, kind="searched", details=words, tokens=80)
        for at, call in enumerate(calls):
            common = {"session_id": call.session_id, "at": call.accepted_at}
            if at % 4 == 0:
                yield Event(kind="loaded", tool_name=call.tool_name, tokens=210, **common)
            yield Event(kind="called", tool_name=call.tool_name, call=call, **common)

    Event.objects.bulk_create(rows(), batch_size=BATCH)


def _audit(number: int, tools: list[Tool]) -> None:
    AuditEntry.objects.bulk_create(
        (
            AuditEntry(
                actor_kind="user",
                actor_label="ada@example.org",
                verb="tool.hold",
                target_kind="tool",
                target_id=tools[at % len(tools)].pk,
                target_label=tools[at % len(tools)].public_name,
                after={"reason": "x"},
            )
            for at in range(number)
        ),
        batch_size=BATCH,
    )


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
    SyncRun.objects.bulk_create(_sync(server) for _ in range(9))
    DefinitionChange.objects.bulk_create(
        DefinitionChange(tool=tool, before=None, after=tool.latest, at=now, outcome="approved")
        for _ in range(9)
    )
    Tool.objects.filter(server__slug__startswith="server2").update(server=server)
    _calls(40, [run], list(Tool.objects.select_related("server")), random.Random(3))  # noqa: S311
