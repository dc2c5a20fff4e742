"""Embedding vectors of the installation's tools: computed in a worker, stored in the database.

A vector belongs to a text, so reverting a change costs no encoding. A background thread loads the
model; until then, and without one, search falls back to keywords and says so in its note.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
from django.conf import settings
from numpy.typing import NDArray

from catalog import cache
from catalog.models import Revision, Vector
from catalog.search.embeddings import encoder as sentence_encoder
from catalog.search.embeddings.encoder import (
    MODEL,
    Encoder,
    ModelNotInstalled,
    ModelUnavailable,
)
from catalog.search.embeddings.matrix import Matrix
from catalog.search.index import make_searchable

logger = logging.getLogger(__name__)

CHUNK = 500  # rows per query
BATCH = 64  # texts encoded per write
LOOKUP_INTERVAL = 1.0  # seconds between lookups of missing vectors
MAX_CACHED_QUERIES = 2_048
MAX_UNUSED_VECTORS = 1_000  # kept for texts no longer in use, so that reverting a change is free
T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """Progress of the embeddings; `state` is ready, working or unavailable."""

    total: int
    embedded: int
    state: str
    reason: str = ""


class Model:
    """The encoder of this process, loaded once and outside of requests."""

    def __init__(self) -> None:
        self.reason = "the embedding model is being loaded"
        self.encoder: Encoder | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.load_attempted = False
        self._not_installed = False

    def load(self) -> Encoder | None:
        """Load the encoder and wait. Return None without a model; `reason` says why."""
        with self._lock:
            if not self.load_attempted:
                try:
                    if not settings.EMBEDDINGS:
                        raise ModelUnavailable("embeddings are disabled in this installation")
                    self.encoder = sentence_encoder.load(settings.MODELS_DIR)
                    self.reason = ""
                except ModelUnavailable as error:
                    level = logging.WARNING if settings.EMBEDDINGS else logging.INFO
                    logger.log(
                        level, "Embeddings unavailable, searching by keywords only: %s", error
                    )
                    self.reason = str(error)
                    self._not_installed = isinstance(error, ModelNotInstalled)
                self.load_attempted = True
            return self.encoder

    def load_in_background(self) -> None:
        """Start a thread that loads the encoder, unless it is loaded or loading."""
        if not settings.EMBEDDINGS:
            self.load()  # sets `reason` immediately
        if self._not_installed and sentence_encoder.find_weights(settings.MODELS_DIR):
            self._not_installed = self.load_attempted = False  # installed since
            self._thread = None
        if not self.load_attempted and self._thread is None:
            self._thread = threading.Thread(target=self.load, name="model", daemon=True)
            self._thread.start()


model = Model()


def model_offer() -> str:
    """Return how to install the model, if it is missing and wanted."""
    if not settings.EMBEDDINGS or sentence_encoder.find_weights(settings.MODELS_DIR):
        return ""
    return (
        "Search uses keywords only. To search by meaning too, run: toolcrib install-model "
        "(80 MB, no restart needed)."
    )


class InstalledVectors(Matrix):
    """Vector source of the installation's indexes, backed by the database."""

    def __init__(self) -> None:
        super().__init__()
        self._lookup = threading.Lock()
        self._last_lookup: dict[str, float] = {}

    @property
    def reason(self) -> str:
        model.load_in_background()
        return model.reason

    def encode(self, texts: Sequence[str]) -> sentence_encoder.Vectors:
        return _encode_queries(tuple(texts))

    def rows(self, keys: Sequence[str]) -> NDArray[np.intp]:
        self._fetch(self.missing(keys))
        return super().rows(keys)

    def _fetch(self, missing: Sequence[str]) -> None:
        now = time.monotonic()
        due = [
            key
            for key in missing
            if now - self._last_lookup.get(key, -LOOKUP_INTERVAL) >= LOOKUP_INTERVAL
        ]
        if not due or not self._lookup.acquire(blocking=False):
            return
        try:
            self._last_lookup = dict.fromkeys(missing, now)
            for chunk in _chunks(due):
                self.add(read(chunk))
        finally:
            self._lookup.release()


installation_vectors = InstalledVectors()


@lru_cache(maxsize=MAX_CACHED_QUERIES)
def _encode_queries(texts: tuple[str, ...]) -> sentence_encoder.Vectors:
    encoder = model.load()
    if encoder is None:
        raise ModelUnavailable(model.reason)
    return encoder.encode_queries(texts)


