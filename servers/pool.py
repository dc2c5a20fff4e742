"""Live connections, one owner task each.

The owner enters and leaves its client; everybody else shares the connection. The pool lives on
one event loop; other threads of the process reach it by `elsewhere`. It decides when to dial
again; what a connection's life means for the catalog is its owner's business (listening.py).
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from servers.client import Connection, UpstreamError, connect
from servers.spec import ServerSpec
from toolcrib.errors import ToolcribError

logger = logging.getLogger(__name__)

T = TypeVar("T")
FIRST_WAIT, LONGEST_WAIT, PARKED_WAIT = 1.0, 60.0, 1800.0
HEALTHY_AFTER = 60.0

_here: "Pool | None" = None


def here() -> "Pool | None":
    """The pool of this process, where one runs."""
    return _here


class Watcher:
    """What a pool tells about its connections. All are called on the pool's loop, and are brief."""

    async def spec(self, server_id: int) -> ServerSpec | None:
        """Return how to reach a server now, or None if it should not be reached."""
        raise NotImplementedError

    async def connecting(self, spec: ServerSpec) -> None: ...
    async def connected(self, spec: ServerSpec, connection: Connection) -> None: ...
    async def failed(self, server_id: int, generation: int, error: ToolcribError) -> None: ...
    def list_changed(self, server_id: int) -> None: ...


class Owner:
    """One server's connection and the task that opens, keeps and closes it."""

    def __init__(self, server_id: int, watcher: Watcher) -> None:
        self.server_id = server_id
        self.watcher = watcher
        self.generation = 0
        self.ready: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        self.poke = asyncio.Event()
        self.wait = FIRST_WAIT
        self.task = asyncio.create_task(self._own(), name=f"connection {server_id}")

    async def _own(self) -> None:
        while True:
            started = time.monotonic()
            try:
                await self._live()
                self._give_up()
                return
            except ToolcribError as error:
                await self._fail(error, time.monotonic() - started)
            except Exception as error:
                logger.exception("The connection to server %s broke", self.server_id)
                await self._fail(
                    UpstreamError("The connection broke.", code="protocol"),
                    time.monotonic() - started,
                )
                del error

    async def _live(self) -> None:
        """Connect and stay until the connection is lost (raises) or must not be (returns)."""
        spec = await self.watcher.spec(self.server_id)
        if spec is None:
            return
        self.generation = spec.generation
        await self.watcher.connecting(spec)
        changed: Callable[[], None] = lambda: self.watcher.list_changed(self.server_id)  # noqa: E731
        async with connect(spec, on_list_changed=changed) as connection:
            if not self.ready.done():
                self.ready.set_result(connection)
            await self.watcher.connected(spec, connection)
            await connection.listen()

    async def _fail(self, error: ToolcribError, lived: float) -> None:
        self.poke.clear()
        if lived > HEALTHY_AFTER:
            self.wait = FIRST_WAIT
        failed, self.ready = self.ready, asyncio.get_running_loop().create_future()
        if not failed.done():
            failed.set_exception(error)
            failed.exception()  # marked as seen: nobody may be waiting
        await self.watcher.failed(self.server_id, self.generation, error)
        parked = not isinstance(error, UpstreamError) or error.parked
        wait = PARKED_WAIT if parked else self.wait * random.uniform(0.5, 1.0)  # noqa: S311
        self.wait = min(self.wait * 2, LONGEST_WAIT)
        try:
            await asyncio.wait_for(self.poke.wait(), wait)
        except TimeoutError:
            return

    async def connection(self) -> Connection:
        """Wait for the connection, dialling at once if the owner was pausing."""
        self.poke.set()
        return await asyncio.shield(self.ready)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self._give_up()

    def _give_up(self) -> None:
        if not self.ready.done():
            self.ready.set_exception(
                UpstreamError("The connection was closed here.", code="closed", hint="Try again.")
            )
            self.ready.exception()  # marked as seen: nobody may be waiting


class Pool:
    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self.owners: dict[int, Owner] = {}
        self.loop = asyncio.get_running_loop()

    def open(self) -> None:
        global _here
        _here = self

    async def close(self) -> None:
        global _here
        if _here is self:
            _here = None
        owners, self.owners = self.owners, {}
        await asyncio.gather(*(owner.stop() for owner in owners.values()))

    async def keep(self, wanted: dict[int, int]) -> None:
        """Hold a connection to exactly these servers, at these generations."""
        stale = [
            server_id
            for server_id, owner in self.owners.items()
            if owner.task.done()
            or server_id not in wanted
            or (owner.generation and owner.generation != wanted[server_id])
        ]
        await asyncio.gather(*(self.owners.pop(server_id).stop() for server_id in stale))
        for server_id in wanted:
            self._owner(server_id)

    async def connection(self, server_id: int, generation: int) -> Connection:
        """Return a live connection to a server as it is configured now, opening it if need be."""
        owner = self.owners.get(server_id)
        if owner and owner.generation and owner.generation != generation:
            del self.owners[server_id]
            await owner.stop()
        owner = self._owner(server_id)
        return await owner.connection()

    def _owner(self, server_id: int) -> Owner:
        owner = self.owners.get(server_id)
        if owner is None or owner.task.done():
            owner = self.owners[server_id] = Owner(server_id, self.watcher)
        return owner

    async def elsewhere(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the pool's loop from another thread's loop."""
        if asyncio.get_running_loop() is self.loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))
