"""What Toolcrib stands on gives way: Redis is stopped (R16), databases are full of writers or
restarted (R19)."""

import asyncio
import json
import os
import shlex
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg

from bench.fault_bed import (
    Bed,
    Callers,
    Row,
    Told,
    free_agent,
    milliseconds,
    percentile,
    register,
    remove,
    until,
    upstream,
)
from tests.support.agents import Agent, Session
from tests.support.installation import (
    PostgresServer,
    Process,
    RedisServer,
    accepts_connections,
    clean_environment,
    postgres_server,
    redis_server,
    unprivileged_user,
)
from tests.support.production import SERVICES, Production
from tests.support.waiting import wait_for

CALLERS = 4
DEADLINE = 5.0
OPEN = "select count(*) from sessions_app_call where state in ('accepted', 'sent')"


class Services:
    """Production in parts, each of which can be taken away. The rows of this module share it."""

    def __init__(self, folder: Path, postgres: PostgresServer, redis: RedisServer) -> None:
        self.folder, self.postgres, self.redis = folder, postgres, redis
        self.url = postgres.create("faults")
        with psycopg.connect(postgres.url("postgres"), autocommit=True) as connection:
            # What was committed is to survive: the tests' PostgreSQL leaves this off.
            connection.execute("ALTER DATABASE faults SET synchronous_commit = on")
        self.toolcrib = Production(self.url, redis.url, folder)
        done = self.toolcrib.run(*SERVICES["migrate"]["command"])
        assert done.returncode == 0, done.stderr
        self.restarted: Process | None = None
        self._agent: Agent | None = None

    @property
    def agent(self) -> Agent:
        if self._agent is None:
            self._agent = free_agent(self.toolcrib)
        return self._agent

    def query(self, text: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url) as connection:
            return connection.execute(text).fetchall()

    def restart_postgres(self) -> None:
        """Kill PostgreSQL as a crash would, and start it again on its data."""
        data = Path(self.query("show data_directory")[0][0])
        argv = shlex.split((data / "postmaster.opts").read_text())
        pid = int((data / "postmaster.pid").read_text().split()[0])
        os.kill(pid, signal.SIGQUIT)  # at once: no checkpoint, and its log is replayed
        wait_for(lambda: not (data / "postmaster.pid").exists() or not _running(pid), 30)
        user = unprivileged_user() if os.geteuid() == 0 else None
        environment = clean_environment({"LC_ALL": "C.UTF-8"})
        started = Process(argv, environment, cwd=data.parent, user=user)
        self.restarted = started
        wait_for(
            lambda: accepts_connections(self.postgres, started), 30, what="PostgreSQL accepts again"
        )

    def close(self) -> None:
        self.toolcrib.stop()
        if self.restarted is not None:
            self.restarted.stop(signal.SIGINT)
            self.restarted.kill()


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


