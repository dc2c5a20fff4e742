"""What is under way for a key in this process, and its end when the key is no longer good.

Requests, streams, calls and connections of MCP clients are entered here for as long as they last.
The database is asked about their keys twice a second, by every process: so what is revoked, has
expired or belongs to an agent that was disabled ends everywhere, whichever way it came in.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from typing import Protocol

from django.db import DatabaseError
from django.db.models import Q
from django.utils import timezone

from sessions_app.agents import api_keys
from sessions_app.models import ApiKey
from toolcrib.lib.db_threads import run_in_db_thread
from toolcrib.lib.errors import ToolcribError

logger = logging.getLogger(__name__)

LOOK_EVERY = 0.5  # seconds between looks at the keys of what is under way


class KeyRevoked(ToolcribError):
    code = "unauthorized"
    status = 401

    def __init__(self) -> None:
        super().__init__(
            "This key was revoked, or has expired.", hint="Ask your operator for another."
        )


class Cancellable(Protocol):
    """Something that goes on for a key, or for none. `end` may be called more than once."""

    @property
    def key(self) -> int | None: ...

    def end(self, why: ToolcribError) -> None: ...


_under_way: set[Cancellable] = set()


def register(what: Cancellable) -> None:
    _under_way.add(what)


def unregister(what: Cancellable) -> None:
    _under_way.discard(what)


@asynccontextmanager
async def watch_revocations() -> AsyncIterator[None]:
    """Look after keys in this block."""
    watch = asyncio.create_task(_watch(), name="keys")
    try:
        yield
    finally:
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch


async def _watch() -> None:
    while True:
        await asyncio.sleep(LOOK_EVERY)
        try:
            await _look()
        except DatabaseError as error:
            logger.warning("The keys of what is under way could not be read: %s", error)
        except Exception:
            logger.exception("The keys of what is under way could not be looked after")


async def _look() -> None:
    held = {what.key for what in list(_under_way) if what.key is not None}
    if not held:
        return
    bad = held - await run_in_db_thread(_is_valid, held)
    for what in list(_under_way):
        if what.key in bad:
            what.end(KeyRevoked())


def _is_valid(wanted: Collection[int]) -> set[int]:
    """Say which of these keys may still be used."""
    now = timezone.now()
    owned = Q(agent=None) | Q(agent__enabled=True)
    return {
        key.pk for key in ApiKey.objects.filter(owned, pk__in=wanted) if api_keys.is_valid(key, now)
    }
