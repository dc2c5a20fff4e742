"""Live connections, one owner task each.

The owner enters and leaves its client; everybody else shares the connection. The pool lives on
one event loop; other threads of the process reach it by `elsewhere`. It decides when to dial
again and when an idle connection closes; what a connection's life means for the catalog is its
watcher's business (listening.py), what a call means is calling.py's.
"""

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any, TypeVar

from django.conf import settings

from servers.connections.bulkhead import Bulkhead, Busy
from servers.connections.connection import Connection, UpstreamError, connect
from servers.spec import ServerSpec
from toolcrib.lib.errors import ToolcribError

logger = logging.getLogger(__name__)

T = TypeVar("T")
Key = tuple[int, str]  # server, and the agent session where the connection is its own
FIRST_WAIT, LONGEST_WAIT, PARKED_WAIT = 1.0, 60.0, 1800.0
DIALS_APART = 30.0  # of all processes together, once a server is known not to answer
HEALTHY_AFTER = 60.0
FREE_TRIES = 3  # failures in a row after which calls no longer make us dial early
DRAIN = 15.0  # seconds past their deadline that calls on a replaced connection get to end

_here: "Pool | None" = None


def process_pool() -> "Pool | None":
    """The listener's pool, where one runs in this process."""
    return _here


class PoolWatcher:
    """What a pool tells about its connections. All are called on the pool's loop, and are brief."""

    async def spec(self, server_id: int) -> ServerSpec | None:
        """Return how to reach a server now, or None if it should not be reached."""
        raise NotImplementedError

    async def may_dial(self, server_id: int, apart: float) -> bool:
        """Say whether it is for this process to try a server that did not answer, again."""
        return True

    async def connecting(self, spec: ServerSpec) -> None: ...
    async def connected(self, spec: ServerSpec, *, kept: bool) -> None: ...
    async def failed(self, server_id: int, generation: int, error: ToolcribError) -> None: ...
    def list_changed(self, server_id: int) -> None: ...


