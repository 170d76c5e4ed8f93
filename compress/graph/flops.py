"""Counts of a model's multiply-accumulates and of a graph's weights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from compress.common.forward import plain_attention

aten = torch.ops.aten
UNCOUNTED: dict[Any, Callable[..., int]] = {
    # Two FLOPs for each product of a matrix or vector with a vector.
    **dict.fromkeys((aten.mv, aten.dot, aten.vdot), lambda left, _, **__: 2 * prod(left)),
    # A matrix product that is added to a tensor, over all batches.
    **dict.fromkeys(
        (aten.addmv, aten.addbmm),
        lambda _, left, right, **__: 2 * prod(left) * (right[-1] if len(right) > 1 else 1),
    ),
    # nn.Bilinear, (rows, in), (out, in, in₂), (rows, in₂): weights times one input, then the other.
    aten._trilinear: lambda _, weight, right, *__, **___: (
        2 * prod(right[:-1]) * (prod(weight) + weight[0] * right[-1])
    ),
}
"""Operators that torch's FLOP counter (2.13) does not know → a function that counts theirs."""


def count_macs(module: Any, inputs: Sequence[torch.Tensor]) -> int:
    """Count the multiply-accumulates (convolutions, products, attention) for one sample."""
    # torch's counter fails on a parameter that is passed to a submodule and requires gradients.
    trainable = [p for p in module.parameters() if p.requires_grad]
    # The counter sees neither fused attention nor oneDNN's LSTM: run them as matrix products.
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        with (
            _without_compiling(),
            plain_attention(),
            FlopCounterMode(display=False, custom_mapping=UNCOUNTED) as counter,
            torch.backends.mkldnn.flags(enabled=False, allow_tf32=None),
            sdpa_kernel(SDPBackend.MATH),
            torch.no_grad(),
        ):
            module(*inputs)
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
    return int(counter.get_total_flops()) // 2 // len(inputs[0])


@contextmanager
def _without_compiling() -> Iterator[None]:
    """Disable Dynamo in a block, or reset it afterwards where the block imports it."""
    # `torch.cond` compiles itself. Under a dispatch mode such as the counter it cannot, and Dynamo
    # caches that failure for its code: the model would then fail for as long as the process lives.
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
            count = max((_weights_per_element(node, reader) for reader in node.users), default=0)
            per_element[name] = max(count, per_element.get(name, 0))
    return sum(int(tensors[name].numel()) * count for name, count in per_element.items())


def _weights_per_element(tensor: Any, reader: Any) -> int:
    """Return how many weights an operator reads from each element of an integer tensor."""
    value, operator = tensor.meta["val"], str(reader.target)
    if value.is_floating_point() or reader.args[0] is not tensor or value.dim() < 1:
        return 0
    if "bitwise_and" in operator:
        return 2  # two of four bits in a byte
    is_table = "embedding" in operator and value.shape[-1] > 1
    if is_table:
        readers = [str(node.target) for node in reader.users]
        if any("bitwise_and" in name for name in readers):
            return 2
        # Zero points of groups are looked up too, and get an axis for the elements of a group.
        is_table = not any("unsqueeze" in name for name in readers)
    is_packed = "view" in operator and value.dtype is torch.uint8
    return int("dequantize" in operator or is_table or is_packed)
