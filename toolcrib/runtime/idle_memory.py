"""Return memory to the operating system while this process is idle.

glibc keeps freed memory, and pages of libraries that were read once, such as the tokenizer's
tables, stay resident. Together they were 170 of 410 MB after a first sync (bench/rest.py).
"""

import asyncio
import ctypes
import re
import time
from contextlib import suppress
from pathlib import Path

CHECK_INTERVAL = 10.0  # seconds
IDLE_CPU_SECONDS = 0.5  # in one interval; with more the process is not idle
ACTIVE_CPU_SECONDS = 1.0  # since the last release; with less there is nothing to return
MADV_DONTNEED = 4
MIN_MAPPING_BYTES = 1 << 20
MAPPING = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) r[-x]{2}p [^\n]*\.so[^\n]*\n(.*?)^VmFlags", re.DOTALL | re.MULTILINE
)


async def release_when_idle() -> None:
    """Release memory once after each period of activity, until cancelled."""
    previous = released_at = 0.0
    while True:
        await asyncio.sleep(CHECK_INTERVAL)
        used = time.process_time()
        if used - previous < IDLE_CPU_SECONDS and used - released_at > ACTIVE_CPU_SECONDS:
            await asyncio.to_thread(release)
            released_at = time.process_time()
        previous = used


def release() -> None:
    """Return freed memory, and unchanged pages of libraries, which are read again when needed."""
    libc = ctypes.CDLL(None)
    with suppress(AttributeError):  # not glibc
        libc.malloc_trim(0)
    with suppress(OSError, AttributeError):  # not Linux
        for start, end in unchanged_mappings(Path("/proc/self/smaps").read_text()):
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED)


def unchanged_mappings(smaps: str) -> list[tuple[int, int]]:
    """Return the addresses of large read-only mappings of libraries that equal their files."""
    return [
        (int(start, 16), int(end, 16))
        for start, end, sizes in MAPPING.findall(smaps)
        if int(end, 16) - int(start, 16) >= MIN_MAPPING_BYTES
        and re.search(r"^Anonymous: +0 kB", sizes, re.MULTILINE)
    ]
