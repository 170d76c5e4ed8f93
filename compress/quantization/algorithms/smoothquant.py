"""SmoothQuant: move outliers of activations into the weights that multiply them.

After Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large
Language Models" (2023). Channels are I and O, rows of a sample N.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from compress.quantization.algorithms.shared_input_layers import (
    SharedInputGroup,
    bypass_copies_,
    shared_input_groups,
)
from compress.quantization.numeric_debug.activation_tap import sample_rows, tap_activations
from compress.quantization.pt2e.quantizer import is_sequence_linear

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.fx import GraphModule, Node

    from compress.data.batch import Batch
    from compress.quantization.config.dtype_scheme import IntegerFormat, Scheme, Smoothing

STRENGTHS = (0.5, 0.6, 0.7, 0.8, 0.9)
"""Candidates of the paper's alpha; its 0.5 is poor for some models (MiniLM: cosine 0.986, at 0.8
0.998), so each group's is searched."""
WORTH_DECIBELS = 1.0
"""What the error must fall by where a multiplication has to be inserted."""
NEAR_DECIBELS = 1.0
"""Of strengths this near to the best the smallest is taken: it relies least on the sample's
extremes, which other data will exceed."""
ROWS, ROWS_PER_BATCH = 512, 64
"""Rows on which strengths are compared."""
SMALLEST = 1e-5


@dataclass
class SmoothingResult:
    """Which layers were smoothed."""

    strengths: dict[str, float] = field(default_factory=dict)
    """First module of each group that was smoothed → its strength."""
    rescaled: set[str] = field(default_factory=set)
    """Modules whose outputs have other scales."""


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
    smoothing: Smoothing,
    exclude: Sequence[str] = (),
    *,
    float_between_layers: bool = False,
) -> SmoothingResult:
    """Divide inputs of linear layers and multiply their weights; outputs stay the same.

    Args:
        graph: a captured module.
        batches: calibration inputs.
        scheme: the integer formats of activations and weights.
        smoothing: a strength for all, or `auto`: each group's own, where one is worth it.
        exclude: patterns of names of modules that stay as they are.
        float_between_layers: whether activations between layers are float, as with ranges found at
            run time, so that a multiplication may be inserted anywhere.
    """
    result = SmoothingResult()
    if smoothing == "off":
        return result
    bypass_copies_(graph)
    groups = [
        group
        for group in shared_input_groups(graph, exclude)
        # Elsewhere the input is quantized, and a multiplication would make it float.
        if float_between_layers or is_sequence_linear(group.linears[0]) or group.absorbers(graph)
    ]
    statistics = collect_statistics(graph, groups, batches) if groups else {}
    for group in groups:
        weight_OI, inputs = group.weight_OI(graph), statistics[group.source]
        if isinstance(smoothing, float):
            strength = smoothing
        else:
            worth = 0.0 if group.absorbers(graph) else WORTH_DECIBELS
            strength = best_strength(weight_OI, inputs, scheme, worth)
        if strength:
            scale_I = channel_scales(weight_OI, inputs.largest_I, strength)
            result.rescaled |= group.divide_input_(graph, scale_I)
            result.strengths[group.name] = strength
    graph.recompile()
    return result


def collect_statistics(
    graph: GraphModule, groups: Sequence[SharedInputGroup], batches: Iterable[Batch]
) -> dict[Node, InputStatistics]:
    """Run batches through a graph, and return the statistics of each group's input."""
    statistics: dict[Node, InputStatistics] = {}

    def update(linear: Node, features: torch.Tensor, _: torch.Tensor) -> None:
        rows_NI = features.flatten(0, -2)
        low_I, high_I = rows_NI.amin(0), rows_NI.amax(0)
        own = statistics.setdefault(linear.args[0], InputStatistics(low_I, high_I))  # type: ignore[arg-type]
        own.low_I, own.high_I = torch.minimum(own.low_I, low_I), torch.maximum(own.high_I, high_I)
        if sum(map(len, own.rows)) < ROWS:
            own.rows.append(sample_rows(rows_NI, ROWS_PER_BATCH))

    tap_activations(graph, batches, [group.linears[0] for group in groups], update)
    return statistics


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
    """Return the smallest strength that is about the best, or 0 where none is worth it.

    Args:
        weight_OI: the weights of a group.
        inputs: statistics of its input.
        scheme: the integer formats.
        worth: decibels that the error must fall by.
    """
    rows_NI = torch.cat(inputs.rows)
    expected_NO = rows_NI @ weight_OI.T

    def output_error(scale_I: torch.Tensor) -> float:
        low, high = float((inputs.low_I / scale_I).min()), float((inputs.high_I / scale_I).max())
        quantized_NI = _fake_quantize_tensor(rows_NI / scale_I, low, high, scheme.activations)
        quantized_OI = _fake_quantize_channels(weight_OI * scale_I, scheme.weights)
        return float((quantized_NI @ quantized_OI.T - expected_NO).square().mean())

    errors = {s: output_error(channel_scales(weight_OI, inputs.largest_I, s)) for s in STRENGTHS}
    least = min(errors.values())
    if least >= output_error(torch.ones_like(inputs.low_I)) * _ratio(-worth):
        return 0.0
    return next(s for s in STRENGTHS if errors[s] <= least * _ratio(NEAR_DECIBELS))


def _ratio(decibels: float) -> float:
    return math.exp(decibels * math.log(10) / 10)


def _fake_quantize_tensor(
    values: torch.Tensor, low: float, high: float, numbers: IntegerFormat
) -> torch.Tensor:
    low, high = min(low, 0.0), max(high, 0.0)
    scale = max((high - low) / (numbers.quant_max - numbers.quant_min), SMALLEST)
    zero = round(numbers.quant_min - low / scale)
    integers = (values / scale + zero).round().clamp(numbers.quant_min, numbers.quant_max)
    return (integers - zero) * scale


def _fake_quantize_channels(weight_OI: torch.Tensor, numbers: IntegerFormat) -> torch.Tensor:
    scale_O1 = (weight_OI.abs().amax(1, keepdim=True) / numbers.quant_max).clamp(min=SMALLEST)
    return (weight_OI / scale_O1).round() * scale_O1
