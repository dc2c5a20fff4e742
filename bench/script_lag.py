"""Event-loop lag of a web process while hostile scripts run in it, beside an idle one.

    python bench/script_lag.py [--scripts 200] [--json]

The scripts of tests/sessions_app/scripts/test_hostile_scripts.py and test_hostile_typescript.py run
one after the other on an installation, while a second one does nothing. In the same seconds both
are asked for an answer that their event loop gives by itself: what it takes is the lag. After each
script an ordinary one has to succeed, in the same process. The limit is for the difference of the
99th percentiles; the longest waits depend on the machine, and are printed.
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from http.client import HTTPConnection
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "toolcrib.settings")

import django  # noqa: E402

django.setup()

from tests.sessions_app.scripts import test_hostile_scripts as python  # noqa: E402
from tests.sessions_app.scripts import test_hostile_typescript as typescript  # noqa: E402
from tests.support.agents import make_agent, register_stdio  # noqa: E402
from tests.support.installation import Installation  # noqa: E402
from toolcrib.lib.figures import percentile  # noqa: E402

MAX_LAG_MS = 50.0  # above that of the idle process
INTERVAL = 0.01  # seconds between two samples
UNLIMITED = dict.fromkeys(("calls_per_minute", "cost_per_minute"), 10**9)
ORDINARY = {"python": "1 + 1", "typescript": "return 1 + 1"}
WRONG_HOST = "unknown.invalid"  # answered with 421 on the event loop, before anything else


class Sampler(threading.Thread):
    """Asks a process again and again, on one connection, and notes how long each answer takes."""

    def __init__(self, port):
        super().__init__(daemon=True)
        self.http = HTTPConnection("127.0.0.1", port, timeout=60)
        self.stopped = threading.Event()
        self.samples = []  # milliseconds
        self.error = ""

    def run(self):
        try:
            while not self.stopped.wait(INTERVAL):
                started = time.perf_counter()
                self.http.request("GET", "/livez", headers={"Host": WRONG_HOST})
                response = self.http.getresponse()
                response.read()
                self.samples.append((time.perf_counter() - started) * 1000)
                assert response.status == 421, response.status
        except (AssertionError, OSError) as error:
            self.error = repr(error)

    def finish(self):
        self.stopped.set()
        self.join()
        assert not self.error, self.error
        return {
            "samples": len(self.samples),
            "p50_ms": percentile(self.samples, 0.5),
            "p99_ms": percentile(self.samples, 0.99),
            "longest_ms": max(self.samples),
        }


def choose_scripts(number):
    """Return scripts of every kind with their languages, evenly spread."""
    codes = [("python", code) for code in (*python.OUTSIDE, *python.INSIDE, *python.GREEDY)]
    steal = f"const STEAL = {json.dumps(typescript.STEAL)};"
    codes += [("typescript", f"{steal} {code}") for code in typescript.OUTSIDE]
    codes += [("typescript", code) for code in typescript.GREEDY]
    codes += [("typescript", code.replace("GO", "null")) for code in typescript.TRICKS]
    step = max(1, len(codes) / number)
    return [codes[int(at * step)] for at in range(min(number, len(codes)))]


def run_script(session, language, code):
    """Run a script to its end and return the answer."""
    response = session.post("/scripts", {"code": code, "language": language})
    assert response.status == 200, response.body
    answer = response.json
    while answer["status"] in ("running", "held"):
        answer = session.agent.send("GET", f"/scripts/{answer['run_id']}?wait=20").json
    return answer


def measure(options):
    with (
        tempfile.TemporaryDirectory(prefix="toolcrib-bench-") as folder,
        Installation(Path(folder) / "busy") as toolcrib,
        Installation(Path(folder) / "idle") as control,
    ):
        register_stdio(toolcrib, "raw", "raw_calls")
        agent = make_agent(toolcrib, "hostile", mode="deferred", code_mode=True, **UNLIMITED)
        session, pid = agent.open(), toolcrib.pid
        for ordinary in ORDINARY.items():
            run_script(session, *ordinary)  # starts the engine
        samplers = {"hostile scripts": Sampler(toolcrib.port), "idle": Sampler(control.port)}
        for sampler in samplers.values():
            sampler.start()
        failed, codes = 0, choose_scripts(options.scripts)
        for language, code in codes:
            failed += run_script(session, language, code)["status"] == "failed"
            assert run_script(session, language, ORDINARY[language])["result"] == 2, code
        lags = {name: sampler.finish() for name, sampler in samplers.items()}
        assert toolcrib.pid == pid
        assert toolcrib.get("/readyz")[0] == 200
    return {"scripts": len(codes), "failed": failed, "lags": lags}


def print_report(report):
    print(
        f"{report['scripts']} hostile scripts; {report['failed']} failed, the others had no effect"
    )
    print(f"{'process':>16}{'samples':>9}{'p50 ms':>9}{'p99 ms':>9}{'longest':>9}")
    for name, row in report["lags"].items():
        print(
            f"{name:>16}{row['samples']:>9,}{row['p50_ms']:>9.1f}{row['p99_ms']:>9.1f}"
            f"{row['longest_ms']:>9.1f}"
        )
    busy, idle = report["lags"].values()
    above = busy["p99_ms"] - idle["p99_ms"]
    print(
        f"{'OK  ' if above <= MAX_LAG_MS else 'MISS'} event-loop lag above the idle process, p99: "
        f"{above:.1f} ms, limit {MAX_LAG_MS:g}"
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--scripts", type=int, default=200, help="at most")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report = measure(options)
    if options.json:
        print(json.dumps(report))
    else:
        print_report(report)


if __name__ == "__main__":
    main()
