"""BM25 from posting lists: a query costs what its words cost, not what the catalog costs. Pure.

rank-bm25 defines the score: its own code computes idf, and the scores are those of its
`get_scores` to the last bit. It must not serve, since it visits every document for every word.
Two things it leaves open are defined here. A corpus without a word has no scores. And where its
idf would make a shared word worth nothing or less than nothing on average (one tool, two tools, a
word in each of few), the idf is log(1 + (N - n + .5) / (n + .5)), which is always above zero.
Whether a document matches is decided by a shared word, never by a score.

Words are numbers here, the same in every index of this process, so that a tool is counted once
however many indexes hold it.
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

LITTLE = 0.2
COMMON = 8  # a word in more than one of so many documents is a common one
NOWHERE: NDArray[np.intp] = np.empty(0, np.intp)
Ints = NDArray[np.int32]
Floats = NDArray[np.float64]


class Vocabulary:
    """Every word met so far and its number. Grows; a number never changes."""

    def __init__(self) -> None:
        self.number: dict[str, int] = {}
        self.words: list[str] = []
        self._lock = threading.Lock()

    def numbers(self, words: Iterable[str]) -> Ints:
        known, words = self.number, list(words)
        found = [known.get(word, -1) for word in words]
        if -1 in found:
            with self._lock:
                for word in words:
                    if word not in known:
                        self.words.append(word)
                        known[word] = len(self.words) - 1
            found = [known[word] for word in words]
        return np.array(found, np.int32)


VOCABULARY = Vocabulary()


@dataclass(frozen=True, eq=False, slots=True)
class Document:
    """The different words of one tool, in order of first use, and how often each stands there."""

    words: Ints
    times: Ints
    length: int


def document(weighted: Iterable[tuple[Sequence[str], int]]) -> Document:
    """Count the words of some texts; a text's weight is how many times it is counted."""
    times: Counter[str] = Counter()
    for words, weight in weighted:
        for word in words:
            times[word] += weight
    return Document(
        VOCABULARY.numbers(times), np.array(list(times.values()), np.int32), times.total()
    )


class CorpusStatistics(BM25Okapi):  # type: ignore[misc]
    """rank-bm25's idf and average length, from document frequencies that are known already.

    The only place that touches the library: it fills in what `_initialize` would count.
    """

    def __init__(self, document_frequencies: Mapping[str, int], documents: int, words: int) -> None:
        self._documents, self._words = documents, words
        super().__init__(document_frequencies, k1=BM25_K1, b=BM25_B)
        if self.average_idf <= 0:
            self.idf = {
                word: log1p((documents - n + 0.5) / (n + 0.5))
                for word, n in document_frequencies.items()
            }

    def _initialize(self, corpus: Mapping[str, int]) -> dict[str, int]:
        self.corpus_size, self.avgdl = self._documents, self._words / self._documents
        return dict(corpus)


class Postings:
    """Which documents hold a word, and what it adds to their score. Immutable."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.size = len(documents)
        self._where = NOWHERE
        self._weights: Floats = np.empty(0)
        # Asked for one by one, which Python's own do three times as fast as numpy's.
        self._starts: list[int] = []
        self._places: dict[str, int] = {}
        self._rows: dict[int, Floats] = {}  # of common words that were asked for
        self.worthless = False  # some word is in just half of the documents, and scores nothing
        self._worth: list[float] = []  # of each word here: its idf, or a little where that is less
        if any(document.length for document in documents):
            self._fill(documents)

    def _fill(self, documents: Sequence[Document]) -> None:
        words = np.concatenate([document.words for document in documents])
        times = np.concatenate([document.times for document in documents])
        each = np.array([len(document.words) for document in documents])
        # In order of first use, as rank-bm25 meets them: it sums their idf in that order.
        numbers, first, place, holding = np.unique(
            words, return_index=True, return_inverse=True, return_counts=True
        )
        met = np.argsort(first)
        lengths = np.array([document.length for document in documents])
        known = VOCABULARY.words
        counted = CorpusStatistics(
            dict(zip([known[n] for n in numbers[met]], holding[met].tolist(), strict=True)),
            self.size,
            int(lengths.sum()),
        )
        weight = np.empty(len(numbers))
        weight[met] = list(counted.idf.values())
        self.worthless = bool((weight == 0).any())
        self._worth = weight.clip(min=LITTLE).tolist()
        order = np.argsort(place, kind="stable")
        self._where = np.repeat(np.arange(self.size), each)[order]  # as numpy indexes
        self._starts = [0, *np.cumsum(holding).tolist()]
        floor = counted.k1 * (1 - counted.b + counted.b * lengths / counted.avgdl)
        often = times[order].astype(np.int64)
        share = often * (counted.k1 + 1) / (often + floor[self._where])
        self._weights = np.repeat(weight, holding) * share
        self._places = {known[number]: at for at, number in enumerate(numbers.tolist())}

    def unknown(self, terms: Iterable[str]) -> list[str]:
        """Those of the terms that no document holds."""
        at = self._places
        return [term for term in terms if term not in at]

    def holders(self, term: str) -> NDArray[np.intp]:
        """The documents that hold a word, ascending."""
        place = self._places.get(term)
        return (
            NOWHERE if place is None else self._where[self._starts[place] : self._starts[place + 1]]
        )

    def scores(self, terms: Iterable[str]) -> Floats:
        """What rank-bm25 scores each document for these terms, added up in the same order."""
        at, starts, total = self._places, self._starts, np.zeros(self.size)
        for term in terms:
            place = at.get(term)
            if place is None:
                continue
            start, end = starts[place], starts[place + 1]
            if COMMON * (end - start) > self.size:
                total += self._row(place)
            else:
                np.add.at(total, self._where[start:end], self._weights[start:end])
        return total

    def _row(self, place: int) -> Floats:
        """What a common word adds to every document: to add all takes less than to pick some."""
        row = self._rows.get(place)
        if row is None:
            start, end = self._starts[place], self._starts[place + 1]
            row = np.zeros(self.size)
            row[self._where[start:end]] = self._weights[start:end]
            self._rows[place] = row
        return row

    def holding(self, term: str, documents: NDArray[np.intp]) -> list[bool]:
        """Which of the documents hold a term."""
        holders = self.holders(term)
        if not len(holders):
            return [False] * len(documents)
        near = holders.take(holders.searchsorted(documents), mode="clip")
        held: list[bool] = (near == documents).tolist()
        return held

    def most(self, terms: Iterable[str]) -> float:
        """What a document could score at most, words that are nowhere counted as the rarest."""
        rarest = log(self.size + 0.5) - log(0.5)
        at, worth = self._places, self._worth
        return sum([worth[at[term]] if term in at else rarest for term in terms]) * (BM25_K1 + 1)
