"""SmoothQuant: move outliers of activations into the weights that multiply them.

After Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large
Language Models" (2023). Channels are I and O, rows of a sample N.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

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
    from compress.quantization.config.dtype_scheme import IntegerFormat, Scheme

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
"""Bound of weights and scales that are divided by, as in the authors' code."""


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
    inserted anywhere.

    Returns:
        First module of each group of layers that was smoothed → its strength; and the modules whose
        outputs have other scales.
    """
    strengths, rescaled = {}, set[str]()
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
            rescaled |= group.divide_input_(graph, scale_I)
            strengths[group.name] = strength
    graph.recompile()
    return strengths, rescaled


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

    The error must fall by `worth` decibels.
    """
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
