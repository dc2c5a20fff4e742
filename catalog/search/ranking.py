"""Hybrid ranking: keyword (BM25) and semantic (cosine) scores, normalized and mixed. Pure.

A query with several clauses is scored as a whole and clause by clause. The semantic share is low
where the best tool contains most of the query's terms, and high where it contains few, as for
questions in everyday language. The decisions in docs/ describe how the numbers were chosen.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from catalog.search import weights
from catalog.search.bm25 import Floats, Postings
from catalog.search.query import ParsedQuery


class KeywordScores(NamedTuple):
    scores: Floats  # of every tool; 0 if it contains no term
    best: float  # the highest score, or 1
    coverage: float  # the best score as a share of the highest possible one, 0..1

    @property
    def normalized(self) -> Floats:
        return self.scores / self.best


def keyword_scores(postings: Postings, query: ParsedQuery) -> KeywordScores:
    """Score every tool by BM25, over the whole query and its clauses."""
    terms = list(query.terms)
    result = _score_terms(postings, terms)
    if query.clauses:
        best, coverage = np.zeros(postings.size), 0.0
        for clause in query.clauses:
            part = _score_terms(postings, query.clause_terms(clause))
            np.maximum(best, part.normalized, out=best)
            coverage += part.coverage
        share = weights.CLAUSE_KEYWORD
        mixed = (1 - share) * result.normalized + share * best
        result = KeywordScores(
            np.where(result.scores > 0, mixed, 0), 1.0, coverage / len(query.clauses)
        )
    if postings.has_zero_idf:
        # A term that half of the tools contain scores 0 but still is a match.
        for term in terms:
            documents = postings.documents_with(term)
            result.scores[documents] = np.maximum(
                result.scores[documents], weights.LEAST_SCORE * result.best
            )
    return result


def _score_terms(postings: Postings, terms: list[str]) -> KeywordScores:
    scores = postings.scores(terms)
    best = highest(scores)
    if best <= 0:
        return KeywordScores(scores, 1.0, 0.0)
    return KeywordScores(scores, best, min(1.0, best / postings.max_score(terms)))


def highest(scores: Floats) -> float:
    """Return the highest score, or 0. Takes half the time of `max`."""
    return float(scores[scores.argmax()]) if len(scores) else 0.0


def semantic_scores(cosines: NDArray[np.float32]) -> tuple[Floats, NDArray[np.bool_]]:
    """Score by cosine similarity: a row per tool, a column for the query and for each clause.

    Return the scores scaled to 0..1, and which tools are similar enough to match. A row of NaN is
    a tool without a vector: it never matches.
    """
    known = ~np.isnan(cosines[:, 0])
    cosine = np.nan_to_num(cosines[:, 0].astype(np.float64))
    best = cosine
    if cosines.shape[1] > 1:
        best_clause = np.nan_to_num(cosines[:, 1:].max(axis=1).astype(np.float64))
        best = np.maximum(cosine, best_clause)
        cosine = (1 - weights.CLAUSE_SEMANTIC) * cosine + weights.CLAUSE_SEMANTIC * best_clause
    count = int(known.sum())
    background = (
        max(0.0, float(cosine.sum()) / max(1, count)) * count / (count + weights.BACKGROUND_DAMPING)
    )
    score = np.where(known, cosine - background, 0).clip(0)
    return score / (highest(score) or 1.0), known & (best >= weights.SEMANTIC_MATCH)


def mix_scores(keyword: KeywordScores, semantic: Floats, known: NDArray[np.bool_]) -> Floats:
    """Mix keyword and semantic scores; a tool without a vector has its keyword score only."""
    weight = weights.SEMANTIC - weights.SEMANTIC_LESS_BY_COVERAGE * keyword.coverage
    normalized = keyword.normalized
    return np.where(known, weight * semantic + (1 - weight) * normalized, normalized)


def mask_scores(scores: Floats, matches: NDArray[np.bool_]) -> Floats:
    """Set the scores of tools that do not match to 0, and those of matches above 0."""
    return np.where(matches, np.maximum(scores, weights.LEAST_SCORE), 0)