@contextmanager
def services() -> Iterator[Services]:
    """Run PostgreSQL, Redis, a web process, a worker and beat."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="toolcrib-faults-")))
        postgres = stack.enter_context(postgres_server())
        redis = stack.enter_context(redis_server())
        found = Services(folder, postgres, redis)
        stack.callback(found.close)
        found.toolcrib.start_all("web", "worker", "beat")
        yield found


async def _load(
    agent: Agent, session: Session, seconds: float, pause: float, name: str
) -> list[Told]:
    """A few callers, each with a pause between its calls."""
    told: list[Told] = []
    ends = time.monotonic() + seconds
    async with Callers(agent) as callers:

        async def one(at: int) -> None:
            paper = {"paper": f"{name}-{at}-{len(told)}"}
            told.append(await callers.call(session, "stamp", paper, timeout=DEADLINE))
            await asyncio.sleep(pause)

        await until(lambda: time.monotonic() > ends, CALLERS, one)
    return told


# --- Redis ----------------------------------------------------------------------------------------


def redis_stopped(parts: Services, size: str) -> Row:
    """R16: calls go on while Redis is away, and what waited for it is made up for."""
    away = {"tiny": 2.0, "short": 10.0, "full": 300.0}[size]
    pause = 0.1 if size == "full" else 0.2
    row = Row("R16", f"Redis stopped for {away:g} s under load")
    toolcrib = parts.toolcrib
    with upstream("counting", "--journal", str(parts.folder / "redis")) as server:
        register(toolcrib, "calm", url=server.url)
        session = parts.agent.open(groups=["mcp:calm"], mode="deferred")
        asyncio.run(_load(parts.agent, session, 1, pause, "first"))
        before = asyncio.run(_load(parts.agent, session, away / 2, pause, "before"))
        parts.redis.stop()
        asked_for = toolcrib.api("POST", "/servers", {
            "name": "meanwhile", "slug": "meanwhile", "transport": "http", "url": server.url,
        })  # fmt: skip
        during = asyncio.run(_load(parts.agent, session, away, pause, "during"))
        others = asyncio.run(_other_acts(parts.agent))
        health = toolcrib.get("/livez")[0], toolcrib.readiness()["status"]
        parts.redis.start()
        began = time.monotonic()
        wait_for(lambda: toolcrib.tool_names("meanwhile"), 180, what="the backlog is done")
        drained = time.monotonic() - began
        after = asyncio.run(_load(parts.agent, session, away / 2, pause, "after"))
        for slug in ("calm", "meanwhile"):
            remove(toolcrib, slug)
    without = [told.seconds for told in before + after]
    within = [told.seconds for told in during]
    ended = Counter(told.state for told in during)
    errors = len(during) - ended["succeeded"]
    ratio = percentile(within, 99) / percentile(without, 99)
    row.done = f"{CALLERS} callers before, {len(during):,} calls while it was away, and after"
    row.figures = {
        "without_ms": milliseconds(without),
        "with_ms": milliseconds(within),
        "p99_with_÷_without": round(ratio, 2),
        "ended": dict(ended),
        "backlog_done_after_s": round(drained, 1),
    }
    row.some("calls while it was away", len(during))
    row.exactly("a server registered meanwhile", asked_for[0], 201)
    row.at_most("calls that failed", errors / len(during) * 100, 0.1, " %", timed=False)
    row.exactly("/livez and /readyz meanwhile", health, (200, "degraded"))
    row.exactly("opening, searching, loading and closing meanwhile", others, [201, 200, 200, 200])
    row.at_most("p99 with ÷ without", ratio, 1.5)
    row.at_most("backlog done after", drained, 60, " s")
    return row


async def _other_acts(agent: Agent) -> list[int]:
    """What else a session does: the statuses of the answers."""
    async with Callers(agent) as callers:
        opened = await callers.ask("POST", "/sessions", {"groups": ["mcp:calm"]})
        path = f"/sessions/{opened.json['id']}"
        acts: dict[str, dict[str, Any]] = {
            "search": {"query": "stamp a paper"},
            "load": {"group_id": "mcp:calm", "tool_names": ["stamp"]},
            "close": {},
        }
        told = [await callers.ask("POST", f"{path}/{act}", body) for act, body in acts.items()]
    return [opened.status, *(found.status for found in told)]


# --- Databases ------------------------------------------------------------------------------------


def many_writers(bed: Bed, size: str) -> Row:
    """R19: fifty sessions that write at once on SQLite."""
    writers, seconds = {"tiny": (50, 2.0), "short": (50, 10.0), "full": (50, 60.0)}[size]
    row = Row("R19", f"{writers} writers at once on SQLite")
    told: list[Told] = []
    with upstream("counting", "--journal", str(bed.folder / "writers")) as server:
        register(bed.toolcrib, "writers", url=server.url)
        changed = bed.toolcrib.api("PATCH", "/servers/writers", {"concurrency": writers})
        assert changed[0] == 200, changed
        logged = len(bed.toolcrib.log)
        asyncio.run(_write(bed, writers, seconds, told))
        log = bed.toolcrib.log[logged:]
        remove(bed.toolcrib, "writers")
    odd = Counter(found.state for found in told if found.status not in (200, 201))
    row.done = f"each opens a session, loads, calls and closes it, over and over for {seconds:g} s"
    row.figures = {
        "writes": len(told),
        "writes_a_second": round(len(told) / seconds, 1),
        "not_ok": dict(odd),
        "ms": milliseconds([found.seconds for found in told]),
    }
    row.some("writes", len(told))
    row.exactly("writes refused or failed", sum(odd.values()))
    row.exactly("“database is locked” in the log", log.count("database is locked"))
    return row


async def _write(bed: Bed, writers: int, seconds: float, told: list[Told]) -> None:
    ends = time.monotonic() + seconds
    async with Callers(bed.agent) as callers:

        async def one(at: int) -> None:
            opened = await callers.ask("POST", "/sessions", {"groups": ["mcp:writers"]})
            told.append(opened)
            if opened.status != 201:
                return
            path = f"/sessions/{opened.json['id']}"
            call = {"tool_name": "stamp", "arguments": {"paper": f"{at}"}}
            loaded = {"group_id": "mcp:writers", "tool_names": ["stamp"]}
            for where, body in (("load", loaded), ("call", call), ("close", {})):
                told.append(await callers.ask("POST", f"{path}/{where}", body))

        await until(lambda: time.monotonic() > ends, writers, one)


def postgres_restarted(parts: Services, size: str) -> Row:
    """R19: PostgreSQL crashes and comes back in the middle of calls."""
    restarts, seconds = {"tiny": (1, 3.0), "short": (2, 5.0), "full": (10, 12.0)}[size]
    row = Row("R19p", "PostgreSQL restarted under load")
    journal = parts.folder / "postgres"
    told: list[Told] = []
    hit = 0  # calls under way while it was down
    with upstream("counting", "--journal", str(journal)) as server:
        register(parts.toolcrib, "kept", url=server.url)
        session = parts.agent.open(groups=["mcp:kept"], mode="deferred")
        for number in range(restarts):
            some, (down, up) = asyncio.run(_around(parts, session, seconds, f"turn-{number}"))
            told += some
            hit += sum(one.at < up and one.at + one.seconds > down for one in some)
        began = time.monotonic()
        if size != "tiny":  # recovery waits for the deadline, and then some
            with suppress(AssertionError):
                wait_for(lambda: parts.query(OPEN)[0][0] == 0, 60)
            row.exactly("rows left open", parts.query(OPEN)[0][0])
        certain = time.monotonic() - began
        last = asyncio.run(_load(parts.agent, session, 0.5, 0.1, "last"))
        remove(parts.toolcrib, "kept")
    ids = {row[0] for row in parts.query("select call_id from sessions_app_call")}
    rows = Counter(
        json.loads(arguments).get("paper")
        for arguments, state in parts.query("select arguments, state from sessions_app_call")
        if state not in ("refused", "failed", "cancelled")
    )
    ran = Counter(line.partition(" ")[2] for line in journal.read_text().splitlines())
    statuses = Counter(found.status for found in told)
    row.done = f"{restarts} crashes in {len(told):,} calls by {CALLERS} callers"
    lost = [one for one in told if one.status == 200 and one.json["call_id"] not in ids]
    odd = Counter(found.state for found in told if found.status not in (200, 503))
    row.figures = {
        "statuses": dict(statuses),
        "executions": ran.total(),
        "certain_after_s": round(certain, 1),
        "odd": dict(odd),
    }
    row.some("calls under way while it was down", hit)
    row.exactly("answered calls without a row", len(lost))
    row.exactly("executions without exactly one row", sum(rows[paper] != 1 for paper in ran))
    row.exactly("papers executed twice", sum(count > 1 for count in ran.values()))
    row.exactly("answers other than 200 and 503", odd.total())
    row.exactly("calls afterwards that fail", sum(found.state != "succeeded" for found in last))
    return row


async def _around(
    parts: Services, session: Session, seconds: float, name: str
) -> tuple[list[Told], tuple[float, float]]:
    """Call before, while and after PostgreSQL is restarted; tell when it was down."""
    load = asyncio.create_task(_load(parts.agent, session, seconds, 0.05, name))
    await asyncio.sleep(seconds / 3)
    down = time.monotonic()
    await asyncio.to_thread(parts.restart_postgres)
    return await load, (down, time.monotonic())
