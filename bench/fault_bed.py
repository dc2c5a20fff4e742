"""Test bed for the fault benches: an installation, upstream servers, callers, result rows.

A row has the procedure and its checks. Checks that depend on the speed of the machine are marked
`timed`: the bench evaluates all checks, the tests only the others.
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
from tests.support.payloads import PayloadReader  # noqa: E402
from tests.support.upstreams.running import ENDPOINTS, stdio_argv  # noqa: E402
from tests.support.waiting import wait_for  # noqa: E402
from toolcrib.lib.figures import percentile as observed_percentile  # noqa: E402

SIZES = ("tiny", "short", "full")  # for the tests, for --short, for `make soak`
UNLIMITED = 1_000_000_000
LIMITS = (
    "calls_in_flight",
    "calls_per_minute",
    "searches_per_minute",
    "cost_per_minute",
    "max_sessions",
)


@dataclass(frozen=True)
class Check:
    condition: str
    value: str
    ok: bool
    timed: bool = False


@dataclass
class Row:
    """One fault: the procedure, the figures, and the checks of its limits."""

    number: str
    fault: str
    procedure: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)

    def check_equal(self, name: str, value: object, expected: object = 0) -> None:
        self.checks.append(Check(f"{name} = {expected}", str(value), value == expected))

    def check_positive(self, name: str, value: int) -> None:
        """Check that the fault occurred; otherwise the other checks prove nothing."""
        self.checks.append(Check(f"{name} > 0", str(value), value > 0))

    def check_at_most(
        self, name: str, value: float, limit: float, unit: str = "", *, timed: bool = True
    ) -> None:
        text = f"{value:,.3g}{unit}" if abs(value) < 1000 else f"{value:,.0f}{unit}"
        self.checks.append(Check(f"{name} ≤ {limit:g}{unit}", text, value <= limit, timed))

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def failed_checks(self) -> list[Check]:
        """Return the failed checks that do not depend on the speed of the machine."""
        return [check for check in self.checks if not check.ok and not check.timed]

    def as_json(self) -> dict[str, Any]:
        checks = [vars(check) for check in self.checks]
        return {
            "row": self.number,
            "fault": self.fault,
            "done": self.procedure,
            "figures": self.figures,
            "checks": checks,
            "ok": self.ok,
        }


def percentile(values: list[float], percent: float) -> float:
    value = observed_percentile(values, percent / 100)
    return math.nan if value is None else value


def latency_ms(values: list[float]) -> dict[str, float]:
    return {
        name: round(percentile(values, at) * 1000, 1) for name, at in (("p50", 50), ("p99", 99))
    }


# --- Process statistics ---------------------------------------------------------------------------


def memory_mb(pid: int, field: str = "VmRSS") -> float:
    """Return the memory of a process: current (VmRSS), or peak since the last reset (VmHWM)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise ValueError(f"process {pid} has no {field}")


def reset_peak_memory(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def count_descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def cpu_wait(pid: int) -> float:
    """Return the seconds that the threads of a process waited for a CPU; 0 on an idle machine."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # the thread ended
            total += int((task / "schedstat").read_text().split()[1])
    return total / 1e9


def start_time(pid: int) -> str | None:
    """Return the start time of a process, to detect reused pids; None if it ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] == b"Z" else fields[19].decode()


