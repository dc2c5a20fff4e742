"""Copies of audit entries as JSON lines, in a file or on standard output (TOOLCRIB_AUDIT_SINK)."""

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from django.conf import settings

STDOUT = "-"
BLOCK = 65_536


def is_enabled() -> bool:
    return bool(settings.AUDIT_SINK)


def deliver(rows: Iterable[dict[str, object]], delivered: int) -> int:
    """Write the rows above the position `delivered`; return the position of the last one.

    A file tells itself which row it ends with, so that a crash repeats and loses nothing.
    """
    if settings.AUDIT_SINK == STDOUT:
        return _write(sys.stdout.buffer, rows, delivered)
    path = Path(settings.AUDIT_SINK)
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+b") as file:
        last = _write(file, rows, max(delivered, _last_position(file)))
        os.fsync(file.fileno())
    return last


def _write(file: IO[bytes], rows: Iterable[dict[str, object]], last: int) -> int:
    for row in rows:
        position = int(str(row["position"]))
        if position > last:
            file.write(json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n")
            last = position
    file.flush()
    return last


def _last_position(file: IO[bytes]) -> int:
    """Return the position on the last line; remove a line that a crash left incomplete."""
    end = file.seek(0, os.SEEK_END)
    tail = b""
    while len(tail) < end and tail.count(b"\n") < 2:
        start = max(end - len(tail) - BLOCK, 0)
        file.seek(start)
        tail = file.read(end - start)
    lines = tail.split(b"\n")
    if lines[-1]:
        file.truncate(end - len(lines[-1]))
    if len(lines) < 2:
        return 0
    try:
        return int(json.loads(lines[-2])["position"])
    except (ValueError, TypeError, KeyError):
        return 0
