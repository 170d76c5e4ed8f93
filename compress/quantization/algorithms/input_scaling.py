"""SmoothQuant and AWQ: rescale the channels of a tensor that linear layers read.

SmoothQuant moves outliers of activations into the weights that multiply them (Xiao et al.,
"SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models", 2023).
AWQ scales up weights of channels with large activations before rounding, so that they err less (Lin
et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", 2024).
All layers that read a tensor must be scaled alike; the division of the tensor is absorbed by the
operator before, where it can be. Channels are I and O, rows of a sample N.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from compress.quantization.algorithms.weight_rounding import round_to_nearest
from compress.quantization.pt2e.graph_capture import (
    is_excluded,
    module_of,
    readers_of,
    replace_value_,
    sample_rows,
    tap_activations,
    value_of,
)
from compress.quantization.pt2e.quantizer import LINEAR, is_constant, is_float, is_sequence_linear

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compress.data.batch import Batch
    from compress.quantization.config.dtype_scheme import IntegerFormat, Scheme

aten = torch.ops.aten
NORMS = {aten.layer_norm.default: (2, 3), aten.rms_norm.default: (2,)}
"""Operator → argument indices of its weight and bias."""
RESHAPE, TRANSPOSE = aten.reshape.default, aten.transpose.int
ATTENTION = aten.scaled_dot_product_attention.default
HEADS_MERGED = (RESHAPE, TRANSPOSE, ATTENTION, TRANSPOSE, RESHAPE, LINEAR)
"""Operators from attention's merged output back to the layer that computes its values."""


@dataclass(frozen=True)
class SharedInputGroup:
    """Linear layers and the tensor that all of them read."""

    source: Node
    linears: tuple[Node, ...]

    @property
    def name(self) -> str:
        """Module of the first layer."""
        return module_of(self.linears[0]) or self.linears[0].name

    def weight_OI(self, graph: GraphModule) -> torch.Tensor:  # noqa: N802 - the letters name the axes
        """Return the layers' weights, concatenated over their outputs."""
        return torch.cat([value_of(graph, cast("Node", linear.args[1])) for linear in self.linears])

    def absorbers(self, graph: GraphModule) -> list[Node]:
        """Return the constants that scale the input; empty where others read it or them too."""
        if set(self.source.users) - set(self.linears):
            return []
        constants = _scaling_constants(self.source)
        return constants if all(len(readers_of(graph, c)) == 1 for c in constants) else []

    def divide_input_(self, graph: GraphModule, scale_I: torch.Tensor) -> set[str]:
        """Divide the input channel by channel, and multiply the weights; outputs stay the same.

        Returns the modules before it that absorbed the division: their outputs have other scales.
        """
        for linear in self.linears:
            weight = cast("Node", linear.args[1])
            replace_value_(graph, weight, value_of(graph, weight) * scale_I)
        absorbers = self.absorbers(graph)
        for constant in absorbers:
            value = value_of(graph, constant)
            replace_value_(graph, constant, value / scale_I.view(-1, *[1] * (value.dim() - 1)))
        if absorbers:
            producers = [reader for constant in absorbers for reader in readers_of(graph, constant)]
            return {module_of(producer) for producer in producers if module_of(producer)}
        name, factor_I = f"{self.linears[0].name}_smoothing", 1 / scale_I
        graph.register_buffer(name, factor_I)
        with graph.graph.inserting_after(self.source):
            factor = graph.graph.get_attr(name)
        with graph.graph.inserting_after(factor):
            product = graph.graph.call_function(aten.mul.Tensor, (self.source, factor))
        factor.meta["val"] = factor_I
        # A part of the first layer: `exclude` and messages name it so.
        product.meta |= {k: v for k, v in self.linears[0].meta.items() if k == "nn_module_stack"}
        product.meta["val"] = self.source.meta["val"]
        for linear in self.linears:
            linear.replace_input_with(self.source, product)
        return set()


