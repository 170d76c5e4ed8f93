"""Which kernels onnxruntime runs for the heavy operators of a file, and what each multiplies."""

from __future__ import annotations

import json
from collections import Counter
from math import prod
from typing import TYPE_CHECKING, Any

from compress.export.onnx.graph import UNCOUNTED, sizes, stored

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import onnx_ir as ir

RECURRENT = {"LSTM", "GRU", "RNN", "DynamicQuantizeLSTM"}
CONVOLUTIONS = {"Conv", "FusedConv", "ConvTranspose", "ConvInteger", "QLinearConv"}
FLOAT_KERNELS = {
    *("Conv", "FusedConv", "Gemm", "FusedGemm", "MatMul", "FusedMatMul"),
    *("LSTM", "GRU", "RNN"),
}
INTEGER_KERNELS = {
    *("QGemm", "QAttention", "ConvInteger"),
    *("MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM"),
}
PACKED_MATMUL = "MatMulNBits"
COUNTED = {
    *CONVOLUTIONS,
    *RECURRENT,
    *("Gemm", "FusedGemm", "QGemm", "MatMul", "FusedMatMul", "QLinearMatMul", PACKED_MATMUL),
    *("MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"),
}
UNCOUNTED_KERNELS = UNCOUNTED | {"QAttention", "MultiHeadAttention", "GroupQueryAttention"}
KERNEL_TIME = "_kernel_time"
"""What follows an operator's name in the event of its kernel's call."""
ACTIVATIONS_IN_8_BITS = 4
"""Value of `accuracy_level` with which MatMulNBits rounds its input, and multiplies integers."""


def count_kernels(optimized: ir.Model) -> dict[str, dict[str, int]]:
    """Return how many integer and float kernels the heavy operators of a rewritten model are."""
    kernels = Counter(node.op_type for node in optimized.graph)
    return {
        "integer_kernels": {k: kernels[k] for k in sorted(kernels) if is_integer_kernel(k)},
        "float_kernels": {k: kernels[k] for k in sorted(FLOAT_KERNELS & kernels.keys())},
    }


def is_integer_kernel(operator: str) -> bool:
    """Whether the kernel of an operator that onnxruntime rewrote to computes in integers."""
    return operator in INTEGER_KERNELS or operator.startswith("QLinear")


def integer_macs_share(optimized: ir.Model, profile: Path) -> float | None:
    """Return the share of the multiply-accumulates of a profiled call that integer kernels did.

    None where an operator's products cannot be counted, or nothing is multiplied.

    Args:
        optimized: the model as onnxruntime rewrote it.
        profile: what its profiler wrote of one call.
    """
    events = [e for e in json.loads(profile.read_text("utf-8")) if is_kernel_call(e)]
    # Both are in onnxruntime's topological order; names are missing or made up.
    operators = [event["args"]["op_name"] for event in events]
    if [node.op_type for node in optimized.graph] != operators:
        return None
    macs: Counter[bool] = Counter()
    for node, event in zip(optimized.graph, events, strict=True):
        if node.op_type in UNCOUNTED_KERNELS:
            return None
        count, in_integers = kernel_macs(node, event["args"])
        macs[in_integers] += count
    return macs[True] / macs.total() if macs.total() else None


def is_kernel_call(event: Mapping[str, Any]) -> bool:
    """Whether an event of a profile is the call of a kernel."""
    return event["cat"] == "Node" and str(event["name"]).endswith(KERNEL_TIME)


def kernel_macs(node: ir.Node, arguments: Mapping[str, Any]) -> tuple[int, bool]:
    """Return a kernel's multiply-accumulates, and whether it does them in integers.

    Args:
        node: an operator as onnxruntime rewrote it.
        arguments: of the event of its call in a profile.
    """
    in_integers = is_integer_kernel(node.op_type)
    if node.op_type not in COUNTED:
        return 0, in_integers
    inputs, outputs = (
        [tuple(shape) for tensor in arguments[key] for shape in tensor.values()]
        for key in ("input_type_shape", "output_type_shape")
    )
    weights = [sizes(tensor) if (tensor := stored(value)) else () for value in node.inputs]
    if node.op_type in RECURRENT:
        # Sequence and batch come first in either layout; each step reads both weights once.
        size = sum(map(prod, weights[1:3]))
        return prod(inputs[0][:2]) * size, in_integers
    if node.op_type in CONVOLUTIONS:
        # The profile leaves out weights that onnxruntime packed.
        weight = weights[3 if node.op_type == "QLinearConv" else 1] or inputs[1]
        read = inputs[0] if node.op_type == "ConvTranspose" else outputs[0]
        return prod(read) * prod(weight[1:]), in_integers
    if node.op_type == PACKED_MATMUL:
        in_integers = node.attributes.get_int("accuracy_level") == ACTIVATIONS_IN_8_BITS
    reduced = inputs[0][-2 if node.attributes.get_int("transA") else -1]
    return prod(outputs[0]) * reduced, in_integers
