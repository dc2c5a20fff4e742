"""Garbage is looked for once a minute among what is new, and among all while nobody waits."""

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
from toolcrib.runtime.memory_tuning import ALL_EVERY, AT_LATEST, EVERY, QUIET, GcSchedule


class Thing:
    """Something that only the collector can end."""

    def __init__(self):
        self.itself = self


@pytest.fixture
def collector():
    """One that has just looked at everything, at second 0, and Python's own way after it."""
    usual = gc.get_threshold()
    gc.set_threshold(*usual[:2], memory_tuning.NEVER)
    made = GcSchedule()
    made._collected = made._collected_all = made._touched = 0.0
    yield made
    gc.set_threshold(*usual)
    gc.unfreeze()


def dropped():
    """A thing that is garbage already."""
    return weakref.ref(Thing())


def test_new_garbage_is_found_once_a_minute_whoever_is_there(collector):
    garbage = dropped()
    collector._touched = EVERY
    collector.look(EVERY - 1)
    assert garbage() is not None
    collector.look(EVERY)
    assert garbage() is None


@pytest.mark.parametrize(
    ("touched", "now", "found"),
    [
        (ALL_EVERY, ALL_EVERY, False),  # somebody is being answered
        (ALL_EVERY, ALL_EVERY + QUIET, True),
        (0, ALL_EVERY - 1, False),
        (AT_LATEST, AT_LATEST - 1, False),
        (AT_LATEST, AT_LATEST, True),
    ],
)
def test_old_garbage_is_found_while_nobody_waits_or_at_the_latest(collector, touched, now, found):
    thing = Thing()
    old = weakref.ref(thing)
    collector.look(EVERY)  # it is left out from here on
    del thing
    collector._touched = touched
    collector.look(now)
    assert (old() is None) is found


def test_python_does_no_full_look_by_itself_meanwhile_and_has_its_own_way_after(monkeypatch):
    usual = gc.get_threshold()
    looks = []

    def look(phase, info):
        if phase == "start" and info["generation"] == 2:
            looks.append(info)

    async def scenario():
        collector = GcSchedule()
        async with collector.working():
            looks.clear()
            assert gc.get_freeze_count() > 10_000
            kept = [[number] for number in range(400_000)]  # by itself it would look
            assert looks == []
            del kept
            collector._collected -= EVERY
            await asyncio.to_thread(wait_for, lambda: looks)

    monkeypatch.setattr(memory_tuning, "LOOK", 0)
    gc.callbacks.append(look)
    try:
        asyncio.run(asyncio.wait_for(scenario(), 30))
    finally:
        gc.callbacks.remove(look)
    assert gc.get_threshold() == usual
    assert gc.get_freeze_count() == 0


HEAPS = """
import ctypes, sys, threading
from toolcrib.runtime.memory_tuning import limit_malloc_arenas
if sys.argv[1] == "shared":
    assert limit_malloc_arenas()
full, told = threading.Barrier(9), threading.Event()
def fill():
    held = [bytes(50_000) for _ in range(20)]
    full.wait(30)
    told.wait(30)
    return held
for _ in range(8):
    threading.Thread(target=fill, daemon=True).start()
full.wait(30)
libc = ctypes.CDLL(None)
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
told.set()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="only glibc has such heaps")
def test_threads_share_two_heaps():
    def heaps(how):
        done = subprocess.run(
            [sys.executable, "-c", HEAPS, how],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.count("<heap nr=")

    assert heaps("shared") <= 2 < heaps("by thread")
