"""Mark in a text what a search matched, as parts: (marked, text). Pure, and never HTML."""

import re
from collections.abc import Iterable, Iterator

import re2

from catalog.search.tokenizer import words

Parts = list[tuple[bool, str]]

RUN = re.compile(r"[^\W_]+")


def by_words(text: str, matched: Iterable[str]) -> Parts:
    """Mark the words of a text that are the same, to search, as those matched."""
    wanted = {term for word in matched for term in words(word)}
    found = [run.span() for run in RUN.finditer(text) if wanted.intersection(words(run.group()))]
    return list(_cut(text, found))


def by_pattern(text: str, pattern: str) -> Parts:
    """Mark what a pattern matched, which search has taken already."""
    options = re2.Options()
    options.case_sensitive, options.log_errors = False, False
    try:
        found = [one.span() for one in re2.compile(pattern, options).finditer(text)]
    except re2.error:
        found = []
    return list(_cut(text, found))


def _cut(text: str, found: Iterable[tuple[int, int]]) -> Iterator[tuple[bool, str]]:
    at = 0
    for start, end in found:
        if end <= start or start < at:
            continue
        if start > at:
            yield False, text[at:start]
        yield True, text[start:end]
        at = end
    if at < len(text):
        yield False, text[at:]
