"""Concurrency limit for searches and loads in this process.

Searches are CPU-bound and compete for the GIL with each other and with the event loop, which
serves the calls of all agents. More than one per CPU gives no more throughput and blocks the loop.
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

MAX_CONCURRENT = (
    len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
)

_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


@asynccontextmanager
async def concurrency_slot() -> AsyncIterator[None]:
    """Hold one of the slots, which are granted in order of arrival."""
    loop = asyncio.get_running_loop()
    async with _semaphores.setdefault(loop, asyncio.Semaphore(MAX_CONCURRENT)):
        yield


async def run_shielded_with_limit(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function in a thread when a slot is free.

    Cancelled while waiting, it never runs. Cancelled while running, it keeps its slot until done.
    """
    async with concurrency_slot():
        task = asyncio.ensure_future(run_in_db_thread(function, *args, **kwargs))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # mark as retrieved
            raise


async def run_with_limit(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function in the request's own thread when a slot is free."""
    async with concurrency_slot():
        return await sync_to_async(function)(*args, **kwargs)
