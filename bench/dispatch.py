"""What a call costs through Toolcrib, and through others, against calling the server directly.

    python bench/dispatch.py [--rounds 5] [--seconds 1] [--at 1 8 32] [--sizes 100 10000 1000000]
                             [--over http stdio] [--only direct REST ...] [--quick] [--json]

One echo server (bench/echo.py, the SDK's MCPServer) behind every path, over streamable HTTP and
over stdio: the SDK's client directly; Toolcrib over REST and over MCP, with ledger, validation,
policy and limits on; FastMCP's proxy with one connected client; mcp-proxy, which turns HTTP into
stdio and stdio into HTTP, so its agents' side is the other one. Each runs in its own process and
environment. Rounds are interleaved: every path is measured once in each round, one at a time, and
ratios are of the same round. Toolcrib's agent has its limits raised (calls in flight, calls a
minute), and its server's concurrency is 64 instead of 8.
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
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import load  # noqa: E402
import peers  # noqa: E402

from tests.installation import Installation, descendants, free_port  # noqa: E402
from tests.waiting import wait_for  # noqa: E402

ECHO = [sys.executable, str(ROOT / "bench" / "echo.py")]
LIMITS = {"calls_in_flight": 1_000_000, "calls_per_minute": 1_000_000_000}
CONCURRENCY = 64
PATHS = ("direct", "REST", "MCP", "FastMCP", "mcp-proxy")
TARGETS = {"REST": (2.0, 0.5), "MCP": (2.6, 0.4)}  # p50 at one caller, calls a second at 32
TICK = os.sysconf("SC_CLK_TCK")


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


def started(stack, argv, port=None):
    """Run a program until the bench ends; with a port, wait until it listens there."""
    process = subprocess.Popen(
        argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )

    def stop():
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(stop)
    if port:
        wait_for(lambda: _listens(port, process), 60, what=f"{argv[:3]} listens")
    return process


def _listens(port, process):
    assert process.poll() is None, process.args
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Bed:
    """Everything that runs: the echo server, Toolcrib and the peers, for one way to reach it."""

    def __init__(self, stack, over, wanted, toolcrib, echo_url):
        self.over, self.toolcrib = over, toolcrib
        self.target = echo_url if over == "http" else ECHO
        self.paths = {}
        for path in wanted:
            made = getattr(self, f"_{path.lower().replace('-', '_')}")(stack)
            if made is not None:
                self.paths[path] = made

    def _direct(self, stack):
        return lambda text: load.sdk(self.target, "echo", text), None

    def _rest(self, stack):
        tool = f"{self.over}__echo"
        return (
            lambda text: load.rest(
                self.toolcrib.url, self.toolcrib.key, self.toolcrib.session, tool, text
            ),
            self.toolcrib.pid,
        )

    def _mcp(self, stack):
        url, tool = f"{self.toolcrib.url}/mcp", f"{self.over}__echo"
        return lambda text: load.sdk(url, tool, text, self.toolcrib.key), self.toolcrib.pid

    def _fastmcp(self, stack):
        programs = peers.installed("fastmcp")
        if programs is None:
            return None
        port = free_port()
        target = [self.target] if self.over == "http" else ECHO
        argv = [str(programs / "python"), str(ROOT / "bench" / "peers.py"), "fastmcp", str(port)]
        process = started(stack, [*argv, *target], port)
        return lambda text: load.sdk(f"http://127.0.0.1:{port}/mcp", "echo", text), process.pid

    def _mcp_proxy(self, stack):
        programs = peers.installed("mcp-proxy")
        if programs is None:
            return None
        program = str(programs / "mcp-proxy")
        if self.over == "http":  # it speaks stdio to agents then
            argv = [program, "--transport", "streamablehttp", "--log-level", "ERROR", self.target]
            return lambda text: load.sdk(argv, "echo", text), None
        port = free_port()
        process = started(
            stack, [program, "--port", str(port), "--log-level", "ERROR", "--", *ECHO], port
        )
        return lambda text: load.sdk(f"http://127.0.0.1:{port}/mcp", "echo", text), process.pid


class Toolcrib(Installation):
    """An installation with the echo server behind it twice, and an agent without limits."""

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


async def one(make, text, callers, seconds, pids):
    async with AsyncExitStack() as stack:
        call = await stack.enter_async_context(make(text))
        await call(0)
        await call(0)
        used, own = cpu(pids()), time.process_time()
        took, lasted = await load.measure(call, callers, seconds)
        used, own = cpu(pids()) - used, time.process_time() - own
    count = len(took)
    return {
        "calls": count,
        "p50": statistics.median(took) * 1000,
        "p99": sorted(took)[min(count - 1, int(count * 0.99))] * 1000,
        "rate": count / lasted,
        "cpu": used / (count + callers) * 1000,  # of all but the caller
        "caller_cpu": own / (count + callers) * 1000,
    }


def processes():
    return descendants(os.getpid())


def run(options):
    rows = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="toolcrib-bench-")))
        port = free_port()
        started(stack, [*ECHO, "--http", str(port)], port)
        echo_url = f"http://127.0.0.1:{port}/mcp"
        toolcrib = stack.enter_context(Toolcrib(folder / "data"))
        toolcrib.fill(echo_url)
        beds = [Bed(stack, over, options.only, toolcrib, echo_url) for over in options.over]
        kinds = [(size, callers) for size in options.sizes for callers in options.at]
        for number in range(options.rounds):
            for bed in beds:
                for size, callers in kinds:
                    for path, (make, _) in bed.paths.items():
                        found = asyncio.run(
                            one(make, "x" * size, callers, options.seconds, processes)
                        )
                        rows.append(
                            {"round": number, "over": bed.over, "size": size, "callers": callers,
                             "path": path, **found}
                        )  # fmt: skip
                        if options.verbose:
                            sys.stderr.write(f"{rows[-1]}\n")
    return rows


def told(values, form="{:.2f}"):
    """A median with least and most."""
    if len(values) == 1:
        return form.format(values[0])
    least, most = form.format(min(values)), form.format(max(values))
    return f"{form.format(statistics.median(values))} ({least}–{most})"


def ratios(rows, what, over, size, callers, path):
    """The figure of a path divided by the direct one of the same round."""
    of = {
        (row["round"], row["path"]): row[what]
        for row in rows
        if (row["over"], row["size"], row["callers"]) == (over, size, callers)
    }
    rounds = sorted({number for number, _ in of})
    return [
        of[number, path] / of[number, "direct"]
        for number in rounds
        if (number, path) in of and (number, "direct") in of
    ]


def tell(rows, options):
    print(
        f"{options.rounds} interleaved rounds of {options.seconds:g} s a cell; median "
        "(least–most). Latency in ms; CPU in ms a call, of all processes but the caller's, and "
        "the caller's own; ratios are to direct in the same round."
    )
    print(
        f"Limits raised: agent {LIMITS['calls_in_flight']:,} in flight and "
        f"{LIMITS['calls_per_minute']:,} a minute (20 and 600 are usual), server concurrency "
        f"{CONCURRENCY} (8). Embedded on SQLite. REST caller: plain asyncio; others: the SDK's."
    )
    head = ("path", "p50", "÷ direct", "p99", "calls/s", "÷ direct", "CPU", "caller")
    widths = (10, 22, 19, 22, 22, 19, 18, 18)
    for over in options.over:
        for size in options.sizes:
            for callers in options.at:
                print(f"\n{over}, {size:,} bytes, {callers} at once")
                print("".join(f"{name:>{wide}}" for name, wide in zip(head, widths, strict=True)))
                for path in options.only:
                    key = (over, size, callers, path)
                    own = [r for r in rows
                           if (r["over"], r["size"], r["callers"], r["path"]) == key]  # fmt: skip
                    if not own:
                        continue
                    cells = (
                        path,
                        told([row["p50"] for row in own]),
                        told(ratios(rows, "p50", *key) or [0.0]),
                        told([row["p99"] for row in own]),
                        told([row["rate"] for row in own], "{:,.0f}"),
                        told(ratios(rows, "rate", *key) or [0.0]),
                        told([row["cpu"] for row in own]),
                        told([row["caller_cpu"] for row in own]),
                    )
                    print("".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True)))
    print()
    for line in verdicts(rows, options):
        print(line)


def verdicts(rows, options):
    """What was promised, and what was found."""
    over, size = "http", options.sizes[0]
    for path, (latency, rate) in TARGETS.items():
        for what, callers, bound, better in (
            ("p50", 1, latency, "at most"),
            ("rate", 32, rate, "at least"),
        ):
            found = ratios(rows, what, over, size, callers, path)
            if not found:
                continue
            middle = statistics.median(found)
            good = middle <= bound if what == "p50" else middle >= bound
            name = "p50 at 1" if what == "p50" else "calls/s at 32"
            yield (
                f"{'OK  ' if good else 'MISS'} {path}: {name} is {middle:.2f} × direct, to be "
                f"{better} {bound} ×"
            )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--at", type=int, nargs="+", default=[1, 8, 32], metavar="CALLERS")
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 10_000, 1_000_000])
    parser.add_argument("--over", nargs="+", choices=("http", "stdio"), default=["http", "stdio"])
    parser.add_argument("--only", nargs="+", choices=PATHS, default=list(PATHS))
    parser.add_argument("--quick", action="store_true", help="100 bytes over HTTP, one short round")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds = 1, min(options.seconds, 0.5)
        options.sizes, options.over, options.at = options.sizes[:1], ["http"], [1, 32]
    rows = run(options)
    if options.json:
        print(json.dumps({"limits": {**LIMITS, "concurrency": CONCURRENCY}, "rows": rows}))
    else:
        tell(rows, options)


if __name__ == "__main__":
    main()
