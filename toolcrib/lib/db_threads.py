"""Database work off the event loop, for code that lives on it."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from django.db import close_old_connections

P = ParamSpec("P")
R = TypeVar("R")


async def run_in_db_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run database work in a thread that may have slept through a database restart."""

    def fresh() -> R:
        close_old_connections()
        try:
            return function(*args, **kwargs)
        finally:
            close_old_connections()

    return await asyncio.to_thread(fresh)