def shared_input_groups(graph: GraphModule, exclude: Sequence[str] = ()) -> list[SharedInputGroup]:
    """Group the linear layers of a graph by the float tensor that they read, in graph order.

    Left out are modules that match `exclude`, and layers that share a weight with another operator.
    """
    groups: dict[Node, list[Node]] = {}
    for node in graph.graph.nodes:
        if node.target is LINEAR and is_float(node.args[0]) and is_constant(node.args[1]):
            unshared = len(readers_of(graph, node.args[1])) == 1
            if unshared and is_float(node.args[1]) and not is_excluded(node, exclude):
                groups.setdefault(node.args[0], []).append(node)
    return [SharedInputGroup(source, tuple(linears)) for source, linears in groups.items()]


def bypass_copies_(graph: GraphModule) -> None:
    """Make readers of a copy, or of a view of the same shape, read the original.

    In a graph without in-place writes they are equal. Tracing leaves a copy where a dropout was.
    """

    def shape(node: Node) -> list[str]:
        # As text: comparing symbolic sizes would add guards that fix them.
        return [str(size) for size in node.meta["val"].shape]

    for node in list(graph.graph.nodes):
        is_copy = node.target in (aten.clone.default, RESHAPE)
        original: Any = node.args[0] if is_copy and not node.kwargs else None
        if original and original.op == "call_function" and shape(original) == shape(node):
            node.replace_all_uses_with(original)
            graph.graph.erase_node(node)
    graph.recompile()


def _scaling_constants(node: Node) -> list[Node]:
    """Return the constants whose scaling scales a tensor's channels; empty where there are none."""
    operands: Sequence[Any] = ()
    if node.target is aten.mul.Tensor:
        constants = [a for a in node.args if is_constant(a) and a.meta["val"].dim() == 1]
        return [c for c in constants if len(c.meta["val"]) == node.meta["val"].shape[-1]][:1]
    if node.target in NORMS:
        if len(node.args[1]) == 1:  # type: ignore[arg-type]  # normalized_shape: of channels alone
            operands = [node.args[index] for index in NORMS[node.target] if len(node.args) > index]
    else:
        layer: Any = _value_projection(node) or node
        if layer.target is aten.relu.default and len(layer.args[0].users) == 1:
            layer = layer.args[0]
        operands = layer.args[1:] if layer.target is LINEAR else ()
    present = [operand for operand in operands if operand is not None]
    return present if all(map(is_constant, present)) else []


def _value_projection(merged: Node) -> Any:
    """Return the layer that computes an attention's values, whose channels its output has."""
    chain: list[Any] = [merged]
    for target in HEADS_MERGED:
        node = chain[-1]
        if node.target is not target or (target is TRANSPOSE and node.args[1:] != (1, 2)):
            return None
        chain.append(node.args[2 if node.target is ATTENTION else 0])
    _, _, attention, values, split, layer, _ = chain
    _, heads, _, size = attention.meta["val"].shape
    same_heads = values.meta["val"].shape[1] == heads
    same_heads &= split.meta["val"].shape[2:] == (heads, size)
    all_merged = merged.meta["val"].dim() == 3 and merged.meta["val"].shape[-1] == heads * size
    unshared = all(len(node.users) == 1 for node in chain[1:-1])
    return layer if same_heads and all_merged and unshared else None


STRENGTHS = (0.5, 0.6, 0.7, 0.8, 0.9)
"""Candidates of the paper's alpha; its 0.5 is poor for some models (MiniLM: cosine 0.986, at 0.8
0.998), so each group's is searched."""
WORTH_DECIBELS = 1.0  # what the error must fall by where a multiplication has to be inserted
NEAR_DECIBELS = 1.0
"""Of strengths this near to the best the smallest is taken: it relies least on the sample's
extremes, which other data will exceed."""
ROWS, ROWS_PER_BATCH = 512, 64  # rows on which strengths are compared
SMALLEST = 1e-5  # bound of weights and scales that are divided by, as in the authors' code


