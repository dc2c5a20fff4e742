"""What a call costs through Toolcrib, and through others, against calling the server directly.

    python bench/dispatch.py [--rounds 5] [--seconds 0.7] [--at 1 8 32] [--sizes 100 10000 1000000]
                             [--over http stdio] [--only direct REST ...] [--no-peers] [--quick]
                             [--profile] [--json]

One echo server (bench/echo.py, the SDK's MCPServer) behind every path, over streamable HTTP and
over stdio: the SDK's client directly; Toolcrib over REST and over MCP, with ledger, validation,
policy and limits on; FastMCP's proxy with one connected client; mcp-proxy, which turns HTTP into
stdio and stdio into HTTP, so its agents' side is the other one. Each runs in its own process and
environment. Rounds are interleaved: every path is measured once in each round, one at a time, in
an order that turns from round to round, and ratios are of the same round. Connections are kept
between rounds. Toolcrib's agent has its limits raised (calls in flight, calls a minute), and its
server's concurrency is 64 instead of 8. What fails is told in its row. `--profile` says what the
milliseconds of a call are made of instead (bench/inside.py).
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

import dispatch_told  # noqa: E402
import load  # noqa: E402

from tests.support import parts  # noqa: E402
from tests.support.installation import Installation, descendants, free_port  # noqa: E402
from tests.support.waiting import wait_for  # noqa: E402

ECHO = [sys.executable, str(ROOT / "bench" / "echo.py")]
PATHS = ("direct", "REST", "MCP", "FastMCP", "mcp-proxy")
PEERS = ("FastMCP", "mcp-proxy")
LIMITS = {"calls_in_flight": 1_000_000, "calls_per_minute": 1_000_000_000}
CONCURRENCY = 64
SMALL = 100  # bytes of the calls before those that are measured
PATIENCE = 30.0  # seconds for a cell, beyond the time that it is to take
TRIES = 2  # rounds in which a cell may fail before it is left alone
TICK = os.sysconf("SC_CLK_TCK")
WORDS = "Every call of every agent passes here, and each is written down before it is sent. "


def text_of(size):
    return (WORDS * (size // len(WORDS) + 1))[:size]


def cpu(pids):
    """Seconds of processor time that these processes have used."""
    used = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        used += int(fields[11]) + int(fields[12])
    return used / TICK


def started(stack, argv, port):
    """Run a program until the bench ends, and wait until it listens."""
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
        assert process.poll() is None, f"{argv[:2]} ended with {process.returncode}"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    stack.callback(stop)
    wait_for(listens, 60, what=f"{argv[:2]} listens")
    return process


class Toolcrib(Installation):
    """An installation with the echo server behind it twice, and an agent without limits."""

    program = str(ROOT / "manage.py")

    def _argv(self, *args):
        program = self.program if args[0] == "serve" else str(ROOT / "manage.py")
        return [sys.executable, program, *args]

    def fill(self, echo_url):
        command, *args = ECHO
        bodies = [
            {"name": "http", "slug": "http", "transport": "http", "url": echo_url},
            {"name": "stdio", "slug": "stdio", "transport": "stdio", "command": command,
             "args": args, "confirm_argv": ECHO},
        ]  # fmt: skip
        for body in bodies:
            status, told = self.api("POST", "/servers", body)
            assert status == 201, told
            slug = body["slug"]
            wait_for(lambda slug=slug: self.tool_names(slug), 60, what=f"{slug} is synced")
            status, told = self.api("PATCH", f"/servers/{slug}", {"concurrency": CONCURRENCY})
            assert status == 200, told
        agent = {"name": "bench", "all_groups": True, "mode": "full", **LIMITS}
        status, told = self.api("POST", "/agents", agent)
        assert status == 201, told
        self.key = self.api("POST", "/agents/bench/keys", {})[1]["key"]
        status, told = self.api("POST", "/sessions", {}, token=self.key)
        assert status == 201, told
        self.session = told["id"]


class Bed:
    """Every path to the echo server that is reached one way, http or stdio."""

    def __init__(self, stack, over, wanted, toolcrib, echo):
        self.over, self.toolcrib = over, toolcrib
        self.echo_url, self.echo_pid = echo
        self.target = self.echo_url if over == "http" else ECHO
        self.held, self.roots, self.missing = {}, {}, {}
        for path in wanted:
            try:
                make, root = getattr(self, f"_{path.lower().replace('-', '_')}")(stack)
            except (OSError, AssertionError) as error:
                self.missing[path] = str(error)
                continue
            self.held[path] = load.Held(make)
            self.roots[path] = root

    def pids(self, path, before):
        """Return the processes whose work a path's calls are; children started by the caller
        itself are those that were not there before."""
        root = self.roots[path]
        found = {root, *descendants(root)} if root else set(descendants(os.getpid())) - before
        return found | ({self.echo_pid} if self.over == "http" else set())

    def _direct(self, stack):
        return partial(load.sdk, self.target, "echo"), None

    def _rest(self, stack):
        crib = self.toolcrib
        made = partial(load.rest, crib.url, crib.key, crib.session, f"{self.over}__echo")
        return made, crib.pid

    def _mcp(self, stack):
        crib = self.toolcrib
        return partial(load.sdk, f"{crib.url}/mcp", f"{self.over}__echo", crib.key), crib.pid

    def _fastmcp(self, stack):
        python = Path(parts.installed_client("fastmcp")) / "python"
        target = [self.target] if self.over == "http" else ECHO
        port = free_port()
        argv = [str(python), str(ROOT / "bench" / "peers.py"), str(port), *target]
        process = started(stack, argv, port)
        return partial(load.sdk, f"http://127.0.0.1:{port}/mcp", "echo"), process.pid

    def _mcp_proxy(self, stack):
        program = str(Path(parts.installed_client("mcp-proxy")) / "mcp-proxy")
        quiet = ("--log-level", "ERROR")
        if self.over == "http":  # it speaks stdio to agents then
            argv = [program, "--transport", "streamablehttp", *quiet, self.target]
            return partial(load.sdk, argv, "echo"), None
        port = free_port()
        process = started(stack, [program, "--port", str(port), *quiet, "--", *ECHO], port)
        return partial(load.sdk, f"http://127.0.0.1:{port}/mcp", "echo"), process.pid


class Run:
    """The rounds. Every cell is measured, or tells why not."""

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
                for held in bed.held.values():
                    await held.close()

    async def _round(self, number, bed):
        paths = list(bed.held)
        turn = number % len(paths)
        for size in self.options.sizes:
            for callers in self.options.at:
                for path in paths[turn:] + paths[:turn]:
                    key = {"over": bed.over, "size": size, "callers": callers, "path": path}
                    found = await self._cell(bed, **key)
                    self.rows.append({"round": number, **key, **found})
                    if self.options.verbose:
                        sys.stderr.write(f"{self.rows[-1]}\n")

    async def _cell(self, bed, over, size, callers, path):
        key = (over, size, callers, path)
        if self.failed.get(key, 0) >= TRIES:
            return {"error": "left alone after it failed"}
        held = bed.held[path]
        try:
            async with asyncio.timeout(self.options.seconds + PATIENCE):
                before = set(descendants(os.getpid()))
                call = await held.call()
                if (over, path) not in self.own or not bed.roots[path]:
                    self.own.setdefault((over, path), set()).update(bed.pids(path, before))
                return await measured(
                    call, text_of(size), callers, self.options.seconds, self.own[over, path]
                )
        except Exception as error:  # noqa: BLE001 - told in its row
            self.failed[key] = self.failed.get(key, 0) + 1
            await held.close()
            return {"error": _words(error)}


async def measured(call, text, callers, seconds, pids):
    await load.measure(call, text_of(SMALL), callers, 0, least=2)  # connected, and known
    used, own = cpu(pids), time.process_time()
    took, lasted = await load.measure(call, text, callers, seconds, least=1)
    used, own = cpu(pids) - used, time.process_time() - own
    count = len(took)
    return {
        "calls": count,
        "p50": statistics.median(took) * 1000,
        "p99": sorted(took)[min(count - 1, int(count * 0.99))] * 1000,
        "rate": count / lasted,
        "cpu": (used + own) / count * 1000,
        "caller": own / count * 1000,
    }


def _words(error):
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    said = " ".join(str(error).split())[:160]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def run(options):
    """Start everything, and return the rows and what could not be started."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="toolcrib-bench-")))
        port = free_port()
        process = started(stack, [*ECHO, "--http", str(port)], port)
        echo = (f"http://127.0.0.1:{port}/mcp", process.pid)
        toolcrib = stack.enter_context(Toolcrib(folder / "data"))
        toolcrib.fill(echo[0])
        beds = [Bed(stack, over, options.only, toolcrib, echo) for over in options.over]
        running = Run(beds, options)
        asyncio.run(running.rounds())
        return running.rows, {bed.over: bed.missing for bed in beds}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.7, help="of a cell, at least")
    parser.add_argument("--at", type=int, nargs="+", default=[1, 8, 32], metavar="CALLERS")
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 10_000, 1_000_000])
    parser.add_argument("--over", nargs="+", choices=("http", "stdio"), default=["http", "stdio"])
    parser.add_argument("--only", nargs="+", choices=PATHS, default=list(PATHS))
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--quick", action="store_true", help="100 bytes over HTTP, one short round")
    parser.add_argument("--profile", action="store_true", help="what a call at concurrency 1 costs")
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
        dispatch_told.tell(rows, missing, options, LIMITS, CONCURRENCY)


if __name__ == "__main__":
    main()
