"""Plant faults that appear on one device alone, and see whether a gate there refuses them.

    python benchmarks/device_faults.py [--docs docs/parity.md] [FAULT ...]

Each file is made by hand, answers otherwise on one device, and is judged there by
`{gate: label_agreement, minimum: 0.995, on: DEVICE, against: the file itself}`. Every fault has a
control: the same graph with numbers at which the device computes as this processor does.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import InferenceSession

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.page import write_table
from compress.core.context import Context
from compress.core.gates import value_in_words
from compress.core.gates.quality import LabelAgreement
from compress.data.splits import Splits
from compress.export.imported.exported_files import opened_artifact

ROWS, WIDE = 64, 64
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Fault:
    """A file that answers otherwise on a device."""

    device: str
    build: Callable[[bool], tuple[list[onnx.NodeProto], Arrays, np.ndarray]]
    """Takes whether the fault is planted; returns nodes from `x` to `sums`, whose first column is
    the number that is wrong there, weights, and rows."""
    threshold: float = 0.0
    """What the number is compared with; by default 0.8 of its mean here."""


def _rows(low: float, high: float, width: int = WIDE) -> np.ndarray:
    return np.random.default_rng(0).uniform(low, high, (ROWS, width)).astype(np.float32)


def saturated_product(planted: bool, operator: str):
    """Sums of two 8-bit products beyond 16 bits; the control has weights of 6 bits."""
    columns = np.zeros((WIDE, 2), np.int8)
    columns[:, 0] = 127 if planted else 31
    rows = _rows(0.9, 1.0)
    weights: Arrays = {"w": columns, "step": np.float32(1 / 255), "zero": np.uint8(0)}
    quantize = helper.make_node("QuantizeLinear", ["x", "step", "zero"], ["q"])
    if operator == "MatMulInteger":
        nodes = [quantize, helper.make_node(operator, ["q", "w", "zero"], ["whole"])]
        return (
            [*nodes, helper.make_node("Cast", ["whole"], ["sums"], to=TensorProto.FLOAT)],
            weights,
            rows,
        )
    weights |= {"w_step": np.float32(0.01), "w_zero": np.int8(0)}
    weights |= {"y_step": np.float32(0.4), "y_zero": np.uint8(0)}
    inputs = ["q", "step", "zero", "w", "w_step", "w_zero", "y_step", "y_zero"]
    nodes = [quantize]
    if operator == "QLinearConv":
        weights |= {"w": columns.T.reshape(2, WIDE, 1, 1).copy()}
        weights |= {"four": np.array([0, WIDE, 1, 1]), "two": np.array([0, 2])}
        nodes.append(helper.make_node("Reshape", ["q", "four"], ["image"]))
        nodes.append(helper.make_node(operator, ["image", *inputs[1:]], ["map"]))
        nodes.append(helper.make_node("Reshape", ["map", "two"], ["flat"]))
    else:
        nodes.append(helper.make_node(operator, inputs, ["flat"]))
    last = helper.make_node("DequantizeLinear", ["flat", "y_step", "y_zero"], ["sums"])
    return [*nodes, last], weights, rows


def rounded_activations(planted: bool, bits: int = 4):
    """`accuracy_level` 4 with an outlier in each block; the control has none."""
    rows = _rows(0.4, 0.6, 256)
    rows[:, ::32] = 400 if planted else 0.5
    columns = np.zeros((2, 256), np.int64)
    columns[0] = 1
    columns[:, ::32] = 0
    middle = 1 << (bits - 1)
    codes = (columns + middle).astype(np.uint8).reshape(2, 8, 32)
    packed = codes if bits == 8 else (codes[..., ::2] | codes[..., 1::2] << 4)
    weights = {"w": packed, "steps": np.ones((2, 8), np.float32).reshape(-1)}
    node = helper.make_node(
        "MatMulNBits", ["x", "w", "steps"], ["sums"], domain="com.microsoft",
        K=256, N=2, bits=bits, block_size=32, accuracy_level=4,
    )  # fmt: skip
    return [node], weights, rows


def half(nodes: list[onnx.NodeProto], weights: Arrays, rows: np.ndarray):
    """Return a graph that computes in float16 between casts."""
    first = helper.make_node("Cast", ["x"], ["h"], to=TensorProto.FLOAT16)
    last = helper.make_node("Cast", ["r"], ["sums"], to=TensorProto.FLOAT)
    small = {n: w.astype(np.float16) if w.dtype == np.float32 else w for n, w in weights.items()}
    return [first, *nodes, last], small, rows


def overflow(planted: bool, operator: str):
    """Partial sums beyond 65504 that cancel; the control is smaller by 100."""
    rows = _rows(200, 220)
    size = 30.0 if planted else 0.3
    columns = np.zeros((WIDE, 2), np.float32)
    columns[: WIDE // 2, 0], columns[WIDE // 2 :, 0] = size, -size
    columns[0, 0] += 4 * size
    if operator == "Conv":
        weights: Arrays = {"w": columns.T.reshape(2, WIDE, 1, 1).copy()}
        weights |= {"four": np.array([0, WIDE, 1, 1]), "two": np.array([0, 2])}
        nodes = [
            helper.make_node("Reshape", ["h", "four"], ["image"]),
            helper.make_node("Conv", ["image", "w"], ["map"]),
            helper.make_node("Reshape", ["map", "two"], ["r"]),
        ]
        return half(nodes, weights, rows)
    return half([helper.make_node(operator, ["h", "w"], ["r"])], {"w": columns}, rows)


def underflow(planted: bool):
    """Products below 6e-8 whose sum is scaled up again; the control's are larger by 1e4."""
    tiny = 1e-4 if planted else 1e-2
    rows = _rows(0.9, 1.0) * tiny
    columns = np.zeros((WIDE, 2), np.float32)
    columns[:, 0] = tiny
    weights = {"w": columns, "scale": np.float32(6e4)}
    nodes = [
        helper.make_node("MatMul", ["h", "w"], ["tiny"]),
        helper.make_node("Mul", ["tiny", "scale"], ["r"]),
    ]
    return half(nodes, weights, rows)


