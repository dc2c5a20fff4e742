"""Pool of live upstream connections, with one owner task each, and the call slots of each server.

The owner opens and closes its connection; all other tasks share it. The pool is bound to one event
loop; other threads reach it through `run_on_loop`. It decides when to reconnect and when to close
an idle connection. Its watcher handles the consequences for the catalog (sync/listener.py), and
calls.py the calls.
"""

import asyncio
import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any, TypeVar

from django.conf import settings

from servers.connections.connection import Connection, connect
from servers.errors import UpstreamError
from servers.spec import ServerSpec
from toolcrib.lib.errors import ToolcribError

logger = logging.getLogger(__name__)

T = TypeVar("T")
Key = tuple[int, str]  # server id, and the agent session if the connection belongs to one
FIRST_BACKOFF, MAX_BACKOFF, PARKED_BACKOFF = 1.0, 60.0, 1800.0
RECONNECT_INTERVAL = 30.0  # of all processes together, for a server known to be unreachable
HEALTHY_AFTER = 60.0
CIRCUIT_THRESHOLD = 3  # consecutive failures after which calls fail fast
DRAIN_GRACE = 15.0  # seconds past their deadline for calls on a replaced connection

_process_pool: "Pool | None" = None


def process_pool() -> "Pool | None":
    """Return the listener's pool, if one runs in this process."""
    return _process_pool


class Busy(UpstreamError):
    """All slots of a server are in use and its queue is full."""

    code = "busy"
    status = 503


class Slot:
    """The right to make one call. A call that timed out keeps it until another call needs it."""

    def __init__(self, bulkhead: "Bulkhead") -> None:
        self.is_late = False
        self._bulkhead = bulkhead

    def hold_after_timeout(self) -> None:
        self.is_late, self.needed = True, asyncio.Event()
        self._bulkhead.hold_after_timeout(self)

    def release(self) -> None:
        self._bulkhead.release(self)


class Bulkhead:
    """The slots of one server, granted in FIFO order. Bound to one event loop."""

    def __init__(self) -> None:
        self.running = 0  # calls within their deadline
        self.refused = 0
        self._late: list[Slot] = []
        self._queue: deque[tuple[asyncio.Future[None], int]] = deque()

    @property
    def waiting(self) -> int:
        """Queued calls, without those that get the slot of a late call as soon as it ends."""
        return max(0, len(self._queue) - len(self._late))

    def try_acquire(self, size: int) -> Slot | None:
        """Return one of `size` slots if there is a free one for the next call."""
        if not self._has_room(size) or self._queue:
            return None
        self.running += 1
        return Slot(self)

    async def acquire(self, size: int) -> Slot:
        """Wait for one of `size` slots, or raise Busy at once if the queue is full."""
        if (slot := self.try_acquire(size)) is not None:
            return slot
        if len(self._queue) >= settings.CALLS_QUEUED + len(self._late):
            self.refused += 1
            raise Busy(
                f"The server is busy: {self.running} calls running, {self.waiting} queued.",
                hint="Try again in a few seconds.",
            )
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (granted, size)
        self._queue.append(entry)
        self._release_late_slots()
        try:
            await granted
        except asyncio.CancelledError:
            if entry in self._queue:
                self._queue.remove(entry)
            elif not granted.cancelled():
                self.running -= 1  # the slot was granted at the moment of the cancellation
            self._grant_slots()
            raise
        return Slot(self)

    def hold_after_timeout(self, slot: Slot) -> None:
        self.running -= 1
        self._late.append(slot)
        self._release_late_slots()

    def release(self, slot: Slot) -> None:
        """Return the slot and grant it to the first call in the queue."""
        if slot.is_late:
            self._late.remove(slot)
        else:
            self.running -= 1
        self._grant_slots()

    def _has_room(self, size: int) -> bool:
        return self.running + len(self._late) < size

    def _grant_slots(self) -> None:
        while self._queue and self._has_room(self._queue[0][1]):
            granted, _ = self._queue.popleft()
            if not granted.done():
                self.running += 1
                granted.set_result(None)
        self._release_late_slots()

    def _release_late_slots(self) -> None:
        """Ask one late call per queued call to end, oldest first."""
        for slot, _ in zip(self._late, self._queue, strict=False):
            slot.needed.set()


