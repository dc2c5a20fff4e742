"""Pages of lists: a cursor is the key of the last row. A leaf."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from toolcrib.lib.errors import Invalid

T = TypeVar("T")
MOST = 200


def check_limit(limit: int) -> int:
    if not 1 <= limit <= MOST:
        raise Invalid(f"limit is a whole number from 1 to {MOST}.")
    return limit


def page(rows: Sequence[T], limit: int, key: Callable[[T], str]) -> tuple[Sequence[T], str | None]:
    """Cut `limit + 1` fetched rows to a page and say where the next one starts."""
    if len(rows) <= limit:
        return rows, None
    return rows[:limit], key(rows[limit - 1])
