"""The first layer of an ONNX file that another device computes otherwise, and why."""

from __future__ import annotations

import math
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir
import torch

from compress.common.tensor_difference import relative_error
from compress.export.onnx.proto_io import read
from compress.export.onnx.session import optimize, unoptimized_predictor

if TYPE_CHECKING:
    from compress.common.forward import Tensors
    from compress.export.common.remote_device import RemoteDevice

ROUNDING = 1e-5
"""What is less, as a share of a layer's norm, is the order in which float32 products are added."""
SATURATED = (
    "sums of 8-bit products are cut off at 16 bits, unless a session sets "
    "session.x64quantprecision to 1, as this toolkit and its servers do"
)
REWRITTEN = (
    "none alone: onnxruntime rewrites the graph for the processor, and chooses other kernels"
)


def first_difference(file: Path, device: RemoteDevice, inputs: Tensors, threads: int) -> str:
    """Name the first layer with other outputs on a device than here, and what explains them.

    Layers are those of the graph as onnxruntime fuses it for any processor, run there and here.
    """
    model = optimize(read(file, weights=True), "extended")
    known = {value.name for value in model.graph.outputs}
    nodes = [node for node in model.graph if node.op_type != "Constant"]
    watched = [v for n in nodes for v in n.outputs if v.name and v.name not in known]
    model.graph.outputs.extend(watched)
    names = [value.name for value in model.graph.outputs]
    with tempfile.TemporaryDirectory(prefix="compress-layers-") as folder, ExitStack() as stack:
        traced = Path(folder) / "layers.onnx"
        ir.save(model, traced, external_data="layers.data")  # the checker wants types of outputs
        here = unoptimized_predictor(traced, threads)
        files = sorted(traced.parent.iterdir(), key=lambda path: path != traced)
        there = stack.enter_context(device.open_files(files, threads, optimized=False))
        pairs = dict(zip(names, zip(here(*inputs), there(*inputs), strict=True), strict=True))
    smallest = ""
    for node, name in ((n, v.name) for n in nodes for v in n.outputs if v.name in pairs):
        own, other = pairs[name]
        if torch.allclose(own, other, rtol=0, atol=0, equal_nan=True):
            continue
        reason, is_rounding = _reason(node, own, other)
        found = f"{name} ({node.op_type}): {reason}"
        if not is_rounding:
            return found
        smallest = smallest or found
    return smallest or REWRITTEN


def _reason(node: ir.Node, here: torch.Tensor, there: torch.Tensor) -> tuple[str, bool]:
    """Return how far a layer's outputs are apart and why, and whether only roundings differ."""
    error, kernel = relative_error(here, there), node.op_type
    is_quantized = "Quantize" in kernel or kernel.startswith(("QLinear", "QGemm", "QAttention"))
    if is_quantized and not here.is_floating_point():
        steps = int((here.long() - there.long()).abs().max())
        if steps > 1:
            return f"{steps} quantization steps apart: {SATURATED}", False
        return "one quantization step apart: a value between two steps is rounded otherwise", True
    if error <= ROUNDING:
        return f"{error:.2g} of its norm: products are added in another order", True
    why = "a kernel of other precision"
    if "accuracy_level" in node.attributes:
        level = node.attributes["accuracy_level"].as_int()
        why = f"`accuracy_level` {level} lets kernels round activations, or not"
    elif "Integer" in kernel or is_quantized:
        why = SATURATED
    elif not math.isfinite(error):
        return "infinite or NaN on one of them: its numbers are too large for a kernel there", False
    return f"{error:.2g} of its norm: {why}", False