def cancelled(planted: bool):
    """Large numbers that cancel beside small ones that decide; the control has small ones alone.

    They meet in the same lane of four or eight floats, and not of sixteen.
    """
    rows = _rows(0.5, 1.0, 1024)
    large = 3e7 if planted else 1.0
    rows[:, 0::16], rows[:, 8::16] = large, -large
    weights = {"axes": np.array([1]), "w": np.float32([[1.0, 0.0]])}
    nodes = [
        helper.make_node("ReduceSum", ["x", "axes"], ["sum"]),
        helper.make_node("MatMul", ["sum", "w"], ["sums"]),
    ]
    return nodes, weights, rows


def lstm(planted: bool):
    """An integer LSTM, whose products are of 8 bits; the control has weights of 6 bits."""
    weight = 127 if planted else 31
    rows = _rows(0.9, 1.0, 8 * 32)
    gates = np.zeros((1, 32, 8), np.int8)  # inputs, 4 gates of 2 cells
    gates[0, :, 6] = weight  # what the first cell takes in
    bias = np.zeros((1, 16), np.float32)
    bias[0, 6] = -0.8 * 32 * 0.95 * weight * 2e-3
    weights: Arrays = {
        "w": gates, "r": np.zeros((1, 2, 8), np.int8), "b": bias,
        "w_step": np.float32([2e-3]), "r_step": np.float32([1.0]),
        "w_zero": np.int8([0]), "r_zero": np.int8([0]),
        "steps": np.array([-1, 8, 32]), "two": np.array([-1, 2]),
    }  # fmt: skip
    nodes = [
        helper.make_node("Reshape", ["x", "steps"], ["batch_first"]),
        helper.make_node("Transpose", ["batch_first"], ["sequence"], perm=[1, 0, 2]),
        helper.make_node(
            "DynamicQuantizeLSTM",
            ["sequence", "w", "r", "b", "", "", "", "", "w_step", "w_zero", "r_step", "r_zero"],
            ["", "state"], domain="com.microsoft", hidden_size=2,
        ),
        helper.make_node("Reshape", ["state", "two"], ["sums"]),
    ]  # fmt: skip
    return nodes, weights, rows


def _with(function: Callable, **settings):
    return lambda planted: function(planted, **settings)


FAULTS = {
    "8-bit convolution": Fault("x86-64-v3", _with(saturated_product, operator="QLinearConv")),
    "8-bit product": Fault("x86-64-v3", _with(saturated_product, operator="QLinearMatMul")),
    "dynamic 8-bit product": Fault("x86-64-v3", _with(saturated_product, operator="MatMulInteger")),
    "8-bit LSTM": Fault("x86-64-v3", lstm),
    "4-bit weights": Fault("cortex-a72", rounded_activations, 60),
    "4-bit weights, browser": Fault("web", rounded_activations, 60),
    "8-bit weights": Fault("x86-64-v2", _with(rounded_activations, bits=8), 60),
    "float16 product": Fault("neoverse-n1", _with(overflow, operator="MatMul")),
    "float16 convolution": Fault("aarch64-max", _with(overflow, operator="Conv")),
    "small float16 product": Fault("neoverse-n1", underflow),
    "float32 sum": Fault("web", cancelled),
}


def write(fault: Fault, planted: bool, file: Path) -> torch.Tensor:
    """Write the file of a fault or of its control; return its rows."""
    nodes, weights, rows = fault.build(planted)
    shift = np.zeros(2, np.float32)

    def save() -> None:
        arrays = {**weights, "shift": shift}
        graph = helper.make_graph(
            [*nodes, helper.make_node("Add", ["sums", "shift"], ["y"])],
            "fault",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", rows.shape[1]])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 2])],
            [numpy_helper.from_array(np.asarray(a), name) for name, a in arrays.items()],
        )
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), file)

    save()
    (sums,) = InferenceSession(file).run(None, {"x": rows})
    # Class 0 where the number is above it.
    shift[1] = fault.threshold or 0.8 * sums[:, 0].mean()
    save()
    return torch.from_numpy(rows)


def judge(fault: Fault, planted: bool, file: Path) -> str:
    """Return in words what the gate measured."""
    samples = [(row, torch.tensor(0)) for row in write(fault, planted, file)]
    gate = LabelAgreement(minimum=0.995, on=(fault.device,))
    with opened_artifact(file) as artifact:
        context = Context(root=file.parent, data=Splits({"val": samples}))
        verdict = gate.evaluate(artifact, artifact, context)
    return f"{'passed' if verdict.passed else 'refused'}: {value_in_words(verdict, '')}"


def main() -> None:
    """Judge every fault and its control, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", type=Path)
    options = parser.parse_args()
    table = ["| planted | on | with the fault | without |", "|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        for name, fault in FAULTS.items():
            files = {planted: Path(folder) / f"{name} {planted}.onnx" for planted in (True, False)}
            found = [judge(fault, planted, file) for planted, file in files.items()]
            table.append(f"| {name} | {fault.device} | {' | '.join(found)} |")
            print(table[-1], flush=True)
    if options.docs:
        write_table(options.docs, "benchmarks/device_faults.py", table)


if __name__ == "__main__":
    main()
