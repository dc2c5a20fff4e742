"""Clients of Redis. Its package is imported by the first: without REDIS_URL nothing needs it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import redis
    import redis.asyncio


def connect(url: str, connect_timeout: float, **options: Any) -> "redis.Redis":
    import redis

    return redis.Redis.from_url(url, socket_connect_timeout=connect_timeout, **options)


def connect_async(url: str, connect_timeout: float) -> "redis.asyncio.Redis":
    import redis.asyncio

    return redis.asyncio.Redis.from_url(url, socket_connect_timeout=connect_timeout)


def redis_error() -> type[Exception]:
    """Return the class of all errors of a client, for an `except` clause."""
    import redis

    return redis.RedisError