@dataclass
class InputStatistics:
    """Extremes of each channel of a group's input, and a sample of its rows."""

    low_I: torch.Tensor  # noqa: N815 - the letters name the axes
    high_I: torch.Tensor  # noqa: N815
    rows: list[torch.Tensor] = field(default_factory=list)

    @property
    def largest_I(self) -> torch.Tensor:  # noqa: N802
        """Largest magnitude of each channel."""
        return torch.maximum(self.high_I, -self.low_I)


def smooth_(
    graph: GraphModule,
    batches: Iterable[Batch],
    scheme: Scheme,
    smoothing: float | Literal["auto"],
    exclude: Sequence[str] = (),
    *,
    float_between_layers: bool = False,
) -> tuple[dict[str, float], set[str]]:
    """Divide inputs of linear layers and multiply their weights; outputs stay the same.

    `smoothing` is a strength for all, or `auto`: each group's own, where one is worth it. Where
    activations are float between layers, as with ranges found at run time, a multiplication may be
    inserted anywhere. Returns the strength by the first module of each group of layers that was
    smoothed, and the modules whose outputs have other scales.
    """
    strengths, rescaled = {}, set[str]()
    bypass_copies_(graph)
    groups = [
        group
        for group in shared_input_groups(graph, exclude)
        # Elsewhere the input is quantized, and a multiplication would make it float.
        if float_between_layers or is_sequence_linear(group.linears[0]) or group.absorbers(graph)
    ]
    statistics: dict[Any, InputStatistics] = {}

    def update(linear: Node, features: torch.Tensor) -> None:
        rows_NI = features.flatten(0, -2)
        low_I, high_I = rows_NI.amin(0), rows_NI.amax(0)
        own = statistics.setdefault(linear.args[0], InputStatistics(low_I, high_I))
        own.low_I, own.high_I = torch.minimum(own.low_I, low_I), torch.maximum(own.high_I, high_I)
        if sum(map(len, own.rows)) < ROWS:
            own.rows.append(sample_rows(rows_NI, ROWS_PER_BATCH))

    if groups:
        tap_activations(graph, batches, [group.linears[0] for group in groups], update)
    for group in groups:
        weight_OI, inputs = group.weight_OI(graph), statistics[group.source]
        if isinstance(smoothing, float):
            strength = smoothing
        else:
            worth = 0.0 if group.absorbers(graph) else WORTH_DECIBELS
            strength = best_strength(weight_OI, inputs, scheme, worth)
        if strength:
            scale_I = channel_scales(weight_OI, inputs.largest_I, strength)
            rescaled |= group.divide_input_(graph, scale_I)
            strengths[group.name] = strength
    graph.recompile()
    return strengths, rescaled


def channel_scales(
    weight_OI: torch.Tensor, largest_I: torch.Tensor, strength: float
) -> torch.Tensor:
    """Return what each channel is divided by: 1 where it is always 0, or never used."""
    used_I = weight_OI.abs().amax(0)
    scale_I = largest_I**strength / used_I.clamp(min=SMALLEST) ** (1 - strength)
    unused_I = (largest_I == 0) | (used_I == 0)
    return scale_I.clamp(min=SMALLEST).masked_fill(unused_I, 1)


def best_strength(
    weight_OI: torch.Tensor, inputs: InputStatistics, scheme: Scheme, worth: float
) -> float:
    """Return the smallest strength near the best; 0 if the error falls by less than `worth` dB."""
    rows_NI = torch.cat(inputs.rows)
    expected_NO = rows_NI @ weight_OI.T

    def output_error(scale_I: torch.Tensor) -> float:
        low, high = float((inputs.low_I / scale_I).min()), float((inputs.high_I / scale_I).max())
        quantized_NI = _fake_quantize_tensor(rows_NI / scale_I, low, high, scheme.activations)
        scaled_OI = weight_OI * scale_I
        largest_O1 = scaled_OI.abs().amax(1, keepdim=True)
        scale_O1 = (largest_O1 / scheme.weights.quant_max).clamp(min=SMALLEST)
        quantized_OI = (scaled_OI / scale_O1).round() * scale_O1
        return float((quantized_NI @ quantized_OI.T - expected_NO).square().mean())

    errors = {s: output_error(channel_scales(weight_OI, inputs.largest_I, s)) for s in STRENGTHS}
    least = min(errors.values())
    if least >= output_error(torch.ones_like(inputs.low_I)) * 10 ** (-worth / 10):
        return 0.0
    return next(s for s in STRENGTHS if errors[s] <= least * 10 ** (NEAR_DECIBELS / 10))


