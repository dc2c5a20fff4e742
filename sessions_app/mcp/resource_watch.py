"""Resource subscriptions of clients: each watched at its server while the client's stream is open.

A client of 2026 names the resources when it opens a stream; an older one subscribes by requests,
which are kept with its connection for the process that has its stream.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from django.db import transaction

from servers.connections import calls as upstream_calls
from sessions_app.dispatch import features
from sessions_app.dispatch.authorization import Caller
from sessions_app.mcp.sessions import UnknownConnection
from sessions_app.models import McpConnection
from toolcrib.lib.errors import Invalid, ToolcribError

MAX_SUBSCRIPTIONS = 100  # of one stream
logger = logging.getLogger(__name__)

OnUpdate = Callable[[str], None]  # the URI, as the client has it


class Watches:
    """The resources that one stream watches."""

    def __init__(self, caller: Caller, on_update: OnUpdate) -> None:
        self._caller, self._on_update = caller, on_update
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def set(self, uris: Iterable[str]) -> None:
        """Watch exactly these resources."""
        wanted = list(dict.fromkeys(uris))[:MAX_SUBSCRIPTIONS]
        for uri in self._tasks.keys() - set(wanted):
            self._tasks.pop(uri).cancel()
        for uri in wanted:
            if uri not in self._tasks:
                self._tasks[uri] = asyncio.create_task(self._watch(uri))

    async def _watch(self, uri: str) -> None:
        loop = asyncio.get_running_loop()

        def on_update() -> None:
            loop.call_soon_threadsafe(self._on_update, uri)

        try:
            target, original = await features.find_watched(self._caller, uri)
            await upstream_calls.watch_resource(target, original, on_update)
        except ToolcribError as error:  # not in this session: never changes for it
            logger.debug("Resource is not watched: %s", error.code)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


@asynccontextmanager
async def watching(caller: Caller, uris: Iterable[str], on_update: OnUpdate) -> AsyncIterator[None]:
    """Watch resources for the duration of the block."""
    watches = Watches(caller, on_update)
    watches.set(uris)
    try:
        yield
    finally:
        await watches.close()


@transaction.atomic
def change_subscription(connection_id: str, uri: str, *, subscribe: bool) -> None:
    """Add or remove a subscription of a handshake connection."""
    rows = McpConnection.objects.select_for_update().filter(connection_id=connection_id)
    row = rows.first()
    if row is None:
        raise UnknownConnection
    uris = [each for each in json.loads(row.subscriptions) if each != uri]
    if subscribe:
        uris.append(uri)
    if len(uris) > MAX_SUBSCRIPTIONS:
        raise Invalid(f"A client may subscribe to at most {MAX_SUBSCRIPTIONS} resources.")
    row.subscriptions = json.dumps(uris)
    row.save(update_fields=["subscriptions"])
