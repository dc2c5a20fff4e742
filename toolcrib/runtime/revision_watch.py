"""Watch for new catalog revisions, so that this process sees changes within a second.

Embedded: reads the revision after every commit (database_watch.py). Production: follows a Redis
stream and also polls the database every second, so a Redis outage loses nothing.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from django.conf import settings
from django.db import DatabaseError

from catalog.models import Revision
from catalog.revision_stream import STREAM
from toolcrib.lib.db_threads import run_in_db_thread
from toolcrib.lib.protocols.redis_client import connect_async, redis_error
from toolcrib.runtime.database_watch import DatabaseWatch

if TYPE_CHECKING:
    from redis.asyncio import Redis

logger = logging.getLogger(__name__)


MIN_INTERVAL, MAX_INTERVAL = 0.05, 10.0  # seconds, embedded
POLL_INTERVAL = 1.0  # seconds, in production


class RevisionWatch:
    def __init__(self, database: DatabaseWatch, on_change: Callable[[int], None]) -> None:
        self.known = 0
        self._database, self._on_change = database, on_change
        self._poll_now = asyncio.Event()

    async def run(self) -> None:
        """Watch the revision until cancelled."""
        stream = asyncio.create_task(self._follow_stream()) if settings.REDIS_URL else None
        try:
            while True:
                seen = self._database.changes
                await self._read()
                if settings.EMBEDDED:
                    await self._database.wait(seen, MIN_INTERVAL, MAX_INTERVAL)
                    continue
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._poll_now.wait(), POLL_INTERVAL)
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
            self._on_change(number)

    async def _follow_stream(self) -> None:
        client = connect_async(settings.REDIS_URL, 1)
        last: bytes | str = ""
        try:
            while True:
                try:
                    last = last or await _last_entry_id(client)
                    response = await client.xread({STREAM: last}, block=5000, count=1000)
                except redis_error():
                    await asyncio.sleep(1)
                    continue
                entries: list[tuple[bytes, object]] = response[0][1] if response else []  # type: ignore[index, assignment]
                if entries:
                    last = entries[-1][0]
                    self._poll_now.set()
        finally:
            await client.aclose()


async def _last_entry_id(client: "Redis") -> bytes | str:
    """Return the id of the stream's last entry, to read later entries from."""
    entries = await client.xrevrange(STREAM, count=1)
    return (entries[0][0] if entries else None) or "0-0"
