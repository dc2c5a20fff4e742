"""Rate limits per agent (sliding window of a minute), and the concurrency limit error.

Sign-in (`toolcrib/accounts/sign_in_limits.py`) uses the same windows with a longer period.

Calls and searches are limited by number. All requests together are limited by cost: a base cost,
which has to fit before the work starts, and a part for the bytes of the response, which is added
afterwards and counts against later requests.

One algorithm in both modes: the sum of this period plus a share of the last one's. Sums are in
Redis if configured, otherwise in this process; while Redis is unavailable, each process counts on
its own. Concurrent calls are counted from ledger rows, so a crash leaks none.
"""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, MutableMapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn, ParamSpec

from django.conf import settings

from sessions_app.models import Agent
from toolcrib.lib.errors import ToolcribError
from toolcrib.lib.protocols.asgi import Send
from toolcrib.lib.protocols.redis_client import connect, redis_error

logger = logging.getLogger(__name__)
P = ParamSpec("P")

REQUEST_COST = 1.0  # call, search, load, details, events
CATALOG_COST = 2.0  # catalog, open, fork
BYTES_PER_COST = 64 * 1024
REDIS_RETRY_SECONDS = 5.0
MAX_LOCAL_SUMS = 10_000  # above it, sums that no longer count are removed
KEY_PREFIX = "toolcrib:rate:"
# Rejections per second that a process answers at once; later ones are delayed.
FREE_REJECTIONS, REJECTION_DELAY = 20, 0.5  # seconds
EXCEEDED = {
    "calls": "{} may make {:,} calls per minute",
    "searches": "{} may make {:,} searches per minute",
    "cost": "the requests of {} may cost {:,} per minute",
}


class RateLimited(ToolcribError):
    code = "rate_limited"
    status = 429


class Charge(NamedTuple):
    """A cost to add to a window if the sum stays within the limit. A negative one is a refund."""

    what: str  # calls, searches or cost
    subject: int | str  # the agent
    limit: float
    cost: float = 1.0
    period: int = 60  # seconds

    @property
    def key(self) -> str:
        return f"{self.what}:{self.subject}"

    def seconds_until_room(self, count: float, previous: float, second: float) -> float:
        """Return when a window with these sums has room if nothing is added; 0 if it has now."""
        room = self.limit - self.cost
        period = self.period
        if count + previous * (1 - second / period) <= room:
            return 0.0
        if count <= room:
            return max(period * (1 - (room - count) / previous) - second, 0.001)
        return period - second + period * (1 - room / count)  # when the sum is the last period's

    def room(self, count: float, previous: float, second: float) -> "Room":
        """Return the wait for a window with these sums, and what is left of it by then."""
        wait = self.seconds_until_room(count, previous, second)
        used = count + previous * (1 - second / self.period) + (0.0 if wait else self.cost)
        return Room(wait, max(self.limit - used, 0.0), self.period - second)


class Room(NamedTuple):
    """What a window has left."""

    wait: float  # seconds until the charge fits; 0: it fits, unless another one does not
    remaining: float
    reset: float  # seconds until the period ends


class Usage:
    """What the limits of an agent have left after a request: of the one that ends first."""

    def __init__(self) -> None:
        self._tightest: tuple[float, Charge, Room] | None = None

    def note(self, charges: Sequence[Charge], rooms: Sequence[Room]) -> None:
        for charge, room in zip(charges, rooms, strict=True):
            share = -room.wait if room.wait else room.remaining / charge.limit
            if self._tightest is None or share < self._tightest[0]:
                self._tightest = share, charge, room

    def headers(self) -> list[tuple[bytes, bytes]]:
        if self._tightest is None:
            return []
        _, charge, room = self._tightest
        values = {
            b"ratelimit-policy": f'"{charge.what}";q={charge.limit:g};w={charge.period}',
            b"ratelimit-limit": f"{charge.limit:.0f}",
            b"ratelimit-remaining": f"{0 if room.wait else math.floor(room.remaining)}",
            b"ratelimit-reset": f"{math.ceil(room.wait or room.reset)}",
        }
        return [(name, value.encode()) for name, value in values.items()]


