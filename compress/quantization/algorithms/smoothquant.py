"""Outliers of activations moved into the weights that multiply them, so that 8 bits hold both.

After Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large
Language Models" (2023). Channels are I and O, rows of a sample N.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from compress.quantization.algorithms.shared_input_layers import Family, drop_copies_, families
from compress.quantization.numeric_debug.activation_tap import some_rows, tap_activations
from compress.quantization.pt2e.quantizer import is_sequence_product

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.fx import GraphModule, Node

    from compress.data.batch import Batch
    from compress.quantization.config.dtype_scheme import IntegerFormat, Scheme, Smoothing

STRENGTHS = (0.5, 0.6, 0.7, 0.8, 0.9)
WORTH_DECIBELS = 1.0
"""What a family's products must gain where a multiplication has to be inserted."""
NEAR_DECIBELS = 1.0
"""Of strengths that are so near to the best the least is taken: it relies least on the sample's
extremes, beyond which other data will go."""
ROWS, ROWS_OF_A_BATCH = 512, 64
"""Rows on which strengths are compared."""
SMALLEST = 1e-5


@dataclass
class Smoothed:
    """What smoothing did."""

    strengths: dict[str, float] = field(default_factory=dict)
    """First module of each family that was smoothed → its strength."""
    rescaled: set[str] = field(default_factory=set)
    """Modules whose results have other scales."""


@dataclass
class Seen:
    """What a family read while samples ran through the graph."""

    low_I: torch.Tensor  # noqa: N815 - the letters name the axes
    high_I: torch.Tensor  # noqa: N815
    rows: list[torch.Tensor] = field(default_factory=list)

    @property
    def largest_I(self) -> torch.Tensor:  # noqa: N802
        """Largest size of each channel."""
        return torch.maximum(self.high_I, -self.low_I)


def smooth_(
    graph: GraphModule,
    batches: Iterable[Batch],
    scheme: Scheme,
    smoothing: Smoothing,
    exclude: Sequence[str] = (),
    *,
    passes_floats: bool = False,
) -> Smoothed:
    """Divide what linear layers read and multiply their weights, in place.

    Args:
        graph: a traced module; it computes what it did.
        batches: calibration inputs.
        scheme: the integers that are to hold both.
        smoothing: a strength for all, or `auto`: each family's own, where one is worth it.
        exclude: patterns of names of modules that stay as they are.
        passes_floats: whether layers pass floats on to each other, as with run-time ranges, so that
            a multiplication may stand between any two.

    Returns:
        What was smoothed.
    """
    if smoothing == "off":
        return Smoothed()
    drop_copies_(graph)
    found = [f for f in families(graph, exclude) if passes_floats or _can_gain(graph, f)]
    seen = observed(graph, found, batches) if found else {}
    done = Smoothed()
    for family in found:
        weight_OI, own = family.weight_OI(graph), seen[family.source]
        if isinstance(smoothing, float):
            strength = smoothing
        else:
            free = bool(family.absorbers(graph))
            strength = best_strength(weight_OI, own, scheme, 0.0 if free else WORTH_DECIBELS)
        if strength:
            done.rescaled |= family.divide_(graph, scales(weight_OI, own.largest_I, strength))
            done.strengths[family.name] = strength
    graph.recompile()
    return done


def observed(
    graph: GraphModule, found: Sequence[Family], batches: Iterable[Batch]
) -> dict[Node, Seen]:
    """Return the extremes of each channel that families read, and some rows of them."""
    seen: dict[Node, Seen] = {}

    def hear(linear: Node, features: torch.Tensor, _: torch.Tensor) -> None:
        rows_NI = features.flatten(0, -2)
        own = seen.setdefault(linear.args[0], Seen(rows_NI.amin(0), rows_NI.amax(0)))  # type: ignore[arg-type]
        own.low_I = torch.minimum(own.low_I, rows_NI.amin(0))
        own.high_I = torch.maximum(own.high_I, rows_NI.amax(0))
        if sum(map(len, own.rows)) < ROWS:
            own.rows.append(some_rows(rows_NI, ROWS_OF_A_BATCH))

    tap_activations(graph, batches, [family.linears[0] for family in found], hear)
    return seen


def scales(weight_OI: torch.Tensor, largest_I: torch.Tensor, strength: float) -> torch.Tensor:
    """Return what each channel is divided by: 1 where it is always 0, or never used."""
    used_I = weight_OI.abs().amax(0)
    scale_I = largest_I**strength / used_I.clamp(min=SMALLEST) ** (1 - strength)
    idle = (largest_I == 0) | (used_I == 0)
    return scale_I.clamp(min=SMALLEST).masked_fill(idle, 1)


def best_strength(weight_OI: torch.Tensor, seen: Seen, scheme: Scheme, worth: float) -> float:
    """Return the least strength that is about the best, or 0 where none is worth it.

    Args:
        weight_OI: the weights of a family.
        seen: what the family reads.
        scheme: the integers that both are rounded to.
        worth: decibels that the error must fall by.
    """
    rows_NI = torch.cat(seen.rows)
    expected_NO = rows_NI @ weight_OI.T

    def error(scale_I: torch.Tensor) -> float:
        low, high = float((seen.low_I / scale_I).min()), float((seen.high_I / scale_I).max())
        rounded_NI = _rounded_tensor(rows_NI / scale_I, low, high, scheme.activations)
        rounded_OI = _rounded_channels(weight_OI * scale_I, scheme.weights)
        return float((rounded_NI @ rounded_OI.T - expected_NO).square().mean())

    errors = {s: error(scales(weight_OI, seen.largest_I, s)) for s in STRENGTHS}
    least = min(errors.values())
    if least >= error(torch.ones_like(seen.low_I)) * _ratio(-worth):
        return 0.0
    return next(s for s in STRENGTHS if errors[s] <= least * _ratio(NEAR_DECIBELS))


def _ratio(decibels: float) -> float:
    return math.exp(decibels * math.log(10) / 10)


def _can_gain(graph: GraphModule, family: Family) -> bool:
    """Whether no integers reach a family, which a multiplication would turn into floats."""
    return is_sequence_product(family.linears[0]) or bool(family.absorbers(graph))


def _rounded_tensor(
    values: torch.Tensor, low: float, high: float, numbers: IntegerFormat
) -> torch.Tensor:
    low, high = min(low, 0.0), max(high, 0.0)
    scale = max((high - low) / (numbers.high - numbers.low), SMALLEST)
    zero = round(numbers.low - low / scale)
    integers = (values / scale + zero).round().clamp(numbers.low, numbers.high)
    return (integers - zero) * scale


def _rounded_channels(weight_OI: torch.Tensor, numbers: IntegerFormat) -> torch.Tensor:
    scale_O1 = (weight_OI.abs().amax(1, keepdim=True) / numbers.high).clamp(min=SMALLEST)
    return (weight_OI / scale_O1).round() * scale_O1
