"""What every fault needs: an installation to hurt, servers to hurt it with, callers, and a row.

A row says what was done and holds its checks. Those that depend on the machine's speed are marked
`timed`: the bench judges all of them, the tests only the others.
"""

import asyncio
import json
import math
import os
import sqlite3
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.support.agents import Agent, Session, make_agent  # noqa: E402
from tests.support.installation import Api, Installation, Process, clean_environment  # noqa: E402
from tests.support.upstreams.running import ENDPOINTS, stdio_argv  # noqa: E402
from tests.support.waiting import wait_for  # noqa: E402
from toolcrib.lib.percentile import percentile as observed_percentile  # noqa: E402

SIZES = ("tiny", "short", "full")  # for the tests, for a look, for `make soak`
UNLIMITED = 1_000_000_000
LIMITS = ("calls_in_flight", "calls_per_minute", "searches_per_minute", "max_sessions")


@dataclass(frozen=True)
class Check:
    what: str
    found: str
    ok: bool
    timed: bool = False


@dataclass
class Row:
    """One fault: what was done, what was seen, and whether that is within its bounds."""

    number: str
    fault: str
    done: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)

    def exactly(self, what: str, found: object, wanted: object = 0) -> None:
        self.checks.append(Check(f"{what} = {wanted}", str(found), found == wanted))

    def some(self, what: str, found: int) -> None:
        """Check that the fault was there at all: without it nothing was shown."""
        self.checks.append(Check(f"{what} > 0", str(found), found > 0))

    def at_most(
        self, what: str, found: float, bound: float, unit: str = "", *, timed: bool = True
    ) -> None:
        told = f"{found:,.3g}{unit}" if abs(found) < 1000 else f"{found:,.0f}{unit}"
        self.checks.append(Check(f"{what} ≤ {bound:g}{unit}", told, found <= bound, timed))

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def failed(self) -> list[Check]:
        """The checks that failed for another reason than the machine's speed."""
        return [check for check in self.checks if not check.ok and not check.timed]

    def as_json(self) -> dict[str, Any]:
        checks = [vars(check) for check in self.checks]
        return {
            "row": self.number,
            "fault": self.fault,
            "done": self.done,
            "figures": self.figures,
            "checks": checks,
            "ok": self.ok,
        }


def percentile(values: list[float], percent: float) -> float:
    found = observed_percentile(values, percent / 100)
    return math.nan if found is None else found


def milliseconds(values: list[float]) -> dict[str, float]:
    return {
        name: round(percentile(values, at) * 1000, 1) for name, at in (("p50", 50), ("p99", 99))
    }


# --- Processes, from outside ----------------------------------------------------------------------


def memory(pid: int, what: str = "VmRSS") -> float:
    """Megabytes a process has now (VmRSS), or had at most since `forget_peak` (VmHWM)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) / 1024
    raise ValueError(f"process {pid} tells no {what}")


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def waited(pid: int) -> float:
    """Seconds that the threads of a process waited for a CPU: none on a machine that is quiet."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it ended
            total += int((task / "schedstat").read_text().split()[1])
    return total / 1e9


def born(pid: int) -> str | None:
    """When a process began, which tells it from a later one of the same number; None: it ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] == b"Z" else fields[19].decode()


def zombies(parents: set[int]) -> list[int]:
    """Processes below these that ended and that nobody has waited for."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError):
                state, parent = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:2]
                if state == b"Z" and int(parent) in parents:
                    found.append(int(entry.name))
    return found


# --- The installation and its servers -------------------------------------------------------------


class Upstream:
    """A server of tests/support/upstreams in a process of its own."""

    def __init__(self, process: Process, url: str) -> None:
        self.process, self.url, self.pid = process, url, process.pid

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)


@contextmanager
def upstream(module: str, *args: str) -> Iterator[Upstream]:
    """Run a server over HTTP."""
    if module in ENDPOINTS:
        args = ("--http", "0", *args)
    argv = stdio_argv(module, *args)
    with Process(argv, clean_environment({})) as process:
        address = process.wait_for_line("listening on ")
        yield Upstream(process, f"http://{address}{ENDPOINTS.get(module, '')}")


def register(toolcrib: Api, slug: str, *, wait: bool = True, **fields: Any) -> None:
    """Register a server, by its URL unless told otherwise, and wait for its first sync."""
    body = {"name": slug, "slug": slug, "transport": "http", **fields}
    status, told = toolcrib.api("POST", "/servers", body)
    assert status == 201, told
    if wait:
        wait_for(lambda: _synced(toolcrib, slug), 60, what=f"{slug} is synced")


def _synced(toolcrib: Api, slug: str) -> Any:
    return toolcrib.api("GET", f"/servers/{slug}")[1]["last_synced_at"]


def register_program(toolcrib: Api, slug: str, module: str, *args: str, **fields: Any) -> None:
    """Register a program of tests/support/upstreams."""
    command, *rest = stdio_argv(module, *args)
    program: dict[str, Any] = {
        "transport": "stdio",
        "command": command,
        "args": rest,
        "cwd": str(ROOT),
    }
    register(toolcrib, slug, confirm_argv=[command, *rest], **program)
    if fields:
        status, told = toolcrib.api("PATCH", f"/servers/{slug}", fields)
        assert status == 200, told


def remove(toolcrib: Api, slug: str) -> None:
    toolcrib.api("DELETE", f"/servers/{slug}")


