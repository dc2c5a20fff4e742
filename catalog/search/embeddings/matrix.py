"""In-memory matrix of embedding vectors, keyed by text and shared by all indexes. Pure."""

import threading
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from catalog.search.embeddings.encoder import WIDTH, Encoder, Vectors

INITIAL_ROWS = 1_024
# From this share of rows on, multiplying the whole matrix is faster than selecting rows first.
FULL_PRODUCT_SHARE = 0.3


class Matrix:
    """Append-only matrix: readers need no lock."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._vectors: Vectors = np.zeros((INITIAL_ROWS, WIDTH), np.float32)
        self._lock = threading.Lock()

    def missing(self, keys: Iterable[str]) -> list[str]:
        return [key for key in keys if key not in self._rows]

    def add(self, vectors: Mapping[str, Vectors]) -> None:
        with self._lock:
            for key, vector in vectors.items():
                if key in self._rows:
                    continue
                row = len(self._rows)
                if row == len(self._vectors):
                    grown = np.zeros((2 * row, WIDTH), np.float32)
                    grown[:row] = self._vectors
                    self._vectors = grown
                self._vectors[row] = vector
                self._rows[key] = row  # last, so that a reader never sees an empty row

    def rows(self, keys: Sequence[str]) -> NDArray[np.intp]:
        """Return the row of each key's vector; -1 if it is missing."""
        return np.array([self._rows.get(key, -1) for key in keys], np.intp)

    def products(self, rows: NDArray[np.intp], vectors: Vectors) -> NDArray[np.float32]:
        """Return the cosine of each row with each vector; NaN for missing rows."""
        count, matrix = len(self._rows), self._vectors
        if not count:
            return np.full((len(rows), len(vectors)), np.nan, np.float32)
        if len(rows) >= FULL_PRODUCT_SHARE * count:
            cosines = (matrix[:count] @ vectors.T)[rows]
        else:
            cosines = matrix[rows] @ vectors.T
        cosines[rows < 0] = np.nan
        return cosines


class DetachedMatrix(Matrix):
    """Vectors outside the database: encoded on creation, for evaluation and benchmarks."""

    reason = ""

    def __init__(self, encoder: Encoder, passages: Mapping[str, str]) -> None:
        super().__init__()
        self.encode = encoder.encode_queries
        keys = list(passages)
        for start in range(0, len(keys), INITIAL_ROWS):
            chunk = keys[start : start + INITIAL_ROWS]
            encoded = encoder.encode_documents([passages[key] for key in chunk])
            self.add(dict(zip(chunk, encoded, strict=True)))
