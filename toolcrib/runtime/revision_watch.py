"""Watch for new catalog revisions, so that this process sees changes within a second.

Embedded: polls the database every 250 ms. Production: follows a Redis stream and also polls the
database every second, so a Redis outage loses nothing.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

import redis.asyncio
from django.conf import settings
from django.db import DatabaseError

from catalog.models import Revision
from catalog.revision_stream import STREAM
from toolcrib.lib.db_threads import run_in_db_thread

logger = logging.getLogger(__name__)


class RevisionWatch:
    def __init__(self, on_change: Callable[[int], None] | None = None) -> None:
        self.known = 0
        self.on_change = on_change
        self._poll_now = asyncio.Event()

    async def run(self) -> None:
        """Watch the revision until cancelled."""
        stream = asyncio.create_task(self._follow_stream()) if settings.REDIS_URL else None
        try:
            while True:
                await self._read()
                with suppress(TimeoutError):
                    await asyncio.wait_for(
                        self._poll_now.wait(), 0.25 if settings.EMBEDDED else 1.0
                    )
                self._poll_now.clear()
        finally:
            if stream:
                stream.cancel()
                await asyncio.gather(stream, return_exceptions=True)

    async def _read(self) -> None:
        try:
            number = await run_in_db_thread(Revision.current)
        except DatabaseError as error:
            logger.warning("Reading the revision failed: %s", error)
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
                    last = last or await _last_entry_id(client)
                    response = await client.xread({STREAM: last}, block=5000, count=1000)
                except redis.RedisError:
                    await asyncio.sleep(1)
                    continue
                entries: list[tuple[bytes, object]] = response[0][1] if response else []  # type: ignore[index, assignment]
                if entries:
                    last = entries[-1][0]
                    self._poll_now.set()
        finally:
            await client.aclose()


async def _last_entry_id(client: "redis.asyncio.Redis") -> bytes | str:
    """Return the id of the stream's last entry, to read later entries from."""
    entries = await client.xrevrange(STREAM, count=1)
    return (entries[0][0] if entries else None) or "0-0"
