"""Operators between dequantize and quantize, turned into torch's own integer kernels.

What onnxruntime fuses, torch's x86 kernels compute as well: convolutions, products, additions, and
what only moves values. Everything else stays float between a quantize and a dequantize.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.ao.quantization.fx._decomposed  # registers quantize_per_tensor and its kin

from compress.common.errors import StageFailed
from export.common.targets import no_such_integers
from export.torchscript.rnn import lower_recurrence_

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import fx

aten = torch.ops.aten
decomposed = torch.ops.quantized_decomposed
kernels = torch.ops.quantized
QUANTIZE = decomposed.quantize_per_tensor.default
DEQUANTIZE = decomposed.dequantize_per_tensor.default
DEQUANTIZE_CHANNELS = decomposed.dequantize_per_channel.default
DEQUANTIZE_AT_RUN_TIME = decomposed.dequantize_per_tensor.tensor
CONVOLUTIONS: dict[Any, tuple[Any, Any, int]] = {
    getattr(aten, f"conv{rank}d").default: (
        getattr(kernels, f"conv{rank}d_prepack"),
        getattr(kernels, f"conv{rank}d").new if rank > 1 else kernels.conv1d.default,
        rank,
    )
    for rank in (1, 2, 3)
}
PADDED = {aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding}
LINEAR = aten.linear.default
MOVES = {
    aten.max_pool2d.default,
    aten.reshape.default,
    aten.permute.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.clone.default,
}
LIMITS = {
    aten.relu.default: (0.0, float("inf")),
    aten.relu6.default: (0.0, 6.0),
}


@dataclass(frozen=True)
class Grid:
    """The numbers that a static quantization can hold."""

    scale: float
    zero_point: int

    @classmethod
    def of(cls, node: Any) -> Grid:
        """Return the grid of a quantize or dequantize.

        Raises:
            StageFailed: torch's kernels know no such integers.
        """
        _, scale, zero_point, low, high, dtype = node.args
        if (low, high, dtype) != (0, 255, torch.uint8):
            found = f"{str(dtype).removeprefix('torch.')} from {low} to {high}"
            raise StageFailed(no_such_integers(found))
        return cls(float(scale), int(zero_point))

    def within(self, low: float, high: float) -> bool:
        """Whether rounding to the grid clips to limits by itself, to half a step."""
        slack = self.scale / 2
        smallest, largest = -self.zero_point * self.scale, (255 - self.zero_point) * self.scale
        return smallest >= low - slack and largest <= high + slack


def lower_(graph: fx.GraphModule) -> None:
    """Replace quantize and dequantize, and what lies between them, by torch's kernels, in place.

    Raises:
        StageFailed: the integers are of a kind that torch has no kernels for.
    """
    lowering = Lowering(graph)
    recur_ = partial(lower_recurrence_, lowering=lowering)
    passes: dict[Any, Callable[[fx.Node], None]] = {
        QUANTIZE: lowering.fuse_,
        LINEAR: lowering.multiply_,
        aten.lstm.input: recur_,
        aten.gru.input: recur_,
        DEQUANTIZE: lowering.dequantize_,
    }
    for target, rewrite_ in passes.items():
        for node in [n for n in graph.graph.nodes if n.target is target]:
            rewrite_(node)
    graph.graph.eliminate_dead_code()
    for node in list(graph.graph.nodes):
        if node.target is DEQUANTIZE_CHANNELS:
            lowering.dequantize_channels_(node)
        elif str(node.target).startswith("quantized_decomposed"):
            raise StageFailed(f"TorchScript has no form of {node.target}; use export_onnx")
    graph.graph.eliminate_dead_code()


class Lowering:
    """Rewrites one graph."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self.graph = graph
        self.integers: dict[fx.Node, fx.Node] = {}
        """A quantize of the given graph → what now makes its integers."""
        self.packed = 0

    def fuse_(self, quantize: fx.Node) -> None:
        """Compute a result's integers from its operands' integers, where a kernel does."""
        grid = Grid.of(quantize)
        head = _before_clamp(quantize, grid)
        with self.inserting_before(quantize):
            made = self._fused(head, grid)
            if made is None:
                source = quantize.args[0]
                made = self.call(
                    aten.quantize_per_tensor.default,
                    (source, grid.scale, grid.zero_point, torch.quint8),
                )
        self.integers[quantize] = made

    def _fused(self, head: Any, grid: Grid) -> fx.Node | None:
        if head is None:
            return None
        operands = [self._integers_of(operand) for operand in head.args[:2]]
        if head.target in MOVES and operands[0] is not None:
            same = Grid.of(head.args[0]) == grid
            return self.call(head.target, (operands[0], *head.args[1:])) if same else None
        if head.target is aten.add.Tensor and None not in operands and not head.kwargs:
            return self.call(kernels.add.default, (*operands, grid.scale, grid.zero_point))
        if operands and operands[0] is not None:
            packed, kernel = self._packed(head)
            if packed is not None:
                return self.call(kernel, (operands[0], packed, grid.scale, grid.zero_point))
        return None

    def _integers_of(self, operand: Any) -> fx.Node | None:
        """Return the integers that an operand is made of, or None."""
        target = getattr(operand, "target", None)
        return self.integers.get(operand.args[0]) if target is DEQUANTIZE else None

    def multiply_(self, product: Any) -> None:
        """Turn a product with a float result into one integer kernel."""
        source = product.args[0]
        static = self._integers_of(source) is not None
        if not (static or source.target is DEQUANTIZE_AT_RUN_TIME):
            return
        with self.inserting_before(product):
            packed, _ = self._packed(product)
            if packed is None:
                return
            rounded = source.args[0]
            if static:
                grid = Grid.of(source)
                kernel = kernels.linear_with_input_q_dq_qweight_dq_output_fp32.default
                made = self.call(kernel, (rounded.args[0], grid.scale, grid.zero_point, packed))
            else:
                made = self.call(kernels.linear_dynamic.default, (rounded.args[0], packed))
        product.replace_all_uses_with(made)

    def dequantize_(self, node: Any) -> None:
        """Turn integers into floats as TorchScript knows it."""
        with self.inserting_before(node):
            made = self.call(aten.dequantize.self, (self.integers[node.args[0]],))
        node.replace_all_uses_with(made)

    def dequantize_channels_(self, node: Any) -> None:
        """Turn a weight that no integer kernel reads into floats."""
        weight, scale, zero, axis, *_ = node.args
        shape = [1] * self.value(weight).dim()
        shape[axis] = -1
        with self.inserting_before(node):
            floats = self.call(aten.to.dtype, (weight, torch.float32))
            zeros, scales = (self.call(aten.view.default, (p, shape)) for p in (zero, scale))
            centred = self.call(aten.sub.Tensor, (floats, zeros))
            made = self.call(aten.mul.Tensor, (centred, scales))
        node.replace_all_uses_with(made)

    def _packed(self, head: Any) -> tuple[fx.Node | None, Any]:
        """Return an operator's weight and bias as its kernel takes them, and the kernel."""
        arguments = _spread(head)
        if arguments is None or not self.is_rounded(head.args[1]):
            return None, None
        weight = self.quantized_weight(head.args[1])
        bias = self._bias(head.args[2] if len(head.args) > 2 else None)
        if head.target is LINEAR:
            return self.held(kernels.linear_prepack(weight, bias)), kernels.linear.default
        target = getattr(aten, str(head.target).split(".")[1]).default
        prepack, kernel, _ = CONVOLUTIONS[target]
        return self.held(prepack(weight, bias, *arguments)), kernel

    def quantized_weight(self, node: Any) -> torch.Tensor:
        """Return a dequantized weight as torch's kernels take it: integers and their scales."""
        weight, scale, zero, axis, *_ = node.args
        return torch._make_per_channel_quantized_tensor(
            self.value(weight), self.value(scale).double(), self.value(zero).long(), axis
        )

    def _bias(self, node: Any) -> torch.Tensor | None:
        if node is None:
            return None
        if node.target is DEQUANTIZE_CHANNELS:
            integers, scale = (self.value(part) for part in node.args[:2])
            return integers.float() * scale.float()
        return self.value(node).detach()

    def held(self, packed: Any) -> fx.Node:
        """Return a node that gives packed weights, which the graph then holds."""
        name = f"_packed_{self.packed}"
        self.packed += 1
        setattr(self.graph, name, packed)
        return self.graph.graph.create_node("get_attr", name)

    def value(self, node: Any) -> torch.Tensor:
        """Return the tensor that a node reads from the graph."""
        owner, _, name = str(node.target).rpartition(".")
        value: torch.Tensor = getattr(self.graph.get_submodule(owner), name)
        return value

    def is_rounded(self, node: Any) -> bool:
        """Whether a weight is held in integers, a scale for each channel."""
        return node.target is DEQUANTIZE_CHANNELS

    def inserting_before(self, node: fx.Node) -> Any:
        """Put what is made within a `with` block before a node."""
        return self.graph.graph.inserting_before(node)

    def call(
        self, target: Any, arguments: Sequence[Any], named: dict[str, Any] | None = None
    ) -> fx.Node:
        """Return a new call of an operator."""
        return self.graph.graph.call_function(target, tuple(arguments), named)


