"""How many searches and loads run at once in this process.

Python runs one thread at a time. Where thirty compete, each is slower for it, and the event loop
waits for all of them in turn: calls of other agents stand still. A search is work for a processor
and waits for nobody, so more at once than there are processors answer no sooner.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from asgiref.sync import sync_to_async

from toolcrib.lib.db_threads import run_in_db_thread

P = ParamSpec("P")
T = TypeVar("T")

AT_ONCE = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

_gates: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


@asynccontextmanager
async def concurrency_slot() -> AsyncIterator[None]:
    """Wait for a turn; who came first goes first."""
    gate = _gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(AT_ONCE))
    async with gate:
        yield


async def run_shielded_with_limit(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run work in a thread when its turn has come. Who leaves before that leaves no work behind;
    what was begun keeps its turn until it is done."""
    async with concurrency_slot():
        working = asyncio.ensure_future(run_in_db_thread(function, *args, **kwargs))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            await asyncio.wait({working})
            if not working.cancelled():
                working.exception()  # seen
            raise


async def run_with_limit(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a search in a thread of its request when its turn has come."""
    async with concurrency_slot():
        return await sync_to_async(function)(*args, **kwargs)
