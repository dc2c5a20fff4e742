"""Extends the audit chain within a second of a commit; asleep while nothing is recorded.

With SQLite it waits for commits (database_watch.py), with PostgreSQL for the notification that
`catalog.audit.record` sends. Every web process waits; one at a time does the work.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from django.db import DatabaseError, InterfaceError, connection

from catalog.audit import chain
from catalog.audit.log import CHANNEL
from toolcrib.lib.db_threads import run_in_db_thread
from toolcrib.lib.errors import ToolcribError
from toolcrib.runtime.database_watch import DatabaseWatch

logger = logging.getLogger(__name__)

MIN_INTERVAL, MAX_INTERVAL = 0.25, 600.0  # seconds between rounds
RETRY_INTERVAL = 5.0  # seconds after a failure, doubled by each further one
CONNECTION_OPTIONS = {"host", "port", "user", "password", "dbname", "sslmode", "sslrootcert"}


async def extend_chain(database: DatabaseWatch) -> None:
    """Extend the chain after every commit that recorded an entry, until cancelled."""
    rounds = _notifications() if connection.vendor == "postgresql" else _commits(database)
    always = True  # the last process may have died before it sealed or delivered its entries
    async for _ in rounds:
        delay = RETRY_INTERVAL
        while True:
            try:
                await run_in_db_thread(chain.extend, always=always)
            except (DatabaseError, InterfaceError, ToolcribError, OSError) as error:
                logger.error("The audit log could not be chained: %s", error)  # noqa: TRY400
                always = True
                await asyncio.sleep(delay)
                delay = min(2 * delay, MAX_INTERVAL)
            else:
                always = False
                break


async def _commits(database: DatabaseWatch) -> AsyncIterator[None]:
    while True:
        seen = database.changes
        yield
        await database.wait(seen, MIN_INTERVAL, MAX_INTERVAL)


async def _notifications() -> AsyncIterator[None]:
    import psycopg  # only here: an installation on SQLite does without its 7 MB

    parameters: dict[str, Any] = connection.get_connection_params()
    options = {name: value for name, value in parameters.items() if name in CONNECTION_OPTIONS}
    while True:
        try:
            async with await psycopg.AsyncConnection.connect(**options, autocommit=True) as link:
                await link.execute(f"LISTEN {CHANNEL}")
                while True:
                    yield
                    async for _ in link.notifies(timeout=MAX_INTERVAL, stop_after=1):
                        pass
                    await link.execute("SELECT 1")  # fails if the connection was lost silently
        except psycopg.Error as error:
            logger.warning("Waiting for audit entries failed; reconnecting: %s", error)
            await asyncio.sleep(RETRY_INTERVAL)
