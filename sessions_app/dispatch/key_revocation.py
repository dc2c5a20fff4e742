"""Key revocation: cancel running requests, streams, calls and connections of invalid keys.

Each is in `running` while it runs. Every process checks the keys in the database twice a second,
so work of a revoked or expired key, or of a disabled agent, is cancelled in all processes.
"""

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from sessions_app.agents import api_keys
from sessions_app.dispatch import polling
from toolcrib.lib.db_threads import run_in_db_thread
from toolcrib.lib.errors import ToolcribError

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


def watch_revocations() -> AbstractAsyncContextManager[None]:
    """Check the keys of running work for the duration of the block."""
    return polling.running(polling.repeat(_check_keys, CHECK_INTERVAL, "Key revocation check"))


async def _check_keys() -> None:
    keys = {work.key for work in list(running) if work.key is not None}
    if not keys:
        return
    invalid = keys - await run_in_db_thread(api_keys.valid_keys, keys)
    for work in list(running):
        if work.key in invalid:
            work.end(KeyRevoked())
