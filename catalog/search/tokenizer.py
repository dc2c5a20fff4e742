"""Tokenizer of the search index: Unicode normalization, identifier splitting and stemming. Pure.

Identifiers are split into their parts, scripts without spaces into character bigrams, and English
words are stemmed, so that `files` matches `file` and `creating` matches `create`.
"""

import re
import threading
import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from itertools import chain

import snowballstemmer

MAX_TEXT_LENGTH = 4_000
MAX_STEM_LENGTH = 24  # longer words are concatenated names and are not stemmed
MAX_NAME_LENGTH = 128
ACCENTS = re.compile("[\u0300-\u036f]")
# Combining marks that belong to words in Indic, Thai, Arabic and other scripts.
MARKS = "".join(c for c in map(chr, range(0x370, 0x2000)) if unicodedata.category(c)[0] == "M")
LETTER_RUN = rf"(?:[^\W_]|[{MARKS}])+"
WORD = re.compile(rf"{LETTER_RUN}(?:[._-]+{LETTER_RUN})*")
ASCII_WORD = re.compile("[A-Za-z0-9]+(?:[._-]+[A-Za-z0-9]+)*")
WORD_BOUNDARY = re.compile(
    r"[._-]+|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
    r"|(?<=[^\W\d_])(?=\d)|(?<=\d)(?=[^\W\d_])"
)
# "don't", "what's" and "I'm": the letters after the apostrophe are no words.
CONTRACTION = re.compile(
    "(?<=[a-z])(?:['\u2019](?:s|m|d|ll|re|ve)|(?<!ca)n['\u2019]t|(?<=can)['\u2019]t)\\b",
    re.IGNORECASE,
)
# Scripts written without spaces, and Hangul, whose words carry suffixes.
UNSPACED = re.compile("([\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]+)")
# Function words. Words that occur in tool names (get, all, not) are not stop words.
STOP_WORDS = """
a about an and are as at be been but by can could did do does for from had has have he her him his
how i if in into is it its me my of on or our please she should so some that the their them then
there these they this those to us was we were what when where which while who will with would you
your
am any just know let like need tell want help looking
"""
_thread_local = threading.local()  # stemmers keep a buffer and are not thread-safe


def fold(text: str) -> str:
    """Normalize accents, character widths and ligatures; keep case."""
    text = text[:MAX_TEXT_LENGTH]
    if text.isascii():
        return text
    bare = ACCENTS.sub("", unicodedata.normalize("NFKD", text))
    return unicodedata.normalize("NFKC", bare)[:MAX_TEXT_LENGTH]


def tokenize(text: str) -> list[str]:
    """Return the terms of a text in order; an identifier yields its parts and its joined form."""
    return list(chain.from_iterable(map(_terms, _split_words(text))))


def tokenize_query(text: str) -> dict[str, str]:
    """Return the distinct terms and their spelling; stop words only if there is nothing else."""
    terms: dict[str, str] = {}
    for spelling in _split_words(text):
        for term in _terms(spelling):
            terms.setdefault(term, spelling)
    stop_words = _stop_words()
    return {term: terms[term] for term in terms if term not in stop_words} or terms


def normalize_name(text: str) -> str:
    """Reduce a name to letters and digits, so that `Create issue` equals `create_issue`."""
    folded = fold(text).casefold().replace(" ", "")
    return folded if folded.isalnum() else "".join(filter(str.isalnum, folded))


def _split_words(text: str) -> list[str]:
    text = CONTRACTION.sub("", fold(text))
    return (ASCII_WORD if text.isascii() else WORD).findall(text)


def _terms(spelling: str) -> tuple[str, ...]:
    return _split_cached(spelling) if len(spelling) <= 64 else _split(spelling)


@lru_cache(maxsize=1)
def _stop_words() -> frozenset[str]:
    return frozenset(tokenize(STOP_WORDS))


def _split(word: str) -> tuple[str, ...]:
    parts = [part for part in WORD_BOUNDARY.split(word) if part]
    if not word.isascii() and UNSPACED.search(word):
        return tuple(chain.from_iterable(_bigrams(part) for part in parts))
    terms = [_stem(part.casefold()) for part in parts]
    if len(parts) > 1:
        joined = "".join(parts).casefold()
        if len(joined) <= MAX_NAME_LENGTH:
            terms.append(_stem(joined))
    return tuple(terms)


_split_cached = lru_cache(maxsize=65_536)(_split)  # a catalog repeats a few thousand words


def _bigrams(part: str) -> Iterable[str]:
    for run in filter(None, UNSPACED.split(part)):
        if len(run) > 2 and UNSPACED.match(run):
            yield from (run[at : at + 2] for at in range(len(run) - 1))
        else:
            yield _stem(run.casefold())


def _stem(word: str) -> str:
    """Stem an English word; return other scripts, very short and very long words unchanged."""
    if not word.isascii() or not 3 <= len(word) <= MAX_STEM_LENGTH:
        return word
    try:
        stemmer = _thread_local.stemmer
    except AttributeError:
        stemmer = _thread_local.stemmer = snowballstemmer.stemmer("english")
    stem: str = stemmer.stemWord(word)
    return stem
