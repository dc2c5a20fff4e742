"""Offer to undo what was just done: kept in the person's session until a page shows it."""

from collections.abc import Iterable

from django.contrib import messages
from django.http import HttpRequest

from catalog.groups.writing import Done

OFFERED = "group_undo"  # the act this session may undo next
NOTHING = "Nothing changed: it stood so already."

Offer = dict[str, object]


def made(sentence: str, *done: Done | None) -> Offer | None:
    """Return the offer to undo these acts, newest first, or nothing where nothing was written."""
    entries = [one.entry.pk for one in reversed(done) if one and one.entry]
    if not entries:
        return None
    return {"entry": entries[0], "also": entries[1:], "sentence": sentence}


def offer(request: HttpRequest, sentence: str, *done: Done | None) -> None:
    found = made(sentence, *done)
    if found:
        request.session[OFFERED] = found
    else:
        messages.info(request, NOTHING)


def say(request: HttpRequest, sentences: Iterable[str]) -> None:
    for sentence in sentences:
        messages.info(request, sentence)
