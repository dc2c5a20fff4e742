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
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, NoReturn, ParamSpec

import redis
from django.conf import settings

from sessions_app.models import Agent
from toolcrib.lib.errors import ToolcribError

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


class LocalWindow:
    """The sums of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, tuple[int, float, float, float]] = {}
        # Values: number of the period, its sum, the sum of the one before, when both are over.

    def hit(self, charges: Sequence[Charge], now: float) -> list[float]:
        """Add all charges or none. Return for each the seconds until there is room for it."""
        with self._lock:
            sums = [self._sums_at(int(now // charge.period), charge.key) for charge in charges]
            waits = [
                charge.seconds_until_room(*both, now % charge.period)
                for charge, both in zip(charges, sums, strict=True)
            ]
            if not any(waits):
                for charge, (count, previous) in zip(charges, sums, strict=True):
                    number, total = int(now // charge.period), max(count + charge.cost, 0.0)
                    end = (number + 2.0) * charge.period
                    self._sums[charge.key] = (number, total, previous, end)
                if len(self._sums) > MAX_LOCAL_SUMS:
                    self._sums = {key: sum for key, sum in self._sums.items() if sum[3] > now}
        return waits

    def _sums_at(self, number: int, key: str) -> tuple[float, float]:
        last, count, previous, _ = self._sums.get(key, (number, 0.0, 0.0, 0.0))
        if last == number:
            return count, previous
        return 0.0, count if last == number - 1 else 0.0

    def clear(self) -> None:
        with self._lock:
            self._sums.clear()


class RedisWindow:
    """The sums of all processes, as a hash per key; the script is `LocalWindow.hit`."""

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
        client = redis.Redis.from_url(url, socket_connect_timeout=0.2, socket_timeout=0.5)
        self._script = client.register_script(self.SCRIPT)

    def hit(self, charges: Sequence[Charge], now: float) -> list[float]:
        """Do the same as `LocalWindow.hit`. Raises RedisError."""
        numbers = [repr(n) for c in charges for n in (c.limit, c.cost, c.period)]
        keys = [KEY_PREFIX + charge.key for charge in charges]
        sums = [float(text) for text in self._script(keys=keys, args=[repr(now), *numbers])]
        return [
            charge.seconds_until_room(count, previous, now % charge.period)
            for charge, count, previous in zip(charges, sums[::2], sums[1::2], strict=True)
        ]


_local = LocalWindow()
_rejections: deque[float] = deque(maxlen=FREE_REJECTIONS)  # times of the last ones
_redis_retry_at = 0.0


@lru_cache(maxsize=1)
def _redis_window(url: str) -> RedisWindow:
    return RedisWindow(url)


def hit(charges: Sequence[Charge]) -> list[float]:
    """Add all charges or none. Return for each the seconds until there is room for it."""
    global _redis_retry_at
    now = time.time()
    if settings.REDIS_URL and time.monotonic() > _redis_retry_at:
        try:
            return _redis_window(settings.REDIS_URL).hit(charges, now)
        except redis.RedisError as error:
            _redis_retry_at = time.monotonic() + REDIS_RETRY_SECONDS
            logger.warning("Redis unavailable, rate limits are counted per process: %s", error)
    return _local.hit(charges, now)


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
    seconds, charge = max(zip(hit(charges), charges, strict=True))
    if seconds:
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
