"""Vectors in memory by the key of their text, as one matrix that all indexes share. Pure."""

import threading
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from catalog.search.embeddings.encoder import WIDTH, Encoder, Vectors

FIRST = 1_024
# From this share on, all products at once cost less than picking rows first.
MOST_OF = 0.3


class Matrix:
    """Rows are only ever added, so a reader needs no lock."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._numbers: Vectors = np.zeros((FIRST, WIDTH), np.float32)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._rows)

    def missing(self, keys: Iterable[str]) -> list[str]:
        return [key for key in keys if key not in self._rows]

    def add(self, vectors: Mapping[str, Vectors]) -> None:
        with self._lock:
            for key, vector in vectors.items():
                if key in self._rows:
                    continue
                row = len(self._rows)
                if row == len(self._numbers):
                    grown = np.zeros((2 * row, WIDTH), np.float32)
                    grown[:row] = self._numbers
                    self._numbers = grown
                self._numbers[row] = vector
                self._rows[key] = row  # last: whoever finds the row finds its numbers

    def rows(self, keys: Sequence[str]) -> NDArray[np.intp]:
        """Where each key's vector stands; -1 for one that is still to come."""
        return np.array([self._rows.get(key, -1) for key in keys], np.intp)

    def products(self, rows: NDArray[np.intp], vectors: Vectors) -> NDArray[np.float32]:
        """How near each row is to each vector; NaN where the row is still to come."""
        count, numbers = len(self._rows), self._numbers
        if not count:
            return np.full((len(rows), len(vectors)), np.nan, np.float32)
        if len(rows) >= MOST_OF * count:
            near = (numbers[:count] @ vectors.T)[rows]
        else:
            near = numbers[rows] @ vectors.T
        near[rows < 0] = np.nan
        return near


class DetachedMatrix:
    """Vectors of no installation: encoded here and now, and gone with the process."""

    reason = ""

    def __init__(self, encoder: Encoder, passages: Mapping[str, str]) -> None:
        self.matrix = Matrix()
        self.encode = encoder.encode_queries
        self.rows = self.matrix.rows
        self.products = self.matrix.products
        keys = list(passages)
        for start in range(0, len(keys), FIRST):
            some = keys[start : start + FIRST]
            made = encoder.encode_documents([passages[key] for key in some])
            self.matrix.add(dict(zip(some, made, strict=True)))
