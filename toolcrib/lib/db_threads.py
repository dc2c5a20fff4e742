"""Run database work in threads that outlive a request."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from django.db import close_old_connections

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def fresh_connections() -> Iterator[None]:
    """Discard stale connections of this thread before and after the block.

    A pooled thread may hold a connection from before a database restart.
    """
    close_old_connections()
    try:
        yield
    finally:
        close_old_connections()


async def run_in_db_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a function in a thread with fresh database connections."""

    def run() -> R:
        with fresh_connections():
            return function(*args, **kwargs)

    return await asyncio.to_thread(run)