class Window:
    """Sums of charges."""

    def charge(self, charges: Sequence[Charge], now: float) -> list[Room]:
        """Add all charges or none. Return for each what its window has left."""
        raise NotImplementedError

    def hit(self, charges: Sequence[Charge], now: float) -> list[float]:
        """Add all charges or none. Return for each the seconds until there is room for it."""
        return [room.wait for room in self.charge(charges, now)]


class LocalWindow(Window):
    """The sums of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, tuple[int, float, float, float]] = {}
        # Values: number of the period, its sum, the sum of the one before, when both are over.

    def charge(self, charges: Sequence[Charge], now: float) -> list[Room]:
        with self._lock:
            sums = [self._sums_at(int(now // charge.period), charge.key) for charge in charges]
            rooms = [
                charge.room(*both, now % charge.period)
                for charge, both in zip(charges, sums, strict=True)
            ]
            if not any(room.wait for room in rooms):
                for charge, (count, previous) in zip(charges, sums, strict=True):
                    number, total = int(now // charge.period), max(count + charge.cost, 0.0)
                    end = (number + 2.0) * charge.period
                    self._sums[charge.key] = (number, total, previous, end)
                if len(self._sums) > MAX_LOCAL_SUMS:
                    self._sums = {key: sum for key, sum in self._sums.items() if sum[3] > now}
        return rooms

    def _sums_at(self, number: int, key: str) -> tuple[float, float]:
        last, count, previous, _ = self._sums.get(key, (number, 0.0, 0.0, 0.0))
        if last == number:
            return count, previous
        return 0.0, count if last == number - 1 else 0.0

    def clear(self) -> None:
        with self._lock:
            self._sums.clear()


class RedisWindow(Window):
    """The sums of all processes, as a hash per key; the script is `LocalWindow.charge`."""

    SCRIPT = """
    local now = tonumber(ARGV[1])
    local sums, allowed = {}, true
    for i, key in ipairs(KEYS) do
      local limit, cost, period = tonumber(ARGV[3 * i - 1]), tonumber(ARGV[3 * i]), ARGV[3 * i + 1]
      local number = math.floor(now / period)
      local values = redis.call('HMGET', key, 'number', 'count', 'previous')
      local last = tonumber(values[1]) or number
      local count, previous = tonumber(values[2]) or 0, tonumber(values[3]) or 0
      if last ~= number then
        previous = last == number - 1 and count or 0
        count = 0
      end
      local share = 1 - (now - number * period) / period
      allowed = allowed and count + previous * share <= limit - cost
      sums[2 * i - 1], sums[2 * i] = count, previous
    end
    for i, key in ipairs(allowed and KEYS or {}) do
      local count = math.max(sums[2 * i - 1] + tonumber(ARGV[3 * i]), 0)
      local period = ARGV[3 * i + 1]
      local number = math.floor(now / period)
      redis.call('HSET', key, 'number', number, 'count', count, 'previous', sums[2 * i])
      redis.call('EXPIRE', key, 2 * period)
    end
    for i, sum in ipairs(sums) do sums[i] = string.format('%.17g', sum) end
    return sums
    """

    def __init__(self, url: str) -> None:
        client = connect(url, 0.2, socket_timeout=0.5)
        self._script = client.register_script(self.SCRIPT)

    def charge(self, charges: Sequence[Charge], now: float) -> list[Room]:
        """Do the same as `LocalWindow.charge`. Raises RedisError."""
        numbers = [repr(n) for c in charges for n in (c.limit, c.cost, c.period)]
        keys = [KEY_PREFIX + charge.key for charge in charges]
        sums = [float(text) for text in self._script(keys=keys, args=[repr(now), *numbers])]
        return [
            charge.room(count, previous, now % charge.period)
            for charge, count, previous in zip(charges, sums[::2], sums[1::2], strict=True)
        ]


_local = LocalWindow()
_usage: ContextVar[Usage | None] = ContextVar("rate_limit_usage", default=None)
_rejections: deque[float] = deque(maxlen=FREE_REJECTIONS)  # times of the last ones
_redis_retry_at = 0.0


@lru_cache(maxsize=1)
def _redis_window(url: str) -> RedisWindow:
    return RedisWindow(url)


def hit(charges: Sequence[Charge]) -> list[float]:
    """Add all charges or none. Return for each the seconds until there is room for it."""
    return [room.wait for room in charge_all(charges)]


def charge_all(charges: Sequence[Charge]) -> list[Room]:
    """Add all charges or none. Return for each what its window has left."""
    global _redis_retry_at
    now = time.time()
    if settings.REDIS_URL and time.monotonic() > _redis_retry_at:
        try:
            return _redis_window(settings.REDIS_URL).charge(charges, now)
        except redis_error() as error:
            _redis_retry_at = time.monotonic() + REDIS_RETRY_SECONDS
            logger.warning("Redis unavailable, rate limits are counted per process: %s", error)
    return _local.charge(charges, now)


def add_headers(send: Send) -> Send:
    """Add what the agent's limits have left to a response, if the request was charged."""
    usage = Usage()
    _usage.set(usage)

    async def send_with_headers(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *usage.headers()]
        await send(message)

    return send_with_headers


