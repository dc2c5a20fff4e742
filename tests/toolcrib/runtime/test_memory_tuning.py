"""GC schedule: young objects once a minute, a full collection while the process is idle."""

import asyncio
import ctypes
import gc
import subprocess
import sys
import weakref

import pytest

from tests.support.installation import ROOT
from tests.support.waiting import wait_for
from toolcrib.runtime import memory_tuning
from toolcrib.runtime.memory_tuning import (
    COLLECT_INTERVAL,
    FULL_INTERVAL,
    IDLE_AFTER,
    MAX_FULL_INTERVAL,
    GcSchedule,
)


class Cycle:
    """A reference cycle, which only the garbage collector can free."""

    def __init__(self):
        self.itself = self


@pytest.fixture
def schedule():
    """Yield a schedule with a full collection at second 0; restore Python's own afterwards."""
    thresholds = gc.get_threshold()
    gc.set_threshold(*thresholds[:2], memory_tuning.NEVER)
    schedule = GcSchedule()
    schedule._collected = schedule._collected_all = schedule._last_request = 0.0
    yield schedule
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def create_garbage():
    """Return a weak reference to an object that is already garbage."""
    return weakref.ref(Cycle())


def test_new_garbage_is_collected_once_a_minute_even_under_load(schedule):
    garbage = create_garbage()
    schedule._last_request = COLLECT_INTERVAL
    schedule.collect_if_due(COLLECT_INTERVAL - 1)
    assert garbage() is not None
    schedule.collect_if_due(COLLECT_INTERVAL)
    assert garbage() is None


@pytest.mark.parametrize(
    ("last_request", "now", "collected"),
    [
        (FULL_INTERVAL, FULL_INTERVAL, False),  # a request is in progress
        (FULL_INTERVAL, FULL_INTERVAL + IDLE_AFTER, True),
        (0, FULL_INTERVAL - 1, False),
        (MAX_FULL_INTERVAL, MAX_FULL_INTERVAL - 1, False),
        (MAX_FULL_INTERVAL, MAX_FULL_INTERVAL, True),
    ],
)
def test_old_garbage_is_collected_while_idle_or_after_the_maximum_interval(
    schedule, last_request, now, collected
):
    cycle = Cycle()
    old = weakref.ref(cycle)
    schedule.collect_if_due(COLLECT_INTERVAL)  # frozen from here on
    del cycle
    schedule._last_request = last_request
    schedule.collect_if_due(now)
    assert (old() is None) is collected


def test_python_runs_no_full_collection_of_its_own_until_the_schedule_ends(monkeypatch):
    thresholds = gc.get_threshold()
    collections = []

    def record(phase, info):
        if phase == "start" and info["generation"] == 2:
            collections.append(info)

    async def scenario():
        schedule = GcSchedule()
        async with schedule.running():
            collections.clear()
            assert gc.get_freeze_count() > 10_000
            objects = [[number] for number in range(400_000)]  # triggers a collection by default
            assert collections == []
            del objects
            schedule._collected -= COLLECT_INTERVAL
            await asyncio.to_thread(wait_for, lambda: collections)

    monkeypatch.setattr(memory_tuning, "CHECK_INTERVAL", 0)
    gc.callbacks.append(record)
    try:
        asyncio.run(asyncio.wait_for(scenario(), 30))
    finally:
        gc.callbacks.remove(record)
    assert gc.get_threshold() == thresholds
    assert gc.get_freeze_count() == 0


ARENAS_SCRIPT = """
import ctypes, sys, threading
from toolcrib.runtime.memory_tuning import limit_malloc_arenas
if sys.argv[1] == "shared":
    assert limit_malloc_arenas()
full, done = threading.Barrier(9), threading.Event()
def fill():
    held = [bytes(50_000) for _ in range(20)]
    full.wait(30)
    done.wait(30)
    return held
for _ in range(8):
    threading.Thread(target=fill, daemon=True).start()
full.wait(30)
libc = ctypes.CDLL(None)
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
done.set()
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt"), reason="only glibc has malloc arenas"
)
def test_threads_share_two_arenas():
    def count_arenas(mode):
        result = subprocess.run(
            [sys.executable, "-c", ARENAS_SCRIPT, mode],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        return result.stdout.count("<heap nr=")

    assert count_arenas("shared") <= 2 < count_arenas("by thread")