class PoolWatcher:
    """Callbacks of a pool. All run on the pool's loop and must be brief."""

    async def spec(self, server_id: int) -> ServerSpec | None:
        """Return the current connection settings, or None if the server must not be reached."""
        raise NotImplementedError

    async def may_reconnect(self, server_id: int, interval: float) -> bool:
        return True

    async def connecting(self, spec: ServerSpec) -> None: ...
    async def connected(self, spec: ServerSpec, *, persistent: bool) -> None: ...
    async def failed(self, server_id: int, generation: int, error: ToolcribError) -> None: ...
    def list_changed(self, server_id: int) -> None: ...


class ConnectionOwner:
    """One connection and the task that opens, keeps and closes it.

    `persistent` connections stay open; others were opened for calls and close when idle. `calls`
    counts the calls that use or await the connection, late ones included.
    """

    def __init__(
        self, server_id: int, watcher: PoolWatcher, *, persistent: bool, elicits: bool = False
    ) -> None:
        self.server_id = server_id
        self.watcher = watcher
        self.persistent = persistent
        self.elicits = elicits
        self.spec: ServerSpec | None = None
        self.calls = 0
        self.last_deadline = 0.0  # the latest deadline of its calls so far, in loop time
        self.no_calls = asyncio.Event()
        self.no_calls.set()
        self.last_used = time.monotonic()
        self.ready: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        self.lost = asyncio.Event()
        self.reconnect_now = asyncio.Event()
        self.backoff = FIRST_BACKOFF
        self.failures = 0  # consecutive, without HEALTHY_AFTER seconds in between
        self.retry_at: float | None = None  # monotonic; None while not waiting
        self.last_error: ToolcribError | None = None
        self.task = asyncio.create_task(self._run(), name=f"connection {server_id}")

    @property
    def generation(self) -> int:
        """The server's generation at the last connection attempt; 0 before the first."""
        return self.spec.generation if self.spec else 0

    @property
    def is_circuit_open(self) -> bool:
        """Whether calls fail fast until the next connection attempt."""
        return self.retry_at is not None and self.failures >= CIRCUIT_THRESHOLD

    async def _run(self) -> None:
        try:
            while True:
                started = time.monotonic()
                try:
                    await self._stay_connected()
                    return
                except ToolcribError as error:
                    await self._handle_failure(error, time.monotonic() - started)
                except Exception:
                    logger.exception("Connection to server %s failed unexpectedly", self.server_id)
                    broken = UpstreamError("The connection failed.", code="protocol")
                    await self._handle_failure(broken, time.monotonic() - started)
        finally:
            self._fail_waiters()

    async def _stay_connected(self) -> None:
        """Connect and listen until the connection is lost (raises) or not allowed (returns)."""
        spec = await self.watcher.spec(self.server_id)
        if spec is None:
            self.last_error = _disabled_error()
            return
        self.spec = spec
        await self.watcher.connecting(spec)
        changed: Callable[[], None] = lambda: self.watcher.list_changed(self.server_id)  # noqa: E731
        async with connect(spec, on_list_changed=changed, elicits=self.elicits) as connection:
            self.lost.clear()
            if not self.ready.done():
                self.ready.set_result(connection)
            await self.watcher.connected(spec, persistent=self.persistent)
            await connection.listen()

    async def _handle_failure(self, error: ToolcribError, lifetime: float) -> None:
        self.reconnect_now.clear()
        if lifetime > HEALTHY_AFTER:
            self.backoff, self.failures = FIRST_BACKOFF, 0
        failed, self.ready = self.ready, asyncio.get_running_loop().create_future()
        if not failed.done():
            failed.set_exception(error)
            failed.exception()  # mark as retrieved: there may be no waiter
        self.last_error = error
        if error.code != "too_large":  # then Toolcrib closed the connection
            self.failures += 1
        parked = not isinstance(error, UpstreamError) or error.parked
        wait = PARKED_BACKOFF if parked else self.backoff * random.uniform(0.5, 1.0)  # noqa: S311
        self.backoff = min(self.backoff * 2, MAX_BACKOFF)
        self.retry_at = time.monotonic() + wait
        self.lost.set()
        try:
            await self._report_failure(error)
            await self._wait_to_reconnect(wait, PARKED_BACKOFF if parked else RECONNECT_INTERVAL)
        finally:
            self.retry_at = None

    async def _wait_to_reconnect(self, wait: float, interval: float) -> None:
        """Wait until the connection is requested, or the backoff ends and the claim succeeds."""
        while True:
            try:
                await asyncio.wait_for(self.reconnect_now.wait(), wait)
                return
            except TimeoutError:
                if self.failures < CIRCUIT_THRESHOLD or await self._may_reconnect(interval):
                    return
            # Another process tried recently, on behalf of all.
            wait = RECONNECT_INTERVAL * random.uniform(0.5, 1.0)  # noqa: S311
            self.retry_at = time.monotonic() + wait

    async def _may_reconnect(self, interval: float) -> bool:
        try:
            return await self.watcher.may_reconnect(self.server_id, interval)
        except Exception:
            logger.exception("Reconnect claim for server %s failed", self.server_id)
            return True

    async def _report_failure(self, error: ToolcribError) -> None:
        # The backoff continues even when the database is unavailable.
        try:
            await self.watcher.failed(self.server_id, self.generation, error)
        except Exception:
            logger.exception("Failure of server %s could not be recorded", self.server_id)

    async def connection(self) -> Connection:
        """Wait for the connection; end a backoff at once."""
        self.reconnect_now.set()
        return await asyncio.shield(self.ready)

    @property
    def live_connection(self) -> Connection | None:
        is_open = self.ready.done() and not self.ready.exception()
        connection = self.ready.result() if is_open else None
        return connection if connection is not None and not connection.closed.is_set() else None

    async def connection_for_call(self) -> Connection:
        """Wait for the connection, without reconnecting more often than the backoff allows.

        The first failures may be transient, so a call after them reconnects at once. Once the
        circuit is open, calls fail fast with the last error.
        """
        if (connection := self.live_connection) is not None:
            return connection
        if self.ready.done() and not self.ready.exception():
            await self.lost.wait()
        self._check_circuit()
        return await self.connection()

    def _check_circuit(self) -> None:
        if self.retry_at is None or not self.is_circuit_open or self.last_error is None:
            return
        seconds = max(1, math.ceil(self.retry_at - time.monotonic()))
        raise UpstreamError(
            self.last_error.message,
            code=self.last_error.code,
            hint=f"Toolcrib reconnects in {seconds} s.",
        )

    def call_started(self, deadline: float) -> None:
        """Count a call that needs the connection until `deadline`."""
        self.calls += 1
        self.last_deadline = max(self.last_deadline, deadline)
        self.no_calls.clear()

    def call_ended(self) -> None:
        self.calls -= 1
        self.last_used = time.monotonic()
        if not self.calls:
            self.no_calls.set()

    def is_idle(self, session: str) -> bool:
        """Tell whether it is unused for too long. Closing one of a session loses its state."""
        has_state = session and self.live_connection is not None
        limit = settings.SESSION_DISCONNECT if has_state else settings.IDLE_DISCONNECT
        unused = time.monotonic() - self.last_used
        return not self.persistent and not self.calls and unused >= limit

    async def stop(self) -> None:
        self.last_error = UpstreamError(
            "Toolcrib closed the connection.", code="closed", hint="Try again."
        )
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self._fail_waiters()  # a task cancelled before its start runs no `finally`

    def _fail_waiters(self) -> None:
        if not self.ready.done():
            self.ready.set_exception(self.last_error or _disabled_error())
            self.ready.exception()  # mark as retrieved: there may be no waiter
        self.lost.set()


