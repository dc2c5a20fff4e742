"""How well each tool fits a query: by its words, by its meaning, or by both. Pure.

Words are scored by BM25, meaning by the cosine of vectors; both are brought to 0..1, the best
being 1, and mixed. A query of several clauses is searched for as a whole and clause by clause.
How much meaning counts follows the query: where the best tool holds most of what the words say,
the words are trusted; where it holds little, as with a question in everyday language, meaning
decides. How the numbers were chosen is in docs/decisions.md.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from catalog.search import weights
from catalog.search.bm25 import Floats, Postings
from catalog.search.query import ParsedQuery


class KeywordScores(NamedTuple):
    scores: Floats  # of every tool; nothing where it holds no word
    best: float  # the highest of them, or 1
    coverage: float  # the share of what its words say that the best tool holds, 0..1

    @property
    def fit(self) -> Floats:
        """How well every tool fits, 0..1."""
        return self.scores / self.best


def keyword_scores(postings: Postings, asked: ParsedQuery) -> KeywordScores:
    terms = list(asked.terms)
    found = _keyword_scores_of(postings, terms)
    if asked.clauses:
        best, covered = np.zeros(postings.size), 0.0
        for clause in asked.clauses:
            part = _keyword_scores_of(postings, asked.words(clause))
            np.maximum(best, part.fit, out=best)
            covered += part.coverage
        fit = (1 - weights.CLAUSE_KEYWORD) * found.fit + weights.CLAUSE_KEYWORD * best
        found = KeywordScores(np.where(found.scores > 0, fit, 0), 1.0, covered / len(asked.clauses))
    if postings.worthless:
        # A word that half of the tools hold scores nothing, and is a match all the same.
        for term in terms:
            holders = postings.holders(term)
            found.scores[holders] = np.maximum(
                found.scores[holders], weights.LEAST_SCORE * found.best
            )
    return found


def _keyword_scores_of(postings: Postings, words: list[str]) -> KeywordScores:
    """Score by words; and say how near the best is to the most there can be."""
    scores = postings.scores(words)
    best = highest(scores)
    if best <= 0:
        return KeywordScores(scores, 1.0, 0.0)
    return KeywordScores(scores, best, min(1.0, best / postings.most(words)))


def highest(scores: Floats) -> float:
    """The highest, or nothing; half as long as `max` takes."""
    return float(scores[scores.argmax()]) if len(scores) else 0.0


def semantic_scores(near: NDArray[np.float32]) -> tuple[Floats, NDArray[np.bool_]]:
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
        cosine = (1 - weights.CLAUSE_SEMANTIC) * cosine + weights.CLAUSE_SEMANTIC * of_clauses
    count = int(known.sum())
    far = (
        max(0.0, float(cosine.sum()) / max(1, count)) * count / (count + weights.BACKGROUND_DAMPING)
    )
    score = np.where(known, cosine - far, 0).clip(0)
    return score / (highest(score) or 1.0), known & (best >= weights.SEMANTIC_MATCH)


def mix_scores(words: KeywordScores, meaning: Floats, known: NDArray[np.bool_]) -> Floats:
    """Mix both; a tool without a vector is judged by its words alone."""
    weight = weights.SEMANTIC - weights.SEMANTIC_LESS_BY_COVERAGE * words.coverage
    fit = words.fit
    return np.where(known, weight * meaning + (1 - weight) * fit, fit)


def mask_scores(score: Floats, fits: NDArray[np.bool_]) -> Floats:
    """Keep the scores of what fits; that is never nothing."""
    return np.where(fits, np.maximum(score, weights.LEAST_SCORE), 0)
