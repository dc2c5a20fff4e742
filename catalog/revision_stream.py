"""Tell every process that the revision rose.

Production writes to a Redis stream; embedded needs nothing, since its one process looks at the
database every 250 ms. A lost message costs a second: everybody looks at the database too.
"""

import logging
from functools import lru_cache

import redis
from django.conf import settings

logger = logging.getLogger(__name__)

STREAM = "toolcrib:revision"


@lru_cache(maxsize=1)
def _redis() -> redis.Redis:
    return redis.Redis.from_url(settings.REDIS_URL, socket_connect_timeout=0.5, socket_timeout=0.5)


def announce() -> None:
    if not settings.REDIS_URL:
        return
    try:
        _redis().xadd(STREAM, {"at": "rose"}, maxlen=1000, approximate=True)
    except redis.RedisError as error:
        logger.warning("The new revision could not be announced on Redis: %s", error)