def text_encoder() -> Callable[[Sequence[str]], sentence_encoder.Vectors] | None:
    """Return a function that encodes texts for comparison; None without a model. Waits for it."""
    return _encode_texts if model.load() is not None else None


def _encode_texts(texts: Sequence[str]) -> sentence_encoder.Vectors:
    return np.concatenate([_encode_queries((text,)) for text in texts])


def read(keys: Sequence[str]) -> dict[str, sentence_encoder.Vectors]:
    rows = Vector.objects.filter(model=MODEL, text_sha256__in=keys)
    return {
        key: np.frombuffer(data, np.float16).astype(np.float32)
        for key, data in rows.values_list("text_sha256", "data")
    }


def passages() -> dict[str, str]:
    """Return the texts to encode, of the tools available to agents, by key."""
    catalog = cache.current()
    offered = {pk: tool for pk, tool in catalog.tools.items() if tool.offered}
    items = [make_searchable(tool, ()) for tool in offered.values()]
    texts = {item.key: item.passage for item in items}
    for by_tool in catalog.agent_phrases.values():
        items += [
            make_searchable(offered[pk], (), phrases)
            for pk, phrases in by_tool.items()
            if pk in offered
        ]
    return texts | {item.phrase_key: item.phrase_passage for item in items if item.phrases}


def missing(keys: Iterable[str]) -> list[str]:
    unknown = installation_vectors.missing(keys)
    stored: set[str] = set()
    for chunk in _chunks(unknown):
        rows = Vector.objects.filter(model=MODEL, text_sha256__in=chunk)
        stored.update(rows.values_list("text_sha256", flat=True))
    return [key for key in unknown if key not in stored]


_embedding = threading.Lock()
_embedded_revision = -1  # the last revision whose vectors are complete


def is_due() -> bool:
    if model.load_attempted:
        model.load_in_background()  # if it was installed since
    available = settings.EMBEDDINGS and not unavailable_reason()
    return available and Revision.current() != _embedded_revision


def embed_missing() -> int:
    """Encode texts without a vector and return their number. For a worker.

    Runs once at a time per process. Processes that run concurrently share the work: each takes
    the remaining texts in a random order.
    """
    global _embedded_revision
    if not is_due() or not _embedding.acquire(blocking=False):
        return 0
    try:
        revision = Revision.current()
        count = _embed(passages())
        if not unavailable_reason():
            _embedded_revision = revision
        return count
    finally:
        _embedding.release()


def _embed(texts: Mapping[str, str]) -> int:
    pending = missing(texts)
    encoder = model.load() if pending else None
    if encoder is None:
        return 0
    count = 0
    random.shuffle(pending)
    while pending:
        batch, pending = pending[:BATCH], pending[BATCH:]
        vectors = encoder.encode_documents([texts[key] for key in batch])
        Vector.objects.bulk_create(
            [
                Vector(model=MODEL, text_sha256=key, data=vector.astype(np.float16).tobytes())
                for key, vector in zip(batch, vectors, strict=True)
            ],
            ignore_conflicts=True,
        )
        count += len(batch)
        if pending:
            pending = missing(pending)
    encoder.release_document_session()
    _delete_unused(texts)
    logger.info("Encoded %d texts for search", count)
    return count


def _delete_unused(texts: Mapping[str, str]) -> None:
    stored = Vector.objects.filter(model=MODEL).count()
    if stored <= 2 * len(texts) + MAX_UNUSED_VECTORS:
        return
    for chunk in _chunks(list(Vector.objects.values_list("pk", "model", "text_sha256"))):
        unused = [pk for pk, name, key in chunk if name != MODEL or key not in texts]
        Vector.objects.filter(pk__in=unused).delete()


def progress() -> Progress:
    """Count the texts available to agents, and those that have a vector."""
    texts = passages()
    stored = set(Vector.objects.filter(model=MODEL).values_list("text_sha256", flat=True))
    embedded = len(texts.keys() & stored)
    reason = unavailable_reason()
    if reason:
        return Progress(len(texts), embedded, "unavailable", reason)
    return Progress(len(texts), embedded, "ready" if embedded == len(texts) else "working")


def unavailable_reason() -> str:
    """Return why there are no embeddings; empty if there are, or while the model is loading."""
    if not settings.EMBEDDINGS:
        model.load()  # sets `reason` immediately
    return model.reason if model.load_attempted else ""


def _chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), CHUNK):
        yield items[start : start + CHUNK]
