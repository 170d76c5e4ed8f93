"""Weight-only quantization: integer weights of a few bits, dequantized where they are used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from compress.artifacts.streaming.packed_model import LARGEST, SMALLEST_RANGE
from compress.common.errors import StageFailed
from compress.graph.torch_export import export_program
from compress.quantization.algorithms.input_scaling import awq_, bypass_copies_
from compress.quantization.algorithms.weight_rounding import (
    QuantizedWeight,
    gptq,
    hqq,
    in_parts,
    pack,
    round_to_nearest,
)
from compress.quantization.pt2e.graph_capture import (
    capture,
    is_excluded,
    module_of,
    remove_unread_tensors_,
    tap_activations,
    value_of,
)
from compress.quantization.pt2e.quantizer import EMBEDDING, LINEAR, is_constant, is_float

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from compress.common.signature import Signature
    from compress.data.batch import Batch
    from compress.quantization.config.dtype_scheme import WeightMethod

aten = torch.ops.aten
TABLE_GROUPS = (64, 32, 16)
"""Numbers of a 4-bit table's row that share a scale: the largest of these that divides the row."""


@dataclass
class WeightQuantizer:
    """Quantizes the weights of linear layers, experts and embeddings; records which."""

    method: WeightMethod
    bits: int
    group_size: int
    embeddings: bool
    exclude: tuple[str, ...] = ()
    embedding_bits: int = 8
    round_activations: bool = False
    """Whether linear layers read activations rounded to 8 bits, by groups of `group_size`."""
    symmetric: bool = False
    """Whether zero points lie in the middle of the integers."""
    after_weight: Callable[[], None] | None = None
    """Called after each weight, such as to return memory to the system."""
    quantized: dict[str, int] = field(default_factory=dict)
    left_float: dict[str, str] = field(default_factory=dict)
    """Module whose weight stayed float → why."""
    rescaled: set[str] = field(default_factory=set)
    """Modules whose outputs `awq` gave other scales."""
    scaled: dict[str, float] = field(default_factory=dict)
    """First module of layers that share an input → AWQ's exponent for it."""
    _dequantized: dict[Any, fx.Node] = field(default_factory=dict)
    """Weight → the node that dequantizes it, which all layers that share it read."""
    _rounded: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Activation → the same rounded, which all layers that share it read."""

    def quantize_(
        self,
        graph: fx.GraphModule,
        second_moments: dict[str, torch.Tensor],
        shared: Collection[str] = (),
    ) -> None:
        """Replace a captured graph's float weights by integers and their dequantization.

        GPTQ and AWQ need the second moments of the tensors that layers read, by name. AWQ leaves
        modules as they are whose weights are `shared` with a part that is not in the graph.
        """
        self._dequantized, self._rounded = {}, {}
        if self.method == "awq":
            kept = (*self.exclude, *shared)
            sizes = (self.bits, self.group_size)
            scaled, rescaled = awq_(graph, second_moments, *sizes, kept, symmetric=self.symmetric)
            self.scaled |= scaled
            self.rescaled |= rescaled
        for node in list(graph.graph.nodes):
            if is_excluded(node, self.exclude):
                continue
            if node.target is LINEAR:
                moment_II = second_moments.get(node.all_input_nodes[0].name)
                self._quantize_linear_(graph, node, moment_II)
            elif node.target is EMBEDDING and self.embeddings:
                self._quantize_embedding_(graph, node)
            elif node.target is aten.index.Tensor and is_constant(node.args[0]):
                self._quantize_experts_(graph, node)
            else:
                continue
            if self.after_weight is not None:
                self.after_weight()
        graph.graph.eliminate_dead_code()
        graph.recompile()

    def _quantize_linear_(
        self, graph: fx.GraphModule, node: fx.Node, moment_II: torch.Tensor | None
    ) -> None:
        weight = node.args[1]
        if not is_constant(weight) or not is_float(weight):
            return
        inputs = weight.meta["val"].shape[1]
        if inputs % self.group_size:
            reason = f"{inputs} inputs are not a multiple of group_size {self.group_size}"
            self.left_float[module_of(node) or str(weight.target)] = reason
            return
        if weight.target not in self._dequantized:
            weight_OI = value_of(graph, weight)
            sizes = (self.bits, self.group_size)
            if self.method == "gptq" and moment_II is not None:
                quantized = gptq(weight_OI, *sizes, moment_II, symmetric=self.symmetric)
            else:  # AWQ's scales are in the weight already
                quantized = self._rounded_alone(weight_OI, sizes)
            with graph.graph.inserting_before(node):
                dequantized = _dequantize(graph, str(weight.target), quantized)
            self._dequantized[weight.target] = dequantized
        node.replace_input_with(weight, self._dequantized[weight.target])
        features = node.args[0]
        if self.round_activations and isinstance(features, fx.Node):
            if features not in self._rounded:
                with graph.graph.inserting_before(node):
                    self._rounded[features] = _round_activations(graph, features, self.group_size)
            node.replace_input_with(features, self._rounded[features])
        self.quantized["linear"] = self.quantized.get("linear", 0) + 1

    def _rounded_alone(self, weight_OI: torch.Tensor, sizes: tuple[int, int]) -> QuantizedWeight:
        """Round a weight by its own values, without the data's."""
        if self.method == "hqq":
            return in_parts(hqq, weight_OI, *sizes)
        return in_parts(round_to_nearest, weight_OI, *sizes, symmetric=self.symmetric)

    def _quantize_embedding_(self, graph: fx.GraphModule, node: fx.Node) -> None:
        """Hold a table in few bits."""
        table = node.args[0]
        if not is_constant(table) or not is_float(table):
            return
        table_VD = value_of(graph, table)
        width = table_VD.shape[1]
        group_size = width
        if self.embedding_bits == 4:
            group_size = next((size for size in TABLE_GROUPS if width % size == 0), 0)
            if not group_size:
                raise StageFailed(
                    f"{module_of(node) or table.target}: a table in 4 bits has rows of a multiple "
                    f"of {TABLE_GROUPS[-1]} numbers, found {width}; set embedding_bits: 8, or "
                    "exclude it"
                )
        sizes = (self.embedding_bits, group_size)
        quantized = in_parts(round_to_nearest, table_VD, *sizes, symmetric=self.symmetric)
        _look_up_(graph, node, f"{table.target}_rows", quantized, self.embedding_bits == 4)
        self.quantized["embedding"] = self.quantized.get("embedding", 0) + 1

    def _quantize_experts_(self, graph: fx.GraphModule, node: fx.Node) -> None:
        """Hold the matrices of a mixture's experts in few bits, of which each row looks some up.

        By rounding or `hqq`: an expert's few inputs give no second moments for the other methods.
        """
        weight: Any = node.args[0]
        indices: Any = node.args[1]
        if not is_float(weight) or weight.meta["val"].dim() != 3 or len(indices) != 1:
            return
        weight_EOI = value_of(graph, weight)
        inputs = weight_EOI.shape[2]
        if inputs % self.group_size:
            reason = f"rows of {inputs} are not a multiple of group_size {self.group_size}"
            self.left_float[str(weight.target)] = reason
            return
        sizes = (self.bits, self.group_size)
        flat, experts = self._rounded_alone(weight_EOI.flatten(0, 1), sizes), weight_EOI.shape[:2]
        integers, scale, zero = (
            part.view(*experts, -1) for part in (flat.integers_OI, flat.scale_OG, flat.zero_OG)
        )
        quantized = QuantizedWeight(integers, scale, zero, self.bits)
        _look_up_(graph, node, str(weight.target), quantized)
        self.quantized["experts"] = self.quantized.get("experts", 0) + 1