def _disabled_error() -> UpstreamError:
    return UpstreamError(
        "The server is disabled or was removed.", code="disabled", hint="An admin can enable it."
    )


class Pool:
    def __init__(self, watcher: PoolWatcher) -> None:
        self.watcher = watcher
        self.owners: dict[Key, ConnectionOwner] = {}
        self.bulkheads: dict[int, Bulkhead] = {}
        self.background: set[asyncio.Task[None]] = set()  # late answers, draining connections
        self.loop = asyncio.get_running_loop()

    def open(self) -> None:
        global _process_pool
        _process_pool = self

    async def close(self) -> None:
        global _process_pool
        if _process_pool is self:
            _process_pool = None
        for task in self.background:
            task.cancel()
        owners, self.owners = self.owners, {}
        await asyncio.gather(*(owner.stop() for owner in owners.values()))
        await asyncio.gather(*self.background, return_exceptions=True)

    @property
    def sessions(self) -> set[str]:
        return {session for _, session in self.owners if session}

    async def maintain(
        self, persistent: Mapping[int, int], enabled: Mapping[int, int], ended: Collection[str]
    ) -> None:
        """Keep connections to the `persistent` servers; both mappings are id to generation.

        Connections that calls opened to other `enabled` servers stay until they are idle, or until
        the session they belong to has `ended`.
        """
        obsolete, replaced = [], []
        for key, owner in self.owners.items():
            server_id, session = key
            owner.persistent = not session and server_id in persistent
            if owner.task.done() or server_id not in enabled or owner.is_idle(session):
                obsolete.append(key)
            elif session in ended or owner.generation not in (0, enabled[server_id]):
                replaced.append((key, owner))
        stops = [self.owners.pop(key).stop() for key in obsolete]
        await asyncio.gather(*stops, *(self._retire(*each) for each in replaced))
        for server_id in persistent:
            self._get_owner((server_id, ""), persistent=True)

    async def connection(self, server_id: int, generation: int) -> Connection:
        """Return a live connection to a server at this generation, opening it if needed."""
        key = (server_id, "")
        owner = self.owners.get(key)
        if owner and owner.generation and owner.generation != generation:
            await self._retire(key, owner)
        return await self._get_owner(key, persistent=True).connection()

    def live_owner(self, server_id: int, session: str, generation: int) -> ConnectionOwner | None:
        """Return the owner of an open connection at this generation, if there is one."""
        owner = self.owners.get((server_id, session))
        if owner is None or owner.generation != generation or owner.live_connection is None:
            return None
        return owner

    async def owner_for_call(
        self, server_id: int, session: str, generation: int, *, elicits: bool = False
    ) -> ConnectionOwner:
        """Return the owner of the connection for a call, at the server's current generation."""
        key = (server_id, session)
        owner = self.owners.get(key)
        if owner and owner.generation and owner.generation != generation:
            # Either the call or the connection may be outdated; the database decides.
            spec = await self.watcher.spec(server_id)
            if spec is None:
                raise _disabled_error()
            if spec.generation != owner.generation:
                await self._retire(key, owner)
        if session and key not in self.owners:
            self._check_session_limit(server_id)
        return self._get_owner(key, persistent=False, elicits=elicits and bool(session))

    def has_room(self, server_id: int, session: str) -> bool:
        """Return whether a session has a connection of its own to a server, or may open one."""
        is_open = (server_id, session) in self.owners
        return is_open or self._session_count(server_id) < settings.SESSION_CONNECTIONS

    def _session_count(self, server_id: int) -> int:
        return sum(1 for server, session in self.owners if session and server == server_id)

    def _check_session_limit(self, server_id: int) -> None:
        count = self._session_count(server_id)
        if count >= settings.SESSION_CONNECTIONS:
            raise Busy(
                f"All {count} session connections to this server are in use.",
                hint="Close sessions that are no longer needed, then try again. "
                "TOOLCRIB_SESSION_CONNECTIONS sets the limit.",
            )

    async def forget_session(self, session: str) -> None:
        own = [each for each in self.owners.items() if session and each[0][1] == session]
        await asyncio.gather(*(self._retire(*each) for each in own))

    def bulkhead(self, server_id: int) -> Bulkhead:
        return self.bulkheads.setdefault(server_id, Bulkhead())

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine as a task that is cancelled when the pool closes."""
        task = asyncio.create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)
        return task

    def _get_owner(self, key: Key, *, persistent: bool, elicits: bool = False) -> ConnectionOwner:
        owner = self.owners.get(key)
        if owner is None or owner.task.done():
            owner = ConnectionOwner(key[0], self.watcher, persistent=persistent, elicits=elicits)
            self.owners[key] = owner
        return owner

    async def _retire(self, key: Key, owner: ConnectionOwner) -> None:
        """Remove a connection from the pool and close it after its calls have ended."""
        if self.owners.get(key) is not owner:
            return  # another task was faster
        del self.owners[key]
        if not owner.calls:
            await owner.stop()
            return

        async def drain() -> None:
            try:
                async with asyncio.timeout_at(owner.last_deadline + DRAIN_GRACE):
                    await owner.no_calls.wait()
            except TimeoutError:
                pass
            finally:
                await owner.stop()

        self.run_in_background(drain())

    async def run_on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the pool's loop, also from the loop of another thread."""
        if asyncio.get_running_loop() is self.loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))
