"""Weight-only quantization: integer weights of a few bits, dequantized where they are used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from compress.artifacts.streaming.packed_model import round_activations
from compress.common.errors import StageFailed
from compress.graph.lifting import program_of_graph
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
    computed,
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
    from compress.quantization.config.dtype_scheme import WeightFormat

aten = torch.ops.aten
TABLE_GROUPS = (64, 32, 16)
"""Numbers of a 4-bit table's row that share a scale: the largest of these that divides the row."""
PRODUCTS = (aten.bmm.default, aten.matmul.default, aten.einsum.default)


@dataclass
class WeightQuantizer:
    """Quantizes the weights of linear layers, experts and embeddings; records which."""

    format: WeightFormat
    exclude: tuple[str, ...] = ()
    after_weight: Callable[[], None] | None = None
    """Called after each weight, such as to return memory to the system."""
    quantized: dict[str, int] = field(default_factory=dict)
    """Kind of layer → its weights that were quantized; one that several layers read counts once."""
    left_float: dict[str, str] = field(default_factory=dict)
    """Module whose weight stayed float → why."""
    rescaled: set[str] = field(default_factory=set)
    """Modules whose outputs `awq` gave other scales."""
    scaled: dict[str, float] = field(default_factory=dict)
    """First module of layers that share an input → AWQ's exponent for it."""
    _dequantized: dict[Any, fx.Node] = field(default_factory=dict)
    """Weight → the node that dequantizes it, which all layers that share it read."""
    _known: set[tuple[str, Any]] = field(default_factory=set)
    """Kind and weight of those that were counted."""
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
        self._dequantized, self._rounded, self._known = {}, {}, set()
        if self.format.method == "awq":
            kept = (*self.exclude, *shared)
            options = {"symmetric": self.format.symmetric}
            scaled, rescaled = awq_(graph, second_moments, *self._sizes, kept, **options)
            self.scaled |= scaled
            self.rescaled |= rescaled
        for node in list(graph.graph.nodes):
            if is_excluded(node, self.exclude):
                continue
            if node.target is LINEAR:
                moment_II = second_moments.get(node.all_input_nodes[0].name)
                self._quantize_linear_(graph, node, moment_II)
            elif node.target is EMBEDDING and self.format.embeddings:
                self._quantize_embedding_(graph, node)
            elif node.target is aten.index.Tensor and is_constant(node.args[0]):
                self._quantize_experts_(graph, node)
            else:
                continue
            if self.after_weight is not None:
                self.after_weight()
        graph.graph.eliminate_dead_code()
        graph.recompile()

    @property
    def _sizes(self) -> tuple[int, int]:
        return self.format.bits, self.format.group_size

    def facts(self) -> dict[str, Any]:
        """Return what stayed float, and what AWQ scaled, for the manifest."""
        scaled = {"scaled": self.scaled} if self.format.method == "awq" else {}
        return {"left_float": self.left_float, **scaled}

    def require_quantized(self) -> None:
        """Raise StageFailed where no weight was quantized."""
        if not self.quantized:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.left_float.items())
            raise StageFailed(
                f"no weight could be quantized ({reasons or 'there is no linear layer'}); expected "
                "a float32 linear layer or an embedding that `exclude` does not name"
            )

    def _quantize_linear_(
        self, graph: fx.GraphModule, node: fx.Node, moment_II: torch.Tensor | None
    ) -> None:
        weight = node.args[1]
        if not is_constant(weight) or not is_float(weight):
            return
        inputs = weight.meta["val"].shape[1]
        if inputs % self.format.group_size:
            reason = f"{inputs} inputs are not a multiple of group_size {self.format.group_size}"
            self.left_float[module_of(node) or str(weight.target)] = reason
            return
        if weight.target not in self._dequantized:
            weight_OI = value_of(graph, weight)
            sizes, symmetric = self._sizes, self.format.symmetric
            if self.format.method == "gptq" and moment_II is not None:
                quantized = gptq(weight_OI, *sizes, moment_II, symmetric=symmetric)
            elif self.format.method == "hqq":
                quantized = in_parts(hqq, weight_OI, *sizes)
            else:  # AWQ's scales are in the weight already
                quantized = in_parts(round_to_nearest, weight_OI, *sizes, symmetric=symmetric)
            with graph.graph.inserting_before(node):
                dequantized = _dequantize(graph, str(weight.target), quantized)
            self._dequantized[weight.target] = dequantized
        node.replace_input_with(weight, self._dequantized[weight.target])
        features = node.args[0]
        if self.format.rounds_activations and isinstance(features, fx.Node):
            if features not in self._rounded:
                # As onnxruntime's MatMulNBits does with `accuracy_level` 4.
                rounded = partial(round_activations, group_size=self.format.group_size)
                with graph.graph.inserting_before(node):
                    self._rounded[features] = computed(graph, rounded, features)
            node.replace_input_with(features, self._rounded[features])
        self._count("linear", weight)

    def _quantize_embedding_(self, graph: fx.GraphModule, node: fx.Node) -> None:
        """Hold a table in few bits."""
        table = node.args[0]
        if not is_constant(table) or not is_float(table):
            return
        table_VD = value_of(graph, table)
        width = table_VD.shape[1]
        group_size = width
        if self.format.embedding_bits == 4:
            group_size = next((size for size in TABLE_GROUPS if width % size == 0), 0)
            if not group_size:
                raise StageFailed(
                    f"{module_of(node) or table.target}: a table in 4 bits has rows of a multiple "
                    f"of {TABLE_GROUPS[-1]} numbers, found {width}; set embedding_bits: 8, or "
                    "exclude it"
                )
        sizes = (self.format.embedding_bits, group_size)
        quantized = in_parts(round_to_nearest, table_VD, *sizes, symmetric=self.format.symmetric)
        _look_up_(graph, node, f"{table.target}_rows", quantized, self.format.embedding_bits == 4)
        self._count("embedding", table)

    def _quantize_experts_(self, graph: fx.GraphModule, node: fx.Node) -> None:
        """Hold the matrices of a mixture's experts in few bits, of which each row looks some up.

        By rounding alone: an expert's few inputs give no second moments for `gptq` and `awq`, and
        onnxruntime's lookup has no zero points of `hqq`, between two integers.
        """
        weight: Any = node.args[0]
        indices: Any = node.args[1]
        if not is_float(weight) or weight.meta["val"].dim() != 3 or len(indices) != 1:
            return
        if not any(reader.target in PRODUCTS for reader in node.users):
            return  # a table of matrices that are, for example, added
        weight_EOI = value_of(graph, weight)
        inputs = weight_EOI.shape[2]
        if inputs % self.format.group_size:
            reason = f"rows of {inputs} are not a multiple of group_size {self.format.group_size}"
            self.left_float[str(weight.target)] = reason
            return
        symmetric, rows_OI = self.format.symmetric, weight_EOI.flatten(0, 1)
        flat = in_parts(round_to_nearest, rows_OI, *self._sizes, symmetric=symmetric)
        integers, scale, zero = (
            part.view(*weight_EOI.shape[:2], -1)
            for part in (flat.integers_OI, flat.scale_OG, flat.zero_OG)
        )
        quantized = QuantizedWeight(integers, scale, zero, self.format.bits)
        _look_up_(graph, node, str(weight.target), quantized)
        self._count("experts", weight)

    def _count(self, kind: str, weight: fx.Node) -> None:
        if (kind, weight.target) not in self._known:
            self._known.add((kind, weight.target))
            self.quantized[kind] = self.quantized.get(kind, 0) + 1