# The next three wait for Redis if it is configured: call them in a thread, not on the event loop.


def check_rate(agent: Agent, what: str, per_minute: int) -> None:
    """Count a call or search of an agent, and charge its cost. Raises RateLimited."""
    _check(agent, Charge(what, agent.pk, per_minute), _cost(agent, REQUEST_COST))


def check_cost(agent: Agent | None, base: float) -> None:
    """Charge the base cost of a request before the work. Operators (None) are not charged.

    Raises RateLimited.
    """
    if agent is not None:
        _check(agent, _cost(agent, base))


def add_cost(agent: Agent | None, size: int) -> None:
    """Charge for the bytes of a response after the work, beyond the limit if need be."""
    if agent is not None:
        hit([Charge("cost", agent.pk, math.inf, size / BYTES_PER_COST)])


# On the event loop: in a thread only if Redis is configured.


async def count_once(agent: Agent, what: str, counted: int | None) -> int:
    """Count a call or search against its limit, unless that was done; return the limit.

    Raises RateLimited.
    """
    limit: int = getattr(agent, f"{what}_per_minute")
    if limit != counted:
        await _run(check_rate, agent, what, limit)
    return limit


async def check_request(agent: Agent, base: float = REQUEST_COST) -> None:
    """Charge the base cost of another request. Raises RateLimited."""
    await _run(check_cost, agent, base)


async def add_bytes(agent: Agent | None, size: int) -> None:
    await _run(add_cost, agent, size)


async def _run(function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    try:
        if settings.REDIS_URL:
            await asyncio.to_thread(function, *args, **kwargs)
        else:
            function(*args, **kwargs)
    except RateLimited:
        await delay_rejection()
        raise


async def delay_rejection() -> None:
    """Delay a rejection that follows many others, since each of them takes time from other agents.

    A client that waits for `Retry-After` never notices.
    """
    now = time.monotonic()
    is_flood = len(_rejections) == FREE_REJECTIONS and now - _rejections[0] < 1.0
    _rejections.append(now)
    if is_flood:
        await asyncio.sleep(REJECTION_DELAY)


def _cost(agent: Agent, base: float) -> Charge:
    # A request that costs more than the limit needs an empty window.
    limit = agent.cost_per_minute
    return Charge("cost", agent.pk, limit, min(base, limit))


def _check(agent: Agent, *charges: Charge) -> None:
    rooms = charge_all(charges)
    usage = _usage.get()
    if usage is not None:
        usage.note(charges, rooms)
    room, charge = max(zip(rooms, charges, strict=True))
    if seconds := room.wait:
        wait = math.ceil(seconds)
        raise RateLimited(
            f"Rate limit exceeded: {EXCEEDED[charge.what].format(agent.name, charge.limit)}.",
            hint=f"Retry in {wait} s.",
            details={"retry_after": wait},
        )


def reject_concurrent_call(agent: Agent, in_flight: int) -> NoReturn:
    """Reject a call above the agent's concurrency limit; the ledger counts the calls."""
    raise RateLimited(
        f"Concurrency limit reached: {agent.name} has {in_flight} calls in flight.",
        hint="Retry when one of them has finished.",
        code="too_many_calls",
        details={"retry_after": 1},
    )


def clear() -> None:
    """Reset the counters of this process, for tests."""
    _local.clear()
    _rejections.clear()
