"""Calls per second of one and of several web processes on PostgreSQL and Redis.

    python bench/workers.py [--workers 1 2] [--at 16 32] [--rounds 5] [--seconds 3] [--json]

The commands of docker-compose.yml, once with each number of WEB_WORKERS, on one PostgreSQL and one
Redis, with a database each. Callers send calls of 100 bytes to the echo server (bench/echo.py) over
REST, with a bare socket, and over MCP 2026-07-28 and 2025-11-25 through the dispatcher, with the
SDK's client. Rounds are interleaved. The CPU of each part is printed in processors, so that one can
see what limits the throughput: a part that uses a whole processor, or the machine, if the parts
together use all of its processors.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import load  # noqa: E402
from dispatch import CONCURRENCY, ECHO, LIMITS, cpu_seconds, make_text, start_program  # noqa: E402
from dispatch_report import spread  # noqa: E402

from tests.support.installation import (  # noqa: E402
    READY,
    Process,
    descendants,
    free_port,
    postgres_server,
    redis_server,
)
from tests.support.production import SERVICES, Production  # noqa: E402

PATHS = ("REST", "MCP 2026", "MCP 2025")


class Deployment:
    """A number of web processes on one port, with the echo server and an agent without limits."""

    def __init__(self, stack, folder, workers, postgres, redis, echo_url):
        self.workers = workers
        folder.mkdir()
        production = self.production = Production(
            postgres.create(f"workers_{workers}"), f"{redis.url[:-1]}{workers}", folder
        )
        done = production.run(*SERVICES["migrate"]["command"])
        assert done.returncode == 0, done.stderr
        port = free_port()
        production.url = f"http://localhost:{port}"
        env = {**production.env, "PORT": str(port), "WEB_WORKERS": str(workers)}
        stack.callback(production.stop)
        self.web = production.processes["web"] = Process(SERVICES["web"]["command"], env)
        self.web.wait_for_line(READY, 150)
        file = folder / "mcp.json"
        file.write_text(json.dumps({"mcpServers": {"echo": {"url": echo_url}}}))
        done = production.command("import_servers", str(file), "--wait", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        self._send("PATCH", "/servers/echo", {"concurrency": CONCURRENCY})
        agent = {"name": "bench", "all_groups": True, "mode": "deferred", **LIMITS}
        self._send("POST", "/agents", agent)
        self.key = self._send("POST", "/agents/bench/keys", {})["key"]
        self.session = self._send("POST", "/sessions", {}, token=self.key)["id"]

    def _send(self, method, path, body, **options):
        status, response = self.production.api(method, path, body, **options)
        assert status in (200, 201), response
        return response

    def pids(self):
        return {self.web.pid, *descendants(self.web.pid)}

    def caller(self, path):
        """Return the context manager of a caller."""
        url, tool = self.production.url, "echo__echo"
        if path == "REST":
            return load.rest_caller(url, self.key, self.session, tool)
        mode = load.MODERN if path == "MCP 2026" else load.LEGACY
        arguments = load.dispatch_arguments(tool)
        return load.sdk_caller(
            f"{url}/mcp", "deferred_tool_call", self.key, mode=mode, arguments=arguments
        )


def parts_of(deployment, services):
    """Return the processes of each part now; every PostgreSQL connection is one."""
    return {
        "web": deployment.pids(),
        "client": {os.getpid()},
        **{
            name: roots | {pid for root in roots for pid in descendants(root)}
            for name, roots in services.items()
        },
    }


async def measure(deployments, services, options):
    rows = []
    async with AsyncExitStack() as stack:
        callers = {
            (deployment.workers, path): await stack.enter_async_context(deployment.caller(path))
            for deployment in deployments
            for path in options.paths
        }
        for number in range(options.rounds):
            for at in options.at:
                for path in options.paths:
                    for deployment in deployments:
                        call = callers[deployment.workers, path]
                        row = await measure_cell(deployment, call, at, services, options)
                        key = {"round": number, "path": path, "callers": at}
                        rows.append({**key, "workers": deployment.workers, **row})
    return rows


async def measure_cell(deployment, call, at, services, options):
    text = make_text(100)
    await load.time_calls(call, text, at, 0, 2)  # warm up
    pids = parts_of(deployment, services)
    before = {name: cpu_seconds(each) for name, each in pids.items()}
    started = time.perf_counter()
    durations, elapsed = await load.time_calls(call, text, at, options.seconds, 1)
    total = time.perf_counter() - started
    cpu = {name: (cpu_seconds(each) - before[name]) / total for name, each in pids.items()}
    return {"rate": len(durations) / elapsed, "cpu": cpu}


def run(options):
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="toolcrib-bench-")))
        folder.chmod(0o755)  # PostgreSQL runs as another user
        port = free_port()
        echo = start_program(stack, [*ECHO, "--http", str(port)], port)
        known = set(descendants(os.getpid()))
        postgres = stack.enter_context(postgres_server())
        redis = stack.enter_context(redis_server())
        services = {
            "echo server": {echo.pid},
            "PostgreSQL and Redis": set(descendants(os.getpid())) - known,
        }
        url = f"http://127.0.0.1:{port}/mcp"
        deployments = [
            Deployment(stack, folder / f"workers-{count}", count, postgres, redis, url)
            for count in options.workers
        ]
        return asyncio.run(measure(deployments, services, options))


def limit_of(cpu):
    """Name what limits the throughput, from the CPU of the parts."""
    processors = len(os.sched_getaffinity(0))
    total = sum(cpu.values())
    if total > 0.9 * processors:
        return f"the machine: all parts together use {total:.1f} of {processors} processors"
    name, used = max(cpu.items(), key=lambda item: item[1])
    return f"{name}, with {used:.1f} processors" if used > 0.8 else "waiting, not CPU"


def print_report(rows, options):
    print(
        f"PostgreSQL and Redis on the same machine; {options.rounds} interleaved rounds of "
        f"{options.seconds:g} s; calls per second, median (min–max); CPU in processors. Limits "
        "raised as in dispatch.py. PostgreSQL runs without fsync, as in tests."
    )
    for path in options.paths:
        for at in options.at:
            for workers in options.workers:
                found = [
                    row
                    for row in rows
                    if (row["path"], row["callers"], row["workers"]) == (path, at, workers)
                ]
                cpu = {
                    name: statistics.median(row["cpu"][name] for row in found)
                    for name in found[0]["cpu"]
                }
                used = ", ".join(f"{name} {value:.2f}" for name, value in cpu.items())
                print(
                    f"{path:>9}, {at} callers, {workers} web processes: "
                    f"{spread([row['rate'] for row in found])} calls/s; {used}; "
                    f"limited by {limit_of(cpu)}"
                )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--at", type=int, nargs="+", default=[16, 32], metavar="CALLERS")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = run(options)
    if options.json:
        print(json.dumps(rows))
    else:
        print_report(rows, options)


if __name__ == "__main__":
    main()