def quantize_weights(
    module: torch.nn.Module,
    signature: Signature,
    quantizer: WeightQuantizer,
    batches: Iterable[Batch],
) -> ExportedProgram:
    """Return the module as a graph with weights of few bits; GPTQ and AWQ read the batches."""
    graph = capture(module, signature)
    bypass_copies_(graph)
    moments = input_second_moments(graph, batches) if quantizer.format.calibrates else {}
    quantizer.quantize_(graph, moments)
    quantizer.require_quantized()
    remove_unread_tensors_(graph)
    return program_of_graph(graph, signature)


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
    outputs, groups = weight.scale_OG.shape

    def floats(integers: Any, scale: Any, zero: Any) -> Any:
        integers = _unpacked(integers) if weight.bits == 4 else integers
        in_groups = integers.view([outputs, groups, -1]).to(torch.float32)
        zeros = zero.to(torch.float32).unsqueeze(-1)
        return ((in_groups - zeros) * scale.unsqueeze(-1)).view([outputs, -1])

    return computed(graph, floats, *_register(graph, name, weight))


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
    size = weight.integers_OI.shape[-1] // weight.scale_OG.shape[-1]

    def floats(integers: Any, scale: Any, zero: Any) -> Any:
        if weight.bits == 4:
            integers = _unpacked(integers).flatten(-2)
        if grouped:
            integers = integers.unflatten(-1, [-1, size])
            scale, zero = scale.unsqueeze(-1), zero.unsqueeze(-1)
        rows = (integers.to(torch.float32) - zero.to(torch.float32)) * scale
        return rows.flatten(-2) if grouped else rows

    with graph.graph.inserting_before(node):
        call: Any = graph.graph.call_function
        parts = [call(node.target, (part, ids)) for part in _register(graph, name, weight)]
        node.replace_all_uses_with(computed(graph, floats, *parts), propagate_meta=True)
    graph.graph.erase_node(node)


def _unpacked(integers: Any) -> Any:
    """Return pairs of the lower and upper four bits of bytes, on a last axis."""
    low, high = torch.bitwise_and(integers, 15), torch.bitwise_right_shift(integers, 4)
    return torch.stack([low, high], -1)


def _register(graph: fx.GraphModule, name: str, weight: QuantizedWeight) -> tuple[fx.Node, ...]:
    """Register integers, scale and zero point as buffers, and return the nodes that read them."""
    integers = pack(weight.integers_OI, weight.bits)
    parts = {"packed": integers, "scale": weight.scale_OG, "zero_point": weight.zero_OG}
    stem = name.replace(".", "_")
    for part, value in parts.items():
        graph.register_buffer(f"{stem}_{part}", value.contiguous())
    return tuple(graph.graph.get_attr(f"{stem}_{part}") for part in parts)
