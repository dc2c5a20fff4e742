"""Read what an address asks for: words, whole numbers, the address itself without empty fields.

A leaf: every app's lists read their filters by it, so that odd input is treated alike everywhere.
"""

from django.http import HttpRequest, QueryDict

LONGEST = 200  # characters of a word
DIGITS = 18  # of a number: what every database takes


def text(query: QueryDict, name: str, longest: int = LONGEST) -> str:
    """Return a field as words that any database can be asked for."""
    return query.get(name, "").replace("\0", "").strip()[:longest]


def number(query: QueryDict, name: str, digits: int = DIGITS) -> int:
    """Return a field as a whole number; 0 for anything else."""
    found = query.get(name, "")
    return int(found) if found.isdecimal() and len(found) <= digits else 0


def clean_address(request: HttpRequest) -> str:
    """Return this address without the fields that were left empty."""
    kept = QueryDict(mutable=True)
    for name, values in request.GET.lists():
        if filled := [value for value in values if value]:
            kept.setlist(name, filled)
    return f"{request.path}?{kept.urlencode()}" if kept else request.path


def is_htmx_fragment(request: HttpRequest) -> bool:
    """Tell whether htmx asks for a part of a page, not for a whole page by a boosted link."""
    return "HX-Request" in request.headers and "HX-Boosted" not in request.headers
