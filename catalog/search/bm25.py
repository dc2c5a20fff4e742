"""BM25 scoring over an inverted index. Pure.

rank-bm25 defines the score: its own code computes the idf, and scores equal those of its
`get_scores` to the last bit. It is not used for serving because it visits every document for
every term. Two cases it leaves open are defined here: a corpus without terms has no scores, and
where its average idf is zero or negative, the idf is log(1 + (N - n + .5) / (n + .5)).

Terms are integers shared by all indexes of the process, so that a tool is tokenized once.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log, log1p

import numpy as np
from numpy.typing import NDArray
from rank_bm25 import BM25Okapi

from catalog.search.weights import BM25_B, BM25_K1

MIN_TERM_WEIGHT = 0.2
COMMON_TERM_RATIO = 8  # a term in more than one of this many documents is common
NO_DOCUMENTS: NDArray[np.intp] = np.empty(0, np.intp)
Ints = NDArray[np.int32]
Floats = NDArray[np.float64]


class Vocabulary:
    """Every term of this process and its number. Append-only: a number never changes."""

    def __init__(self) -> None:
        self.number: dict[str, int] = {}
        self.terms: list[str] = []
        self._lock = threading.Lock()

    def numbers(self, terms: Iterable[str]) -> Ints:
        """Return the numbers of the terms, and add those that are new."""
        known, terms = self.number, list(terms)
        numbers = [known.get(term, -1) for term in terms]
        if -1 in numbers:
            with self._lock:
                for term in terms:
                    if term not in known:
                        self.terms.append(term)
                        known[term] = len(self.terms) - 1
            numbers = [known[term] for term in terms]
        return np.array(numbers, np.int32)


VOCABULARY = Vocabulary()


@dataclass(frozen=True, eq=False, slots=True)
class Document:
    """Term frequencies of one tool: its distinct terms in order of first use, and their counts."""

    terms: Ints
    counts: Ints
    length: int


def make_document(weighted: Iterable[tuple[Sequence[str], int]]) -> Document:
    """Count the terms of several texts; the weight of a text multiplies its counts."""
    counts: Counter[str] = Counter()
    for terms, weight in weighted:
        for term in terms:
            counts[term] += weight
    return Document(
        VOCABULARY.numbers(counts), np.array(list(counts.values()), np.int32), counts.total()
    )


class CorpusStatistics(BM25Okapi):  # type: ignore[misc]
    """idf and average length as rank-bm25 computes them, from known document frequencies."""

    def __init__(self, document_frequencies: Mapping[str, int], documents: int, terms: int) -> None:
        self._documents, self._terms = documents, terms
        super().__init__(document_frequencies, k1=BM25_K1, b=BM25_B)
        if self.average_idf <= 0:
            self.idf = {
                term: log1p((documents - n + 0.5) / (n + 0.5))
                for term, n in document_frequencies.items()
            }

    def _initialize(self, corpus: Mapping[str, int]) -> dict[str, int]:
        self.corpus_size, self.avgdl = self._documents, self._terms / self._documents
        return dict(corpus)


class Postings:
    """Inverted index: the documents that contain each term, with precomputed weights. Immutable."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.size = len(documents)
        self._documents = NO_DOCUMENTS
        self._weights: Floats = np.empty(0)
        # Python lists: single lookups are three times as fast as in numpy arrays.
        self._starts: list[int] = []
        self._positions: dict[str, int] = {}
        self._dense_rows: dict[int, Floats] = {}  # of common terms that were queried
        self.has_zero_idf = False  # a term in exactly half of the documents scores 0
        self._term_weights: list[float] = []  # idf of each term, at least MIN_TERM_WEIGHT
        if any(document.length for document in documents):
            self._fill(documents)

    def _fill(self, documents: Sequence[Document]) -> None:
        terms = np.concatenate([document.terms for document in documents])
        counts = np.concatenate([document.counts for document in documents])
        terms_per_document = np.array([len(document.terms) for document in documents])
        # In order of first use: rank-bm25 sums the idf in that order, and rounding depends on it.
        numbers, first, position, frequency = np.unique(
            terms, return_index=True, return_inverse=True, return_counts=True
        )
        by_first_use = np.argsort(first)
        lengths = np.array([document.length for document in documents])
        vocabulary = VOCABULARY.terms
        statistics = CorpusStatistics(
            dict(
                zip(
                    [vocabulary[n] for n in numbers[by_first_use]],
                    frequency[by_first_use].tolist(),
                    strict=True,
                )
            ),
            self.size,
            int(lengths.sum()),
        )
        idf = np.empty(len(numbers))
        idf[by_first_use] = list(statistics.idf.values())
        self.has_zero_idf = bool((idf == 0).any())
        self._term_weights = idf.clip(min=MIN_TERM_WEIGHT).tolist()
        order = np.argsort(position, kind="stable")
        self._documents = np.repeat(np.arange(self.size), terms_per_document)[order]
        self._starts = [0, *np.cumsum(frequency).tolist()]
        k1, b = statistics.k1, statistics.b
        length_penalty = k1 * (1 - b + b * lengths / statistics.avgdl)
        ordered_counts = counts[order].astype(np.int64)
        saturation = ordered_counts * (k1 + 1) / (ordered_counts + length_penalty[self._documents])
        self._weights = np.repeat(idf, frequency) * saturation
        self._positions = {vocabulary[number]: at for at, number in enumerate(numbers.tolist())}

    def unknown(self, terms: Iterable[str]) -> list[str]:
        positions = self._positions
        return [term for term in terms if term not in positions]

    def documents_with(self, term: str) -> NDArray[np.intp]:
        position = self._positions.get(term)
        if position is None:
            return NO_DOCUMENTS
        return self._documents[self._starts[position] : self._starts[position + 1]]

    def scores(self, terms: Iterable[str]) -> Floats:
        """Return the BM25 score of every document, summed in the order of rank-bm25."""
        positions, starts, total = self._positions, self._starts, np.zeros(self.size)
        for term in terms:
            position = positions.get(term)
            if position is None:
                continue
            start, end = starts[position], starts[position + 1]
            if COMMON_TERM_RATIO * (end - start) > self.size:
                total += self._dense_row(position)
            else:
                np.add.at(total, self._documents[start:end], self._weights[start:end])
        return total

    def _dense_row(self, position: int) -> Floats:
        """Return a common term's weights for all documents: faster to add than to scatter."""
        row = self._dense_rows.get(position)
        if row is None:
            start, end = self._starts[position], self._starts[position + 1]
            row = np.zeros(self.size)
            row[self._documents[start:end]] = self._weights[start:end]
            self._dense_rows[position] = row
        return row

    def contain(self, term: str, documents: NDArray[np.intp]) -> list[bool]:
        matches = self.documents_with(term)
        if not len(matches):
            return [False] * len(documents)
        nearest = matches.take(matches.searchsorted(documents), mode="clip")
        contained: list[bool] = (nearest == documents).tolist()
        return contained

    def max_score(self, terms: Iterable[str]) -> float:
        """Return an upper bound of the score; unknown terms count as the rarest."""
        rarest = log(self.size + 0.5) - log(0.5)
        positions, weights = self._positions, self._term_weights
        return sum(
            [weights[positions[term]] if term in positions else rarest for term in terms]
        ) * (BM25_K1 + 1)
