"""Hold agents to their limits: a rate by the minute, and calls in flight.

Rates are counted on Redis where there is one, else in this process; while Redis is away each
process counts for itself. Calls in flight are rows of the ledger, so a crash leaks none.
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

AWAY = 5.0  # seconds for which Redis is not asked after it failed


class RateLimited(ToolcribError):
    code = "rate_limited"
    status = 429


class SlidingWindow:
    """A sliding window of a minute: what came in this one, and a falling share of the last.

    In place of the library's storage in memory, which starts a thread every few calls to tidy up.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, ...], tuple[int, int, int]] = {}  # minute, in it, before

    def hit(self, names: tuple[str, ...], most: int) -> tuple[bool, int]:
        minute, second = divmod(time.time(), 60)
        with self._lock:
            known, count, before = self._counts.get(names, (int(minute), 0, 0))
            if known != minute:
                count, before = 0, count if known == minute - 1 else 0
            weighed = count + before * (1 - second / 60)
            within = weighed + 1 <= most
            self._counts[names] = (int(minute), count + within, before)
        return within, 0 if within else max(1, round(60 - second))

    def forget(self) -> None:
        with self._lock:
            self._counts.clear()


_local = SlidingWindow()


@lru_cache(maxsize=1)
def _shared() -> SlidingWindowCounterRateLimiter:
    storage: Storage = RedisStorage(
        settings.REDIS_URL,
        wrap_exceptions=True,
        socket_connect_timeout=0.2,
        socket_timeout=0.5,
        key_prefix="toolcrib:limits",
    )
    return SlidingWindowCounterRateLimiter(storage)


_away_until = 0.0


def _within(per_minute: int, *names: str) -> tuple[bool, int]:
    """Count one; tell whether it was within the limit, and in how many seconds to try again."""
    global _away_until
    if settings.REDIS_URL and time.monotonic() > _away_until:
        try:
            return _count(_shared(), RateLimitItemPerMinute(per_minute), *names)
        except (StorageError, redis.RedisError) as error:
            _away_until = time.monotonic() + AWAY
            logger.warning("Limits are counted by process while Redis is away: %s", error)
    return _local.hit(names, per_minute)


def _count(
    limiter: SlidingWindowCounterRateLimiter, item: RateLimitItemPerMinute, *names: str
) -> tuple[bool, int]:
    if limiter.hit(item, *names):
        return True, 0
    ends = limiter.get_window_stats(item, *names).reset_time
    return False, max(1, min(60, round(ends - time.time())))


def check_rate(agent: Agent, what: str, per_minute: int) -> None:
    """Count one call or search of an agent, or refuse it with when to try again."""
    within, wait = _within(per_minute, what, str(agent.pk))
    if not within:
        raise RateLimited(
            f"{agent.name} made more than {per_minute} {what} in a minute, its limit.",
            hint=f"Try again in {wait} s.",
            details={"retry_after": wait},
        )


def reject_concurrent_call(agent: Agent, under_way: int) -> NoReturn:
    """Refuse a call beyond those that may be under way, which the ledger counts."""
    raise RateLimited(
        f"{agent.name} has {under_way} calls under way, its limit.",
        hint="Wait for one to end.",
        code="too_many_calls",
        details={"retry_after": 1},
    )


def clear() -> None:
    """Begin to count anew in this process, for tests."""
    _local.forget()
