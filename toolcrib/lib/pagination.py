"""Pagination of lists: by offset, by id, and by API cursor."""

from base64 import b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Generic, Protocol, TypeVar

from django.db.models import Model, QuerySet
from django.http import QueryDict

from toolcrib.lib.display import group_digits
from toolcrib.lib.errors import Invalid, InvalidRequest
from toolcrib.lib.request import number
from toolcrib.lib.text import plural

T = TypeVar("T")
M = TypeVar("M", bound=Model)
R = TypeVar("R")
T_co = TypeVar("T_co", covariant=True)
PAGE_SIZE = 50
MAX_LIMIT = 200
CURSOR_MARK = 4  # characters of a cursor that name its list


class Sliceable(Protocol[T_co]):
    """A list or a queryset."""

    def __getitem__(self, part: slice, /) -> Iterable[T_co]: ...


@dataclass(frozen=True)
class Page(Generic[T]):
    """One page of a list, with the cursors of the previous and next pages."""

    rows: Sequence[T]
    total: int
    first: int
    previous_cursor: str
    next_cursor: str

    def describe(self, noun: str) -> str:
        """Describe the range, such as: 51 to 100 of 214 tools."""
        total = plural(self.total, noun)
        if len(self.rows) == self.total:
            return total
        last = self.first + len(self.rows)
        return f"{group_digits(self.first + 1)} to {group_digits(last)} of {total}"

    def with_rows(self, rows: Sequence[R]) -> "Page[R]":
        return Page(rows, self.total, self.first, self.previous_cursor, self.next_cursor)


def page_by_offset(
    rows: "QuerySet[Any] | Sequence[T]",
    offset: int,
    size: int = PAGE_SIZE,
    total: int | None = None,
) -> Page[T]:
    """Return one page. Pass `total` if counting is cheaper without the rows' annotations."""
    if total is None:
        total = rows.count() if isinstance(rows, QuerySet) else len(rows)
    offset = max(0, min(offset, (total - 1) // size * size if total else 0))
    return Page(
        rows=list(rows[offset : offset + size]),
        total=total,
        first=offset,
        previous_cursor=str(offset) if offset else "",
        next_cursor=str(offset + size) if offset + size < total else "",
    )


def page_by_id(
    rows: QuerySet[M], *, before: int = 0, after: int = 0, size: int = PAGE_SIZE
) -> Page[M]:
    """Return one page, newest first. The cursors are ids, so new rows do not shift pages."""
    total = rows.count()
    if before:
        newer = list(rows.filter(pk__gt=before).order_by("pk")[: size + 1])
        page, more_newer, more_older = newer[:size][::-1], len(newer) > size, True
    else:
        older = rows.filter(pk__lt=after) if after else rows
        fetched = list(older.order_by("-pk")[: size + 1])
        page, more_newer, more_older = fetched[:size], bool(after), len(fetched) > size
    return Page(
        rows=page,
        total=total,
        first=0,
        previous_cursor=str(page[0].pk) if page and more_newer else "",
        next_cursor=str(page[-1].pk) if page and more_older else "",
    )


def offset_of(query: QueryDict, size: int = PAGE_SIZE) -> int:
    """Read the page's offset: `after` is its first row, `before` the row after its last."""
    for name, step in (("after", 0), ("before", size)):
        if row := number(query, name, digits=9):
            return max(0, row - step)
    return 0


def check_limit(limit: int) -> int:
    """Return the limit, or raise Invalid if it is out of range."""
    if not 1 <= limit <= MAX_LIMIT:
        raise Invalid(f"limit must be an integer from 1 to {MAX_LIMIT}.")
    return limit


def seal_cursor(list_name: str, value: str) -> str:
    """Return a cursor that only this list accepts."""
    return urlsafe_b64encode(f"{_mark(list_name)}{value}".encode()).decode().rstrip("=")


def open_cursor(list_name: str, cursor: str) -> str:
    """Return what a cursor of this list stands for, or raise InvalidRequest."""
    try:
        text = b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
    except ValueError:
        text = ""
    mark, value = text[:CURSOR_MARK], text[CURSOR_MARK:]
    if mark != _mark(list_name) or not value or "\0" in value:
        raise InvalidRequest(
            [{"loc": ("query", "cursor"), "msg": "not issued by this list; send next_cursor"}]
        )
    return value


def _mark(list_name: str) -> str:
    return sha256(list_name.encode()).hexdigest()[:CURSOR_MARK]


def cut_list(rows: Sequence[T], limit: int, cursor: str) -> tuple[Sequence[T], str | None]:
    """Return a page of a list whose order is fixed, and the cursor of the next page."""
    start = parse_id(cursor) if cursor else 0
    end = start + check_limit(limit)
    return rows[start:end], str(end) if end < len(rows) else None


def parse_id(cursor: str) -> int:
    """Return the id in a cursor, or raise Invalid."""
    if not (cursor.isdecimal() and cursor.isascii() and len(cursor) <= 18):
        raise Invalid("Invalid cursor.", hint="Use next_cursor of the previous page.")
    return int(cursor)


def cut_page(
    rows: Sliceable[T], limit: int, key: Callable[[T], str]
) -> tuple[Sequence[T], str | None]:
    """Return the first `limit` rows and the cursor of the next page."""
    fetched = list(rows[: check_limit(limit) + 1])
    return fetched[:limit], key(fetched[limit - 1]) if len(fetched) > limit else None