def free_agent(toolcrib: Api, name: str = "bench", **fields: Any) -> Agent:
    """An agent whose limits are out of the way."""
    return make_agent(toolcrib, name, **{**dict.fromkeys(LIMITS, UNLIMITED), **fields})


class Bed:
    """A running embedded installation and an agent without limits. Rows share it."""

    def __init__(self, folder: Path, env: Mapping[str, str] | None = None) -> None:
        # Idle connections close soon, so that what a row leaves behind can be told from them.
        self.toolcrib = Installation(
            folder / "data", {"TOOLCRIB_IDLE_DISCONNECT": "5", **(env or {})}
        )
        self.folder = folder
        self._agent: Agent | None = None

    def __enter__(self) -> "Bed":
        try:
            self.toolcrib.start()
        except BaseException:
            self.toolcrib.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.toolcrib.__exit__()

    @property
    def pid(self) -> int:
        return self.toolcrib.pid

    @property
    def running(self) -> bool:
        return self.toolcrib.process is not None and self.toolcrib.process.running

    @property
    def agent(self) -> Agent:
        if self._agent is None:
            self._agent = free_agent(self.toolcrib)
        return self._agent

    def session(self, slug: str) -> Session:
        return self.agent.open(groups=[f"mcp:{slug}"], mode="deferred")

    def query(self, text: str, *values: object) -> list[tuple[Any, ...]]:
        """Look at the database from outside, as it is on disk."""
        path = self.toolcrib.data_dir / "toolcrib.sqlite3"
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        try:
            return connection.execute(text, values).fetchall()
        finally:
            connection.close()

    def calls(self, session: Session) -> list[dict[str, Any]]:
        """A session's rows of the ledger, oldest first."""
        columns = ("call_id", "state", "error_code", "arguments", "idempotency_key", "sent_at")
        return [
            dict(zip(columns, row, strict=True))
            for row in self.query(
                f"select {', '.join('c.' + name for name in columns)} from sessions_app_call c "  # noqa: S608
                "join sessions_app_agentsession s on s.id = c.session_id "
                "where s.session_id = ? order by c.id",
                session.id,
            )
        ]


# --- Callers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """What became of a request: status 0 when the connection broke first."""

    status: int
    body: bytes
    seconds: float
    at: float  # when it was sent, by time.monotonic

    @property
    def json(self) -> dict[str, Any]:
        found = json.loads(self.body) if self.body else {}
        return found if isinstance(found, dict) else {}

    @property
    def state(self) -> str:
        """The state of a call, the code of an error, or what else it was."""
        if not self.status:
            return "broken"
        if self.status == 200:
            return str(self.json.get("state", "ok"))
        return str(self.json.get("error", {}).get("code", self.status))


class Callers:
    """Kept connections to one address, as many as are in use at once. For one event loop."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        address = urlsplit(agent.url)
        self.host, self.port = address.hostname or "", address.port or 80
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def __aenter__(self) -> "Callers":
        return self

    async def __aexit__(self, *exc: object) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()

    async def call(
        self, session: Session, tool: str, arguments: object = None, *, key: str = "",
        timeout: float | None = None,  # noqa: ASYNC109 - the call's own
    ) -> Told:  # fmt: skip
        body: dict[str, Any] = {"tool_name": tool, "arguments": arguments or {}}
        if timeout is not None:
            body["timeout"] = timeout
        headers = {"Idempotency-Key": key} if key else {}
        return await self.ask("POST", f"{session.path}/call", body, headers)

    async def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Told:
        return await self.fetch(method, f"/api/v1{path}", body, self.agent.headers(headers))

    async def fetch(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Told:
        """Send one request and read the answer. A connection that breaks is an answer too."""
        data = json.dumps(body).encode() if body is not None else b""
        fields = {"Host": f"localhost:{self.port}", "Content-Length": len(data), **(headers or {})}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {v}" for name, v in fields.items())]
        began = time.monotonic()
        line = None
        try:
            line = self._idle.pop() if self._idle else await self._connect()
            reader, writer = line
            writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
            status, told, last = await _answer(reader)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            if line is not None:
                line[1].close()
            return Told(0, b"", time.monotonic() - began, began)
        except asyncio.CancelledError:
            if line is not None:
                line[1].transport.abort()  # the caller leaves
            raise
        if last:
            writer.close()
        else:
            self._idle.append(line)
        return Told(status, told, time.monotonic() - began, began)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port, limit=2**20)


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes, bool]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
    fields = dict(line.split(": ", 1) for line in head[1:-2])
    body = b""
    if "content-length" in fields:
        body = await reader.readexactly(int(fields["content-length"]))
    elif fields.get("transfer-encoding") == "chunked":
        while size := int((await reader.readline()).strip(), 16):
            body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
    return int(head[0].split(" ")[1]), body, fields.get("connection") == "close"


async def at_rate(
    per_second: float, seconds: float, one: Callable[[int], Awaitable[Told]]
) -> list[Told]:
    """Send so many a second, whether or not the earlier ones were answered."""
    began = time.monotonic()
    running = []
    for number in range(round(per_second * seconds)):
        ahead = began + number / per_second - time.monotonic()
        if ahead > 0:
            await asyncio.sleep(ahead)
        running.append(asyncio.ensure_future(one(number)))
    return await asyncio.gather(*running)


async def until(
    stop: Callable[[], bool], workers: int, one: Callable[[int], Awaitable[None]]
) -> None:
    """Have so many workers do it over and over until told to stop."""

    async def work(at: int) -> None:
        while not stop():
            await one(at)

    await asyncio.gather(*(work(at) for at in range(workers)))
