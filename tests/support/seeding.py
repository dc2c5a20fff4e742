"""Seed a database with generated rows in bulk, for page benchmarks. Deterministic."""

import random
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from django.contrib.auth.models import User
from django.utils import timezone

from catalog.models import (
    AuditEntry,
    CatalogSnapshot,
    Definition,
    DefinitionChange,
    GoldenQuery,
    GoldenResult,
    Group,
    Membership,
    Tool,
    ToolHint,
    ToolState,
)
from servers.models import Server, StateChange, SyncRun
from sessions_app.models import (
    Agent,
    AgentGroup,
    AgentSession,
    ApiKey,
    Call,
    Event,
    Expansion,
    Rule,
    ScriptRun,
)
from sessions_app.usage import rollups
from tests.support.factories import make_event, make_run
from toolcrib.lib.json_codec import canonical, digest
from toolcrib.lib.roles import Role, give_role

BATCH = 500
CALLS_AT_ONCE = 20_000  # kept in memory
DAYS = 90  # over which many sessions are spread
VERBS = ("get", "list", "create", "update", "delete", "search", "export", "send")
NOUNS = ("issue", "forecast", "ticket", "invoice", "file", "page", "message", "report")
WORDS = ("newest", "entries", "project", "filtered", "label", "person", "day", "team", "region")


def make_admin() -> User:
    user, _ = User.objects.get_or_create(username="ada@example.org")
    give_role(user, Role.ADMIN)
    user.save()
    return user


