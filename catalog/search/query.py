"""Split a long request into what it asks for one after another. Pure.

"Book a flight and then mail the ticket to Ann" wants two tools, and neither is the best for the
whole sentence: each clause is searched for too.
"""

import re
from collections.abc import Callable, Mapping, Sized
from typing import NamedTuple

from catalog.search import translation
from catalog.search.bm25 import Postings
from catalog.search.spelling import SPELLING
from catalog.search.tokenizer import tokenize_query, words

MOST = 8
FEWEST_WORDS = 2  # a shorter clause says too little alone and joins its neighbour
SEAM = re.compile(
    r"(?<=[.!?;])\s+|[,;:\n]\s*|[。！？；，、：]|\s-\s"
    r"|\s(?:and|then|also|as well as|plus|followed by|after that|next|finally|along with"
    r"|und|dann|y|luego|et|puis)\s",
    re.IGNORECASE,
)


def split_clauses(query: str, words: Callable[[str], Sized]) -> list[str]:
    """Return the clauses of a query, or none where it is only one."""
    found: list[str] = []
    waiting = ""
    for part in filter(None, (piece.strip() for piece in SEAM.split(query))):
        clause = f"{waiting} {part}" if waiting else part
        if len(words(clause)) < FEWEST_WORDS:
            waiting = clause
        else:
            found.append(clause)
            waiting = ""
    if waiting and found:
        found[-1] += f" {waiting}"
    if len(found) > MOST:
        found[MOST - 1 :] = [" ".join(found[MOST - 1 :])]
    return found if len(found) > 1 else []


class ParsedQuery(NamedTuple):
    """A query taken apart."""

    text: str
    terms: dict[str, str]  # each different word, and how it is spelled in the query
    repaired: dict[str, str]  # of the words that no tool holds, the one that was meant
    clauses: tuple[str, ...]
    translated: frozenset[str] = frozenset()  # the terms that stand for a word of another language

    @property
    def replacing(self) -> set[str]:
        """The terms that are not what the query says."""
        return {*self.repaired.values(), *self.translated}

    @property
    def texts(self) -> list[str]:
        """What has to be encoded: the whole, then each clause."""
        return [self.text, *self.clauses]

    def words(self, text: str) -> list[str]:
        return list(dict.fromkeys(self.repaired.get(word, word) for word in tokenize_query(text)))


def parse_query(query: str, postings: Postings, *, by_clause: bool = True) -> ParsedQuery:
    """Read a query; a word that no tool here holds may be foreign, or a mistake for one held."""
    terms = tokenize_query(query)
    repaired: dict[str, str] = {}
    translated: frozenset[str] = frozenset()
    unknown = postings.unknown(terms)
    if unknown:
        query, terms, translated = _read(query, terms, unknown, postings)
        for word in postings.unknown(terms):
            meant = SPELLING.meant(word, lambda near: len(postings.holders(near)))
            if meant:
                repaired[word] = meant
        right: dict[str, str] = {}
        for word, spelling in terms.items():
            right.setdefault(repaired.get(word, word), spelling)
        terms = right
    parts = tuple(split_clauses(query, tokenize_query)) if by_clause else ()
    return ParsedQuery(query, terms, repaired, parts, translated)


def _read(
    query: str, terms: dict[str, str], unknown: list[str], postings: Postings
) -> tuple[str, dict[str, str], frozenset[str]]:
    """Read a query of another language in English: its text, its words, and which are not its own.

    What tools hold as it was asked for is searched for too.
    """
    reading = translation.english(
        query,
        terms.values(),
        [terms[word] for word in unknown],
        lambda english: not postings.unknown(words(english)),
    )
    if not reading:
        return query, terms, frozenset()
    own = {
        word: spelling
        for word, spelling in terms.items()
        if word not in unknown and spelling not in reading.dropped
    }
    read = tokenize_query(reading.text)
    known = {word: reading.origin.get(english, english) for word, english in read.items()}
    translated = frozenset(word for word in read if read[word] in reading.origin)
    return reading.text, known | own, translated


def explain_terms(asked: ParsedQuery) -> Mapping[str, str]:
    """For people: each word that counts, as the query spells it, mistakes with what was meant."""
    replacing = asked.replacing
    return {
        term: f"“{spelling}” → “{term}”" if term in replacing else f"“{spelling}”"
        for term, spelling in asked.terms.items()
    }