def zombies(parents: set[int]) -> list[int]:
    """Return the children of these processes that ended and were not reaped."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError):
                state, parent = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:2]
                if state == b"Z" and int(parent) in parents:
                    pids.append(int(entry.name))
    return pids


# --- The installation and its servers -------------------------------------------------------------


class Upstream:
    """A running server of tests/support/upstreams."""

    def __init__(self, process: Process, url: str) -> None:
        self.process, self.url, self.pid = process, url, process.pid

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)


@contextmanager
def running_upstream(module: str, *args: str) -> Iterator[Upstream]:
    """Run a server of tests/support/upstreams over HTTP."""
    if module in ENDPOINTS:
        args = ("--http", "0", *args)
    argv = stdio_argv(module, *args)
    with Process(argv, clean_environment({})) as process:
        address = process.wait_for_line("listening on ")
        yield Upstream(process, f"http://{address}{ENDPOINTS.get(module, '')}")


def register(toolcrib: Api, slug: str, *, wait: bool = True, **fields: Any) -> None:
    """Register a server, by default over HTTP, and wait for its first sync."""
    body = {"name": slug, "slug": slug, "transport": "http", **fields}
    status, response = toolcrib.api("POST", "/servers", body)
    assert status == 201, response
    if wait:
        wait_for(lambda: _last_synced_at(toolcrib, slug), 60, what=f"{slug} is synced")


def _last_synced_at(toolcrib: Api, slug: str) -> Any:
    return toolcrib.api("GET", f"/servers/{slug}")[1]["last_synced_at"]


def register_stdio(toolcrib: Api, slug: str, module: str, *args: str, **fields: Any) -> None:
    """Register a stdio server of tests/support/upstreams."""
    command, *rest = stdio_argv(module, *args)
    program: dict[str, Any] = {
        "transport": "stdio",
        "command": command,
        "args": rest,
        "cwd": str(ROOT),
    }
    register(toolcrib, slug, confirm_argv=[command, *rest], **program)
    if fields:
        status, response = toolcrib.api("PATCH", f"/servers/{slug}", fields)
        assert status == 200, response


def remove(toolcrib: Api, slug: str) -> None:
    toolcrib.api("DELETE", f"/servers/{slug}")


def make_unlimited_agent(toolcrib: Api, name: str = "bench", **fields: Any) -> Agent:
    """Create an agent without effective limits."""
    return make_agent(toolcrib, name, **{**dict.fromkeys(LIMITS, UNLIMITED), **fields})


class Bed:
    """Test bed: an embedded installation and an agent without limits, shared by rows."""

    def __init__(self, folder: Path, env: Mapping[str, str] | None = None) -> None:
        # Idle connections close soon, so that they are not mistaken for leaks of a row.
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
            self._agent = make_unlimited_agent(self.toolcrib)
        return self._agent

    def session(self, slug: str) -> Session:
        return self.agent.open(groups=[f"mcp:{slug}"], mode="deferred")

    def query(self, text: str, *values: object) -> list[tuple[Any, ...]]:
        """Query the SQLite file directly, read-only."""
        path = self.toolcrib.data_dir / "toolcrib.sqlite3"
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        try:
            return connection.execute(text, values).fetchall()
        finally:
            connection.close()

    def calls(self, session: Session) -> list[dict[str, Any]]:
        """Return the calls of a session, oldest first."""
        columns = ("call_id", "state", "error_code", "arguments", "idempotency_key", "sent_at")
        calls = [
            dict(zip(columns, row, strict=True))
            for row in self.query(
                f"select {', '.join('c.' + name for name in columns)} from sessions_app_call c "  # noqa: S608
                "join sessions_app_agentsession s on s.id = c.session_id "
                "where s.session_id = ? order by c.id",
                session.id,
            )
        ]
        payloads = PayloadReader.of_folder(self.toolcrib.data_dir)
        for call in calls:
            call["arguments"] = payloads.read(call["arguments"])
        return calls


# --- Callers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Response:
    """Outcome of a request; status 0 if the connection broke before the response."""

    status: int
    body: bytes
    seconds: float
    at: float  # time of sending, by time.monotonic

    @property
    def json(self) -> dict[str, Any]:
        value = json.loads(self.body) if self.body else {}
        return value if isinstance(value, dict) else {}

    @property
    def state(self) -> str:
        """The state of the call, the error code, `ok` or `broken`."""
        if not self.status:
            return "broken"
        if self.status == 200:
            return str(self.json.get("state", "ok"))
        return str(self.json.get("error", {}).get("code", self.status))


class Callers:
    """Pool of keep-alive connections to one URL, for one event loop."""

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
        timeout: float | None = None,  # noqa: ASYNC109 - of the call
    ) -> Response:  # fmt: skip
        body: dict[str, Any] = {"tool_name": tool, "arguments": arguments or {}}
        if timeout is not None:
            body["timeout"] = timeout
        headers = {"Idempotency-Key": key} if key else {}
        return await self.request_api("POST", f"{session.path}/call", body, headers)

    async def request_api(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Response:
        return await self.request(method, f"/api/v1{path}", body, self.agent.headers(headers))

    async def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Response:
        """Send one request and read the response. A broken connection is a response too."""
        data = json.dumps(body).encode() if body is not None else b""
        fields = {"Host": f"localhost:{self.port}", "Content-Length": len(data), **(headers or {})}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {v}" for name, v in fields.items())]
        started = time.monotonic()
        connection = None
        try:
            connection = self._idle.pop() if self._idle else await self._connect()
            reader, writer = connection
            writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
            status, content, closes = await _read_response(reader)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            if connection is not None:
                connection[1].close()
            return Response(0, b"", time.monotonic() - started, started)
        except asyncio.CancelledError:
            if connection is not None:
                connection[1].transport.abort()  # the caller disconnects
            raise
        if closes:
            writer.close()
        else:
            self._idle.append(connection)
        return Response(status, content, time.monotonic() - started, started)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port, limit=2**20)


async def _read_response(reader: asyncio.StreamReader) -> tuple[int, bytes, bool]:
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


async def send_at_rate(
    per_second: float, seconds: float, send: Callable[[int], Awaitable[Response]]
) -> list[Response]:
    """Send requests at a fixed rate, without waiting for earlier responses."""
    started = time.monotonic()
    running = []
    for number in range(round(per_second * seconds)):
        ahead = started + number / per_second - time.monotonic()
        if ahead > 0:
            await asyncio.sleep(ahead)
        running.append(asyncio.ensure_future(send(number)))
    return await asyncio.gather(*running)


async def repeat_until(
    stop: Callable[[], bool], workers: int, action: Callable[[int], Awaitable[None]]
) -> None:
    """Repeat an action in concurrent workers until `stop` returns true."""

    async def work(number: int) -> None:
        while not stop():
            await action(number)

    await asyncio.gather(*(work(number) for number in range(workers)))
