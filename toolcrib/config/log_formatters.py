"""Log file handler, one-line formatter and filter: upstream text cannot forge log lines, and
repeated errors do not fill the log."""

import logging
import os
import sys
import threading
import time
from io import FileIO, TextIOWrapper
from logging.handlers import RotatingFileHandler

from toolcrib.lib.redaction.redactor import redact_text
from toolcrib.lib.text import escape_hidden

PERIOD = 60.0  # seconds
BURST = 5  # equal records in a period
MAX_SEEN = 1_000


class PrivateLogFile(RotatingFileHandler):
    """A rotating log file with mode 0600, also after rotation."""

    _reported_at = -PERIOD

    def _open(self) -> TextIOWrapper:
        descriptor = os.open(
            self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        return TextIOWrapper(FileIO(descriptor, "a"), encoding=self.encoding, write_through=True)

    def handleError(self, record: logging.LogRecord) -> None:
        """Report in one line, once a minute, that the file cannot be written.

        Python would print a traceback for every record; standard error has the record itself.
        """
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif time.monotonic() - self._reported_at > PERIOD:
            self._reported_at = time.monotonic()
            sys.stderr.write(f"The log file cannot be written: {error.strerror}.\n")


class RepeatFilter(logging.Filter):
    """Drop warnings and errors that repeat more than BURST times in PERIOD; the next one that is
    logged says how many were dropped. The text to format is compared, not the formatted one, so
    what a client sends makes no difference."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._seen: dict[object, tuple[float, int]] = {}  # start of the period, records since

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        passes: bool | None = getattr(record, "passes_repeat_filter", None)
        if passes is None:  # otherwise another handler has asked
            passes = record.passes_repeat_filter = self._count(record, time.monotonic())
        return passes

    def _count(self, record: logging.LogRecord, now: float) -> bool:
        raised = record.exc_info[0] if record.exc_info else None
        key = (record.name, record.levelno, str(record.msg)[:500], raised)
        with self._lock:
            if len(self._seen) > MAX_SEEN:
                self._seen.clear()
            start, count = self._seen.get(key, (now, 0))
            if now - start > PERIOD:
                if count > BURST:
                    record.msg = f"{record.msg} (and {count - BURST} more since the last line)"
                start, count = now, 0
            self._seen[key] = start, count + 1
        return count < BURST


class OneLineFormatter(logging.Formatter):
    """Write each record as one line, tracebacks included: redacted, control characters escaped."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return escape_hidden(redact_text(super().format(record)).replace("\n", " | "))
