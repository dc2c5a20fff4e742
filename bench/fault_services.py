"""Failures of dependencies: Redis stopped (R16), concurrent SQLite writers and PostgreSQL
restarts (R19)."""

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
    Response,
    Row,
    latency_ms,
    make_unlimited_agent,
    percentile,
    register,
    remove,
    repeat_until,
    running_upstream,
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
from tests.support.payloads import DATA_KEYS, PayloadReader
from tests.support.production import SERVICES, Production
from tests.support.waiting import wait_for

CALLERS = 4
DEADLINE = 5.0
OPEN = "select count(*) from sessions_app_call where state in ('accepted', 'sent')"


class Services:
    """A production deployment whose services can be stopped, shared by the rows of this module."""

    def __init__(self, folder: Path, postgres: PostgresServer, redis: RedisServer) -> None:
        self.folder, self.postgres, self.redis = folder, postgres, redis
        self.url = postgres.create("faults")
        with psycopg.connect(postgres.url("postgres"), autocommit=True) as connection:
            # Commits must survive a crash: the PostgreSQL of the tests has this off.
            connection.execute("ALTER DATABASE faults SET synchronous_commit = on")
        self.toolcrib = Production(self.url, redis.url, folder)
        process = self.toolcrib.run(*SERVICES["migrate"]["command"])
        assert process.returncode == 0, process.stderr
        self.restarted: Process | None = None
        self._agent: Agent | None = None

    @property
    def agent(self) -> Agent:
        if self._agent is None:
            self._agent = make_unlimited_agent(self.toolcrib)
        return self._agent

    def query(self, text: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url) as connection:
            return connection.execute(text).fetchall()

    def restart_postgres(self) -> None:
        """Stop PostgreSQL without a checkpoint, as in a crash, and start it again."""
        self.start_postgres(self.stop_postgres())

    def stop_postgres(self) -> Path:
        """Stop PostgreSQL without a checkpoint, and return its data folder."""
        data = Path(self.query("show data_directory")[0][0])
        pid = int((data / "postmaster.pid").read_text().split()[0])
        os.kill(pid, signal.SIGQUIT)  # immediate shutdown: WAL is replayed at the next start
        wait_for(lambda: not (data / "postmaster.pid").exists() or not _is_running(pid), 30)
        if self.restarted is not None:
            self.restarted.wait()
        return data

    def start_postgres(self, data: Path) -> None:
        argv = shlex.split((data / "postmaster.opts").read_text())
        user = unprivileged_user() if os.geteuid() == 0 else None
        environment = clean_environment({"LC_ALL": "C.UTF-8"})
        started = Process(argv, environment, cwd=data.parent, user=user)
        self.restarted = started
        wait_for(
            lambda: accepts_connections(self.postgres, started),
            30,
            what="PostgreSQL accepts connections",
        )

    def close(self) -> None:
        self.toolcrib.stop()
        if self.restarted is not None:
            self.restarted.stop(signal.SIGINT)
            self.restarted.kill()


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