def seed(*, tools: int, groups: int, calls: int, sessions: int, suffix: str = "") -> dict[str, Any]:
    """Seed the database and return example ids for the URLs of its pages.

    The first server has a tenth of the tools, the first group contains all of them, and the example
    session is the longest. `suffix` keeps the names of two seedings apart.
    """
    dice = random.Random(7)  # noqa: S311 - made-up rows
    servers = _servers(max(8, min(100, tools // 100)), suffix)
    rows = _tools(tools, servers, dice)
    Tool.objects.get_or_create(
        public_name="house_rules",
        defaults={"name": "house_rules", "approved": rows[0].approved, "latest": rows[0].approved},
    )
    group_rows = _groups(groups, rows, dice, suffix)
    agents = _agents(12, group_rows, suffix)
    _rules(agents, group_rows, suffix)
    runs = _sessions(sessions, agents, rows, dice)
    add_calls(calls - calls // 100, runs, rows, dice)
    longest = runs[len(runs) // 2]
    add_calls(calls // 100, [longest], rows, dice)
    _audit(min(calls // 4, 20_000), rows, group_rows)
    add_golden(rows[1:2] if tools < 100 else rows[1:100])
    return {
        "public_name": rows[0].public_name,
        "group_id": group_rows[0].group_id,
        "other_group": group_rows[1].group_id,
        "slug": servers[0].slug,
        "name": agents[0].name,
        "session_id": longest.session_id,
        "run_id": _script_run(longest).run_id,
    }


def _servers(number: int, suffix: str) -> list[Server]:
    now = timezone.now()
    servers = Server.objects.bulk_create(
        Server(
            slug=f"server{suffix}-{index}",
            name=f"Server {index}",
            transport="http",
            url="http://127.0.0.1:9/mcp",
            state={3: "failing", 7: "disabled"}.get(index % 20, "connected"),
            state_reason="It refused the connection." if index % 20 == 3 else "",
            enabled=index % 20 != 7,
            last_synced_at=now - timedelta(minutes=index),
        )
        for index in range(number)
    )
    SyncRun.objects.bulk_create(sync_run(server) for server in servers for _ in range(3))
    return servers


def sync_run(server: Server) -> SyncRun:
    now = timezone.now()
    return SyncRun(
        server=server,
        trigger="manual",
        outcome=SyncRun.Outcome.OK,
        fence=1,
        started_at=now,
        finished_at=now,
    )


def _body(name: str, index: int, dice: random.Random) -> str:
    """Return a definition of typical size."""
    text = " ".join(dice.sample(WORDS, 8)) + "."
    fields = {
        f"{noun}_{word}": {"type": "string", "description": " ".join(dice.sample(WORDS, 7))}
        for noun, word in zip(NOUNS, WORDS, strict=False)
    }
    return canonical(
        {
            "name": name,
            "description": f"{name.replace('_', ' ').capitalize()}: {text}",
            "inputSchema": {"type": "object", "properties": fields, "required": [*fields][:2]},
            "annotations": {"readOnlyHint": index % 3 == 0, "destructiveHint": index % 7 == 0},
        }
    )


def _tools(number: int, servers: list[Server], dice: random.Random) -> list[Tool]:
    definitions = []
    for index in range(number):
        name = f"{dice.choice(VERBS)}_{dice.choice(NOUNS)}_{index}_{servers[0].slug}"
        body = _body(name, index, dice)
        definitions.append(
            Definition(
                sha256=digest(body),
                name=name,
                body=body,
                tokens=len(body) // 4,
                search_text=f"{name} {body[:200]}",
            )
        )
    stored = Definition.objects.bulk_create(definitions, batch_size=BATCH)
    homes = [servers[0 if index % 10 == 0 else index % len(servers)] for index in range(number)]
    now = timezone.now()
    rows = Tool.objects.bulk_create(
        (
            Tool(
                server=homes[index],
                name=definition.name,
                public_name=f"{homes[index].slug}__{definition.name}"[:64],
                approved=definition,
                latest=stored[index - 1] if index % 100 == 50 else definition,
                state=ToolState.WAITING if index % 100 == 50 else ToolState.AVAILABLE,
                changed_at=now,
                findings=[{"code": "hidden", "text": "x"}] if index % 50 == 1 else [],
            )
            for index, definition in enumerate(stored)
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


def _groups(number: int, tools: list[Tool], dice: random.Random, suffix: str) -> list[Group]:
    groups = Group.objects.bulk_create(
        Group(group_id=f"group{suffix}-{index}", display_name=f"Group {index}", position=index)
        for index in range(number)
    )
    Membership.objects.bulk_create(
        (
            Membership(group=group, tool=tool, position=index, preload=index < 5 or None)
            for group in groups
            for index, tool in enumerate(
                tools if group is groups[0] else dice.sample(tools, min(60, len(tools)))
            )
        ),
        batch_size=BATCH,
    )
    return groups


def _agents(number: int, groups: list[Group], suffix: str) -> list[Agent]:
    agents = Agent.objects.bulk_create(
        Agent(name=f"agent{suffix}-{index}", all_groups=index == 1) for index in range(number)
    )
    AgentGroup.objects.bulk_create(
        AgentGroup(agent=agent, group=group, position=index)
        for agent in agents
        for index, group in enumerate(groups[:5])
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


def _rules(agents: list[Agent], groups: list[Group], suffix: str) -> None:
    """Add one rule for each agent, with all parts of a match that name rows."""
    first = Rule.objects.count()
    Rule.objects.bulk_create(
        Rule(
            name=f"House rule {suffix}{position}" if suffix or position else "House rule",
            effect="hold",
            position=first + position,
            match={
                "agents": [{"id": agent.pk, "name": agent.name}],
                "groups": [{"id": group.pk, "name": group.group_id} for group in groups[:3]],
                "arguments": [{"path": "/amount", "op": "gt", "value": position}],
            },
        )
        for position, agent in enumerate(agents)
    )


def _snapshot(tools: list[Tool]) -> CatalogSnapshot:
    pins = {tool.public_name: {"definition": tool.approved_id, "seq": 0} for tool in tools[:30]}
    body = canonical({"pins": pins, "tools": [], "groups": []})
    snapshot, _ = CatalogSnapshot.objects.get_or_create(
        sha256=digest(body), defaults={"text": "Tools are in groups.", "body": body, "tokens": 5}
    )
    return snapshot


def _sessions(
    number: int, agents: list[Agent], tools: list[Tool], dice: random.Random
) -> list[AgentSession]:
    snapshot = _snapshot(tools)
    now, interval = timezone.now(), min(timedelta(minutes=8), timedelta(days=DAYS) / number)
    runs = []
    for index in range(number):
        started = now - interval * (number - index)
        run = AgentSession(
            agent=agents[index % len(agents)],
            strategy="dispatch",
            mode="deferred",
            decided_by="count",
            snapshot=snapshot,
            revision=1,
            state="open" if index % 50 == 0 else "closed",
            last_used_at=started + timedelta(minutes=5),
            ended_at=None if index % 50 == 0 else started + timedelta(minutes=5),
            tokens_all=dice.randint(20_000, 90_000),
            tokens_catalog=900,
            tokens_load=dice.randint(100, 3000),
            calls=20,
            errors=dice.randint(0, 2),
        )
        runs.append(run)
    sessions = AgentSession.objects.bulk_create(runs, batch_size=BATCH)
    for run in sessions:
        run.created_at = run.last_used_at - timedelta(minutes=5)
    AgentSession.objects.bulk_update(sessions, ["created_at"], batch_size=BATCH)
    Expansion.objects.bulk_create(
        (_expansion(run, dice.sample(tools, min(3, len(tools)))) for run in sessions),
        batch_size=BATCH,
    )
    return sessions


def _expansion(run: AgentSession, tools: list[Tool]) -> Expansion:
    pins = {tool.public_name: {"definition": tool.latest_id, "seq": 1} for tool in tools}
    return Expansion(
        session=run, group_id="group-0", names=sorted(pins), pins=canonical(pins), sequence=1
    )


def add_calls(
    number: int, runs: list[AgentSession], tools: list[Tool], dice: random.Random
) -> None:
    used = tools[: max(1, len(tools) // 4)]  # most tools are never called
    _session_events(runs, [tool.public_name for tool in used])
    for start in range(0, number, CALLS_AT_ONCE):
        _add_calls(range(start, min(start + CALLS_AT_ONCE, number)), runs, used, dice)


def _add_calls(
    numbers: range, runs: list[AgentSession], used: list[Tool], dice: random.Random
) -> None:
    rows = []
    for index in numbers:
        run = runs[index % len(runs)]
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
                arguments=f'{{"query":"{"x" * 80}"}}',
                state="failed" if failed else "succeeded",
                is_error=failed,
                accepted_at=moment,
                sent_at=moment,
                finished_at=moment + timedelta(milliseconds=dice.randint(5, 2000)),
                deadline=moment + timedelta(minutes=1),
                tokens=dice.randint(20, 600),
                result_copy=f'{{"content":[{{"text":"{"y" * dice.randint(50, 3000)}"}}]}}',
            )
        )
    calls = Call.objects.bulk_create(rows, batch_size=BATCH)
    _call_events(calls)


def _script_run(session: AgentSession) -> ScriptRun:
    """Add a script that made the last three calls of a session."""
    run = make_run(session, code="# weather of three cities\nprint('three')")
    last = session.call_rows.order_by("-pk").values_list("pk", flat=True)[:3]
    Call.objects.filter(pk__in=list(last)).update(run=run, path="script", is_error=True)
    make_event(session, "script", tokens=12, run_id=run.run_id, state="completed", calls=3)
    return run


def _session_events(runs: list[AgentSession], names: list[str]) -> None:
    def rows() -> Iterator[Event]:
        for index, run in enumerate(runs):
            yield Event(session=run, at=run.created_at, kind="opened", tokens=900)
            details = canonical(_search(index, names))
            common = {"session": run, "at": run.created_at, "tokens": 80}
            yield Event(kind="searched", details=details, **common)

    Event.objects.bulk_create(rows(), batch_size=BATCH)


def _call_events(calls: list[Call]) -> None:
    def rows() -> Iterator[Event]:
        for index, call in enumerate(calls):
            common = {"session_id": call.session_id, "at": call.accepted_at}
            if index % 4 == 0:
                names = canonical({"names": [call.tool_name], "how": "load", "remaining": 50})
                yield Event(kind="loaded", group_id="group-0", details=names, tokens=210, **common)
            yield Event(kind="called", tool_name=call.tool_name, call=call, **common)

    Event.objects.bulk_create(rows(), batch_size=BATCH)


def _search(index: int, names: list[str]) -> dict[str, Any]:
    hits = [] if index % 9 == 0 else [names[at % len(names)] for at in range(index, index + 10)]
    return {
        "query": f"find {index % 40}",
        "strategy": "hybrid",
        "total": len(hits),
        "hits": hits,
        "newly_loaded": 0,
    }


def _audit(number: int, tools: list[Tool], groups: list[Group]) -> None:
    def about(index: int) -> dict[str, Any]:
        if index % 3:
            tool = tools[index % len(tools)]
            change = {"verb": "tool.hold", "after": {"reason": "x"}}
            return {"target_id": tool.pk, "target_label": tool.public_name, **change}
        group = groups[index % len(groups)]
        change = {"verb": "group.preload", "after": {"preload": {tools[0].public_name: True}}}
        return {"target_id": group.pk, "target_label": group.group_id, **change}

    AuditEntry.objects.bulk_create(
        (
            AuditEntry(
                actor_kind="user",
                actor_label="ada@example.org",
                target_kind="tool" if index % 3 else "group",
                **about(index),
            )
            for index in range(number)
        ),
        batch_size=BATCH,
    )


def count_usage() -> None:
    """Count hours and days of usage, as the task does, and add the state changes of all servers."""
    while rollups.count_ended_hours():
        pass
    while rollups.sum_ended_days():
        pass
    now = timezone.now()
    StateChange.objects.bulk_create(
        (
            StateChange(server=server, at=now - timedelta(days=day, minutes=minutes), state=state)
            for server in Server.objects.all()
            for day in range(DAYS, 0, -1)
            for minutes, state in ((10, "failing"), (0, "connected"))
        ),
        batch_size=BATCH,
    )


def add_golden(tools: list[Tool]) -> None:
    """Add a golden query with a result, and search aliases, for each tool."""
    now = timezone.now()
    for tool in tools:
        golden = GoldenQuery.objects.create(
            query=f"find {tool.public_name}", right=[tool.public_name], origin="playground"
        )
        GoldenResult.objects.create(
            golden=golden, strategy="hybrid", revision=1, good_revision=1, broke=True, at=now
        )
        for text in ("one", "two"):
            ToolHint.objects.create(tool=tool, kind="alias", text=text)