class ConnectionOwner:
    """One connection and the task that opens, keeps and closes it.

    `kept` owners stay; others were made for calls, and go when idle. `calls` counts the calls on
    the connection, or waiting for it, late ones included.
    """

    def __init__(self, server_id: int, watcher: PoolWatcher, *, kept: bool) -> None:
        self.server_id = server_id
        self.watcher = watcher
        self.kept = kept
        self.spec: ServerSpec | None = None
        self.calls = 0
        self.until = 0.0  # the last deadline of its calls so far, by the clock of the loop
        self.quiet = asyncio.Event()
        self.quiet.set()
        self.used = time.monotonic()
        self.ready: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        self.lost = asyncio.Event()
        self.poke = asyncio.Event()
        self.wait = FIRST_WAIT
        self.failures = 0  # in a row, without a healthy minute between
        self.pause_ends: float | None = None  # monotonic; None while not pausing
        self.problem: ToolcribError | None = None
        self.task = asyncio.create_task(self._own(), name=f"connection {server_id}")

    @property
    def generation(self) -> int:
        """Of the server as it was dialled; 0 before the first dial."""
        return self.spec.generation if self.spec else 0

    @property
    def is_ready(self) -> bool:
        ready = self.ready
        return ready.done() and not ready.exception() and not ready.result().closed.is_set()

    @property
    def is_barred(self) -> bool:
        """Whether calls are refused at once until the next dial."""
        return self.pause_ends is not None and self.failures >= FREE_TRIES

    async def _own(self) -> None:
        try:
            while True:
                started = time.monotonic()
                try:
                    await self._live()
                    return
                except ToolcribError as error:
                    await self._fail(error, time.monotonic() - started)
                except Exception:
                    logger.exception("The connection to server %s broke", self.server_id)
                    broken = UpstreamError("The connection broke.", code="protocol")
                    await self._fail(broken, time.monotonic() - started)
        finally:
            self._give_up()

    async def _live(self) -> None:
        """Connect and stay until the connection is lost (raises) or must not be (returns)."""
        spec = await self.watcher.spec(self.server_id)
        if spec is None:
            self.problem = _gone()
            return
        self.spec = spec
        await self.watcher.connecting(spec)
        changed: Callable[[], None] = lambda: self.watcher.list_changed(self.server_id)  # noqa: E731
        async with connect(spec, on_list_changed=changed) as connection:
            self.lost.clear()
            if not self.ready.done():
                self.ready.set_result(connection)
            await self.watcher.connected(spec, kept=self.kept)
            await connection.listen()

    async def _fail(self, error: ToolcribError, lived: float) -> None:
        self.poke.clear()
        if lived > HEALTHY_AFTER:
            self.wait, self.failures = FIRST_WAIT, 0
        failed, self.ready = self.ready, asyncio.get_running_loop().create_future()
        if not failed.done():
            failed.set_exception(error)
            failed.exception()  # marked as seen: nobody may be waiting
        self.problem = error
        if error.code != "too_large":  # we hung up on it
            self.failures += 1
        parked = not isinstance(error, UpstreamError) or error.parked
        wait = PARKED_WAIT if parked else self.wait * random.uniform(0.5, 1.0)  # noqa: S311
        self.wait = min(self.wait * 2, LONGEST_WAIT)
        self.pause_ends = time.monotonic() + wait
        self.lost.set()
        try:
            await self._tell_failed(error)
            await self._pause(wait, PARKED_WAIT if parked else DIALS_APART)
        finally:
            self.pause_ends = None

    async def _pause(self, wait: float, apart: float) -> None:
        """Wait until somebody asks for the connection, or it is time, and our turn, to dial."""
        while True:
            try:
                await asyncio.wait_for(self.poke.wait(), wait)
                return
            except TimeoutError:
                if self.failures < FREE_TRIES or await self._may_dial(apart):
                    return
            # Another process dialled lately, for all of us. It may be back before long.
            wait = DIALS_APART * random.uniform(0.5, 1.0)  # noqa: S311
            self.pause_ends = time.monotonic() + wait

    async def _may_dial(self, apart: float) -> bool:
        try:
            return await self.watcher.may_dial(self.server_id, apart)
        except Exception:
            logger.exception("Whether to dial server %s could not be found out", self.server_id)
            return True

    async def _tell_failed(self, error: ToolcribError) -> None:
        # The pauses are kept by this task: it goes on, whatever the database says.
        try:
            await self.watcher.failed(self.server_id, self.generation, error)
        except Exception:
            logger.exception("The failure of server %s could not be noted", self.server_id)

    async def connection(self) -> Connection:
        """Wait for the connection, dialling at once if the owner was pausing."""
        self.poke.set()
        return await asyncio.shield(self.ready)

    async def connection_for_call(self) -> Connection:
        """Wait for the connection, without dialling more often than the pauses allow.

        The first failures may be bad luck, so a call dials at once after them. Then it is
        answered at once with what the last dial found.
        """
        if self.ready.done() and self.ready.exception() is None:
            connection = self.ready.result()
            if not connection.closed.is_set():
                return connection
            await self.lost.wait()
        self._check_pause()
        return await self.connection()

    def _check_pause(self) -> None:
        if self.pause_ends is None or not self.is_barred or self.problem is None:
            return
        left = max(1, math.ceil(self.pause_ends - time.monotonic()))
        raise UpstreamError(
            self.problem.message,
            code=self.problem.code,
            hint=f"Toolcrib tries to connect again in {left} s.",
        )

    def began(self, deadline: float) -> None:
        """Note that a call needs the connection, at most so long."""
        self.calls += 1
        self.until = max(self.until, deadline)
        self.quiet.clear()

    def ended(self) -> None:
        self.calls -= 1
        self.used = time.monotonic()
        if not self.calls:
            self.quiet.set()

    def idle(self, seconds: float) -> bool:
        return not self.kept and not self.calls and time.monotonic() - self.used >= seconds

    async def stop(self) -> None:
        self.problem = UpstreamError(
            "The connection was closed here.", code="closed", hint="Try again."
        )
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self._give_up()  # a task that never began ends without a word

    def _give_up(self) -> None:
        if not self.ready.done():
            self.ready.set_exception(self.problem or _gone())
            self.ready.exception()  # marked as seen: nobody may be waiting
        self.lost.set()


def _gone() -> UpstreamError:
    return UpstreamError(
        "The server is disabled, or was removed.",
        code="disabled",
        hint="An admin can enable it.",
    )


def _patience(session: str, owner: ConnectionOwner) -> float:
    """How long a connection may be idle. What a session built up in its own is lost with it."""
    own = session and owner.is_ready
    return settings.SESSION_DISCONNECT if own else settings.IDLE_DISCONNECT


