"""What a script gives back: printed text and a returned value, bounded, and always valid JSON."""

from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from math import isfinite

from sessions_app.scripts.engines import MAX_LOG_BYTES, MAX_RESULT_BYTES
from toolcrib.lib.json_codec import canonical

MAX_DEPTH = 64
MAX_VALUES = 100_000
MAX_PRINTED_BYTES = 20 * MAX_LOG_BYTES  # a script that prints more is ended
CUT = "\n… (cut: only the first {:,} bytes are kept)"


class TooLarge(ValueError):
    """A value with too many parts."""


class Logs:
    """Printed text. What exceeds the limit is dropped; far above it, the script is ended."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._size = 0

    @property
    def text(self) -> str:
        text = self._data.decode("utf-8", "ignore")
        return text + CUT.format(MAX_LOG_BYTES) if self._size > MAX_LOG_BYTES else text

    def add(self, stream: str, text: str) -> None:
        data = text.encode("utf-8", "replace")
        self._size += len(data)
        self._data += data[: MAX_LOG_BYTES - len(self._data)]
        if self._size > MAX_PRINTED_BYTES:
            raise MemoryError(f"the script printed more than {MAX_PRINTED_BYTES:,} bytes")


def join_logs(before: str, text: str) -> str:
    """Return the logs of a run that was continued, within the limit."""
    data = (before + text).encode("utf-8", "replace")
    if len(data) <= MAX_LOG_BYTES:
        return before + text
    return data[:MAX_LOG_BYTES].decode("utf-8", "ignore") + CUT.format(MAX_LOG_BYTES)


def replace_surrogates(text: str) -> str:
    """Return a text that can be encoded: JavaScript has halves of characters, UTF-8 has not."""
    return text.encode("utf-8", "replace").decode()


def as_json(value: object) -> object:
    """Return a value of a script as JSON has it. Raises TooLarge."""
    return _Converter().convert(value, 0)


class _Converter:
    def __init__(self) -> None:
        self._values = 0

    def convert(self, value: object, depth: int) -> object:
        self._values += 1
        if self._values > MAX_VALUES or depth > MAX_DEPTH:
            raise TooLarge(f"The value has more than {MAX_VALUES:,} parts or {MAX_DEPTH} levels.")
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int):
            return value if abs(value) < 10**100 else str(value)[:200]
        if isinstance(value, float):
            return value if isfinite(value) else str(value)
        if isinstance(value, Mapping):
            return {
                key if isinstance(key, str) else str(key): self.convert(item, depth + 1)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple | set | frozenset):
            return [self.convert(item, depth + 1) for item in value]
        if isinstance(value, date | time):
            return value.isoformat()
        if isinstance(value, Decimal | timedelta):
            return str(value)
        if isinstance(value, bytes):
            return value.decode("utf-8", "replace")
        return str(value)[:200]


def returned_json(value: object, cut_bytes: int = 0) -> tuple[str, bool]:
    """Return a returned value as canonical JSON, and whether it was cut.

    With `cut_bytes`, the value is the beginning of a JSON text of so many bytes.
    """
    if cut_bytes:
        return _cut_json(str(value).encode("utf-8", "replace"), cut_bytes), True
    try:
        text = canonical(as_json(value))
    except TooLarge as error:
        return canonical({"cut": True, "reason": str(error)}), True
    data = text.encode("utf-8", "replace")
    if len(data) <= MAX_RESULT_BYTES:
        return data.decode(), False
    return _cut_json(data, len(data)), True


def _cut_json(data: bytes, size: int) -> str:
    # Half of it, since quoting may double it.
    start = data[: MAX_RESULT_BYTES // 2].decode("utf-8", "ignore")
    return canonical({"cut": True, "bytes": size, "start": start})
