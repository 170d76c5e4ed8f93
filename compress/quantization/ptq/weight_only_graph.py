"""Weights of a few bits in a traced graph, turned back into floats where they are used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from compress.common.errors import StageFailed
from compress.graph.torch_export import export_program
from compress.quantization.algorithms.awq import scale_by_activations_
from compress.quantization.algorithms.shared_input_layers import drop_copies_
from compress.quantization.algorithms.weight_rounding import (
    Rounded,
    gptq,
    hqq,
    packed,
    round_to_nearest,
)
from compress.quantization.numeric_debug.activation_tap import tap_activations
from compress.quantization.pt2e.graph_constants import value_of
from compress.quantization.pt2e.module_names import is_excluded, module_of
from compress.quantization.pt2e.quantizer import (
    EMBEDDING,
    LINEAR,
    is_constant,
    is_float,
)
from compress.quantization.ptq.calibrate import drop_unread_tensors_, traced

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.export import ExportedProgram

    from compress.common.signature import Signature
    from compress.data.batch import Batch
    from compress.quantization.config.dtype_scheme import WeightMethod

aten = torch.ops.aten
LOOKED_UP_BITS = 8
"""Tables are read by row, one byte for each number."""


@dataclass
class WeightQuantizer:
    """Rounds the weights of linear layers and tables; knows afterwards which it did."""

    method: WeightMethod
    bits: int
    group_size: int
    embeddings: bool
    exclude: tuple[str, ...] = ()
    quantized: dict[str, int] = field(default_factory=dict)
    """Number of quantized operators by kind."""
    left: dict[str, str] = field(default_factory=dict)
    """Module whose weight stayed float → why."""
    rescaled: set[str] = field(default_factory=set)
    """Modules whose results `awq` gave other scales."""
    scaled: dict[str, float] = field(default_factory=dict)
    """First module of layers that read one tensor → power of its size that it was divided by."""
    _made: dict[Any, fx.Node] = field(default_factory=dict)
    """Weight → the node that turns its integers back, which all layers that share it read."""

    def rewrite_(self, graph: fx.GraphModule, moments: dict[str, torch.Tensor]) -> None:
        """Replace weights by integers, in place.

        Args:
            graph: a traced module.
            moments: tensor that layers read → its second moment, for GPTQ.
        """
        for node in list(graph.graph.nodes):
            if node.target is LINEAR and self._takes(graph, node, node.args[1]):
                self._round_linear_(graph, node, moments.get(_read_by(node)))
            elif node.target is EMBEDDING and self._takes_table(node):
                self._round_table_(graph, node)
        graph.graph.eliminate_dead_code()
        graph.recompile()

    def scale_(self, graph: fx.GraphModule, moments: dict[str, torch.Tensor]) -> None:
        """Scale what layers read so that their weights round better, in place."""
        self.scaled, self.rescaled = scale_by_activations_(
            graph, moments, self.bits, self.group_size, self.exclude
        )

    def _takes(self, graph: fx.GraphModule, node: fx.Node, weight: object) -> bool:
        if not is_constant(weight) or not is_float(weight) or is_excluded(node, self.exclude):
            return False
        inputs = weight.meta["val"].shape[1]
        if inputs % self.group_size:
            name = module_of(node) or str(weight.target)
            self.left[name] = f"{inputs} inputs are no multiple of group_size {self.group_size}"
            return False
        return True

    def _takes_table(self, node: fx.Node) -> bool:
        held = self.embeddings and is_constant(node.args[0]) and is_float(node.args[0])
        return held and not is_excluded(node, self.exclude)

    def _round_linear_(
        self, graph: fx.GraphModule, node: fx.Node, moment_II: torch.Tensor | None
    ) -> None:
        weight: Any = node.args[1]
        if weight.target not in self._made:
            with graph.graph.inserting_before(node):
                rounded = self._rounded(value_of(graph, weight), moment_II)
                self._made[weight.target] = _as_floats(graph, str(weight.target), rounded)
        node.replace_input_with(weight, self._made[weight.target])
        self._count("linear")

    def _rounded(self, weight_OI: torch.Tensor, moment_II: torch.Tensor | None) -> Rounded:
        if self.method == "gptq" and moment_II is not None:
            return gptq(weight_OI, self.bits, self.group_size, moment_II)
        method = hqq if self.method == "hqq" else round_to_nearest
        return method(weight_OI, self.bits, self.group_size)

    def _round_table_(self, graph: fx.GraphModule, node: fx.Node) -> None:
        table: Any = node.args[0]
        table_VD = value_of(graph, table)
        rounded = round_to_nearest(table_VD, LOOKED_UP_BITS, table_VD.shape[1])
        with graph.graph.inserting_before(node):
            call = graph.graph.call_function
            held = _buffers(graph, f"{table.target}_rows", rounded.integers_OI, rounded)
            integers, scale, zero = (call(EMBEDDING, (part, node.args[1])) for part in held)
            floats = call(aten.to.dtype, (integers, torch.float32))
            centred = call(aten.sub.Tensor, (floats, call(aten.to.dtype, (zero, torch.float32))))
            product = call(aten.mul.Tensor, (centred, scale))
            node.replace_all_uses_with(product, propagate_meta=True)
        graph.graph.erase_node(node)
        self._count("embedding")

    def _count(self, kind: str) -> None:
        self.quantized[kind] = self.quantized.get(kind, 0) + 1


def quantize_weights(
    module: torch.nn.Module,
    signature: Signature,
    quantizer: WeightQuantizer,
    batches: Iterable[Batch],
) -> ExportedProgram:
    """Return the module as a graph that holds its weights in a few bits.

    Args:
        module: a module in eval mode; it is not changed.
        signature: its interface.
        quantizer: which weights are rounded, and how.
        batches: calibration inputs, for GPTQ and AWQ; one batch at a time is held in memory.

    Raises:
        StageFailed: nothing can be quantized.
    """
    graph = traced(module, signature)
    drop_copies_(graph)
    moments = second_moments(graph, batches) if quantizer.method in ("gptq", "awq") else {}
    if quantizer.method == "awq":
        quantizer.scale_(graph, moments)
    quantizer.rewrite_(graph, moments)
    if not quantizer.quantized:
        reasons = "; ".join(f"{name}: {why}" for name, why in quantizer.left.items())
        raise StageFailed(
            f"no weight could be quantized ({reasons or 'there is no linear layer'}); expected a "
            "float32 linear layer or an embedding that `exclude` does not name"
        )
    drop_unread_tensors_(graph)
    return export_program(graph, signature)


def second_moments(graph: fx.GraphModule, batches: Iterable[Batch]) -> dict[str, torch.Tensor]:
    """Return tensor that linear layers read → mean of the products of its channels, in float64."""
    sums: dict[str, torch.Tensor] = {}
    rows: dict[str, int] = {}

    def hear(linear: fx.Node, features: torch.Tensor, _: torch.Tensor) -> None:
        name, rows_NI = _read_by(linear), features.flatten(0, -2).double()
        sums[name] = sums.get(name, 0) + rows_NI.T @ rows_NI
        rows[name] = rows.get(name, 0) + len(rows_NI)

    linears = [node for node in graph.graph.nodes if node.target is LINEAR]
    firsts = {_read_by(linear): linear for linear in reversed(linears)}
    tap_activations(graph, batches, firsts.values(), hear)
    return {name: total / rows[name] for name, total in sums.items()}


def _read_by(linear: fx.Node) -> str:
    source: Any = linear.args[0]
    return str(source.name)


def _as_floats(graph: fx.GraphModule, name: str, rounded: Rounded) -> fx.Node:
    """Insert what turns packed integers back into a weight, and return it."""
    call = graph.graph.call_function
    outputs, groups = rounded.scale_OG.shape
    bytes_held = packed(rounded.integers_OI, rounded.bits)
    held, scale, zero = _buffers(graph, name, bytes_held, rounded)
    integers = held
    if rounded.bits == 4:
        low = call(aten.bitwise_and.Scalar, (held, 15))
        high = call(aten.bitwise_right_shift.Tensor_Scalar, (held, 4))
        integers = call(aten.stack.default, ([low, high], -1))
    in_groups = call(aten.view.default, (integers, [outputs, groups, -1]))
    floats = call(aten.to.dtype, (in_groups, torch.float32))
    zeros = call(aten.unsqueeze.default, (call(aten.to.dtype, (zero, torch.float32)), -1))
    scales = call(aten.unsqueeze.default, (scale, -1))
    weight = call(aten.mul.Tensor, (call(aten.sub.Tensor, (floats, zeros)), scales))
    return call(aten.view.default, (weight, [outputs, -1]))


def _buffers(
    graph: fx.GraphModule, name: str, integers: torch.Tensor, rounded: Rounded
) -> tuple[fx.Node, fx.Node, fx.Node]:
    parts = {"packed": integers, "scale": rounded.scale_OG, "zero_point": rounded.zero_OG}
    stem = name.replace(".", "_")
    for part, value in parts.items():
        graph.register_buffer(f"{stem}_{part}", value.contiguous())
    first, second, third = (graph.graph.get_attr(f"{stem}_{part}") for part in parts)
    return first, second, third
