"""Rate limits per agent (sliding window of a minute), and the concurrency limit error.

Counters are in Redis if configured, otherwise in this process; while Redis is unavailable, each
process counts on its own. Concurrent calls are counted from ledger rows, so a crash leaks none.
"""

import logging
import threading
import time
from functools import lru_cache
from typing import NoReturn

import redis
from django.conf import settings
from limits import RateLimitItemPerMinute
from limits.errors import StorageError
from limits.storage import RedisStorage, Storage
from limits.strategies import SlidingWindowCounterRateLimiter

from sessions_app.models import Agent
from toolcrib.lib.errors import ToolcribError

logger = logging.getLogger(__name__)

REDIS_RETRY_SECONDS = 5.0


class RateLimited(ToolcribError):
    code = "rate_limited"
    status = 429


class SlidingWindow:
    """In-process sliding window of a minute: this minute's count plus a share of the last one's.

    Replaces the in-memory storage of `limits`, which starts a cleanup thread every few calls.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, ...], tuple[int, int, int]] = {}
        # Values: minute, count in that minute, count in the minute before.

    def hit(self, key: tuple[str, ...], limit: int) -> tuple[bool, int]:
        """Count a request. Return whether it is within the limit, and seconds until a retry."""
        minute, second = divmod(time.time(), 60)
        with self._lock:
            last_minute, count, previous = self._counts.get(key, (int(minute), 0, 0))
            if last_minute != minute:
                count, previous = 0, count if last_minute == minute - 1 else 0
            weighted = count + previous * (1 - second / 60)
            allowed = weighted + 1 <= limit
            self._counts[key] = (int(minute), count + allowed, previous)
        return allowed, 0 if allowed else max(1, round(60 - second))

    def clear(self) -> None:
        with self._lock:
            self._counts.clear()


_local = SlidingWindow()


@lru_cache(maxsize=1)
def _redis_limiter() -> SlidingWindowCounterRateLimiter:
    storage: Storage = RedisStorage(
        settings.REDIS_URL,
        wrap_exceptions=True,
        socket_connect_timeout=0.2,
        socket_timeout=0.5,
        key_prefix="toolcrib:limits",
    )
    return SlidingWindowCounterRateLimiter(storage)


_redis_retry_at = 0.0


def _hit(per_minute: int, *key: str) -> tuple[bool, int]:
    """Count a request. Return whether it is within the limit, and seconds until a retry."""
    global _redis_retry_at
    if settings.REDIS_URL and time.monotonic() > _redis_retry_at:
        try:
            return _hit_redis(_redis_limiter(), RateLimitItemPerMinute(per_minute), *key)
        except (StorageError, redis.RedisError) as error:
            _redis_retry_at = time.monotonic() + REDIS_RETRY_SECONDS
            logger.warning("Redis unavailable, rate limits are counted per process: %s", error)
    return _local.hit(key, per_minute)


def _hit_redis(
    limiter: SlidingWindowCounterRateLimiter, item: RateLimitItemPerMinute, *key: str
) -> tuple[bool, int]:
    if limiter.hit(item, *key):
        return True, 0
    reset_time = limiter.get_window_stats(item, *key).reset_time
    return False, max(1, min(60, round(reset_time - time.time())))


def check_rate(agent: Agent, what: str, per_minute: int) -> None:
    """Count a call or search of an agent. Raises RateLimited with the time to retry."""
    allowed, wait = _hit(per_minute, what, str(agent.pk))
    if not allowed:
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
