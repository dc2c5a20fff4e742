"""Pagination of lists: by offset, by id, and by the cursor that the API returns."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from django.db.models import Model, QuerySet
from django.http import QueryDict

from toolcrib.lib.errors import Invalid
from toolcrib.lib.request import number

T = TypeVar("T")
M = TypeVar("M", bound=Model)
R = TypeVar("R")
T_co = TypeVar("T_co", covariant=True)
PAGE = 50
MAX_LIMIT = 200


class Sliceable(Protocol[T_co]):
    """A list or a queryset."""

    def __getitem__(self, part: slice, /) -> Iterable[T_co]: ...


@dataclass(frozen=True)
class Page(Generic[T]):
    """Some rows of a list, and the cursors of the pages before and after."""

    rows: Sequence[T]
    total: int
    first: int
    previous_cursor: str
    next_cursor: str

    def says(self, what: str) -> str:
        """Describe the range, such as: 51 to 100 of 214 tools."""
        noun = what if self.total == 1 else f"{what}s"
        if len(self.rows) == self.total:
            return f"{self.total:,} {noun}"
        last = self.first + len(self.rows)
        return f"{self.first + 1:,} to {last:,} of {self.total:,} {noun}"

    def with_rows(self, rows: Sequence[R]) -> "Page[R]":
        """Return the same page with other values in place of its rows."""
        return Page(rows, self.total, self.first, self.previous_cursor, self.next_cursor)


# --- Pages --------------------------------------------------------------------------------------


def page_by_offset(
    rows: "QuerySet[Any] | Sequence[T]", offset: int, size: int = PAGE, total: int | None = None
) -> Page[T]:
    """Cut a page. Pass `total` where counting is cheaper without the rows' annotations."""
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


def page_by_id(rows: QuerySet[M], *, before: int = 0, after: int = 0, size: int = PAGE) -> Page[M]:
    """Cut a page, newest first. The cursors are ids, so that new rows shift nothing."""
    total = rows.count()
    if before:
        newer = list(rows.filter(pk__gt=before).order_by("pk")[: size + 1])
        found, more_newer, more_older = newer[:size][::-1], len(newer) > size, True
    else:
        older = rows.filter(pk__lt=after) if after else rows
        fetched = list(older.order_by("-pk")[: size + 1])
        found, more_newer, more_older = fetched[:size], bool(after), len(fetched) > size
    return Page(
        rows=found,
        total=total,
        first=0,
        previous_cursor=str(found[0].pk) if found and more_newer else "",
        next_cursor=str(found[-1].pk) if found and more_older else "",
    )


def offset_of(query: QueryDict, size: int = PAGE) -> int:
    """Read where a page starts: `after` counts the rows before it, `before` those up to its end."""
    for name, step in (("after", 0), ("before", size)):
        if found := number(query, name, digits=9):
            return max(0, found - step)
    return 0


# --- The API ------------------------------------------------------------------------------------


def check_limit(limit: int) -> int:
    if not 1 <= limit <= MAX_LIMIT:
        raise Invalid(f"limit must be an integer from 1 to {MAX_LIMIT}.")
    return limit


def cut_page(
    rows: Sliceable[T], limit: int, key: Callable[[T], str]
) -> tuple[Sequence[T], str | None]:
    """Return the first `limit` rows, and the cursor of the next page."""
    found = list(rows[: check_limit(limit) + 1])
    return found[:limit], key(found[limit - 1]) if len(found) > limit else None
