"""Sessions, loads, catalogs and searches per second of one web process.

    python bench/session.py [--rounds 3] [--seconds 2] [--at 1 8 32] [--json]

Real HTTP to a real installation with 600 tools in 33 groups (bench/fleet.py), once embedded on
SQLite and once in production mode with PostgreSQL and Redis, in the same run. Each round measures
every operation at every number of callers on both, one after the other; the figures are the median
of the rounds with minimum and maximum. Only one installation is under load at a time. A caller that
has loaded from every group opens another session, which is not counted.
"""

import argparse
import http.client
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import fleet  # noqa: E402

from tests.support import parts  # noqa: E402
from tests.support.installation import Installation, postgres_server, redis_server  # noqa: E402

UNLIMITED = 1_000_000_000
LIMITS = (
    "calls_in_flight",
    "calls_per_minute",
    "searches_per_minute",
    "cost_per_minute",
    "max_sessions",
)
QUERIES = (
    "create an issue",
    "list pull requests by label",
    "send a message to a channel",
    "search files in a folder",
    "export a report as csv",
    "restart a pod",
    "refund a payment",
    "find a free slot",
)
OPERATIONS = {
    "open": "sessions opened/s",
    "load": "loads of 3 tools/s",
    "catalog": "catalogs fetched/s",
    "search": "searches/s",
}


class Caller:
    """A persistent connection with the key of an agent."""

    def __init__(self, address, key):
        host, _, port = address.partition("//")[2].partition(":")
        self.connection = http.client.HTTPConnection(host, int(port), timeout=60)
        self.headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def request(self, method, path, body=None):
        data = json.dumps(body) if body is not None else None
        self.connection.request(method, f"/api/v1{path}", data, self.headers)
        response = self.connection.getresponse()
        content = response.read()
        assert response.status in (200, 201), (
            f"{method} {path}: {response.status} {content[:500]!r}"
        )
        return content


class Backend:
    """An installation with the fleet imported, and an agent without limits."""

    def __init__(self, label, toolcrib, folder, mcp_json):
        self.label = label
        self.toolcrib = toolcrib
        file = folder / "mcp.json"
        file.write_text(json.dumps(mcp_json))
        process = toolcrib.command("import_servers", str(file), "--wait", "--json")
        assert process.returncode == 0, process.stdout + process.stderr
        limits = dict.fromkeys(LIMITS, UNLIMITED)
        status, response = toolcrib.api(
            "POST", "/agents", {"name": "bench", "all_groups": True, **limits}
        )
        assert status == 201, response
        self.key = toolcrib.api("POST", "/agents/bench/keys", {})[1]["key"]
        self.tools = self._tools()
        self.numbers = itertools.count()

    def _tools(self):
        """Return three tool names of each group, with the group id."""
        session = json.loads(self.caller().request("POST", "/sessions", {}))
        body = self.caller().request("GET", f"/sessions/{session['id']}/catalog")
        groups = json.loads(body)["groups"]
        return [(group["group_id"], group["tool_names"][:3]) for group in groups]

    def caller(self):
        return Caller(self.toolcrib.url, self.key)

    def operation(self, name, caller, session):
        """Return a function that does one operation. A load is always the first of its group."""
        if name == "open":
            return lambda number: caller.request("POST", "/sessions", {})
        if name == "catalog":
            return lambda number: caller.request("GET", f"{session}/catalog")
        if name == "search":
            return lambda number: caller.request(
                "POST", f"{session}/search", {"query": QUERIES[number % len(QUERIES)]}
            )

        def load(number):
            nonlocal session
            if number and number % len(self.tools) == 0:
                session = self.open_session(caller)
            group, names = self.tools[number % len(self.tools)]
            return caller.request(
                "POST", f"{session}/load", {"group_id": group, "tool_names": names}
            )

        return load

    def open_session(self, caller):
        return f"/sessions/{json.loads(caller.request('POST', '/sessions', {}))['id']}"

    def measure_rate(self, name, callers, seconds):
        """Run an operation in concurrent callers; return the rate and our own CPU share."""
        counts = [0] * callers
        failures = []
        ready = threading.Barrier(callers + 1)
        stop = threading.Event()

        def run(index):
            try:
                caller = self.caller()
                run_once = self.operation(name, caller, self.open_session(caller))
                run_once(0)
                ready.wait(60)
                for number in itertools.count(1):
                    if stop.is_set():
                        return
                    run_once(number)
                    counts[index] += 1
            except Exception as error:  # noqa: BLE001 - raised in the main thread
                failures.append(error)
                ready.abort()

        threads = [threading.Thread(target=run, args=(index,)) for index in range(callers)]
        for thread in threads:
            thread.start()
        try:
            ready.wait(60)
        except threading.BrokenBarrierError:
            raise failures[0] from None
        started, cpu = time.perf_counter(), time.process_time()
        time.sleep(seconds)
        count, elapsed = sum(counts), time.perf_counter() - started
        cpu = time.process_time() - cpu
        stop.set()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return count / elapsed, cpu / elapsed


