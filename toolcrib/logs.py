"""One record, one line: upstream text cannot forge or break log lines."""

import logging
import re

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u200b-\u200f\u202a-\u202e\u2066-\u2069]")


class OneLineFormatter(logging.Formatter):
    """Escape control characters of the whole record, tracebacks included."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return CONTROL.sub(_escape, super().format(record))


def _escape(found: re.Match[str]) -> str:
    return " | " if found[0] == "\n" else f"\\u{ord(found[0]):04x}"
