"""How many sessions, loads, catalogs and searches a second one web process serves.

    python bench/session.py [--rounds 3] [--seconds 2] [--at 1 8 32] [--json]

Real HTTP to a real installation with 600 tools in 33 groups (bench/fleet.py), once embedded on
SQLite and once as production with PostgreSQL and Redis, side by side in one run. Each round
measures every act at every number of callers on both, one after the other; the figures are the
median of the rounds with least and most. Only one installation is asked at a time. A caller that
has loaded from every group opens another session, which is not counted as anything.
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
LIMITS = ("calls_in_flight", "calls_per_minute", "searches_per_minute", "max_sessions")
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
ACTS = {
    "open": "sessions opened/s",
    "load": "loads of 3 tools/s",
    "catalog": "catalogs fetched/s",
    "search": "searches/s",
}


class Caller:
    """One connection that is kept open, and one agent's key."""

    def __init__(self, address, key):
        host, _, port = address.partition("//")[2].partition(":")
        self.connection = http.client.HTTPConnection(host, int(port), timeout=60)
        self.headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def ask(self, method, path, body=None):
        data = json.dumps(body) if body is not None else None
        self.connection.request(method, f"/api/v1{path}", data, self.headers)
        answer = self.connection.getresponse()
        told = answer.read()
        assert answer.status in (200, 201), f"{method} {path}: {answer.status} {told[:500]!r}"
        return told


class Backend:
    """A filled installation, and what its agent may ask."""

    def __init__(self, label, toolcrib, folder, mcp_json):
        self.label = label
        self.toolcrib = toolcrib
        file = folder / "mcp.json"
        file.write_text(json.dumps(mcp_json))
        done = toolcrib.command("import_servers", str(file), "--wait", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        limits = dict.fromkeys(LIMITS, UNLIMITED)
        status, told = toolcrib.api(
            "POST", "/agents", {"name": "bench", "all_groups": True, **limits}
        )
        assert status == 201, told
        self.key = toolcrib.api("POST", "/agents/bench/keys", {})[1]["key"]
        self.tools = self._tools()
        self.numbers = itertools.count()

    def _tools(self):
        """Three tools of each group, by its id."""
        session = json.loads(self.caller().ask("POST", "/sessions", {}))
        body = self.caller().ask("GET", f"/sessions/{session['id']}/catalog")
        groups = json.loads(body)["groups"]
        return [(group["group_id"], group["tool_names"][:3]) for group in groups]

    def caller(self):
        return Caller(self.toolcrib.url, self.key)

    def work(self, act, caller, session):
        """Return a function that does one act. A load is always the first of its group."""
        if act == "open":
            return lambda number: caller.ask("POST", "/sessions", {})
        if act == "catalog":
            return lambda number: caller.ask("GET", f"{session}/catalog")
        if act == "search":
            return lambda number: caller.ask(
                "POST", f"{session}/search", {"query": QUERIES[number % len(QUERIES)]}
            )

        def load(number):
            nonlocal session
            if number and number % len(self.tools) == 0:
                session = self.opened(caller)
            group, names = self.tools[number % len(self.tools)]
            return caller.ask("POST", f"{session}/load", {"group_id": group, "tool_names": names})

        return load

    def opened(self, caller):
        return f"/sessions/{json.loads(caller.ask('POST', '/sessions', {}))['id']}"

    def rate(self, act, callers, seconds):
        """Have so many callers do it over and over, and return how many were done a second."""
        done = [0] * callers
        failures = []
        ready = threading.Barrier(callers + 1)
        stop = threading.Event()

        def run(at):
            try:
                caller = self.caller()
                one = self.work(act, caller, self.opened(caller))
                one(0)
                ready.wait(60)
                for number in itertools.count(1):
                    if stop.is_set():
                        return
                    one(number)
                    done[at] += 1
            except Exception as error:  # noqa: BLE001 - told by the main thread
                failures.append(error)
                ready.abort()

        threads = [threading.Thread(target=run, args=(at,)) for at in range(callers)]
        for thread in threads:
            thread.start()
        try:
            ready.wait(60)
        except threading.BrokenBarrierError:
            raise failures[0] from None
        began, busy = time.perf_counter(), time.process_time()
        time.sleep(seconds)
        count, took = sum(done), time.perf_counter() - began
        busy = time.process_time() - busy
        stop.set()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return count / took, busy / took


def postgres_backend(stack, folder, mcp_json):
    """Production by the commands of docker-compose.yml: one web process, PostgreSQL, Redis."""
    from tests.support.production import SERVICES, Production

    database = stack.enter_context(postgres_server()).create("bench")
    redis = stack.enter_context(redis_server())
    production = Production(database, redis.url, folder)
    done = production.run(*SERVICES["migrate"]["command"])
    assert done.returncode == 0, done.stderr
    stack.callback(production.stop)
    production.start("web")
    return Backend("PostgreSQL", production, folder, mcp_json)


def backends(stack, folder, mcp_json):
    for name in ("sqlite", "postgres"):
        (folder / name).mkdir()
    embedded = stack.enter_context(Installation(folder / "sqlite" / "data"))
    found = [Backend("SQLite", embedded, folder / "sqlite", mcp_json)]
    if parts.postgres_bin() and parts.redis_server():
        found.append(postgres_backend(stack, folder / "postgres", mcp_json))
    else:
        sys.stderr.write(
            "left out: PostgreSQL or redis-server is not installed; python -m tests.support.parts "
            "installs them\n"
        )
    return found


def measure(found, options):
    kinds = [(act, callers) for act in ACTS for callers in options.at]
    rates = {(b.label, *kind): [] for b in found for kind in kinds}
    busiest = 0.0
    for _ in range(options.rounds):
        for kind in kinds:
            for backend in found:
                rate, busy = backend.rate(*kind, options.seconds)
                rates[backend.label, *kind].append(rate)
                busiest = max(busiest, busy)
    return rates, busiest


def tell(found, rates, busiest, options):
    print(
        f"{options.tools:,} tools in {options.groups} groups; one web process each; "
        f"{options.rounds} interleaved rounds of {options.seconds:g} s; a second, "
        "median (least–most)"
    )
    print(
        "The agent's limits are raised out of the way: " + ", ".join(LIMITS) + ". PostgreSQL runs "
        "without fsync, as in the tests; SQLite with WAL and synchronous=NORMAL."
    )
    head = "  ".join(f"{f'{callers} callers':>22}" for callers in options.at)
    print(f"{'':>20}  {'':>10}  {head}")
    for act, words in ACTS.items():
        for backend in found:
            cells = []
            for callers in options.at:
                of = rates[backend.label, act, callers]
                cells.append(f"{statistics.median(of):,.0f} ({min(of):,.0f}–{max(of):,.0f})")
            row = "  ".join(f"{cell:>22}" for cell in cells)
            print(f"{words:>20}  {backend.label:>10}  {row}")
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
        found = backends(stack, folder, mcp_json)
        rates, busiest = measure(found, options)
        if options.json:
            rows = [
                {"backend": label, "act": act, "callers": callers, "rates": of}
                for (label, act, callers), of in rates.items()
            ]
            print(json.dumps({"rows": rows, "load_generator": busiest}))
        else:
            tell(found, rates, busiest, options)


if __name__ == "__main__":
    main()
