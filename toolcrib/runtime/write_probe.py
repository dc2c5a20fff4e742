"""Check that the database accepts writes, for /readyz: a full disk still answers reads."""

import logging
import threading
import time
from datetime import UTC, datetime

from django.contrib.sessions.models import Session
from django.db import DatabaseError, InterfaceError

from toolcrib.lib.errors import DatabaseUnavailable

logger = logging.getLogger(__name__)

INTERVAL = 5.0  # seconds; anyone may ask for /readyz
KEY = "readyz"  # of a row that is never a session: real keys are longer
SIZE = 16 * 1024  # bytes, so that new pages are needed
LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)  # expired, so that it is never used as a session


class WriteProbe:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._checked_at = -INTERVAL
        self._problem = ""

    def problem(self) -> str:
        """Return why writes fail, or nothing. Writes at most once in INTERVAL."""
        if time.monotonic() - self._checked_at >= INTERVAL and self._lock.acquire(blocking=False):
            try:
                self._problem = self._write()
                self._checked_at = time.monotonic()
            finally:
                self._lock.release()
        return self._problem

    def _write(self) -> str:
        row = {"session_data": "0" * SIZE, "expire_date": LONG_AGO}
        try:
            Session.objects.update_or_create(session_key=KEY, defaults=row)
        except (DatabaseError, InterfaceError) as error:
            logger.error("Not ready, writes fail: %s", error)  # noqa: TRY400 - no traceback needed
            return DatabaseUnavailable(error).message
        return ""


write_probe = WriteProbe()
