"""Latency of POST /sessions/{id}/search by one agent and by concurrent agents.

The complete ASGI application runs in this process and receives requests without a socket, so that
a task on the same event loop can measure stalls. Started by bench/search.py in an empty data
folder:

    python bench/search_endpoint.py TOOLS.jsonl AGENTS SEARCHES
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TICK = 0.002  # seconds between two measurements of the loop lag
SERVERS = 40
WARM_UP = 5  # searches


def run(tools, agents, encoder, searches=200):
    """Write the tools to a file and run this module as a program."""
    with tempfile.TemporaryDirectory(prefix="toolcrib-bench-") as folder:
        file_path = Path(folder) / "tools.jsonl"
        with file_path.open("w") as file:
            for tool in tools:
                texts = tool.parameters.split("\n")
                properties = {name[:60]: {} for name in texts if name and " " not in name}
                item = {"name": tool.name.partition("__")[2][:100], "properties": properties}
                item["description"] = tool.description
                file.write(json.dumps(item) + "\n")
        environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith("TOOLCRIB_")
            },
            "TOOLCRIB_DATA": folder,
            "TOOLCRIB_MODELS": str(ROOT / ".cache" / "models"),
            "OPENBLAS_NUM_THREADS": "1",
        }
        subprocess.run(
            [sys.executable, __file__, str(file_path), str(agents), str(searches)],
            cwd=ROOT,
            env=environment,
            check=True,
        )


def create_rows(path, agents):
    """Create the tables, tools with groups and vectors, and agents; return the agents' keys."""
    import numpy as np
    from django.core.management import call_command

    from catalog.audit import Actor
    from catalog.models import Vector
    from catalog.search.embeddings import encoder
    from catalog.search.embeddings import store as vector_store
    from sessions_app.agents.actions import create_with_key
    from tests.support.factories import ingest_tools, make_server

    call_command("migrate", verbosity=0, interactive=False)
    by_server = {}
    for at, line in enumerate(path.read_text().splitlines()):
        item = json.loads(line)
        schema = {"type": "object", "properties": item["properties"]}
        by_server.setdefault(at % SERVERS, []).append(
            {"name": item["name"], "description": item["description"], "inputSchema": schema}
        )
    for at, tools in by_server.items():
        ingest_tools(make_server(slug=f"server-{at}", connection_policy="on_demand"), *tools)
    noise = np.random.default_rng(1)
    rows = []
    for key in vector_store.passages():
        vector = noise.normal(size=encoder.WIDTH)
        data = (vector / np.linalg.norm(vector)).astype(np.float16).tobytes()
        rows.append(Vector(model=encoder.MODEL, text_sha256=key, data=data))
    Vector.objects.bulk_create(rows, batch_size=500)
    actor = Actor("command", "bench")
    return [
        create_with_key(
            f"agent-{at}",
            all_groups=True,
            actor=actor,
            searches_per_minute=10**6,
            cost_per_minute=10**9,
        )[-1]
        for at in range(agents)
    ]  # fmt: skip


async def send_request(application, key, method, path, body):
    """Send one request as an ASGI server does."""
    sent = []
    content = json.dumps(body).encode()
    headers = [
        (b"host", b"localhost"),
        (b"authorization", f"Bearer {key}".encode()),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
    ]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }
    pending = [{"type": "http.request", "body": content}]

    async def receive():
        if pending:
            return pending.pop()
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    await application(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in sent)
    assert sent[0]["status"] in (200, 201), body
    return json.loads(body)


@asynccontextmanager
async def lifespan(application):
    """Run the ASGI lifespan protocol as a server does."""
    to_app, from_app = asyncio.Queue(), asyncio.Queue()
    task = asyncio.create_task(
        application({"type": "lifespan", "asgi": {"version": "3.0"}}, to_app.get, from_app.put)
    )
    await to_app.put({"type": "lifespan.startup"})
    assert (await from_app.get())["type"] == "lifespan.startup.complete"
    yield
    await to_app.put({"type": "lifespan.shutdown"})
    await task


async def record_stalls(lags):
    """Append the lag of the event loop to a list, in a loop."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(TICK)
        lags.append(time.perf_counter() - before - TICK)


async def measure(keys, queries, searches):
    from toolcrib.asgi import application

    async with lifespan(application):
        sessions = [
            await send_request(application, key, "POST", "/api/v1/sessions", {}) for key in keys
        ]
        paths = [f"/api/v1/sessions/{session['id']}/search" for session in sessions]

        async def search(at, number):
            query = {"query": queries[number % len(queries)]}
            started = time.perf_counter()
            response = await send_request(application, keys[at], "POST", paths[at], query)
            return time.perf_counter() - started, response["strategy"]

        strategy = ""
        while strategy != "hybrid":
            strategy = (await search(0, 0))[1]
        for number in range(WARM_UP):
            await search(0, number)
        lags = []
        watch = asyncio.create_task(record_stalls(lags))
        alone = [(await search(0, number))[0] for number in range(searches)]
        stall_alone = max(lags)
        lags.clear()

        async def search_repeatedly(at):
            each = max(1, searches // len(keys))
            return [(await search(at, at * 7 + number))[0] for number in range(each)]

        together = [
            seconds
            for durations in await asyncio.gather(*map(search_repeatedly, range(len(keys))))
            for seconds in durations
        ]
        watch.cancel()
        return alone, stall_alone, together, max(lags)


def main():
    file_path, agents, searches = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    sys.path.insert(0, str(ROOT))
    os.environ["DJANGO_SETTINGS_MODULE"] = "toolcrib.settings"
    import django

    django.setup()
    keys = create_rows(file_path, agents)
    lines = [json.loads(line) for line in file_path.read_text().splitlines()]
    queries = [" ".join(line["description"].split()[:8]) or line["name"] for line in lines[:97]]
    alone, stall_alone, together, stall_together = asyncio.run(measure(keys, queries, searches))
    p50, p95 = sorted(alone)[len(alone) // 2], sorted(together)[int(0.95 * len(together))]
    print(f"\nPOST /sessions/…/search, hybrid, {len(lines):,} tools, wall time:")
    print(f"  one agent     p50 {1000 * p50:8.1f} ms   longest stall {1000 * stall_alone:6.1f} ms")
    print(
        f"  {agents:>2} agents     p95 {1000 * p95:8.1f} ms   longest stall "
        f"{1000 * stall_together:6.1f} ms"
    )
    print(f"  p95 of {agents} ÷ p50 of one: {p95 / p50:.1f}")


if __name__ == "__main__":
    main()
