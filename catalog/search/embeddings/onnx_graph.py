"""Build the ONNX graph of all-MiniLM-L6-v2 from its weights, to run it without torch. Pure.

Token ids and a mask in, one vector per token out; the caller does the pooling. `quantize` writes
the int8 copy for queries, which takes half the time with the same measured results. Runs as a
program: building takes seconds and holds the GIL, so no process that serves requests imports it.
"""

import contextlib
import json
import mmap
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Weights = dict[str, NDArray[np.float32]]

LAYERS = 6
HEADS = 12
WIDTH = 384
EPSILON = 1e-12
OPSET = 20


def read_weights(path: Path) -> Weights:
    """Read the F32 tensors of a safetensors file: header length, JSON header, data."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        start = 8 + length
        tensors = {}
        for name, entry in header.items():
            if entry.get("dtype") == "F32":
                low, high = entry["data_offsets"]
                numbers = np.frombuffer(raw[start + low : start + high], np.float32)
                tensors[name] = numbers.reshape(entry["shape"])
    return tensors


def build(weights: Weights) -> onnx.ModelProto:
    graph = _Graph()
    graph.embed(weights)
    state = "embedded"
    for layer in range(LAYERS):
        state = graph.layer(state, weights, f"encoder.layer.{layer}")
    graph.add("Identity", [state], "states")
    shape = ["batch", "length"]
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            "all-MiniLM-L6-v2",
            [helper.make_tensor_value_info(n, TensorProto.INT64, shape) for n in ("ids", "mask")],
            [helper.make_tensor_value_info("states", TensorProto.FLOAT, [*shape, WIDTH])],
            graph.constants,
        ),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=9,
    )
    onnx.checker.check_model(model)
    return model


def quantize(source: Path, target: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(source, target, weight_type=QuantType.QInt8, per_channel=True)


class _Graph:
    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def add(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def constant(self, name: str, value: Any) -> str:
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def embed(self, weights: Weights) -> None:
        """Add the token, position and type embeddings, and the additive attention mask."""
        position = weights["embeddings.position_embeddings.weight"]
        kind = weights["embeddings.token_type_embeddings.weight"][0]  # a single text: type 0
        words = self.constant("words", weights["embeddings.word_embeddings.weight"])
        self.add("Gather", [words, "ids"], "word")
        self.add("Shape", ["ids"], "length", start=1, end=2)
        self.constant("zero", np.array([0]))
        self.add(
            "Slice", [self.constant("positions", position + kind), "zero", "length"], "position"
        )
        self.add("Add", ["word", "position"], "sum")
        self.normalize("sum", weights, "embeddings.LayerNorm", "embedded")
        self.add("Unsqueeze", ["mask", self.constant("axes", np.array([1, 2]))], "mask4")
        self.add("Cast", ["mask4"], "present", to=TensorProto.FLOAT)
        self.add("Sub", [self.constant("one", np.float32(1)), "present"], "absent")
        self.add("Mul", ["absent", self.constant("far", np.float32(-1e4))], "bias")
        self.constant("split", np.array([0, 0, HEADS, WIDTH // HEADS]))
        self.constant("join", np.array([0, 0, WIDTH]))
        self.constant("scale", np.float32((WIDTH / HEADS) ** -0.5))

    def layer(self, state: str, weights: Weights, at: str) -> str:
        attended = self.attention(state, weights, at)
        self.add("Add", [state, attended], f"{at}.attended")
        state = self.normalize(
            f"{at}.attended", weights, f"{at}.attention.output.LayerNorm", f"{at}.middle"
        )
        wide = self.linear(state, weights, f"{at}.intermediate.dense")
        self.add("Gelu", [wide], f"{at}.bent")
        narrow = self.linear(f"{at}.bent", weights, f"{at}.output.dense")
        self.add("Add", [state, narrow], f"{at}.summed")
        return self.normalize(f"{at}.summed", weights, f"{at}.output.LayerNorm", f"{at}.out")

    def attention(self, state: str, weights: Weights, at: str) -> str:
        heads = {}
        for part, order in (
            ("query", (0, 2, 1, 3)),
            ("key", (0, 2, 3, 1)),
            ("value", (0, 2, 1, 3)),
        ):
            flat = self.linear(state, weights, f"{at}.attention.self.{part}")
            self.add("Reshape", [flat, "split"], f"{at}.{part}.heads")
            heads[part] = self.add(
                "Transpose", [f"{at}.{part}.heads"], f"{at}.{part}", perm=list(order)
            )
        self.add("MatMul", [heads["query"], heads["key"]], f"{at}.products")
        self.add("Mul", [f"{at}.products", "scale"], f"{at}.scaled")
        self.add("Add", [f"{at}.scaled", "bias"], f"{at}.masked")
        self.add("Softmax", [f"{at}.masked"], f"{at}.shares", axis=-1)
        self.add("MatMul", [f"{at}.shares", heads["value"]], f"{at}.mixed")
        self.add("Transpose", [f"{at}.mixed"], f"{at}.rows", perm=[0, 2, 1, 3])
        self.add("Reshape", [f"{at}.rows", "join"], f"{at}.joined")
        return self.linear(f"{at}.joined", weights, f"{at}.attention.output.dense")

    def linear(self, state: str, weights: Weights, at: str) -> str:
        matrix = self.constant(f"{at}.weight", weights[f"{at}.weight"].T)
        bias = self.constant(f"{at}.bias", weights[f"{at}.bias"])
        self.add("MatMul", [state, matrix], f"{at}.product")
        return self.add("Add", [f"{at}.product", bias], f"{at}.sum")

    def normalize(self, state: str, weights: Weights, at: str, output: str) -> str:
        scale = self.constant(f"{at}.weight", weights[f"{at}.weight"])
        bias = self.constant(f"{at}.bias", weights[f"{at}.bias"])
        return self.add("LayerNormalization", [state, scale, bias], output, epsilon=EPSILON)


def main(weights: Path, target: Path) -> None:
    """Build both graphs and move them to the target folder atomically."""
    model = build(read_weights(weights))
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="building-") as folder:
        full_precision = Path(folder) / "documents.onnx"
        onnx.save(model, full_precision)
        quantize(full_precision, Path(folder) / "queries.onnx")
        complete = Path(folder) / "complete"
        complete.mkdir()
        for name in ("documents.onnx", "queries.onnx"):
            (Path(folder) / name).rename(complete / name)
        with contextlib.suppress(OSError):  # another process was faster
            complete.rename(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
