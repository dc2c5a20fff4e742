"""Cost of requests through Toolcrib and through other proxies, compared with a direct call.

    python bench/dispatch.py [--rounds 5] [--seconds 0.7] [--at 1 16 32] [--sizes 100]
                             [--over http] [--only NAME ...] [--no-peers] [--no-pinned] [--quick]
                             [--profile] [--json]

One echo server (bench/echo.py, the SDK's MCPServer) behind every row, over streamable HTTP or
stdio. Direct: the SDK's client, with protocol version 2026-07-28 and with 2025-11-25. Toolcrib,
with ledger, validation, policy and limits enabled, 600 other tools in scope (bench/fleet.py) and an
agent in deferred mode: calls over REST, with a bare socket and with httpx; calls over MCP of both
eras, through the dispatcher and by the tool's own name, in the key's rolling session and in one in
the URL; searches and loads over MCP. Peers, each in its own environment: FastMCP's proxy, also with
its search, and mcp-proxy, which converts HTTP to stdio and stdio to HTTP, so that its client side
uses the other transport.

Each process runs alone with its own environment. Rounds are interleaved: every row is measured
once in each round, one at a time, in rotating order, and ratios are within a round, to the direct
call of the same era. Above one caller every row is also measured pinned: the client and the echo
server on one processor, Toolcrib or the peer on the other, direct likewise without the other.
Connections are kept between rounds. The limits of Toolcrib's agent are raised (calls in flight,
calls, searches and cost per minute), and the concurrency of its server is 64 instead of 8. Errors
are printed in their row. `--profile` prints the stages of a call instead (bench/inside.py).
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
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import dispatch_report  # noqa: E402
import fleet  # noqa: E402
import load  # noqa: E402

from tests.support import parts  # noqa: E402
from tests.support.installation import Installation, descendants, free_port  # noqa: E402
from tests.support.waiting import wait_for  # noqa: E402

ECHO = [sys.executable, str(ROOT / "bench" / "echo.py")]
LIMITS = dict.fromkeys(
    ("calls_in_flight", "calls_per_minute", "searches_per_minute", "cost_per_minute"), 10**9
)
CONCURRENCY = 64
WARM_UP_BYTES = 100  # size of the calls before the measurement
CELL_TIMEOUT = 30.0  # seconds, in addition to the measured time
MAX_FAILURES = 2  # of a cell before it is skipped
TICK = os.sysconf("SC_CLK_TCK")
WORDS = "Every call of every agent passes here, and each is written down before it is sent. "
PHRASES = (
    "create an issue in a repository",
    "send a message to a channel",
    "search files by name",
    "list pull requests",
    "refund a payment",
    "restart a pod",
    "find a free slot",
    "export a report",
)
VERBS = ("find", "move", "copy", "sort", "merge", "check")
THINGS = ("file", "invoice", "meeting", "label")


@dataclass(frozen=True)
class Row:
    """One row of the table: what is measured, and the direct call it is compared with."""

    name: str
    method: str  # of Bed, which returns a caller and the process that is measured
    options: tuple = ()
    direct: str = "direct 2026"
    is_peer: bool = False
    over: tuple = ("http", "stdio")


ROWS = (
    Row("direct 2026", "direct", (load.MODERN,)),
    Row("direct 2025", "direct", (load.LEGACY,), "direct 2025"),
    Row("REST, socket", "rest", (load.rest_caller,)),
    Row("REST, httpx", "rest", (load.httpx_caller,)),
    Row("dispatcher 2026", "mcp_call", (load.MODERN, "", True)),
    Row("dispatcher 2026, URL", "mcp_call", (load.MODERN, "url", True)),
    Row("own name 2026", "mcp_call", (load.MODERN, "", False)),
    Row("dispatcher 2025", "mcp_call", (load.LEGACY, "", True), "direct 2025"),
    Row("own name 2025", "mcp_call", (load.LEGACY, "", False), "direct 2025"),
    Row("load", "mcp_load", (load.MODERN,), over=("http",)),
    Row("load 2025", "mcp_load", (load.LEGACY,), "direct 2025", over=("http",)),
    Row("search, bm25", "mcp_search", (load.MODERN, "bm25"), over=("http",)),
    Row("search, cached", "mcp_search", (load.MODERN, "cached"), over=("http",)),
    Row("search, new", "mcp_search", (load.MODERN, "new"), over=("http",)),
    Row("search 2025, bm25", "mcp_search", (load.LEGACY, "bm25"), "direct 2025", over=("http",)),
    Row("FastMCP", "fastmcp", ("",), is_peer=True),
    Row("FastMCP dispatcher", "fastmcp", ("call_tool",), is_peer=True),
    Row("FastMCP search", "fastmcp", ("search_tools",), is_peer=True, over=("http",)),
    Row("mcp-proxy", "mcp_proxy", (), "direct 2025", is_peer=True),
)
BY_NAME = {row.name: row for row in ROWS}


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


def set_processors(pids, processors):
    """Let all threads of these processes run on these processors only."""
    for pid in pids:
        with suppress(OSError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with suppress(OSError):
                    os.sched_setaffinity(int(thread.name), processors)


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
    """An installation with the fleet, the echo server over HTTP and stdio, and an agent."""

    program = str(ROOT / "manage.py")

    def _argv(self, *args):
        program = self.program if args[0] == "serve" else str(ROOT / "manage.py")
        return [sys.executable, program, *args]

    def create_rows(self, echo_url, mcp_json):
        file = self.data_dir.parent / "mcp.json"
        file.write_text(json.dumps(mcp_json))
        imported = self.command("import_servers", str(file), "--wait", "--json")
        assert imported.returncode == 0, imported.stdout + imported.stderr
        command, *args = ECHO
        bodies = [
            {"name": "http", "slug": "http", "transport": "http", "url": echo_url},
            {"name": "stdio", "slug": "stdio", "transport": "stdio", "command": command,
             "args": args, "confirm_argv": ECHO},
        ]  # fmt: skip
        for body in bodies:
            slug = body["slug"]
            self._send("POST", "/servers", body)
            wait_for(lambda slug=slug: self.tool_names(slug), 60, what=f"{slug} is synced")
            self._send("PATCH", f"/servers/{slug}", {"concurrency": CONCURRENCY})
            preload = {"tools": [f"{slug}__listed_echo"], "preload": True}
            self._send("PATCH", f"/groups/mcp:{slug}/members", preload)
        agent = {"name": "bench", "all_groups": True, "mode": "deferred", **LIMITS}
        self._send("POST", "/agents", agent)
        self.key = self._send("POST", "/agents/bench/keys", {})["key"]
        self.session = self._send("POST", "/sessions", {}, token=self.key)["id"]

    def _send(self, method, path, body, **options):
        status, response = self.api(method, path, body, **options)
        assert status in (200, 201), response
        return response


class Bed:
    """Callers for every row to the echo server over one transport, http or stdio."""

    def __init__(self, stack, over, rows, toolcrib, echo):
        self.over, self.toolcrib = over, toolcrib
        self.echo_url, self.echo_pid = echo
        self.target = self.echo_url if over == "http" else ECHO
        self.callers, self.roots, self.missing = {}, {}, {}
        for row in rows:
            if over not in row.over:
                continue
            try:
                make, root = getattr(self, f"_{row.method}")(stack, *row.options)
            except (OSError, AssertionError) as error:
                self.missing[row.name] = str(error)
                continue
            self.callers[row.name] = load.PersistentCaller(make)
            self.roots[row.name] = root

    def pids(self, name, before):
        """Return the processes in the middle of a row, and the echo server.

        Without a root process the middle is the children of this process that are not in `before`.
        """
        root = self.roots[name]
        middle = {root, *descendants(root)} if root else set(descendants(os.getpid())) - before
        return middle, {self.echo_pid} if self.over == "http" else set()

    def _direct(self, stack, mode):
        return partial(load.sdk_caller, self.target, "echo", mode=mode), None

    def _rest(self, stack, caller):
        crib = self.toolcrib
        return partial(caller, crib.url, crib.key, crib.session, f"{self.over}__echo"), crib.pid

    def _mcp(self, mode, session, tool, arguments, check):
        crib = self.toolcrib
        url = f"{crib.url}/mcp" + (f"/{crib.session}" if session else "")
        options = {"mode": mode, "arguments": arguments, "check": check}
        return partial(load.sdk_caller, url, tool, crib.key, **options), crib.pid

    def _mcp_call(self, stack, mode, session, dispatched):
        if dispatched:
            arguments = load.dispatch_arguments(f"{self.over}__echo")
            return self._mcp(mode, session, "deferred_tool_call", arguments, load.check_echo)
        tool = f"{self.over}__listed_echo"
        return self._mcp(mode, session, tool, load.echo_arguments, load.check_echo)

    def _mcp_load(self, stack, mode):
        def arguments(text, number):
            return {"group_id": "mcp:http", "tool_names": ["http__echo"]}

        def check(content, text):
            assert '"expanded":true' in content, content[:300]

        return self._mcp(mode, "", "load_tools", arguments, check)

    def _mcp_search(self, stack, mode, kind):
        def arguments(text, number):
            if kind == "new":
                return {"query": new_query(number)}
            query = {"query": PHRASES[number % len(PHRASES)]}
            return query | ({"strategy": "bm25"} if kind == "bm25" else {})

        strategy = "bm25" if kind == "bm25" else "hybrid"

        def check(content, text):
            assert f'"strategy":"{strategy}"' in content, content[:300]

        return self._mcp(mode, "", "search_tools", arguments, check)

    def _fastmcp(self, stack, tool):
        python = Path(parts.installed_client("fastmcp")) / "python"
        target = [self.target] if self.over == "http" else ECHO
        port = free_port()
        search = ["--search"] if tool else []
        argv = [str(python), str(ROOT / "bench" / "peers.py"), str(port), *search, *target]
        process = start_program(stack, argv, port)
        url = f"http://127.0.0.1:{port}/mcp"
        if tool == "call_tool":
            options = {"arguments": load.dispatch_arguments("echo")}
        elif tool:
            # Its catalog has the tools of the echo server only: others would not be found.
            options = {"arguments": lambda text, number: {"query": "echo a text"},
                       "check": lambda content, text: None}  # fmt: skip
        else:
            options = {}
        return partial(load.sdk_caller, url, tool or "echo", **options), process.pid

    def _mcp_proxy(self, stack):
        program = str(Path(parts.installed_client("mcp-proxy")) / "mcp-proxy")
        quiet = ("--log-level", "ERROR")
        if self.over == "http":  # its client side is stdio
            argv = [program, "--transport", "streamablehttp", *quiet, self.target]
            return partial(load.sdk_caller, argv, "echo", mode=load.LEGACY), None
        port = free_port()
        process = start_program(stack, [program, "--port", str(port), *quiet, "--", *ECHO], port)
        url = f"http://127.0.0.1:{port}/mcp"
        return partial(load.sdk_caller, url, "echo", mode=load.LEGACY), process.pid


class Run:
    """Measure every cell in interleaved rounds; a cell that fails has its error."""

    def __init__(self, beds, options):
        self.beds, self.options = beds, options
        self.rows, self.failed, self.processes, self.encoder_ms = [], {}, {}, []
        self.processors = sorted(os.sched_getaffinity(0))

    async def rounds(self):
        try:
            model = load_encoder() if "search, new" in self.options.only else None
            for number in range(self.options.rounds):
                for bed in self.beds:
                    await self._round(number, bed)
                    if model is not None and "search, new" in bed.callers:
                        self.encoder_ms.append(await encoder_ms(model, bed, number))
        finally:
            for bed in self.beds:
                for caller in bed.callers.values():
                    await caller.close()

    async def _round(self, number, bed):
        names = list(bed.callers)
        turn = number % len(names)
        for size in self.options.sizes:
            for callers in self.options.at:
                for pinned in (False, True) if callers > 1 and self.options.pinned else (False,):
                    for name in names[turn:] + names[:turn]:
                        key = {"over": bed.over, "size": size, "callers": callers}
                        key |= {"pinned": pinned, "path": name}
                        figures = await self._cell(bed, **key)
                        self.rows.append({"round": number, **key, **figures})
                        if self.options.verbose:
                            sys.stderr.write(f"{self.rows[-1]}\n")

    async def _cell(self, bed, over, size, callers, pinned, path):
        key = (over, size, callers, pinned, path)
        if self.failed.get(key, 0) >= MAX_FAILURES:
            return {"error": "skipped after failures"}
        caller = bed.callers[path]
        try:
            async with asyncio.timeout(self.options.seconds + CELL_TIMEOUT):
                before = set(descendants(os.getpid()))
                call = await caller.call()
                if (over, path) not in self.processes or not bed.roots[path]:
                    middle, echo = bed.pids(path, before)
                    known, _ = self.processes.get((over, path), (set(), echo))
                    self.processes[over, path] = (known | middle, echo)
                middle, echo = self.processes[over, path]
                if pinned:
                    set_processors({os.getpid(), *echo}, {self.processors[0]})
                    set_processors(middle - echo, {self.processors[1]})
                return await measure(
                    call, make_text(size), callers, self.options.seconds, middle, echo
                )
        except Exception as error:  # noqa: BLE001 - printed in its row
            self.failed[key] = self.failed.get(key, 0) + 1
            await caller.close()
            return {"error": _describe(error)}
        finally:
            if pinned and (over, path) in self.processes:
                middle, echo = self.processes[over, path]
                set_processors({os.getpid(), *middle, *echo}, set(self.processors))


async def measure(call, text, callers, seconds, middle, echo):
    await load.time_calls(
        call, make_text(WARM_UP_BYTES), callers, 0, least=2
    )  # connections and caches
    before = cpu_seconds(middle), cpu_seconds(echo), time.process_time()
    durations, elapsed = await load.time_calls(call, text, callers, seconds, least=1)
    after = cpu_seconds(middle), cpu_seconds(echo), time.process_time()
    count = len(durations)
    in_middle, in_echo, in_caller = (
        (end - start) / count * 1000 for start, end in zip(before, after, strict=True)
    )
    return {
        "calls": count,
        "p50": statistics.median(durations) * 1000,
        "p99": sorted(durations)[min(count - 1, int(count * 0.99))] * 1000,
        "rate": count / elapsed,
        "cpu": in_middle + in_echo + in_caller,
        "middle": in_middle,
        "caller": in_caller,
    }


def _describe(error):
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error).split())[:160]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def load_encoder():
    """Load the sentence model that Toolcrib uses for new queries."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "toolcrib.settings")
    from catalog.search.embeddings import encoder

    return encoder.load(ROOT / ".cache" / "models")


