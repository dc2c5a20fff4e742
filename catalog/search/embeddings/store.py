"""The vectors of the installation's tools: made in a worker, kept in the database, by text.

A vector belongs to a text and not to a tool, so a changed tool costs one text, and a change back
costs nothing. The model is loaded by a thread, never by a request; until then, and where there is
none, search goes on by words and says so.
"""

import logging
import random
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
from django.conf import settings
from numpy.typing import NDArray

from catalog import cache
from catalog.models import Revision, Vector
from catalog.search.embeddings import encoder as sentence_encoder
from catalog.search.embeddings.encoder import MODEL, Encoder, ModelUnavailable
from catalog.search.embeddings.matrix import Matrix
from catalog.search.index import Searchable, make_searchable

logger = logging.getLogger(__name__)

CHUNK = 500  # rows read at once
BATCH = 64  # texts encoded between two writes
LOOK_AGAIN = 1.0  # seconds between two looks for vectors that are still to come
KEPT_QUERIES = 2_048
SPARE = 1_000  # vectors of texts that nothing holds now: a change back costs nothing
T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """How far the vectors are, for people: ready, working or unavailable and why."""

    total: int
    embedded: int
    state: str
    reason: str = ""


class Model:
    """The encoder of this process, loaded once, by whoever asks first off the request path."""

    def __init__(self) -> None:
        self.reason = "the embedding model is being loaded"
        self.encoder: Encoder | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.tried = False

    def load(self) -> Encoder | None:
        """Load it now, and wait. None where there is no model; `reason` says why."""
        with self._lock:
            if not self.tried:
                try:
                    if not settings.EMBEDDINGS:
                        raise ModelUnavailable("embeddings are turned off in this installation")
                    self.encoder = sentence_encoder.load(settings.MODELS_DIR)
                    self.reason = ""
                except ModelUnavailable as error:
                    level = logging.WARNING if settings.EMBEDDINGS else logging.INFO
                    logger.log(level, "Search goes by words only: %s", error)
                    self.reason = str(error)
                self.tried = True
            return self.encoder

    def load_in_background(self) -> None:
        """Have a thread load it, where nobody has."""
        if not settings.EMBEDDINGS:
            self.load()  # finds out at once that there is none
        if not self.tried and self._thread is None:
            self._thread = threading.Thread(target=self.load, name="model", daemon=True)
            self._thread.start()


model = Model()


class InstalledVectors:
    """The vectors of this installation, as an index asks for them."""

    def __init__(self) -> None:
        self.matrix = Matrix()
        self._lock = threading.Lock()
        self._looked: dict[str, float] = {}

    @property
    def reason(self) -> str:
        model.load_in_background()
        return model.reason

    def encode(self, texts: Sequence[str]) -> sentence_encoder.Vectors:
        return _encoded(tuple(texts))

    def rows(self, keys: Sequence[str]) -> NDArray[np.intp]:
        """Where the vectors stand; those not here yet are looked for in the database."""
        self._fetch(self.matrix.missing(keys))
        return self.matrix.rows(keys)

    def products(
        self, rows: NDArray[np.intp], vectors: sentence_encoder.Vectors
    ) -> NDArray[np.float32]:
        return self.matrix.products(rows, vectors)

    def _fetch(self, missing: Sequence[str]) -> None:
        now = time.monotonic()
        due = [key for key in missing if now - self._looked.get(key, -LOOK_AGAIN) >= LOOK_AGAIN]
        if not due or not self._lock.acquire(blocking=False):
            return
        try:
            self._looked = dict.fromkeys(missing, now)
            for some in _chunks(due):
                self.matrix.add(read(some))
        finally:
            self._lock.release()


installed = InstalledVectors()


@lru_cache(maxsize=KEPT_QUERIES)
def _encoded(texts: tuple[str, ...]) -> sentence_encoder.Vectors:
    encoder = model.load()
    if encoder is None:
        raise ModelUnavailable(model.reason)
    return encoder.encode_queries(texts)


def read(keys: Sequence[str]) -> dict[str, sentence_encoder.Vectors]:
    rows = Vector.objects.filter(model=MODEL, text_sha256__in=keys)
    return {
        key: np.frombuffer(data, np.float16).astype(np.float32)
        for key, data in rows.values_list("text_sha256", "data")
    }


def searchable_tools() -> dict[str, Searchable]:
    """The tools agents may see, by the key of their passage."""
    offered = (item for item in cache.current().tools.values() if item.offered)
    return {tool.key: tool for tool in (make_searchable(item, ()) for item in offered)}


def missing(keys: Iterable[str]) -> list[str]:
    """Those that have no vector yet."""
    unknown = installed.matrix.missing(keys)
    have: set[str] = set()
    for some in _chunks(unknown):
        kept = Vector.objects.filter(model=MODEL, text_sha256__in=some)
        have.update(kept.values_list("text_sha256", flat=True))
    return [key for key in unknown if key not in have]


_embedding = threading.Lock()
_done_at = -1  # the revision whose vectors are all there


def is_due() -> bool:
    """Whether the catalog changed since this process last saw all vectors there."""
    return settings.EMBEDDINGS and not unavailable_reason() and Revision.current() != _done_at


def embed_missing() -> int:
    """Encode what has no vector yet, and return how many texts that were. For a worker.

    One at a time in a process. Another process may be at it too: each takes what is left in an
    order of its own, so that they share the work.
    """
    global _done_at
    if not is_due() or not _embedding.acquire(blocking=False):
        return 0
    try:
        revision = Revision.current()
        done = _embed(searchable_tools())
        if not unavailable_reason():
            _done_at = revision
        return done
    finally:
        _embedding.release()


def _embed(tools: Mapping[str, Searchable]) -> int:
    todo = missing(tools)
    encoder = model.load() if todo else None
    if encoder is None:
        return 0
    done = 0
    random.shuffle(todo)
    while todo:
        some, todo = todo[:BATCH], todo[BATCH:]
        made = encoder.encode_documents([tools[key].passage for key in some])
        Vector.objects.bulk_create(
            [
                Vector(model=MODEL, text_sha256=key, data=vector.astype(np.float16).tobytes())
                for key, vector in zip(some, made, strict=True)
            ],
            ignore_conflicts=True,
        )
        done += len(some)
        if todo:
            todo = missing(todo)
    encoder.rest()
    _forget_old(tools)
    logger.info("Encoded %d texts for search", done)
    return done


def _forget_old(tools: Mapping[str, Searchable]) -> None:
    kept = Vector.objects.filter(model=MODEL).count()
    if kept <= 2 * len(tools) + SPARE:
        return
    for some in _chunks(list(Vector.objects.values_list("pk", "model", "text_sha256"))):
        old = [pk for pk, name, key in some if name != MODEL or key not in tools]
        Vector.objects.filter(pk__in=old).delete()


def progress() -> Progress:
    """How many of the texts that agents may find have their vectors."""
    tools = searchable_tools()
    known = set(Vector.objects.filter(model=MODEL).values_list("text_sha256", flat=True))
    done = len(tools.keys() & known)
    reason = unavailable_reason()
    if reason:
        return Progress(len(tools), done, "unavailable", reason)
    return Progress(len(tools), done, "ready" if done == len(tools) else "working")


def unavailable_reason() -> str:
    """Why there are no embeddings here; nothing where there are, or may soon be."""
    if not settings.EMBEDDINGS:
        model.load()  # finds out at once that there is none
    return model.reason if model.load_attempted else ""


def _chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), CHUNK):
        yield items[start : start + CHUNK]
