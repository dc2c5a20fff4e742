"""Memory is returned once after each period of activity; only unchanged pages are dropped."""

import asyncio
import time

from tests.support.waiting import scaled, wait_for
from toolcrib.runtime import idle_memory

SMAPS = """\
7f0000000000-7f0000400000 r--p 00000000 fe:00 11     /usr/lib/tables.so.1
Rss:                4096 kB
Anonymous:             0 kB
VmFlags: rd mr mw me
7f0000400000-7f0000800000 r--p 00400000 fe:00 11     /usr/lib/relocated.so
Rss:                4096 kB
Anonymous:            16 kB
VmFlags: rd mr mw me ac
7f0000800000-7f0000c00000 rw-p 00800000 fe:00 11     /usr/lib/data.so
Rss:                4096 kB
Anonymous:             0 kB
VmFlags: rd wr mr mw me ac
7f0000c00000-7f0001000000 r-xp 00000000 fe:00 12     /usr/bin/program
Rss:                4096 kB
Anonymous:             0 kB
VmFlags: rd ex mr mw me
7f0001000000-7f0001001000 r-xp 00000000 fe:00 13     /usr/lib/small.so
Rss:                   4 kB
Anonymous:             0 kB
VmFlags: rd ex mr mw me
7f0001001000-7f0001401000 rw-p 00000000 00:00 0
Rss:                4096 kB
Anonymous:          4096 kB
VmFlags: rd wr mr mw me ac
"""


def test_only_large_unchanged_read_only_libraries_are_dropped():
    assert idle_memory.unchanged_mappings(SMAPS) == [(0x7F0000000000, 0x7F0000400000)]


def test_the_process_continues_after_a_release():
    text = "tokenizers and models read their tables again " * 100
    from toolcrib.lib import token_counter

    before = token_counter._counter()[1](text)
    idle_memory.release()
    assert token_counter._counter()[1](text) == before


def test_memory_is_released_once_after_activity(monkeypatch):
    released = []
    monkeypatch.setattr(idle_memory, "CHECK_INTERVAL", 0.01)
    monkeypatch.setattr(idle_memory, "release", lambda: released.append(cpu))
    cpu = 5.0
    monkeypatch.setattr(time, "process_time", lambda: cpu)
    checks = []
    wait = asyncio.sleep

    async def counted_sleep(seconds):
        checks.append(cpu)
        await wait(seconds)

    monkeypatch.setattr(asyncio, "sleep", counted_sleep)

    async def scenario():
        nonlocal cpu
        task = asyncio.create_task(idle_memory.release_when_idle())
        await asyncio.to_thread(wait_for, lambda: len(checks) > 5)
        assert released == [5.0]
        cpu = 9.0
        await asyncio.to_thread(wait_for, lambda: len(released) == 2)
        count = len(checks)
        await asyncio.to_thread(wait_for, lambda: len(checks) > count + 5)
        task.cancel()

    asyncio.run(asyncio.wait_for(scenario(), scaled(30)))
    assert released == [5.0, 9.0]
