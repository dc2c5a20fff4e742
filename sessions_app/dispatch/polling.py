"""Background checks that are repeated for as long as Toolcrib runs."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from django.db import DatabaseError

logger = logging.getLogger(__name__)


async def repeat(check: Callable[[], Awaitable[None]], seconds: float, what: str) -> None:
    """Repeat a check; one that fails is logged, and the next one is made all the same."""
    while True:
        await asyncio.sleep(seconds)
        try:
            await check()
        except DatabaseError as error:
            logger.warning("%s failed: %s", what, error)
        except Exception:
            logger.exception("%s failed", what)


@asynccontextmanager
async def running(*repeated: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run repeated checks for the duration of the block."""
    tasks = [asyncio.create_task(checks) for checks in repeated]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
