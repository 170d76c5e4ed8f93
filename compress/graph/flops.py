"""Counting what a model holds and does: weights, multiply-accumulates."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def _product_flops(left: Sequence[int], right: Sequence[int], **_: Any) -> int:
    """Count the operations of a matrix, or a vector, with a vector: two for each product."""
    return 2 * prod(left)


def _added_product_flops(
    _added: Sequence[int], left: Sequence[int], right: Sequence[int], **_: Any
) -> int:
    """Count the operations of a product that is added to something: all of its batches' rows."""
    return 2 * prod(left) * (right[-1] if len(right) > 1 else 1)


def _bilinear_flops(
    _left: Sequence[int], weight: Sequence[int], right: Sequence[int], *_: Any, **__: Any
) -> int:
    """Count the operations of nn.Bilinear: weights by one input, then by the other.

    Shapes are (rows, in), (out, in, in₂) and (rows, in₂).
    """
    rows, outputs, width = prod(right[:-1]), weight[0], right[-1]
    return 2 * rows * (prod(weight) + outputs * width)


aten = torch.ops.aten
UNCOUNTED: dict[Any, Callable[..., int]] = {
    **dict.fromkeys((aten.mv, aten.dot, aten.vdot), _product_flops),
    **dict.fromkeys((aten.addmv, aten.addbmm), _added_product_flops),
    aten._trilinear: _bilinear_flops,
}
"""Products that torch's counter (2.13) leaves out → how many operations they are."""


def count_macs(module: Any, inputs: Sequence[torch.Tensor]) -> int:
    """Count the multiply-accumulates (convolutions, products, attention) for one sample."""
    # torch's counter fails on a parameter that is handed to a submodule and asks for gradients.
    learning = [p for p in module.parameters() if p.requires_grad]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    # The counter sees neither fused attention nor oneDNN's LSTM: run them as products.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        for parameter in learning:
            parameter.requires_grad_(False)
        with (
            _uncompiled(),
            FlopCounterMode(display=False, custom_mapping=UNCOUNTED) as counter,
            torch.backends.mkldnn.flags(enabled=False, allow_tf32=None),
            sdpa_kernel(SDPBackend.MATH),
            torch.no_grad(),
        ):
            module(*inputs)
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)
        torch.backends.mha.set_fastpath_enabled(fast_path)
    return int(counter.get_total_flops()) // 2 // len(inputs[0])


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Let nothing be compiled in a block, or else forget it.

    `torch.cond` compiles itself. Under a mode that sees operators it cannot, which Dynamo remembers
    of its code: the model would then fail for as long as the process lives.
    """
    if "torch._dynamo" in sys.modules:
        with torch.compiler.set_stance("force_eager"):
            yield
        return
    try:
        yield
    finally:
        if "torch._dynamo" in sys.modules:  # imported in the block: nothing else was compiled yet
            torch.compiler.reset()


def count_graph_weights(program: torch.export.ExportedProgram) -> int:
    """Count a graph's weights: parameters, and the integer tensors that quantization made of them.

    Scales and zero points (and BatchNorm statistics) are not weights.
    """
    inputs = program.graph_signature
    by_placeholder = {
        **inputs.inputs_to_parameters,
        **inputs.inputs_to_buffers,
        **inputs.inputs_to_lifted_tensor_constants,
    }
    tensors = {**program.state_dict, **program.constants}
    per_element = {name: 1 for name in inputs.parameters if name in tensors}
    for node in program.graph.nodes:
        name = by_placeholder.get(node.name, str(node.target))
        if node.op in ("get_attr", "placeholder") and name in tensors:
            held = max((_weights_per_element(node, reader) for reader in node.users), default=0)
            per_element[name] = max(held, per_element.get(name, 0))
    return sum(int(tensors[name].numel()) * count for name, count in per_element.items())


def _weights_per_element(tensor: Any, reader: Any) -> int:
    """Return how many weights an operator finds in each element of an integer tensor."""
    value, operator = tensor.meta["val"], str(reader.target)
    if value.is_floating_point() or reader.args[0] is not tensor or value.dim() < 1:
        return 0
    if "bitwise_and" in operator:
        return 2  # two of four bits in a byte
    is_table = "embedding" in operator and value.shape[-1] > 1
    is_packed = "view" in operator and value.dtype is torch.uint8
    return int("dequantize" in operator or is_table or is_packed)