class Pool:
    def __init__(self, watcher: PoolWatcher) -> None:
        self.watcher = watcher
        self.owners: dict[Key, ConnectionOwner] = {}
        self.bulkheads: dict[int, Bulkhead] = {}
        self.afterwards: set[asyncio.Task[None]] = set()  # late answers, connections that drain
        self.loop = asyncio.get_running_loop()

    def open(self) -> None:
        global _here
        _here = self

    async def close(self) -> None:
        global _here
        if _here is self:
            _here = None
        for task in self.afterwards:
            task.cancel()
        owners, self.owners = self.owners, {}
        await asyncio.gather(*(owner.stop() for owner in owners.values()))
        await asyncio.gather(*self.afterwards, return_exceptions=True)

    @property
    def sessions(self) -> set[str]:
        """The agent sessions that have connections of their own."""
        return {session for _, session in self.owners if session}

    async def keep(
        self,
        wanted: Mapping[int, int],
        known: Mapping[int, int] | None = None,
        ended: Collection[str] = (),
    ) -> None:
        """Hold a connection to the wanted servers, at these generations.

        Connections that calls opened to other `known` servers stay until they are idle, or until
        the session whose own they are has `ended`.
        """
        known = wanted if known is None else known
        gone, replaced = [], []
        for key, owner in self.owners.items():
            server_id, session = key
            owner.kept = not session and server_id in wanted
            if owner.task.done() or server_id not in known or owner.idle(_patience(session, owner)):
                gone.append(key)
            elif session in ended or owner.generation not in (0, known[server_id]):
                replaced.append((key, owner))
        stops = [self.owners.pop(key).stop() for key in gone]
        await asyncio.gather(*stops, *(self._replace(*each) for each in replaced))
        for server_id in wanted:
            self._owner((server_id, ""), kept=True)

    async def connection(self, server_id: int, generation: int) -> Connection:
        """Return a live connection to a server as it is configured now, opening it if need be."""
        key = (server_id, "")
        owner = self.owners.get(key)
        if owner and owner.generation and owner.generation != generation:
            await self._replace(key, owner)
        return await self._owner(key, kept=True).connection()

    async def owner_for_call(
        self, server_id: int, session: str, generation: int
    ) -> ConnectionOwner:
        """Return who owns the connection that a call goes over, as the server is now."""
        key = (server_id, session)
        owner = self.owners.get(key)
        if owner and owner.generation and owner.generation != generation:
            # Either side may be the older one; the database knows.
            spec = await self.watcher.spec(server_id)
            if spec is None:
                raise _gone()
            if spec.generation != owner.generation:
                await self._replace(key, owner)
        if session and key not in self.owners:
            self._check_room(server_id)
        return self._owner(key, kept=False)

    def _check_room(self, server_id: int) -> None:
        own = sum(1 for server, session in self.owners if session and server == server_id)
        if own >= settings.SESSION_CONNECTIONS:
            raise Busy(
                f"All {own} connections that sessions may have of their own to this server "
                "are taken.",
                hint="Close sessions that are no longer needed, then try again. "
                "TOOLCRIB_SESSION_CONNECTIONS sets how many may.",
            )

    async def forget_session(self, session: str) -> None:
        """Close the connections that were one session's own, once their calls have ended."""
        own = [each for each in self.owners.items() if session and each[0][1] == session]
        await asyncio.gather(*(self._replace(*each) for each in own))

    def bulkhead(self, server_id: int) -> Bulkhead:
        return self.bulkheads.setdefault(server_id, Bulkhead())

    def later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Let something go on by itself, but not beyond the pool's end."""
        task = asyncio.create_task(work)
        self.afterwards.add(task)
        task.add_done_callback(self.afterwards.discard)
        return task

    def _owner(self, key: Key, *, kept: bool) -> ConnectionOwner:
        owner = self.owners.get(key)
        if owner is None or owner.task.done():
            owner = self.owners[key] = ConnectionOwner(key[0], self.watcher, kept=kept)
        return owner

    async def _replace(self, key: Key, owner: ConnectionOwner) -> None:
        """Let go of a connection once its calls have ended."""
        if self.owners.get(key) is not owner:
            return  # somebody was quicker
        del self.owners[key]
        if not owner.calls:
            await owner.stop()
            return

        async def drain() -> None:
            try:
                async with asyncio.timeout_at(owner.until + DRAIN):
                    await owner.quiet.wait()
            except TimeoutError:
                pass
            finally:
                await owner.stop()

        self.later(drain())

    async def elsewhere(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the pool's loop from another thread's loop."""
        if asyncio.get_running_loop() is self.loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))
