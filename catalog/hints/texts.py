"""Checks of automatic hints: texts that no person wrote. Pure."""

from collections.abc import Iterable

from catalog.models.search import MAX_AUTOMATIC_HINT_LENGTH, MAX_AUTOMATIC_HINTS
from toolcrib.lib.text import is_hidden


def clean_texts(texts: Iterable[object]) -> tuple[list[str], int]:
    """Return the usable hints among some values, and how many are not usable."""
    usable: dict[str, None] = {}
    rejected = 0
    for value in texts:
        line = " ".join(value.split()) if isinstance(value, str) else ""
        if 0 < len(line) <= MAX_AUTOMATIC_HINT_LENGTH and not any(map(is_hidden, line)):
            usable[line] = None
        else:
            rejected += 1
    kept = list(usable)[:MAX_AUTOMATIC_HINTS]
    return kept, rejected + len(usable) - len(kept)
