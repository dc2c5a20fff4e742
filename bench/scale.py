"""What a request costs with more tools in scope, and with another agent's flood beside it.

    python bench/scale.py [--sizes 100 10000 100000] [--rounds 5] [--requests 20] [--json]

One installation for each number of tools, embedded on SQLite, the tools spread evenly over ten
servers (bench/fleet.py), keyword search; calls go to bench/echo.py. Every operation is measured on
every installation in each round, one request at a time; ratios are to the first size, within a
round. Then, at the second size, what is expected to grow with its bytes: a session in full mode,
a load of a whole group, and a catalog with the names of all tools, in ms per MB of response, with
the longest stall of the event loop. Memory is that of the web process, at rest after all requests.
At last, at the second size, the latency of one agent's calls, ten a second, while sixteen callers
of another agent, with the default limits, open sessions, read catalogs, load and search without a
pause, compared with the same calls alone, in alternation. Each flood is that of a new agent, from
its start: it has its whole allowance.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import fleet  # noqa: E402
import rest  # noqa: E402
import session  # noqa: E402
from dispatch import ECHO, start_program  # noqa: E402
from dispatch_report import spread  # noqa: E402
from load import MODERN  # noqa: E402

from tests.support.installation import Installation, free_port  # noqa: E402

SERVERS = 10
MAX_RATIOS = {10_000: 1.5, 100_000: 2.0}  # by number of tools
MAX_FLOOD_RATIO = 2.0
MAX_STALL_MS = 100.0
META = "io.modelcontextprotocol/"
FLOOD_CALLERS = 16
WARM_UP = 3  # requests of each operation
QUERIES = session.QUERIES


class Sized:
    """An installation with a number of tools, an agent without limits and one with the defaults."""

    def __init__(self, stack, folder, size, echo_url):
        self.size = size
        options = argparse.Namespace(groups=SERVERS, tools=size, folder=None, most=None, even=True)
        mcp_json = stack.enter_context(fleet.running(options))
        folder.mkdir()
        self.toolcrib = stack.enter_context(Installation(folder / "data"))
        # Calls go to a small server: the SDK's reads its whole list for every call.
        mcp_json["mcpServers"]["echo"] = {"url": echo_url}
        file = folder / "mcp.json"
        file.write_text(json.dumps(mcp_json))
        started = time.monotonic()
        done = self.toolcrib.command("import_servers", str(file), "--wait", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        self.sync_seconds = time.monotonic() - started
        limits = dict.fromkeys(session.LIMITS, session.UNLIMITED)
        self.key = self.agent("bench", limits)
        self.mcp_key = self.agent("full", {**limits, "mode": "full"})
        slug = next(iter(mcp_json["mcpServers"]))
        servers = fleet.generate_servers(SERVERS, size, even=True)
        self.group, self.tools = f"mcp:{slug}", servers[slug]
        self.connect()
        self.session = self.open()
        self.numbers = itertools.count()

    def agent(self, name, limits):
        body = {"name": name, "all_groups": True, "mode": "deferred", **limits}
        status, response = self.toolcrib.api("POST", "/agents", body)
        assert status == 201, response
        return self.toolcrib.api("POST", f"/agents/{name}/keys", {})[1]["key"]

    def connect(self):
        """Open a connection: an idle one is closed after a while."""
        self.caller = session.Caller(self.toolcrib.url, self.key)

    def open(self, **options):
        return f"/sessions/{json.loads(self.request('POST', '/sessions', options))['id']}"

    def request(self, method, path, body=None):
        if method == "MCP":
            return self._list(path)
        return self.caller.request(method, path, body)

    def _list(self, method):
        """Send a request of MCP 2026-07-28 without parameters, as the agent in full mode."""
        url = f"{self.toolcrib.url}/mcp"
        meta = {f"{META}protocolVersion": MODERN, f"{META}clientCapabilities": {}}
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {"_meta": meta}}
        headers = {
            "Authorization": f"Bearer {self.mcp_key}",
            "Content-Type": "application/json",
            "Accept": "application/json, text/event-stream",
            "MCP-Protocol-Version": MODERN,
            "Mcp-Method": method,
        }
        request = urllib.request.Request(url, json.dumps(message).encode(), headers)  # noqa: S310
        with urllib.request.urlopen(request, timeout=120) as response:  # noqa: S310
            return response.read()

    def names(self):
        """Return ten names, others each time while there are any."""
        start = 10 * next(self.numbers) % max(1, len(self.tools) - 9)
        return [tool["name"] for tool in self.tools[start : start + 10]]

    def prepare(self, operation):
        """Return the request of one operation; what it needs is done before."""
        if operation == "open":
            return "POST", "/sessions", {}
        if operation == "catalog":
            return "GET", f"{self.session}/catalog?format=text", None
        if operation == "load of ten":
            body = {"group_id": self.group, "tool_names": self.names()}
            return "POST", f"{self.open()}/load", body
        if operation == "call":
            body = {"tool_name": "echo__echo", "arguments": {"text": "at any scale"}}
            return "POST", f"{self.session}/call", body
        if operation == "fork":
            return "POST", f"{self.session}/fork", {}
        query = QUERIES[next(self.numbers) % len(QUERIES)]
        return "POST", f"{self.session}/search", {"query": query, "strategy": "bm25"}

    def time(self, operation):
        """Return the milliseconds of one request."""
        request = self.prepare(operation)
        started = time.perf_counter()
        self.request(*request)
        return (time.perf_counter() - started) * 1000

    def longest_stall(self):
        return self.toolcrib.api("GET", "/health")[1]["event_loop"]["longest_ms"]


LARGE = ("full mode", "tool list over MCP", "whole group", "catalog as JSON")
OPERATIONS = ("open", "catalog", "load of ten", "call", "fork", "search by words")


def measure(installations, options):
    """Return the median milliseconds of each operation, by size and round."""
    times = {}
    for number in range(options.rounds):
        for operation in OPERATIONS:
            for installation in installations:
                installation.connect()
                for _ in range(WARM_UP):
                    installation.time(operation)
                values = [installation.time(operation) for _ in range(options.requests)]
                times[operation, installation.size, number] = statistics.median(values)
    return times


def measure_bytes(installation, options):
    """Return ms per MB of large responses, and the longest stall of the event loop meanwhile."""
    figures = {}
    time.sleep(options.settle)  # stalls are those of the last minute: leave the sync behind
    installation.connect()
    for name in LARGE:
        values, sizes = [], []
        for _ in range(options.rounds):
            request = ("POST", "/sessions", {"mode": "full"})
            if name == "whole group":
                body = {"group_id": installation.group, "confirm": True}
                request = ("POST", f"{installation.open()}/load", body)
            elif name == "catalog as JSON":  # with the names of all tools
                request = ("GET", f"{installation.session}/catalog", None)
            elif name == "tool list over MCP":
                request = ("MCP", "tools/list")
            started = time.perf_counter()
            body = installation.request(*request)
            values.append((time.perf_counter() - started) * 1000)
            sizes.append(len(body) / 1e6)
        rates = [value / size for value, size in zip(values, sizes, strict=True)]
        figures[name] = {"ms": values, "mb": sizes[-1], "ms_per_mb": rates}
    figures["longest_stall_ms"] = installation.longest_stall()
    return figures


FLOOD = """
import sys
sys.path.insert(0, sys.argv[1])
import scale
scale.flood(*sys.argv[2:])
"""


def flood(url, key, group):
    """Send requests of another agent until killed."""

    def run(number):
        caller = session.Caller(url, key)
        opened = None
        while True:
            try:
                if opened is None:
                    opened = (
                        f"/sessions/{json.loads(caller.request('POST', '/sessions', {}))['id']}"
                    )
                caller.request("GET", f"{opened}/catalog")
                body = {"group_id": group, "confirm": True}
                caller.request("POST", f"{opened}/load", body)
                caller.request("POST", f"{opened}/search", {"query": QUERIES[number % 8]})
            except AssertionError:  # a rejected request: the next one at once
                if number % 4 == 0:
                    opened = None

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(FLOOD_CALLERS)]
    for thread in threads:
        thread.start()
    print("flooding", flush=True)
    threading.Event().wait()


def time_paced(installation, seconds):
    """Return the median milliseconds of calls that are made every tenth of a second."""
    installation.connect()
    ends = time.monotonic() + seconds
    times = []
    while time.monotonic() < ends:
        times.append(installation.time("call"))
        time.sleep(0.1)
    return statistics.median(times)


def measure_flood(installation, options):
    """Return the median milliseconds of a call alone and in a flood from its start, by round."""
    rounds = []
    argv = [sys.executable, "-c", FLOOD, str(ROOT / "bench"), installation.toolcrib.url]
    for number in range(options.rounds):
        key = installation.agent(f"flood-{number}", {})  # with its whole allowance
        alone = time_paced(installation, options.flood_seconds)
        process = subprocess.Popen(
            [*argv, key, installation.group],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout.readline() == "flooding\n"
            beside = time_paced(installation, options.flood_seconds)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        rounds.append((alone, beside))
    return rounds


def run(options):
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="toolcrib-bench-")))
        port = free_port()
        start_program(stack, [*ECHO, "--http", str(port)], port)
        installations = [
            Sized(stack, folder / str(size), size, f"http://127.0.0.1:{port}/mcp")
            for size in options.sizes
        ]
        times = measure(installations, options)
        second = installations[min(1, len(installations) - 1)]
        figures = {
            "times": times,
            "sync_seconds": {each.size: each.sync_seconds for each in installations},
            "bytes": measure_bytes(second, options),
            "flood": measure_flood(second, options),
        }
        time.sleep(min(options.settle, 25))  # idle memory is returned
        figures["memory_mb"] = {
            each.size: rest.memory_mb(each.toolcrib.pid)["resident"] for each in installations
        }
        return figures


def mark(value, limit):
    return "OK  " if value <= limit else "MISS"


def print_report(figures, options):
    times, rounds = figures["times"], range(options.rounds)
    print(
        f"{SERVERS} servers each, embedded, SQLite; {options.rounds} interleaved rounds of "
        f"{options.requests} requests; p50 in ms, median (min–max); ratios to {options.sizes[0]:,} "
        "tools in the same round. The agent's limits are raised, but for the flood."
    )
    for operation in OPERATIONS:
        for size in options.sizes:
            values = [times[operation, size, number] for number in rounds]
            ratios = [
                value / times[operation, options.sizes[0], number]
                for number, value in enumerate(values)
            ]
            limit = MAX_RATIOS.get(size)
            verdict = f", limit {limit}" if limit else ""
            sign = mark(statistics.median(ratios), limit) if limit else "    "
            print(
                f"{sign} {operation:>16} at {size:>7,} tools: {spread(values):>20} ms, "
                f"× {spread(ratios)}{verdict}"
            )
    for size in options.sizes:
        print(
            f"     {size:>7,} tools: {figures['memory_mb'][size]:,.0f} MB resident at rest; "
            f"imported and synced in {figures['sync_seconds'][size]:.0f} s"
        )
    large = figures["bytes"]
    for name in LARGE:
        entry = large[name]
        print(
            f"     {name}: {entry['mb']:.1f} MB in {spread(entry['ms'])} ms, "
            f"{spread(entry['ms_per_mb'])} ms per MB"
        )
    stall = large["longest_stall_ms"]
    print(
        f"{mark(stall, MAX_STALL_MS)} longest stall of the event loop: {stall:.0f} ms, "
        f"limit {MAX_STALL_MS:.0f}"
    )
    ratios = [beside / alone for alone, beside in figures["flood"]]
    print(
        f"{mark(statistics.median(ratios), MAX_FLOOD_RATIO)} a call beside the flood: "
        f"{spread([beside for _, beside in figures['flood']])} ms, alone "
        f"{spread([alone for alone, _ in figures['flood']])} ms, × {spread(ratios)}, "
        f"limit {MAX_FLOOD_RATIO}"
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=20, help="of an operation in one round")
    parser.add_argument("--flood-seconds", type=float, default=10)
    parser.add_argument("--settle", type=float, default=61, help="seconds before stalls count")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = run(options)
    if options.json:
        rows = [
            {"operation": operation, "tools": size, "round": number, "ms": value}
            for (operation, size, number), value in figures.pop("times").items()
        ]
        print(json.dumps({"rows": rows, **figures}))
    else:
        print_report(figures, options)


if __name__ == "__main__":
    main()