def postgres_backend(stack, folder, mcp_json):
    """Start the commands of docker-compose.yml: one web process, PostgreSQL, Redis."""
    from tests.support.production import SERVICES, Production

    database = stack.enter_context(postgres_server()).create("bench")
    redis = stack.enter_context(redis_server())
    production = Production(database, redis.url, folder)
    process = production.run(*SERVICES["migrate"]["command"])
    assert process.returncode == 0, process.stderr
    stack.callback(production.stop)
    production.start("web")
    return Backend("PostgreSQL", production, folder, mcp_json)


def start_backends(stack, folder, mcp_json):
    for name in ("sqlite", "postgres"):
        (folder / name).mkdir()
    embedded = stack.enter_context(Installation(folder / "sqlite" / "data"))
    backends = [Backend("SQLite", embedded, folder / "sqlite", mcp_json)]
    if parts.postgres_bin() and parts.redis_server():
        backends.append(postgres_backend(stack, folder / "postgres", mcp_json))
    else:
        sys.stderr.write(
            "skipped: PostgreSQL or redis-server is not installed; python -m tests.support.parts "
            "installs them\n"
        )
    return backends


def measure(backends, options):
    kinds = [(operation, callers) for operation in OPERATIONS for callers in options.at]
    rates = {(b.label, *kind): [] for b in backends for kind in kinds}
    busiest = 0.0
    for _ in range(options.rounds):
        for kind in kinds:
            for backend in backends:
                rate, cpu = backend.measure_rate(*kind, options.seconds)
                rates[backend.label, *kind].append(rate)
                busiest = max(busiest, cpu)
    return rates, busiest


def print_report(backends, rates, busiest, options):
    print(
        f"{options.tools:,} tools in {options.groups} groups; one web process each; "
        f"{options.rounds} interleaved rounds of {options.seconds:g} s; per second, "
        "median (min–max)"
    )
    print(
        "The agent's limits are raised: " + ", ".join(LIMITS) + ". PostgreSQL runs "
        "without fsync, as in tests; SQLite with WAL and synchronous=NORMAL."
    )
    head = "  ".join(f"{f'{callers} callers':>22}" for callers in options.at)
    print(f"{'':>20}  {'':>10}  {head}")
    for operation, title in OPERATIONS.items():
        for backend in backends:
            cells = []
            for callers in options.at:
                values = rates[backend.label, operation, callers]
                middle = statistics.median(values)
                cells.append(f"{middle:,.0f} ({min(values):,.0f}–{max(values):,.0f})")
            row = "  ".join(f"{cell:>22}" for cell in cells)
            print(f"{title:>20}  {backend.label:>10}  {row}")
    print(f"The load generator used at most {busiest:.0%} of one core.")


def main():
    parser = argparse.ArgumentParser()
    fleet.add_options(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--at", type=int, nargs="+", default=[1, 8, 32], metavar="CALLERS")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="toolcrib-bench-")))
        mcp_json = stack.enter_context(fleet.running(options))
        backends = start_backends(stack, folder, mcp_json)
        rates, busiest = measure(backends, options)
        if options.json:
            rows = [
                {"backend": label, "act": operation, "callers": callers, "rates": values}
                for (label, operation, callers), values in rates.items()
            ]
            print(json.dumps({"rows": rows, "load_generator": busiest}))
        else:
            print_report(backends, rates, busiest, options)


if __name__ == "__main__":
    main()
