"""How well each tool fits a query: by its words, by its meaning, or by both. Pure.

Words are scored by BM25, meaning by the cosine of vectors; both are brought to 0..1, the best
being 1, and mixed. A query of several clauses is searched for as a whole and clause by clause.
How much meaning counts follows the query: where the best tool holds most of what the words say,
the words are trusted; where it holds little, as with a question in everyday language, meaning
decides. How the numbers were chosen is in docs/decisions.md.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from catalog.search import translation
from catalog.search.bm25 import Floats, Postings
from catalog.search.query import clauses
from catalog.search.spelling import SPELLING
from catalog.search.tokenizer import query_words, words

# What the clauses count beside the whole query, by words and by meaning.
CLAUSE_WORDS = 0.4
CLAUSE_MEANING = 0.5
# Meaning counts .8 where no word is found, less the better the words are covered.
MEANING, LESS_BY_COVERAGE = 0.8, 0.5
# In a catalog of few tools their average says little about what is far away.
FEW = 20
# From this cosine on a tool fits a query none of whose words it holds.
NEAR = 0.25
HINT = 0.25
LEAST = 0.001


class Asked(NamedTuple):
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
        return list(dict.fromkeys(self.repaired.get(word, word) for word in query_words(text)))


def taken_apart(query: str, postings: Postings, *, by_clause: bool = True) -> Asked:
    """Read a query; a word that no tool here holds may be foreign, or a mistake for one held."""
    terms = query_words(query)
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
    parts = tuple(clauses(query, query_words)) if by_clause else ()
    return Asked(query, terms, repaired, parts, translated)


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
    read = query_words(reading.text)
    known = {word: reading.origin.get(english, english) for word, english in read.items()}
    translated = frozenset(word for word in read if read[word] in reading.origin)
    return reading.text, known | own, translated


class ByWords(NamedTuple):
    scores: Floats  # of every tool; nothing where it holds no word
    best: float  # the highest of them, or 1
    coverage: float  # the share of what its words say that the best tool holds, 0..1

    @property
    def fit(self) -> Floats:
        """How well every tool fits, 0..1."""
        return self.scores / self.best


def by_words(postings: Postings, asked: Asked) -> ByWords:
    terms = list(asked.terms)
    found = _scored(postings, terms)
    if asked.clauses:
        best, covered = np.zeros(postings.size), 0.0
        for clause in asked.clauses:
            part = _scored(postings, asked.words(clause))
            np.maximum(best, part.fit, out=best)
            covered += part.coverage
        fit = (1 - CLAUSE_WORDS) * found.fit + CLAUSE_WORDS * best
        found = ByWords(np.where(found.scores > 0, fit, 0), 1.0, covered / len(asked.clauses))
    if postings.worthless:
        # A word that half of the tools hold scores nothing, and is a match all the same.
        for term in terms:
            holders = postings.holders(term)
            found.scores[holders] = np.maximum(found.scores[holders], LEAST * found.best)
    return found


def _scored(postings: Postings, words: list[str]) -> ByWords:
    """Score by words; and say how near the best is to the most there can be."""
    scores = postings.scores(words)
    best = highest(scores)
    if best <= 0:
        return ByWords(scores, 1.0, 0.0)
    return ByWords(scores, best, min(1.0, best / postings.most(words)))


def highest(scores: Floats) -> float:
    """The highest, or nothing; half as long as `max` takes."""
    return float(scores[scores.argmax()]) if len(scores) else 0.0


def by_meaning(near: NDArray[np.float32]) -> tuple[Floats, NDArray[np.bool_]]:
    """Judge by cosines: a row for each tool, a column for the whole and for each clause.

    Returns how near each tool is, the nearest being 1, and which are near enough to fit. A row
    of NaN is a tool whose vector is still to come: it fits nothing.
    """
    known = ~np.isnan(near[:, 0])
    cosine = np.nan_to_num(near[:, 0].astype(np.float64))
    best = cosine
    if near.shape[1] > 1:
        of_clauses = np.nan_to_num(near[:, 1:].max(axis=1).astype(np.float64))
        best = np.maximum(cosine, of_clauses)
        cosine = (1 - CLAUSE_MEANING) * cosine + CLAUSE_MEANING * of_clauses
    count = int(known.sum())
    far = max(0.0, float(cosine.sum()) / max(1, count)) * count / (count + FEW)
    score = np.where(known, cosine - far, 0).clip(0)
    return score / (highest(score) or 1.0), known & (best >= NEAR)


def fused(words: ByWords, meaning: Floats, known: NDArray[np.bool_]) -> Floats:
    """Mix both; a tool without a vector is judged by its words alone."""
    weight = MEANING - LESS_BY_COVERAGE * words.coverage
    fit = words.fit
    return np.where(known, weight * meaning + (1 - weight) * fit, fit)


def fitting(score: Floats, fits: NDArray[np.bool_]) -> Floats:
    """Keep the scores of what fits; that is never nothing."""
    return np.where(fits, np.maximum(score, LEAST), 0)


def spelled(asked: Asked) -> Mapping[str, str]:
    """For people: each word that counts, as the query spells it, mistakes with what was meant."""
    replacing = asked.replacing
    return {
        term: f"“{spelling}” → “{term}”" if term in replacing else f"“{spelling}”"
        for term, spelling in asked.terms.items()
    }
