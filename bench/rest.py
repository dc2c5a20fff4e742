"""CPU and memory of an installation that nobody uses.

    python bench/rest.py [--seconds 60] [--settle 20] [--pages 0] [--json]

Embedded, on SQLite, with seven connected servers (five of bench/fleet.py with 160 tools, and the
echo server over HTTP and over stdio), the sentence model loaded and all tools embedded. After the
last request the process settles; then its CPU time is read by thread at the start and at the end
of the measured time, and its memory at the end. Supervisors and the programs of stdio servers are
printed apart, as they are processes of their own. With `--pages 50`, that many pages of an admin
are open, each with its stream of live updates: what they cost while nothing changes.
"""

import argparse
import http.client
import json
import re
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import dispatch  # noqa: E402
import httpx2  # noqa: E402

from tests.support.installation import descendants  # noqa: E402

MAX_CPU_PERCENT = 0.5  # of one processor
MAX_CPU_PERCENT_OF_PAGES = 5.0  # with 50 open pages
LIVE = "/live?topic=sessions&topic=servers&topic=catalog&topic=approvals&age=0"
MAX_MEMORY_MB = 250


def thread_seconds(pid):
    """Return the CPU seconds of each thread, with its name."""
    threads = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        # The scheduler's nanoseconds: clock ticks are too coarse for a process at rest.
        nanoseconds = int((task / "schedstat").read_text().split()[0])
        threads[task.name] = (task / "comm").read_text().strip(), nanoseconds / 1e9
    return threads


def memory_mb(pid):
    """Return the resident and the private memory of a process."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    sizes = {name: int(size) for name, size in re.findall(r"(\w+):\s+(\d+) kB", text)}
    private = sizes["Private_Clean"] + sizes["Private_Dirty"]
    return {"resident": sizes["Rss"] / 1024, "private": private / 1024}


def sign_in(toolcrib):
    """Create the first admin; return the Cookie header of the signed-in browser."""
    with httpx2.Client(base_url=toolcrib.url, trust_env=False) as browser:
        path = toolcrib.setup_url.removeprefix(toolcrib.url)
        token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', browser.get(path).text)
        assert token, "no form on the set-up page"
        fields = {"csrfmiddlewaretoken": token[1], "email": "ada@example.org"}
        answer = browser.post(path, data={**fields, "password": "of the bench at rest 9"})
        assert answer.status_code == 302, answer.text
        return "; ".join(f"{name}={value}" for name, value in browser.cookies.items())


def open_pages(stack, toolcrib, number):
    """Open streams of live updates, as pages do; they stay open until the stack is closed."""
    cookie = sign_in(toolcrib)
    for _ in range(number):
        connection = http.client.HTTPConnection("127.0.0.1", toolcrib.port)
        stack.enter_context(closing(connection))
        connection.request("GET", LIVE, headers={"Cookie": cookie, "Accept": "text/event-stream"})
        response = connection.getresponse()
        kind = response.getheader("Content-Type", "")
        assert (response.status, kind.partition(";")[0]) == (200, "text/event-stream"), kind


def measure(toolcrib, options):
    time.sleep(options.settle)
    before, started = thread_seconds(toolcrib.pid), time.monotonic()
    time.sleep(options.seconds)
    after, seconds = thread_seconds(toolcrib.pid), time.monotonic() - started
    threads = {}
    for task, (name, total) in after.items():
        used = total - before.get(task, (name, 0.0))[1]
        threads[name] = threads.get(name, 0.0) + used / seconds * 100
    return {
        "servers": len(toolcrib.api("GET", "/servers")[1]["items"]),
        "cpu_percent": sum(threads.values()),
        "threads": dict(sorted(threads.items(), key=lambda item: -item[1])),
        "memory_mb": memory_mb(toolcrib.pid),
        "children_mb": sum(memory_mb(pid)["resident"] for pid in descendants(toolcrib.pid)),
    }


def run(options):
    with ExitStack() as stack:
        toolcrib, _ = dispatch.start_all(stack, options)
        body = {"query": "restart a pod"}
        path = f"/sessions/{toolcrib.session}/search"
        status, found = toolcrib.api("POST", path, body, token=toolcrib.key)
        assert status == 200, found
        assert found["strategy"] == "hybrid", found
        if options.pages:
            open_pages(stack, toolcrib, options.pages)
        return {"pages": options.pages, **measure(toolcrib, options)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60, help="measured time")
    parser.add_argument("--settle", type=float, default=20, help="time after the last request")
    parser.add_argument("--pages", type=int, default=0, help="open pages with live updates")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.tools, options.servers, options.folder = 160, 5, None
    figures = run(options)
    if options.json:
        print(json.dumps(figures))
        return
    memory, cpu = figures["memory_mb"], figures["cpu_percent"]
    print(f"{figures['servers']} servers, {options.seconds:g} s at rest, sentence model loaded")
    for name, percent in figures["threads"].items():
        print(f"  {percent:6.3f} % of a processor: thread {name}")
    limit = MAX_CPU_PERCENT_OF_PAGES if options.pages else MAX_CPU_PERCENT
    mark = "OK  " if cpu <= limit else "MISS"
    print(f"{mark} CPU {cpu:.2f} % of a processor, limit {limit:g} %; {options.pages} pages open")
    mark = "OK  " if memory["resident"] <= MAX_MEMORY_MB else "MISS"
    print(
        f"{mark} memory {memory['resident']:.0f} MB resident ({memory['private']:.0f} MB private), "
        f"limit {MAX_MEMORY_MB} MB; servers' programs {figures['children_mb']:.0f} MB"
    )


if __name__ == "__main__":
    main()
