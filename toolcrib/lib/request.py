"""Query-parameter parsing: text, integers, the URL without empty parameters.

Every list reads its filters through this module, so malformed input is treated alike everywhere.
"""

from django.http import HttpRequest, QueryDict

MAX_TEXT_LENGTH = 200  # characters
MAX_DIGITS = 18  # fits a 64-bit integer column


def text(query: QueryDict, name: str, max_length: int = MAX_TEXT_LENGTH) -> str:
    """Return a parameter as trimmed text without NUL, which PostgreSQL rejects."""
    return query.get(name, "").replace("\0", "").strip()[:max_length]


def number(query: QueryDict, name: str, digits: int = MAX_DIGITS) -> int:
    """Return a parameter as a non-negative integer; 0 if it is not one."""
    value = query.get(name, "")
    return int(value) if value.isdecimal() and len(value) <= digits else 0


def clean_url(request: HttpRequest) -> str:
    """Return the request's URL without empty query parameters."""
    query = QueryDict(mutable=True)
    for name, values in request.GET.lists():
        if filled := [value for value in values if value]:
            query.setlist(name, filled)
    return f"{request.path}?{query.urlencode()}" if query else request.path


def is_htmx_fragment(request: HttpRequest) -> bool:
    """Return whether htmx requests a fragment rather than a full page through a boosted link."""
    return "HX-Request" in request.headers and "HX-Boosted" not in request.headers
