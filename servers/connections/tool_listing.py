"""Paginated lists of tools, prompts and resources, with limits and cursor loop detection.

Knows only the format of a page; `Connection` fetches them.
"""

import json
from collections.abc import Awaitable, Callable, Mapping

from django.conf import settings

from servers.errors import ListingError, UpstreamError, format_bytes
from servers.spec import Listing

MAX_CURSOR_BYTES = 64 * 1024
# Methods by the member of their result that is the list.
METHODS = {
    "tools": "tools/list",
    "prompts": "prompts/list",
    "resources": "resources/list",
    "resourceTemplates": "resources/templates/list",
}


async def list_all_pages(
    fetch: Callable[[str | None], Awaitable[Mapping[str, object] | None]],
    member: str = "tools",
) -> Listing:
    """Fetch every page of a list. Raises rather than return an incomplete list."""
    tools: list[object] = []
    ttls: list[int] = []
    warnings: list[str] = []
    cursors: list[str] = []
    size = pages = 0
    while True:
        page = await fetch(cursors[-1] if cursors else None)
        if page is None:
            return Listing((), 0, None, (f"The server offers no {member}.",))
        pages += 1
        size += _size(page)
        page_tools = page.get(member)
        if not isinstance(page_tools, list):
            raise UpstreamError(
                f"The server answered {METHODS[member]} without a list of {member}.",
                hint="This is a bug in the server.",
            )
        tools += page_tools
        _check_limits(member, len(tools), size)
        ttl = page.get("ttlMs")
        if isinstance(ttl, int) and not isinstance(ttl, bool) and ttl >= 0:
            ttls.append(ttl)
        elif ttl is not None:
            warnings = ["The server's ttlMs is not a non-negative integer; ignored."]
        cursor = page.get("nextCursor")
        if cursor is None:
            return Listing(tuple(tools), pages, min(ttls, default=None), tuple(warnings))
        cursors.append(_check_cursor(cursor, cursors))
        if pages >= settings.MAX_PAGES:
            raise ListingError(
                f"The list of {member} has more than {settings.MAX_PAGES} pages.",
                code="page_limit",
                hint="TOOLCRIB_MAX_PAGES sets the limit.",
            )


def _size(page: Mapping[str, object]) -> int:
    text = json.dumps(page, default=str, ensure_ascii=False)
    return len(text.encode("utf-8", "surrogatepass"))


def _check_cursor(cursor: object, previous: list[str]) -> str:
    """Return the cursor if it is new. Cursors are opaque: compared, never parsed."""
    if (
        not isinstance(cursor, str)
        or len(cursor.encode("utf-8", "surrogatepass")) > MAX_CURSOR_BYTES
    ):
        raise ListingError(
            "The server sent a cursor that is not a string, or is too long.", code="cursor_invalid"
        )
    if previous and previous[-1] == cursor:
        raise ListingError("The server returns the same cursor repeatedly.", code="cursor_repeated")
    if cursor in previous:
        raise ListingError("The server's cursors form a loop.", code="cursor_loop")
    return cursor


def _check_limits(member: str, tools: int, size: int) -> None:
    if tools > settings.MAX_TOOLS:
        raise ListingError(
            f"The server offers more than {settings.MAX_TOOLS} {member}.",
            code="tool_limit",
            hint="TOOLCRIB_MAX_TOOLS sets the limit.",
        )
    if size > settings.MAX_LISTING_BYTES:
        raise ListingError(
            f"The list of {member} is larger than {format_bytes(settings.MAX_LISTING_BYTES)}.",
            code="listing_too_large",
            hint="TOOLCRIB_MAX_LISTING_BYTES sets the limit.",
        )
