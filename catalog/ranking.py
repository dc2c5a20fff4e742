"""Words of a text, and BM25 over them. Pure: knows nothing of tools.

rank-bm25 counts and defines the score; posting lists made from its statistics answer, so that a
query costs what its words cost and not what the catalog costs. Its own idf is replaced: it is
zero or negative for a word in half of the documents or more, and then the right answer among one,
two or twenty alike tools would score nothing. `log(1 + (N - n + .5) / (n + .5))` is always above
zero. (Its BM25Plus is positive too, but adds the same bonus to documents without the word.)
Whether a document matches is decided by a shared word, never by a score.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from math import log1p

import numpy as np
from numpy.typing import NDArray
from rank_bm25 import BM25Okapi

K1, B = 1.5, 0.75
LONGEST_TEXT = 4_000
LONGEST_NAME = 128
ACCENTS = re.compile("[\u0300-\u036f]")
# Vowel signs and the like, which are part of a word in scripts of India, Thailand, Arabia...
MARKS = "".join(c for c in map(chr, range(0x370, 0x2000)) if unicodedata.category(c)[0] == "M")
LETTERS = rf"(?:[^\W_]|[{MARKS}])+"
WORD = re.compile(rf"{LETTERS}(?:[._-]+{LETTERS})*")
ASCII_WORD = re.compile("[A-Za-z0-9]+(?:[._-]+[A-Za-z0-9]+)*")
SEAM = re.compile(
    r"[._-]+|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
    r"|(?<=[^\W\d_])(?=\d)|(?<=\d)(?=[^\W\d_])"
)
# Scripts written without spaces; Hangul too, whose words carry endings.
UNSPACED = re.compile("([\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]+)")
# Words that hold a sentence together. Words that name what a tool does (get, all, not) stay.
FILLERS = """
a about an and are as at be been but by can could did do does for from had has have he her him his
how i if in into is it its me my of on or our please she should so some that the their them then
there these they this those to us was we were what when where which while who will with would you
your
"""


def fold(text: str) -> str:
    """Bring forms of the same letters together: accents, widths, ligatures. Keeps case."""
    text = text[:LONGEST_TEXT]
    if text.isascii():
        return text
    bare = ACCENTS.sub("", unicodedata.normalize("NFKD", text))
    return unicodedata.normalize("NFKC", bare)[:LONGEST_TEXT]


def words(text: str) -> list[str]:
    """Split a text into words, in order; an identifier gives its parts and itself, joined."""
    return list(chain.from_iterable(map(_terms, _spelled(text))))


def query_words(text: str) -> dict[str, str]:
    """The different words of a query, each with how it is spelled there.

    Fillers are left out, unless there is nothing else.
    """
    found: dict[str, str] = {}
    for spelling in _spelled(text):
        for term in _terms(spelling):
            found.setdefault(term, spelling)
    return {term: found[term] for term in found if term not in _fillers()} or found


def joined(text: str) -> str:
    """Reduce a name to its letters and digits, so that `Create issue` meets `create_issue`."""
    return "".join(filter(str.isalnum, fold(text).casefold()))


def _spelled(text: str) -> list[str]:
    text = fold(text)
    return (ASCII_WORD if text.isascii() else WORD).findall(text)


def _terms(spelling: str) -> tuple[str, ...]:
    return _known(spelling) if len(spelling) <= 32 else _split(spelling)


@lru_cache(maxsize=1)
def _fillers() -> frozenset[str]:
    return frozenset(words(FILLERS))


def _split(word: str) -> tuple[str, ...]:
    parts = [part for part in SEAM.split(word) if part]
    if not word.isascii() and UNSPACED.search(word):
        return tuple(chain.from_iterable(_pairs(part) for part in parts))
    found = [_stem(part.casefold()) for part in parts]
    if len(parts) > 1:
        whole = "".join(parts).casefold()
        if len(whole) <= LONGEST_NAME:
            found.append(_stem(whole))
    return tuple(found)


_known = lru_cache(maxsize=32_768)(_split)  # most words of a catalog are the same few thousand


def _pairs(part: str) -> Iterable[str]:
    """Split where no spaces are written: each two neighbours are a word."""
    for run in filter(None, UNSPACED.split(part)):
        if len(run) > 2 and UNSPACED.match(run):
            yield from (run[at : at + 2] for at in range(len(run) - 1))
        else:
            yield run.casefold()


def _stem(word: str) -> str:
    """Make an English plural singular, roughly: only that the two meet matters."""
    if len(word) < 4 or word[-1] != "s" or word[-2] in "su":
        return word
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("ches", "shes", "sses", "xes")):
        return word[:-2]
    return word[:-1]


def statistics(documents: Sequence[Sequence[str]]) -> BM25Okapi:
    """Count by rank-bm25 and give it an idf above zero. It takes no corpus without a word."""
    counted = BM25Okapi(documents, k1=K1, b=B)
    holding: dict[str, int] = {}
    for frequencies in counted.doc_freqs:
        for word in frequencies:
            holding[word] = holding.get(word, 0) + 1
    total = len(documents)
    counted.idf = {word: log1p((total - n + 0.5) / (n + 0.5)) for word, n in holding.items()}
    return counted


class Postings:
    """Which documents hold a word, and what it adds to their score. Immutable."""

    def __init__(self, documents: Sequence[Sequence[str]]) -> None:
        self.size = len(documents)
        self._of: dict[str, tuple[NDArray[np.int32], NDArray[np.float64]]] = {}
        if any(documents):
            self._fill(statistics(documents))

    def _fill(self, counted: BM25Okapi) -> None:
        lists: dict[str, tuple[list[int], list[int]]] = {word: ([], []) for word in counted.idf}
        for document, frequencies in enumerate(counted.doc_freqs):
            for word, times in frequencies.items():
                holders, counts = lists[word]
                holders.append(document)
                counts.append(times)
        lengths = np.array(counted.doc_len)
        floor = counted.k1 * (1 - counted.b + counted.b * lengths / counted.avgdl)
        for word, (holders, counts) in lists.items():
            where, times = np.array(holders, np.int32), np.array(counts)
            weights = counted.idf[word] * (times * (counted.k1 + 1) / (times + floor[where]))
            self._of[word] = where, weights

    def scores(self, terms: Iterable[str]) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """Return the documents that hold a term, ascending, and the score of each."""
        sums = np.zeros(self.size)
        for term in terms:
            if term in self._of:
                where, weights = self._of[term]
                sums[where] += weights
        matching = np.flatnonzero(sums)  # a weight is above zero, so a sum is where a word is
        return matching, sums[matching]

    def holds(self, term: str, document: int) -> bool:
        where, _ = self._of.get(term, (np.empty(0, np.int32), None))
        at = int(np.searchsorted(where, document))
        return at < len(where) and int(where[at]) == document
