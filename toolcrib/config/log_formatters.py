"""Log file handler and one-line formatter: upstream text cannot forge log lines."""

import logging
import os
from io import FileIO, TextIOWrapper
from logging.handlers import RotatingFileHandler

from toolcrib.lib.text import escape_hidden


class PrivateLogFile(RotatingFileHandler):
    """A rotating log file with mode 0600, also after rotation."""

    def _open(self) -> TextIOWrapper:
        descriptor = os.open(
            self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        return TextIOWrapper(FileIO(descriptor, "a"), encoding=self.encoding, write_through=True)


class OneLineFormatter(logging.Formatter):
    """Write each record as one line with control characters escaped, tracebacks included."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return escape_hidden(super().format(record).replace("\n", " | "))
