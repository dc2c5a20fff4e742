"""Cost of a call through Toolcrib and through other proxies, compared with a direct call.

    python bench/dispatch.py [--rounds 5] [--seconds 0.7] [--at 1 8 32] [--sizes 100 10000 1000000]
                             [--over http stdio] [--only direct REST ...] [--no-peers] [--quick]
                             [--profile] [--json]

One echo server (bench/echo.py, the SDK's MCPServer) behind every path, over streamable HTTP and
over stdio: the SDK's client directly; Toolcrib over REST and over MCP, with ledger, validation,
policy and limits enabled; FastMCP's proxy with one connected client; mcp-proxy, which converts HTTP
to stdio and stdio to HTTP, so its client side uses the other transport. Each runs in its own
process and environment. Rounds are interleaved: every path is measured once in each round, one at
a time, in rotating order, and ratios are within a round. Connections are kept between rounds. The
limits of Toolcrib's agent are raised (calls in flight, calls per minute), and the concurrency of
its server is 64 instead of 8. Errors are printed in their row. `--profile` prints the stages of a
call instead (bench/inside.py).
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import dispatch_report  # noqa: E402
import load  # noqa: E402

from tests.support import parts  # noqa: E402
from tests.support.installation import Installation, descendants, free_port  # noqa: E402
from tests.support.waiting import wait_for  # noqa: E402

ECHO = [sys.executable, str(ROOT / "bench" / "echo.py")]
PATHS = ("direct", "REST", "MCP", "FastMCP", "mcp-proxy")
PEERS = ("FastMCP", "mcp-proxy")
LIMITS = {"calls_in_flight": 1_000_000, "calls_per_minute": 1_000_000_000}
CONCURRENCY = 64
WARM_UP_BYTES = 100  # size of the calls before the measurement
CELL_TIMEOUT = 30.0  # seconds, in addition to the measured time
MAX_FAILURES = 2  # of a cell before it is skipped
TICK = os.sysconf("SC_CLK_TCK")
WORDS = "Every call of every agent passes here, and each is written down before it is sent. "


def make_text(size):
    return (WORDS * (size // len(WORDS) + 1))[:size]


def cpu_seconds(pids):
    """Return the CPU seconds used by these processes."""
    used = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        used += int(fields[11]) + int(fields[12])
    return used / TICK


def start_program(stack, argv, port):
    """Start a program that runs until the bench ends, and wait until it listens."""
    process = subprocess.Popen(
        argv,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def stop():
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def listens():
        assert process.poll() is None, f"{argv[:2]} exited with {process.returncode}"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    stack.callback(stop)
    wait_for(listens, 60, what=f"{argv[:2]} listens")
    return process


class Toolcrib(Installation):
    """An installation with the echo server over HTTP and stdio, and an agent without limits."""

    program = str(ROOT / "manage.py")

    def _argv(self, *args):
        program = self.program if args[0] == "serve" else str(ROOT / "manage.py")
        return [sys.executable, program, *args]

    def create_rows(self, echo_url):
        command, *args = ECHO
        bodies = [
            {"name": "http", "slug": "http", "transport": "http", "url": echo_url},
            {"name": "stdio", "slug": "stdio", "transport": "stdio", "command": command,
             "args": args, "confirm_argv": ECHO},
        ]  # fmt: skip
        for body in bodies:
            status, response = self.api("POST", "/servers", body)
            assert status == 201, response
            slug = body["slug"]
            wait_for(lambda slug=slug: self.tool_names(slug), 60, what=f"{slug} is synced")
            status, response = self.api("PATCH", f"/servers/{slug}", {"concurrency": CONCURRENCY})
            assert status == 200, response
        agent = {"name": "bench", "all_groups": True, "mode": "full", **LIMITS}
        status, response = self.api("POST", "/agents", agent)
        assert status == 201, response
        self.key = self.api("POST", "/agents/bench/keys", {})[1]["key"]
        status, response = self.api("POST", "/sessions", {}, token=self.key)
        assert status == 201, response
        self.session = response["id"]


class Bed:
    """Callers for every path to the echo server over one transport, http or stdio."""

    def __init__(self, stack, over, paths, toolcrib, echo):
        self.over, self.toolcrib = over, toolcrib
        self.echo_url, self.echo_pid = echo
        self.target = self.echo_url if over == "http" else ECHO
        self.callers, self.roots, self.missing = {}, {}, {}
        for path in paths:
            try:
                make, root = getattr(self, f"_{path.lower().replace('-', '_')}")(stack)
            except (OSError, AssertionError) as error:
                self.missing[path] = str(error)
                continue
            self.callers[path] = load.PersistentCaller(make)
            self.roots[path] = root

    def pids(self, path, before):
        """Return the processes that work for the calls of a path. Without a root process these are
        the children of this process that are not in `before`."""
        root = self.roots[path]
        pids = {root, *descendants(root)} if root else set(descendants(os.getpid())) - before
        return pids | ({self.echo_pid} if self.over == "http" else set())

    def _direct(self, stack):
        return partial(load.sdk_caller, self.target, "echo"), None

    def _rest(self, stack):
        crib = self.toolcrib
        caller = partial(load.rest_caller, crib.url, crib.key, crib.session, f"{self.over}__echo")
        return caller, crib.pid

    def _mcp(self, stack):
        crib = self.toolcrib
        return partial(load.sdk_caller, f"{crib.url}/mcp", f"{self.over}__echo", crib.key), crib.pid

    def _fastmcp(self, stack):
        python = Path(parts.installed_client("fastmcp")) / "python"
        target = [self.target] if self.over == "http" else ECHO
        port = free_port()
        argv = [str(python), str(ROOT / "bench" / "peers.py"), str(port), *target]
        process = start_program(stack, argv, port)
        return partial(load.sdk_caller, f"http://127.0.0.1:{port}/mcp", "echo"), process.pid

    def _mcp_proxy(self, stack):
        program = str(Path(parts.installed_client("mcp-proxy")) / "mcp-proxy")
        quiet = ("--log-level", "ERROR")
        if self.over == "http":  # its client side is stdio
            argv = [program, "--transport", "streamablehttp", *quiet, self.target]
            return partial(load.sdk_caller, argv, "echo"), None
        port = free_port()
        process = start_program(stack, [program, "--port", str(port), *quiet, "--", *ECHO], port)
        return partial(load.sdk_caller, f"http://127.0.0.1:{port}/mcp", "echo"), process.pid


class Run:
    """Measure every cell in interleaved rounds; a cell that fails has its error."""

    def __init__(self, beds, options):
        self.beds, self.options = beds, options
        self.rows, self.failed, self.own = [], {}, {}

    async def rounds(self):
        try:
            for number in range(self.options.rounds):
                for bed in self.beds:
                    await self._round(number, bed)
        finally:
            for bed in self.beds:
                for caller in bed.callers.values():
                    await caller.close()

    async def _round(self, number, bed):
        paths = list(bed.callers)
        turn = number % len(paths)
        for size in self.options.sizes:
            for callers in self.options.at:
                for path in paths[turn:] + paths[:turn]:
                    key = {"over": bed.over, "size": size, "callers": callers, "path": path}
                    figures = await self._cell(bed, **key)
                    self.rows.append({"round": number, **key, **figures})
                    if self.options.verbose:
                        sys.stderr.write(f"{self.rows[-1]}\n")

    async def _cell(self, bed, over, size, callers, path):
        key = (over, size, callers, path)
        if self.failed.get(key, 0) >= MAX_FAILURES:
            return {"error": "skipped after failures"}
        caller = bed.callers[path]
        try:
            async with asyncio.timeout(self.options.seconds + CELL_TIMEOUT):
                before = set(descendants(os.getpid()))
                call = await caller.call()
                if (over, path) not in self.own or not bed.roots[path]:
                    self.own.setdefault((over, path), set()).update(bed.pids(path, before))
                return await measure(
                    call, make_text(size), callers, self.options.seconds, self.own[over, path]
                )
        except Exception as error:  # noqa: BLE001 - printed in its row
            self.failed[key] = self.failed.get(key, 0) + 1
            await caller.close()
            return {"error": _describe(error)}


async def measure(call, text, callers, seconds, pids):
    await load.time_calls(
        call, make_text(WARM_UP_BYTES), callers, 0, least=2
    )  # connections and caches
    used, own = cpu_seconds(pids), time.process_time()
    durations, elapsed = await load.time_calls(call, text, callers, seconds, least=1)
    used, own = cpu_seconds(pids) - used, time.process_time() - own
    count = len(durations)
    return {
        "calls": count,
        "p50": statistics.median(durations) * 1000,
        "p99": sorted(durations)[min(count - 1, int(count * 0.99))] * 1000,
        "rate": count / elapsed,
        "cpu": (used + own) / count * 1000,
        "caller": own / count * 1000,
    }


def _describe(error):
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error).split())[:160]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def run(options):
    """Start all programs; return the rows and the paths that could not be started."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="toolcrib-bench-")))
        port = free_port()
        process = start_program(stack, [*ECHO, "--http", str(port)], port)
        echo = (f"http://127.0.0.1:{port}/mcp", process.pid)
        toolcrib = stack.enter_context(Toolcrib(folder / "data"))
        toolcrib.create_rows(echo[0])
        beds = [Bed(stack, over, options.only, toolcrib, echo) for over in options.over]
        running = Run(beds, options)
        asyncio.run(running.rounds())
        return running.rows, {bed.over: bed.missing for bed in beds}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.7, help="minimum time of a cell")
    parser.add_argument("--at", type=int, nargs="+", default=[1, 8, 32], metavar="CALLERS")
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 10_000, 1_000_000])
    parser.add_argument("--over", nargs="+", choices=("http", "stdio"), default=["http", "stdio"])
    parser.add_argument("--only", nargs="+", choices=PATHS, default=list(PATHS))
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--quick", action="store_true", help="100 bytes over HTTP, one short round")
    parser.add_argument("--profile", action="store_true", help="stages of a call at concurrency 1")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds = 1, min(options.seconds, 0.3)
        options.sizes, options.over, options.at = options.sizes[:1], ["http"], [1, 32]
    if options.no_peers:
        options.only = [path for path in options.only if path not in PEERS]
    if options.profile:
        import dispatch_profile  # it needs this module

        dispatch_profile.run(options)
        return
    rows, missing = run(options)
    if options.json:
        limits = {**LIMITS, "concurrency": CONCURRENCY}
        print(json.dumps({"limits": limits, "missing": missing, "rows": rows}))
    else:
        dispatch_report.print_report(rows, missing, options, LIMITS, CONCURRENCY)


if __name__ == "__main__":
    main()
