"""Key revocation: cancel running requests, streams, calls and connections of invalid keys.

Each is in `running` while it runs. Every process checks the keys in the database twice a second,
so work of a revoked or expired key, or of a disabled agent, is cancelled in all processes.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Protocol

from django.db import DatabaseError

from sessions_app.agents import api_keys
from toolcrib.lib.db_threads import run_in_db_thread
from toolcrib.lib.errors import ToolcribError

logger = logging.getLogger(__name__)

CHECK_INTERVAL = 0.5  # seconds


class KeyRevoked(ToolcribError):
    code = "unauthorized"
    status = 401

    def __init__(self) -> None:
        super().__init__(
            "This key was revoked or has expired.", hint="Ask your operator for a new key."
        )


class Cancellable(Protocol):
    """Running work that belongs to a key, or to none. `end` may be called more than once."""

    @property
    def key(self) -> int | None: ...

    def end(self, reason: ToolcribError) -> None: ...


running: set[Cancellable] = set()


@asynccontextmanager
async def watch_revocations() -> AsyncIterator[None]:
    """Check the keys of running work for the duration of the block."""
    task = asyncio.create_task(_watch(), name="keys")
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _watch() -> None:
    while True:
        await asyncio.sleep(CHECK_INTERVAL)
        try:
            await _check_keys()
        except DatabaseError as error:
            logger.warning("Key revocation check failed: %s", error)
        except Exception:
            logger.exception("Key revocation check failed")


async def _check_keys() -> None:
    keys = {work.key for work in list(running) if work.key is not None}
    if not keys:
        return
    invalid = keys - await run_in_db_thread(api_keys.valid_keys, keys)
    for work in list(running):
        if work.key in invalid:
            work.end(KeyRevoked())
