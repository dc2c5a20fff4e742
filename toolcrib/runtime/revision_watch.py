"""Know the newest revision in this process, within a second of any other process's change.

Embedded looks at the database every 250 ms. Production reads a Redis stream from where it left
off, and looks at the database every second too, so that a Redis outage delays and loses nothing.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

import redis.asyncio
from django.conf import settings
from django.db import DatabaseError, close_old_connections

from catalog.models import Revision
from catalog.revision_stream import STREAM

logger = logging.getLogger(__name__)


class RevisionWatch:
    def __init__(self, on_change: Callable[[int], None] | None = None) -> None:
        self.known = 0
        self.on_change = on_change
        self._look = asyncio.Event()

    async def run(self) -> None:
        """Follow the revision until cancelled."""
        stream = asyncio.create_task(self._follow_stream()) if settings.REDIS_URL else None
        try:
            while True:
                await self._read()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._look.wait(), 0.25 if settings.EMBEDDED else 1.0)
                self._look.clear()
        finally:
            if stream:
                stream.cancel()
                await asyncio.gather(stream, return_exceptions=True)

    async def _read(self) -> None:
        try:
            number = await asyncio.to_thread(_current)
        except DatabaseError as error:
            logger.warning("The revision could not be read: %s", error)
            return
        if number != self.known:
            self.known = number
            if self.on_change:
                self.on_change(number)

    async def _follow_stream(self) -> None:
        client = redis.asyncio.Redis.from_url(settings.REDIS_URL, socket_connect_timeout=1)
        last: bytes | str = ""
        try:
            while True:
                try:
                    last = last or await _newest(client)
                    found = await client.xread({STREAM: last}, block=5000, count=1000)
                except redis.RedisError:
                    await asyncio.sleep(1)
                    continue
                entries: list[tuple[bytes, object]] = found[0][1] if found else []  # type: ignore[index, assignment]
                if entries:
                    last = entries[-1][0]
                    self._look.set()
        finally:
            await client.aclose()


async def _newest(client: "redis.asyncio.Redis") -> bytes | str:
    """Where the stream ends now: what comes later is read from here, however long it takes."""
    entries = await client.xrevrange(STREAM, count=1)
    return (entries[0][0] if entries else None) or "0-0"


def _current() -> int:
    close_old_connections()
    try:
        return Revision.current()
    finally:
        close_old_connections()