def quantize_weights(
    module: torch.nn.Module,
    signature: Signature,
    quantizer: WeightQuantizer,
    batches: Iterable[Batch],
) -> ExportedProgram:
    """Return the module as a graph with weights of few bits; GPTQ and AWQ read the batches."""
    graph = capture(module, signature)
    bypass_copies_(graph)
    needs_data = quantizer.method in ("gptq", "awq")
    quantizer.quantize_(graph, input_second_moments(graph, batches) if needs_data else {})
    if not quantizer.quantized:
        reasons = "; ".join(f"{name}: {why}" for name, why in quantizer.left_float.items())
        raise StageFailed(
            f"no weight could be quantized ({reasons or 'there is no linear layer'}); expected a "
            "float32 linear layer or an embedding that `exclude` does not name"
        )
    remove_unread_tensors_(graph)
    return export_program(graph, signature)


@torch.inference_mode()
def input_second_moments(
    graph: fx.GraphModule,
    batches: Iterable[Batch],
    keep_outputs: Callable[[Any], None] = lambda outputs: None,
) -> dict[str, torch.Tensor]:
    """Compute XᵀX/N of each linear layer's input in float64, by the name of the input's node.

    `keep_outputs` is called with the graph's outputs for each batch.
    """
    sums: dict[str, torch.Tensor] = {}
    rows: dict[str, int] = {}

    def accumulate(linear: fx.Node, features: torch.Tensor) -> None:
        name, rows_NI = linear.all_input_nodes[0].name, features.flatten(0, -2).double()
        product_II = rows_NI.T @ rows_NI
        sums[name] = sums[name].add_(product_II) if name in sums else product_II
        rows[name] = rows.get(name, 0) + len(rows_NI)

    linears = [node for node in graph.graph.nodes if node.target is LINEAR]
    # Layers that share an input share its moments.
    one_per_input = {linear.all_input_nodes[0]: linear for linear in reversed(linears)}
    tap_activations(graph, batches, one_per_input.values(), accumulate, keep_outputs)
    return {name: total.div_(rows[name]) for name, total in sums.items()}


