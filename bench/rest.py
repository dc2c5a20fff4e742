"""CPU and memory of an installation that nobody uses.

    python bench/rest.py [--seconds 60] [--settle 20] [--json]

Embedded, on SQLite, with seven connected servers (five of bench/fleet.py with 160 tools, and the
echo server over HTTP and over stdio), the sentence model loaded and all tools embedded. After the
last request the process settles; then its CPU time is read by thread at the start and at the end
of the measured time, and its memory at the end. Supervisors and the programs of stdio servers are
printed apart, as they are processes of their own.
"""

import argparse
import json
import re
import sys
import time
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import dispatch  # noqa: E402

from tests.support.installation import descendants  # noqa: E402

MAX_CPU_PERCENT = 0.5  # of one processor
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
        return measure(toolcrib, options)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60, help="measured time")
    parser.add_argument("--settle", type=float, default=20, help="time after the last request")
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
    mark = "OK  " if cpu <= MAX_CPU_PERCENT else "MISS"
    print(f"{mark} CPU {cpu:.2f} % of a processor, limit {MAX_CPU_PERCENT:g} %")
    mark = "OK  " if memory["resident"] <= MAX_MEMORY_MB else "MISS"
    print(
        f"{mark} memory {memory['resident']:.0f} MB resident ({memory['private']:.0f} MB private), "
        f"limit {MAX_MEMORY_MB} MB; servers' programs {figures['children_mb']:.0f} MB"
    )


if __name__ == "__main__":
    main()
