"""Words of a text, as search compares them. Pure: knows nothing of tools.

Identifiers are taken apart, scripts without spaces are read two characters at a time, and English
words are cut to their stem, so that `files` meets `file` and `creating` meets `create`.
"""

import re
import threading
import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from itertools import chain

import snowballstemmer

LONGEST_TEXT = 4_000
LONGEST_WORD = 24  # letters that have a stem; longer ones are names in one
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
am any just know let like need tell want help looking
"""
_own = threading.local()  # a stemmer works in a buffer of its own, so each thread has one


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


def tokenize_query(text: str) -> dict[str, str]:
    """The different words of a query, each with how it is spelled there.

    Fillers are left out, unless there is nothing else.
    """
    found: dict[str, str] = {}
    for spelling in _spelled(text):
        for term in _terms(spelling):
            found.setdefault(term, spelling)
    fillers = _fillers()
    return {term: found[term] for term in found if term not in fillers} or found


def joined(text: str) -> str:
    """Reduce a name to its letters and digits, so that `Create issue` meets `create_issue`."""
    folded = fold(text).casefold().replace(" ", "")
    return folded if folded.isalnum() else "".join(filter(str.isalnum, folded))


def _spelled(text: str) -> list[str]:
    text = fold(text)
    return (ASCII_WORD if text.isascii() else WORD).findall(text)


def _terms(spelling: str) -> tuple[str, ...]:
    return _known(spelling) if len(spelling) <= 64 else _split(spelling)


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


_known = lru_cache(maxsize=65_536)(_split)  # most words of a catalog are the same few thousand


def _pairs(part: str) -> Iterable[str]:
    """Split where no spaces are written: each two neighbours are a word."""
    for run in filter(None, UNSPACED.split(part)):
        if len(run) > 2 and UNSPACED.match(run):
            yield from (run[at : at + 2] for at in range(len(run) - 1))
        else:
            yield _stem(run.casefold())


def _stem(word: str) -> str:
    """Cut an English word to its stem; a word of another script or no word at all stays."""
    if not word.isascii() or not 3 <= len(word) <= LONGEST_WORD:
        return word
    try:
        stemmer = _own.stemmer
    except AttributeError:
        stemmer = _own.stemmer = snowballstemmer.stemmer("english")
    stem: str = stemmer.stemWord(word)
    return stem