def new_query(number):
    """Return a query that was not sent before."""
    verb, thing = VERBS[number % len(VERBS)], THINGS[number % len(THINGS)]
    return f"{verb} the {thing} number {os.getpid()} {number}"


async def encoder_ms(model, bed, number):
    """Return the time of the model for one new query, between requests as in Toolcrib.

    In a loop of its own its weights would stay in the processor's cache. The query has as many
    tokens as those that are served.
    """
    call = await bed.callers["search, new"].call()
    times = []

    def encode(turn):
        started = time.perf_counter()
        model.encode_queries([new_query(1_000 + 20 * number + turn)])
        times.append((time.perf_counter() - started) * 1000)

    for turn in range(20):
        await call(0, "")
        await asyncio.to_thread(encode, turn)
    return statistics.median(times)


def environment():
    return {"TOOLCRIB_EMBEDDINGS": "1", "TOOLCRIB_MODELS": str(ROOT / ".cache" / "models")}


def start_all(stack, options, kind=Toolcrib, env=None):
    """Start the echo server, the fleet and Toolcrib; return Toolcrib and the echo server."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="toolcrib-bench-")))
    port = free_port()
    process = start_program(stack, [*ECHO, "--http", str(port)], port)
    echo = (f"http://127.0.0.1:{port}/mcp", process.pid)
    fleet_options = argparse.Namespace(
        groups=min(getattr(options, "servers", 33), options.tools),
        tools=options.tools,
        folder=options.folder,
        most=options.tools,
        even=False,
    )
    mcp_json = stack.enter_context(fleet.running(fleet_options))
    toolcrib = stack.enter_context(kind(folder / "data", {**environment(), **(env or {})}))
    toolcrib.create_rows(echo[0], mcp_json)
    wait_for(lambda: vectors_ready(toolcrib), 300, what="the search vectors are computed")
    return toolcrib, echo


def vectors_ready(toolcrib):
    search = toolcrib.api("GET", "/health")[1]["search"]
    return search["state"] == "ready" and search["embedded"] == search["total"]


def run(options):
    """Start all programs; return the rows and the paths that could not be started."""
    with ExitStack() as stack:
        toolcrib, echo = start_all(stack, options)
        rows = [BY_NAME[name] for name in options.only]
        beds = [Bed(stack, over, rows, toolcrib, echo) for over in options.over]
        running = Run(beds, options)
        asyncio.run(running.rounds())
        return running.rows, {bed.over: bed.missing for bed in beds}, running.encoder_ms


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.7, help="minimum time of a cell")
    parser.add_argument("--at", type=int, nargs="+", default=[1, 16, 32], metavar="CALLERS")
    parser.add_argument("--sizes", type=int, nargs="+", default=[100])
    parser.add_argument("--over", nargs="+", choices=("http", "stdio"), default=["http"])
    parser.add_argument("--only", nargs="+", choices=list(BY_NAME), default=list(BY_NAME))
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--no-pinned", dest="pinned", action="store_false")
    parser.add_argument("--quick", action="store_true", help="two rows, one short round")
    parser.add_argument("--tools", type=int, default=600, help="other tools in scope")
    parser.add_argument("--folder", "--fleet", dest="folder", help="folder with real definitions")
    parser.add_argument("--profile", action="store_true", help="stages of a call at concurrency 1")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds, options.tools = 1, min(options.seconds, 0.3), 20
        options.sizes, options.over, options.at = options.sizes[:1], ["http"], [1, 16]
        options.pinned = False
        options.only = [name for name in options.only if name in dispatch_report.QUICK_ROWS]
    if options.no_peers:
        options.only = [name for name in options.only if not BY_NAME[name].is_peer]
    if options.profile:
        import dispatch_profile

        dispatch_profile.run(options)
        return
    rows, missing, encoder = run(options)
    if options.json:
        print(json.dumps({"rows": rows, "missing": missing, "encoder_ms": encoder}))
        return
    directs = {row.name: row.direct for row in ROWS}
    report = dispatch_report.Report(rows, missing, options, directs, encoder)
    report.print_all(LIMITS, CONCURRENCY)


if __name__ == "__main__":
    main()