def _fake_quantize_tensor(
    values: torch.Tensor, low: float, high: float, numbers: IntegerFormat
) -> torch.Tensor:
    low, high = min(low, 0.0), max(high, 0.0)
    scale = max((high - low) / (numbers.quant_max - numbers.quant_min), SMALLEST)
    zero = round(numbers.quant_min - low / scale)
    integers = (values / scale + zero).round().clamp(numbers.quant_min, numbers.quant_max)
    return (integers - zero) * scale


EXPONENTS = tuple(step / 10 for step in range(1, 11))  # grid of the paper's alpha
WORTH = 0.9  # largest share of the error that may remain where a multiplication has to be inserted
SMALLEST_SCALE = 1e-4  # bound of channels' scales, as in the authors' code


def awq_(
    graph: GraphModule,
    second_moments: Mapping[str, torch.Tensor],
    bits: int,
    group_size: int,
    exclude: Sequence[str] = (),
    *,
    symmetric: bool = False,
) -> tuple[dict[str, float], set[str]]:
    """Divide inputs of linear layers and multiply their weights; outputs stay the same.

    `second_moments` are by the name of the tensor that layers read: means of the products of its
    channels. Modules that match `exclude` stay as they are. Returns the exponent by the first
    module of each group of layers that was scaled, and the modules whose outputs have other scales.
    """
    exponents, rescaled = {}, set[str]()

    def quantized(weight_OI: torch.Tensor) -> torch.Tensor:
        return round_to_nearest(weight_OI, bits, group_size, symmetric=symmetric).dequantize()

    for group in shared_input_groups(graph, exclude):
        weight_OI, moment_II = group.weight_OI(graph), second_moments[group.source.name]
        if weight_OI.shape[1] % group_size:
            continue
        moment_II = moment_II.float()
        worth = 1.0 if group.absorbers(graph) else WORTH
        exponent = best_exponent(weight_OI, moment_II, quantized, worth)
        if exponent:
            rescaled |= group.divide_input_(graph, awq_scales(moment_II, exponent))
            exponents[group.name] = exponent
    graph.recompile()
    return exponents, rescaled


def awq_scales(moment_II: torch.Tensor, exponent: float) -> torch.Tensor:
    """Return what each channel is divided by: a power of its root mean square."""
    rms_I = moment_II.diagonal().clamp(min=0).sqrt()
    scale_I = (rms_I / rms_I.max().clamp(min=SMALLEST_SCALE)).clamp(min=SMALLEST_SCALE) ** exponent
    # Normalized as in the authors' code.
    return scale_I / (scale_I.max() * scale_I.min()).sqrt()


def best_exponent(
    weight_OI: torch.Tensor,
    moment_II: torch.Tensor,
    quantized: Callable[[torch.Tensor], torch.Tensor],
    worth: float,
) -> float:
    """Return the exponent with the least output error, or 0 where none is worth it.

    `quantized` quantizes and dequantizes a weight; of the error of plain rounding the share `worth`
    may remain.
    """

    def output_error(scale_I: torch.Tensor) -> float:
        # The moments of the inputs replace the samples: errors are a quadratic form of the weights.
        error_OI = quantized(weight_OI * scale_I) / scale_I - weight_OI
        return float(((error_OI @ moment_II) * error_OI).sum())

    errors = {e: output_error(awq_scales(moment_II, e)) for e in EXPONENTS}
    best = min(errors, key=lambda exponent: errors[exponent])
    return best if errors[best] < worth * output_error(torch.ones_like(weight_OI[0])) else 0.0
