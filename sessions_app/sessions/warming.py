"""Build indexes in a thread when the catalog changed, so that the next search finds them ready."""

import logging
import threading

from django.db import DatabaseError, close_old_connections

from catalog.search.embeddings import store as vector_store
from sessions_app.sessions import scope

logger = logging.getLogger(__name__)

_again = threading.Event()
_busy = threading.Lock()


def warm_soon(revision: int) -> None:
    """Start a thread, or have the one that is at it go round again."""
    _again.set()
    threading.Thread(target=_warm, name="warming", daemon=True).start()


def _warm() -> None:
    while _again.is_set() and _busy.acquire(blocking=False):
        try:
            close_old_connections()
            _again.clear()
            vector_store.model.load_soon()
            scope.rebuild_recent()
        except DatabaseError:
            logger.exception("Indexes could not be built ahead; searches build them")
        finally:
            close_old_connections()
            _busy.release()
