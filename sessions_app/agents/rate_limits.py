"""Rate limits per agent (sliding window of a minute), and the concurrency limit error.

One algorithm in both modes: the count of this minute plus a share of the last minute's. Counters
are in Redis if configured, otherwise in this process; while Redis is unavailable, each process
counts on its own. Concurrent calls are counted from ledger rows, so a crash leaks none.
"""

import logging
import threading
import time
from functools import lru_cache
from typing import NoReturn

import redis
from django.conf import settings

from sessions_app.models import Agent
from toolcrib.lib.errors import ToolcribError

logger = logging.getLogger(__name__)

REDIS_RETRY_SECONDS = 5.0
KEY_PREFIX = "toolcrib:rate:"


class RateLimited(ToolcribError):
    code = "rate_limited"
    status = 429


def retry_after(now: float) -> int:
    """Return the seconds until the next minute, when a full window has room again."""
    return max(1, round(60 - now % 60))


class LocalWindow:
    """Counters in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, tuple[int, int, int]] = {}
        # Values: minute, count in that minute, count in the minute before.

    def hit(self, key: str, limit: int, now: float) -> bool:
        """Count a request and return whether it is within the limit."""
        minute, second = divmod(now, 60)
        with self._lock:
            last_minute, count, previous = self._counts.get(key, (int(minute), 0, 0))
            if last_minute != minute:
                count, previous = 0, count if last_minute == minute - 1 else 0
            allowed = count + previous * (1 - second / 60) + 1 <= limit
            self._counts[key] = (int(minute), count + allowed, previous)
        return allowed

    def clear(self) -> None:
        with self._lock:
            self._counts.clear()


class RedisWindow:
    """The counters of all processes, as a hash per key; the script is `LocalWindow.hit`."""

    SCRIPT = """
    local now, limit = tonumber(ARGV[1]), tonumber(ARGV[2])
    local minute = math.floor(now / 60)
    local second = now - minute * 60
    local values = redis.call('HMGET', KEYS[1], 'minute', 'count', 'previous')
    local last = tonumber(values[1]) or minute
    local count, previous = tonumber(values[2]) or 0, tonumber(values[3]) or 0
    if last ~= minute then
      previous = last == minute - 1 and count or 0
      count = 0
    end
    local allowed = count + previous * (1 - second / 60) + 1 <= limit
    if allowed then count = count + 1 end
    redis.call('HSET', KEYS[1], 'minute', minute, 'count', count, 'previous', previous)
    redis.call('EXPIRE', KEYS[1], 120)
    return allowed and 1 or 0
    """

    def __init__(self, url: str) -> None:
        client = redis.Redis.from_url(url, socket_connect_timeout=0.2, socket_timeout=0.5)
        self._script = client.register_script(self.SCRIPT)

    def hit(self, key: str, limit: int, now: float) -> bool:
        """Count a request and return whether it is within the limit. Raises RedisError."""
        return bool(self._script(keys=[KEY_PREFIX + key], args=[repr(now), limit]))


_local = LocalWindow()
_redis_retry_at = 0.0


@lru_cache(maxsize=1)
def _redis_window(url: str) -> RedisWindow:
    return RedisWindow(url)


def _hit(key: str, limit: int, now: float) -> bool:
    global _redis_retry_at
    if settings.REDIS_URL and time.monotonic() > _redis_retry_at:
        try:
            return _redis_window(settings.REDIS_URL).hit(key, limit, now)
        except redis.RedisError as error:
            _redis_retry_at = time.monotonic() + REDIS_RETRY_SECONDS
            logger.warning("Redis unavailable, rate limits are counted per process: %s", error)
    return _local.hit(key, limit, now)


def check_rate(agent: Agent, what: str, per_minute: int) -> None:
    """Count a call or search of an agent. Raises RateLimited with the time to retry."""
    now = time.time()
    if not _hit(f"{what}:{agent.pk}", per_minute, now):
        wait = retry_after(now)
        raise RateLimited(
            f"Rate limit exceeded: {agent.name} may make {per_minute} {what} per minute.",
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