def _dequantize(graph: fx.GraphModule, name: str, weight: QuantizedWeight) -> fx.Node:
    """Insert the dequantization of a packed weight, and return its float node."""
    call = graph.graph.call_function
    outputs, groups = weight.scale_OG.shape
    integers, scale, zero = _register(graph, name, pack(weight.integers_OI, weight.bits), weight)
    if weight.bits == 4:
        integers = _unpack(graph, integers)
    in_groups = call(aten.view.default, (integers, [outputs, groups, -1]))
    floats = call(aten.to.dtype, (in_groups, torch.float32))
    zeros = call(aten.unsqueeze.default, (call(aten.to.dtype, (zero, torch.float32)), -1))
    scales = call(aten.unsqueeze.default, (scale, -1))
    dequantized = call(aten.mul.Tensor, (call(aten.sub.Tensor, (floats, zeros)), scales))
    return call(aten.view.default, (dequantized, [outputs, -1]))


def _look_up_(
    graph: fx.GraphModule,
    node: fx.Node,
    name: str,
    weight: QuantizedWeight,
    grouped: bool = True,
) -> None:
    """Look up integers, scales and zero points in place of a node's rows; dequantize these alone.

    Not `grouped`, a row of a table has one scale.
    """
    ids: Any = node.args[1]
    with graph.graph.inserting_before(node):
        call: Any = graph.graph.call_function
        parts = _register(graph, name, pack(weight.integers_OI, weight.bits), weight)
        integers, scale, zero = (call(node.target, (part, ids)) for part in parts)
        if weight.bits == 4:
            integers = call(aten.flatten.using_ints, (_unpack(graph, integers), -2))
        if grouped:
            size = weight.integers_OI.shape[-1] // weight.scale_OG.shape[-1]
            integers = call(aten.unflatten.int, (integers, -1, [-1, size]))
            scale, zero = (call(aten.unsqueeze.default, (part, -1)) for part in (scale, zero))
        floats = call(aten.to.dtype, (integers, torch.float32))
        centred = call(aten.sub.Tensor, (floats, call(aten.to.dtype, (zero, torch.float32))))
        result = call(aten.mul.Tensor, (centred, scale))
        if grouped:
            result = call(aten.flatten.using_ints, (result, -2))
        node.replace_all_uses_with(result, propagate_meta=True)
    graph.graph.erase_node(node)


def _unpack(graph: fx.GraphModule, integers: fx.Node) -> fx.Node:
    """Insert the unpacking of bytes into pairs of their lower and upper four bits."""
    low = graph.graph.call_function(aten.bitwise_and.Scalar, (integers, 15))
    high = graph.graph.call_function(aten.bitwise_right_shift.Tensor_Scalar, (integers, 4))
    return graph.graph.call_function(aten.stack.default, ([low, high], -1))


def _round_activations(graph: fx.GraphModule, features: fx.Node, group_size: int) -> fx.Node:
    """Insert the rounding of an activation to 8 bits, one scale for each group of a row.

    As onnxruntime's MatMulNBits does with `accuracy_level` 4: the largest magnitude becomes 127,
    and halves are rounded to even.
    """
    call = graph.graph.call_function
    groups = call(aten.unflatten.int, (features, -1, [-1, group_size]))
    largest = call(aten.amax.default, (call(aten.abs.default, (groups,)), [-1], True))
    largest = call(aten.clamp_min.default, (largest, SMALLEST_RANGE))
    inverse = call(aten.mul.Tensor, (call(aten.reciprocal.default, (largest,)), LARGEST))
    integers = call(aten.round.default, (call(aten.mul.Tensor, (groups, inverse)),))
    scale = call(aten.mul.Tensor, (largest, 1 / LARGEST))
    floats = call(aten.mul.Tensor, (integers, scale))
    return call(aten.flatten.using_ints, (floats, -2))


def _register(
    graph: fx.GraphModule, name: str, integers: torch.Tensor, weight: QuantizedWeight
) -> tuple[fx.Node, ...]:
    """Register integers, scale and zero point as buffers, and return the nodes that read them."""
    parts = {"packed": integers, "scale": weight.scale_OG, "zero_point": weight.zero_OG}
    stem = name.replace(".", "_")
    for part, value in parts.items():
        graph.register_buffer(f"{stem}_{part}", value.contiguous())
    return tuple(graph.graph.get_attr(f"{stem}_{part}") for part in parts)
