"""Publish catalog revision changes to all processes over a Redis stream.

Every process polls the database as well, so a lost message delays it by a second.
"""

import logging
from functools import lru_cache
from typing import TYPE_CHECKING

from django.conf import settings

from toolcrib.lib.protocols.redis_client import connect, redis_error

if TYPE_CHECKING:
    from redis import Redis

logger = logging.getLogger(__name__)

STREAM = "toolcrib:revision"


@lru_cache(maxsize=1)
def _redis() -> "Redis":
    return connect(settings.REDIS_URL, 0.5, socket_timeout=0.5)


def announce() -> None:
    """Publish that the revision increased; without Redis, do nothing."""
    if not settings.REDIS_URL:
        return
    try:
        _redis().xadd(STREAM, {"at": "rose"}, maxlen=1000, approximate=True)
    except redis_error() as error:
        logger.warning("Publishing the new revision to Redis failed: %s", error)
