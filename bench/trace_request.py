"""List the modules that one warm request passes: `python bench/trace_request.py`.

Starts Toolcrib with a profile function in every thread and sends a call over REST, a call over MCP
of both eras and a search, each after two of the same kind and on a kept connection. A module counts
if one of its functions ran in each of three requests and not while the server was idle; helpers in
`toolcrib/lib` are listed and not counted. docs/architecture.md quotes the result.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
OURS = tuple(f"{ROOT}/{app}/" for app in ("catalog", "servers", "sessions_app", "toolcrib"))
# Helpers that know nothing of the product, and the subclass of the web server's protocol.
NOT_COUNTED = ("toolcrib/lib/", "sessions_app/models/", "toolcrib/http/http_protocol.py")
REQUESTS = 3  # of each kind that are traced
IDLE_SECONDS = 3.0  # longer than every periodic task of a web process


class Recorder:
    """Functions of ours that ran since the last reset, in the order of their first call."""

    def __init__(self) -> None:
        self.codes: dict[CodeType, None] = {}

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            self.codes.setdefault(frame.f_code)

    def write(self, target: Path) -> None:
        names = [f"{code.co_filename}:{code.co_qualname}" for code in list(self.codes)]
        unfinished = target.with_suffix(".part")
        unfinished.write_text(json.dumps(names))
        unfinished.rename(target)
        self.codes = {}


def serve() -> None:
    """Run `manage.py serve` under the recorder; SIGUSR1 writes and resets what it has."""
    recorder = Recorder()
    target = Path(os.environ["BENCH_TRACE"])
    signal.signal(signal.SIGUSR1, lambda *_: recorder.write(target))
    threading.setprofile(recorder.profile)
    sys.setprofile(recorder.profile)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "toolcrib.settings")
    from django.core.management import execute_from_command_line

    execute_from_command_line(["manage.py", "serve"])


@contextmanager
def traced(folder: Path) -> Iterator[tuple[Any, Callable[[], list[str]]]]:
    """A running installation, and a function that returns what ran since it was last called."""
    from tests.support.installation import Installation
    from tests.support.waiting import wait_for

    target = folder / "trace.json"

    class Traced(Installation):
        def _argv(self, *args: str) -> list[str]:
            if args[0] == "serve":
                return [sys.executable, __file__, "--serve"]
            return super()._argv(*args)

    with Traced(folder / "data", {"BENCH_TRACE": str(target)}) as toolcrib:

        def take() -> list[str]:
            target.unlink(missing_ok=True)
            os.kill(toolcrib.pid, signal.SIGUSR1)
            wait_for(target.exists, what="the trace")
            return list(json.loads(target.read_text()))

        yield toolcrib, take


def in_all(taken: Sequence[Sequence[str]]) -> list[str]:
    """Return the functions that each request passes; periodic tasks run beside one of them."""
    return [name for name in taken[0] if all(name in others for others in taken)]


def modules(functions: list[str], idle: set[str]) -> list[str]:
    names: dict[str, None] = {}
    for function in functions:
        if function not in idle:
            names.setdefault(function.partition(":")[0].removeprefix(f"{ROOT}/"))
    return list(names)


async def over_mcp(agent: Any, mode: str, take: Callable[[], list[str]]) -> list[str]:
    from tests.support.mcp_clients import connected_client

    request = {"name": "weather__get_forecast", "arguments": {"city": "Oslo"}}
    async with connected_client(agent, mode=mode) as client:
        for _ in range(2):
            await client.call_tool("deferred_tool_call", request)
        await asyncio.to_thread(take)
        taken = []
        for _ in range(REQUESTS):
            await client.call_tool("deferred_tool_call", request)
            taken.append(await asyncio.to_thread(take))
        return in_all(taken)


def main() -> None:
    from tests.support.agents import make_agent
    from tests.support.mcp_clients import MODERN
    from tests.support.servers import register
    from tests.support.upstreams.running import running_http

    with (
        tempfile.TemporaryDirectory() as name,
        running_http("healthy") as url,
        traced(Path(name)) as (toolcrib, take),
    ):
        register(toolcrib, "weather", url)
        agent = make_agent(toolcrib, "tracer", mode="deferred")
        session = agent.open()
        connection = agent.connect()

        def repeat(request: Callable[[], Any]) -> list[str]:
            request()
            request()
            take()
            taken = []
            for _ in range(REQUESTS):
                request()
                taken.append(take())
            return in_all(taken)

        def post(path: str, body: Mapping[str, Any]) -> None:
            """Send a request on a connection that is kept, as clients do."""
            url = f"/api/v1{session.path}{path}"
            connection.request("POST", url, json.dumps(body), agent.headers())
            response = connection.getresponse()
            assert response.status == 200, response.read()
            response.read()

        def call() -> None:
            post("/call", {"tool_name": "weather__get_forecast", "arguments": {"city": "Oslo"}})

        def search() -> None:
            post("/search", {"query": "weather forecast"})

        search()
        time.sleep(IDLE_SECONDS)  # until the indexes of the new catalog are built
        results = {
            "call over REST": repeat(call),
            "search over REST": repeat(search),
            "call over MCP 2026-07-28": asyncio.run(over_mcp(agent, MODERN, take)),
            "call over MCP 2025-11-25": asyncio.run(over_mcp(agent, "legacy", take)),
        }
        take()
        time.sleep(IDLE_SECONDS)
        idle = set(take())
    for title, functions in results.items():
        passed = modules(functions, idle)
        counted = [module for module in passed if not module.startswith(NOT_COUNTED)]
        print(f"\n{title}: {len(counted)} modules")
        packages: dict[str, list[str]] = {}
        for module in passed:
            package, _, name = module.rpartition("/")
            packages.setdefault(package, []).append(name.removesuffix(".py"))
        for package, names in packages.items():
            print(f"  {package}: {' '.join(names)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args().serve:
        serve()
    else:
        main()
