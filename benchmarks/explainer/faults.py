"""Faults with a known place and a known cause, put into a trained network.

In each pair of neighbouring layers, with a relu between them, the first one is changed, and the
second one changed back or made to ignore it, so that the float network answers as before.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from explainer.families import digits

Pair = tuple[nn.Module, nn.Module]


@dataclass(frozen=True)
class Fault:
    """What is done to a network, or to how it is quantized."""

    name: str
    cause: str
    """Beginning of the cause's key; empty for a clean control. A sample that is unlike `val` may be
    too narrow at one end and too wide at the other."""
    layer: str = ""
    """The layer that loses accuracy; empty where no single one does."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Of the stage."""
    calibration: str = ""


def inject(module: nn.Module, fault: Fault) -> None:
    """Put a fault into a network, in place."""
    kind, _, amount = fault.name.partition(" ")
    if kind not in ("unlike", "outliers", "weights"):
        return
    first, second = module.pairs()[fault.layer]
    with torch.no_grad():
        if kind == "unlike":
            scale_channels(first, second, (0, 3), float(amount))
        elif kind == "outliers":
            add_outliers(module, first, second, float(amount))
        else:
            add_wide_weights(first, second, float(amount))


def scale_channels(
    first: nn.Module, second: nn.Module, channels: tuple[int, ...], factor: float
) -> None:
    """Scale channels between two layers."""
    for channel in channels:
        first.weight[channel] *= factor
        first.bias[channel] *= factor
        second.weight[:, channel] /= factor


def add_outliers(module: nn.Module, first: nn.Module, second: nn.Module, factor: float) -> None:
    """Make a channel that the second layer does not read fire seldom, and high."""
    seen: list[torch.Tensor] = []
    hook = first.register_forward_hook(lambda m, inputs, output: seen.append(output))
    module(digits()["train"].tensors[0])
    hook.remove()
    (values,) = seen
    axis = 1 if values.dim() == 4 else values.dim() - 1
    by_channel = values.movedim(axis, 0).flatten(1)
    rare = by_channel[5].sort().values
    threshold = rare[int(0.998 * len(rare))]
    largest = by_channel.amax()
    gain = factor * largest / (rare[-1] - threshold).clamp(min=1e-3)
    first.bias[5] = gain * (first.bias[5] - threshold)
    first.weight[5] *= gain
    second.weight[:, 5] = 0


def add_wide_weights(first: nn.Module, second: nn.Module, factor: float) -> None:
    """Give the second layer large weights for a channel that never fires."""
    first.weight[5] = 0
    first.bias[5] = -1
    second.weight[:, 5] = factor * second.weight.abs().amax()


def faults_of(family: str, places: list[str]) -> list[Fault]:
    """Return ten faults of a family."""
    a, b, c = places[0], places[1], places[-1]
    return [
        Fault("unlike 300", "unlike_channels", a),
        Fault("unlike 1000", "unlike_channels", b),
        Fault("unlike 3000", "unlike_channels", c),
        Fault("outliers 300", "outliers", a),
        Fault("outliers 1000", "outliers", c),
        Fault("weights 1000", "weight_bits", b),
        Fault("weights 5000", "weight_bits", c),
        Fault("cut", "range_cut_off", settings=(("observer", "percentile"), ("percentile", 60.0))),
        Fault("dark sample", "sample", calibration="dark"),
        Fault("raw sample", "sample", calibration="raw"),
    ]