def _before_clamp(quantize: Any, grid: Grid) -> fx.Node | None:
    """Return the operator whose result is rounded; a clamp that rounding does anyway is skipped."""
    node: Any = quantize.args[0]
    limits = LIMITS.get(node.target)
    if node.target in (aten.hardtanh.default, aten.clamp.default):
        low, high = (*node.args[1:], None, None)[:2]
        low = -1.0 if low is None and node.target is aten.hardtanh.default else low
        high = 1.0 if high is None and node.target is aten.hardtanh.default else high
        limits = (
            float("-inf") if low is None else float(low),
            float("inf") if high is None else float(high),
        )
    if limits is None:
        return node if len(node.users) == 1 or node.target in MOVES else None
    if not grid.within(*limits) or len(node.users) > 1:
        return None
    head: fx.Node = node.args[0]
    return head if len(head.users) == 1 else None


def _spread(head: Any) -> tuple[Any, ...] | None:
    """Return a convolution's stride, padding, dilation and groups, one number for each axis."""
    if head.target is LINEAR:
        return ()
    if head.target not in CONVOLUTIONS and head.target not in PADDED:
        return None
    rank = int(str(head.target).split("conv")[1][0])
    given = (*head.args[3:], *[None] * 4)[:4]
    stride, dilation = ([1] * rank if v is None else _each(v, rank) for v in (given[0], given[2]))
    padding: Any = given[1]
    if isinstance(padding, str):
        kernel = head.args[1].args[0].meta["val"].shape[2:]
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        if padding == "same" and any(t % 2 for t in total):
            return None
        padding = [t // 2 if padding == "same" else 0 for t in total]
    padding = [0] * rank if padding is None else _each(padding, rank)
    return stride, padding, dilation, given[3] or 1


def _each(values: Any, rank: int) -> list[int]:
    listed = list(values)
    return listed * rank if len(listed) == 1 else listed
