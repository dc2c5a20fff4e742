"""POST /sessions/{id}/search by one agent and by many at once, on the whole application.

The application runs in this process with everything it runs in production of one machine, and is
asked without a socket between, so that a task beside it can tell how long the event loop stood
still. Started by bench/search.py in an empty data folder:

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
TICK = 0.002  # seconds between two looks at the clock
SERVERS = 40
QUIET = 5  # searches before any is counted


def run(tools, agents, encoder, searches=200):
    """Write the tools down and run this file as a program."""
    with tempfile.TemporaryDirectory(prefix="toolcrib-bench-") as folder:
        listed = Path(folder) / "tools.jsonl"
        with listed.open("w") as file:
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
            [sys.executable, __file__, str(listed), str(agents), str(searches)],
            cwd=ROOT,
            env=environment,
            check=True,
        )


def fill(path, agents):
    """Make the tables, the tools in their groups, vectors for all, and agents with sessions."""
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
    made = []
    for key in vector_store.searchable_tools():
        vector = noise.normal(size=encoder.WIDTH)
        data = (vector / np.linalg.norm(vector)).astype(np.float16).tobytes()
        made.append(Vector(model=encoder.MODEL, text_sha256=key, data=data))
    Vector.objects.bulk_create(made, batch_size=500)
    actor = Actor("command", "bench")
    return [
        create_with_key(
            f"agent-{at}", all_groups=True, actor=actor, searches_per_minute=10**6
        )[-1]
        for at in range(agents)
    ]  # fmt: skip


async def ask(application, key, method, path, body):
    """One request, as a server would hand it over."""
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
    waiting = [{"type": "http.request", "body": content}]

    async def receive():
        if waiting:
            return waiting.pop()
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    await application(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in sent)
    assert sent[0]["status"] in (200, 201), body
    return json.loads(body)


@asynccontextmanager
async def lifespan(application):
    """Start and stop everything as a server does."""
    to_it, from_it = asyncio.Queue(), asyncio.Queue()
    task = asyncio.create_task(
        application({"type": "lifespan", "asgi": {"version": "3.0"}}, to_it.get, from_it.put)
    )
    await to_it.put({"type": "lifespan.startup"})
    assert (await from_it.get())["type"] == "lifespan.startup.complete"
    yield
    await to_it.put({"type": "lifespan.shutdown"})
    await task


async def stalls(found):
    """Note how much later than asked for the loop came back."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(TICK)
        found.append(time.perf_counter() - before - TICK)


async def measure(keys, queries, searches):
    from toolcrib.asgi import application

    async with lifespan(application):
        opened = [await ask(application, key, "POST", "/api/v1/sessions", {}) for key in keys]
        paths = [f"/api/v1/sessions/{one['id']}/search" for one in opened]

        async def search(at, number):
            query = {"query": queries[number % len(queries)]}
            started = time.perf_counter()
            answer = await ask(application, keys[at], "POST", paths[at], query)
            return time.perf_counter() - started, answer["strategy"]

        strategy = ""
        while strategy != "hybrid":
            strategy = (await search(0, 0))[1]
        for number in range(QUIET):
            await search(0, number)
        found = []
        watch = asyncio.create_task(stalls(found))
        alone = [(await search(0, number))[0] for number in range(searches)]
        of_one = max(found)
        found.clear()

        async def busy(at):
            each = max(1, searches // len(keys))
            return [(await search(at, at * 7 + number))[0] for number in range(each)]

        together = [
            one for some in await asyncio.gather(*map(busy, range(len(keys)))) for one in some
        ]
        watch.cancel()
        return alone, of_one, together, max(found)


def main():
    listed, agents, searches = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    sys.path.insert(0, str(ROOT))
    os.environ["DJANGO_SETTINGS_MODULE"] = "toolcrib.settings"
    import django

    django.setup()
    keys = fill(listed, agents)
    lines = [json.loads(line) for line in listed.read_text().splitlines()]
    queries = [" ".join(line["description"].split()[:8]) or line["name"] for line in lines[:97]]
    alone, of_one, together, worst = asyncio.run(measure(keys, queries, searches))
    one, p95 = sorted(alone)[len(alone) // 2], sorted(together)[int(0.95 * len(together))]
    print(f"\nPOST /sessions/…/search, hybrid, {len(lines):,} tools, wall time:")
    print(f"  one agent     p50 {1000 * one:8.1f} ms   longest stall {1000 * of_one:6.1f} ms")
    print(
        f"  {agents:>2} agents     p95 {1000 * p95:8.1f} ms   longest stall {1000 * worst:6.1f} ms"
    )
    print(f"  p95 of {agents} ÷ p50 of one: {p95 / one:.1f}")


if __name__ == "__main__":
    main()