@contextmanager
def running_services() -> Iterator[Services]:
    """Run PostgreSQL, Redis, a web process, a worker and beat."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="toolcrib-faults-")))
        postgres = stack.enter_context(postgres_server())
        redis = stack.enter_context(redis_server())
        deployment = Services(folder, postgres, redis)
        stack.callback(deployment.close)
        deployment.toolcrib.start_all("web", "worker", "beat")
        yield deployment


async def _load(
    agent: Agent, session: Session, seconds: float, pause: float, name: str
) -> list[Response]:
    """Run concurrent callers, each with a pause between its calls."""
    responses: list[Response] = []
    ends = time.monotonic() + seconds
    async with Callers(agent) as callers:

        async def one(at: int) -> None:
            paper = {"paper": f"{name}-{at}-{len(responses)}"}
            responses.append(await callers.call(session, "stamp", paper, timeout=DEADLINE))
            await asyncio.sleep(pause)

        await repeat_until(lambda: time.monotonic() > ends, CALLERS, one)
    return responses


# --- Redis ----------------------------------------------------------------------------------------


def redis_stopped(parts: Services, size: str) -> Row:
    """R16: calls continue while Redis is down, and queued work is done afterwards."""
    downtime = {"tiny": 2.0, "short": 10.0, "full": 300.0}[size]
    pause = 0.1 if size == "full" else 0.2
    row = Row("R16", f"Redis stopped for {downtime:g} s under load")
    toolcrib = parts.toolcrib
    with running_upstream("counting", "--journal", str(parts.folder / "redis")) as server:
        register(toolcrib, "calm", url=server.url)
        session = parts.agent.open(groups=["mcp:calm"], mode="deferred")
        asyncio.run(_load(parts.agent, session, 1, pause, "first"))
        before = asyncio.run(_load(parts.agent, session, downtime / 2, pause, "before"))
        parts.redis.stop()
        registration = toolcrib.api("POST", "/servers", {
            "name": "meanwhile", "slug": "meanwhile", "transport": "http", "url": server.url,
        })  # fmt: skip
        during = asyncio.run(_load(parts.agent, session, downtime, pause, "during"))
        statuses = asyncio.run(_other_operations(parts.agent))
        health = toolcrib.get("/livez")[0], toolcrib.readiness()["status"]
        parts.redis.start()
        start = time.monotonic()
        wait_for(lambda: toolcrib.tool_names("meanwhile"), 180, what="the backlog is processed")
        drained = time.monotonic() - start
        after = asyncio.run(_load(parts.agent, session, downtime / 2, pause, "after"))
        for slug in ("calm", "meanwhile"):
            remove(toolcrib, slug)
    without = [response.seconds for response in before + after]
    within = [response.seconds for response in during]
    states = Counter(response.state for response in during)
    errors = len(during) - states["succeeded"]
    ratio = percentile(within, 99) / percentile(without, 99)
    row.procedure = (
        f"{CALLERS} callers before, during ({len(during):,} calls) and after the downtime"
    )
    row.figures = {
        "without_ms": latency_ms(without),
        "with_ms": latency_ms(within),
        "p99_with_÷_without": round(ratio, 2),
        "states": dict(states),
        "backlog_processed_after_s": round(drained, 1),
    }
    row.check_positive("calls during the downtime", len(during))
    row.check_equal("status of registering a server", registration[0], 201)
    row.check_at_most("failed calls", errors / len(during) * 100, 0.1, "%", timed=False)
    row.check_equal("/livez and /readyz", health, (200, "degraded"))
    row.check_equal("statuses of open, search, load and close", statuses, [201, 200, 200, 200])
    row.check_at_most("p99 with ÷ without", ratio, 1.5)
    row.check_at_most("backlog processed after", drained, 60, " s")
    return row


async def _other_operations(agent: Agent) -> list[int]:
    """Open, search, load and close a session; return the statuses."""
    async with Callers(agent) as callers:
        opened = await callers.request_api("POST", "/sessions", {"groups": ["mcp:calm"]})
        path = f"/sessions/{opened.json['id']}"
        bodies: dict[str, dict[str, Any]] = {
            "search": {"query": "stamp a paper"},
            "load": {"group_id": "mcp:calm", "tool_names": ["stamp"]},
            "close": {},
        }
        responses = [
            await callers.request_api("POST", f"{path}/{name}", body)
            for name, body in bodies.items()
        ]
    return [opened.status, *(response.status for response in responses)]


# --- Databases ------------------------------------------------------------------------------------


def many_writers(bed: Bed, size: str) -> Row:
    """R19: fifty concurrent writers on SQLite."""
    writers, seconds = {"tiny": (50, 2.0), "short": (50, 10.0), "full": (50, 60.0)}[size]
    row = Row("R19", f"{writers} concurrent writers on SQLite")
    responses: list[Response] = []
    with running_upstream("counting", "--journal", str(bed.folder / "writers")) as server:
        register(bed.toolcrib, "writers", url=server.url)
        changed = bed.toolcrib.api("PATCH", "/servers/writers", {"concurrency": writers})
        assert changed[0] == 200, changed
        logged = len(bed.toolcrib.log)
        asyncio.run(_write(bed, writers, seconds, responses))
        log = bed.toolcrib.log[logged:]
        remove(bed.toolcrib, "writers")
    failed = Counter(response.state for response in responses if response.status not in (200, 201))
    row.procedure = (
        f"each opens a session, loads, calls and closes it, repeatedly for {seconds:g} s"
    )
    row.figures = {
        "writes": len(responses),
        "writes_per_second": round(len(responses) / seconds, 1),
        "failed": dict(failed),
        "ms": latency_ms([response.seconds for response in responses]),
    }
    row.check_positive("writes", len(responses))
    row.check_equal("rejected or failed writes", sum(failed.values()))
    row.check_equal("“database is locked” in the log", log.count("database is locked"))
    return row


async def _write(bed: Bed, writers: int, seconds: float, responses: list[Response]) -> None:
    ends = time.monotonic() + seconds
    async with Callers(bed.agent) as callers:

        async def one(at: int) -> None:
            opened = await callers.request_api("POST", "/sessions", {"groups": ["mcp:writers"]})
            responses.append(opened)
            if opened.status != 201:
                return
            path = f"/sessions/{opened.json['id']}"
            call = {"tool_name": "stamp", "arguments": {"paper": f"{at}"}}
            load = {"group_id": "mcp:writers", "tool_names": ["stamp"]}
            for name, body in (("load", load), ("call", call), ("close", {})):
                responses.append(await callers.request_api("POST", f"{path}/{name}", body))

        await repeat_until(lambda: time.monotonic() > ends, writers, one)


def postgres_restarted(parts: Services, size: str) -> Row:
    """R19: PostgreSQL crashes and restarts during calls."""
    restarts, seconds = {"tiny": (1, 3.0), "short": (2, 5.0), "full": (10, 12.0)}[size]
    row = Row("R19p", "PostgreSQL restarted under load")
    journal = parts.folder / "postgres"
    responses: list[Response] = []
    affected = 0  # calls in flight during the downtime
    with running_upstream("counting", "--journal", str(journal)) as server:
        register(parts.toolcrib, "kept", url=server.url)
        session = parts.agent.open(groups=["mcp:kept"], mode="deferred")
        for number in range(restarts):
            batch, (down, up) = asyncio.run(
                _call_during_restart(parts, session, seconds, f"turn-{number}")
            )
            responses += batch
            affected += sum(call.at < up and call.at + call.seconds > down for call in batch)
        start = time.monotonic()
        if size != "tiny":  # recovery waits until after the deadline
            with suppress(AssertionError):
                wait_for(lambda: parts.query(OPEN)[0][0] == 0, 60)
            row.check_equal("rows left open", parts.query(OPEN)[0][0])
        recovered = time.monotonic() - start
        last = asyncio.run(_load(parts.agent, session, 0.5, 0.1, "last"))
        remove(parts.toolcrib, "kept")
    ids = {row[0] for row in parts.query("select call_id from sessions_app_call")}
    keys = (ciphertext for (ciphertext,) in parts.query(DATA_KEYS))
    payloads = PayloadReader(parts.toolcrib.env["TOOLCRIB_ENCRYPTION_KEYS"], keys)
    rows = Counter(
        json.loads(payloads.read(arguments)).get("paper")
        for arguments, state in parts.query("select arguments, state from sessions_app_call")
        if state not in ("refused", "failed", "cancelled")
    )
    ran = Counter(line.partition(" ")[2] for line in journal.read_text().splitlines())
    statuses = Counter(response.status for response in responses)
    row.procedure = f"{restarts} crashes in {len(responses):,} calls by {CALLERS} callers"
    lost = [
        response
        for response in responses
        if response.status == 200 and response.json["call_id"] not in ids
    ]
    unexpected = Counter(
        response.state for response in responses if response.status not in (200, 503)
    )
    row.figures = {
        "statuses": dict(statuses),
        "executions": ran.total(),
        "recovered_after_s": round(recovered, 1),
        "unexpected": dict(unexpected),
    }
    row.check_positive("calls in flight during the downtime", affected)
    row.check_equal("accepted calls without a row", len(lost))
    row.check_equal("executions without exactly one row", sum(rows[paper] != 1 for paper in ran))
    row.check_equal("papers executed twice", sum(count > 1 for count in ran.values()))
    row.check_equal("statuses other than 200 and 503", unexpected.total())
    row.check_equal(
        "failed calls afterwards", sum(response.state != "succeeded" for response in last)
    )
    return row


async def _call_during_restart(
    parts: Services, session: Session, seconds: float, name: str
) -> tuple[list[Response], tuple[float, float]]:
    """Call before, during and after a restart of PostgreSQL; return when it was down."""
    load = asyncio.create_task(_load(parts.agent, session, seconds, 0.05, name))
    await asyncio.sleep(seconds / 3)
    down = time.monotonic()
    await asyncio.to_thread(parts.restart_postgres)
    return await load, (down, time.monotonic())
