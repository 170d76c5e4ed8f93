"""Which layers of a quantized format may be left in float, and what each of them loses in it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from export.latency.float_layers import (
    FLOAT,
    MixedModel,
    weighted_layers,
)
from export.onnx.proto_io import read

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from compress.core.progress import Progress
    from compress.profiling.interaction_sum import Value
    from export.latency.resizing import ResizableModel
    from export.latency.width_costs import WidthCosts

QUANTIZED = "quantized"
"""Value of the decision about a layer that is not put back to float."""
SMALL_LOSS_SHARE = 0.02
"""Share of a format's loss that a layer must have, or be faster in float, to be decided."""
MUCH_FASTER_SHARE = 0.02
"""Share of the time of all kernels by which a layer must be faster in float."""


def decision_of(layer: str) -> str:
    """Return the name of the decision about a layer's format; groups of channels have others."""
    return f"format of {layer}"


@dataclass(frozen=True)
class LayerSensitivity:
    """What single layers of a quantized format lose."""

    file: Path
    """The ONNX file of the whole model in this format."""
    numbers: Mapping[str, tuple[int, ...]]
    """Layer → its numbers among the layers with weights; several where it is called several
    times."""
    loss_increases: Mapping[str, float]
    """Layer → the squared distance of the outputs that quantizing it alone adds."""

    def mixed(self, model: ResizableModel) -> MixedModel | None:
        """Return a resizable model with these layers to decide.

        None where it has other layers than the file, as where pruning rewrites modules.
        """
        if len(weighted_layers(model.model)) != len(weighted_layers(read(self.file))):
            return None
        return MixedModel(model, {decision_of(name): own for name, own in self.numbers.items()})


@dataclass(frozen=True)
class DecidedLayers:
    """The layers of a format that a search decides about."""

    names: tuple[str, ...]
    loss_increase: Mapping[str, Mapping[Value, float]]
    """Decision → quantized or float → what is lost so."""
    scopes: Sequence[tuple[str, ...]]
    """Decisions that meet in a kernel."""
    unsuitable: str = ""
    """Why there can be none."""

    @property
    def grid(self) -> dict[str, tuple[Value, ...]]:
        """The values of each decision."""
        return dict.fromkeys(self.loss_increase, (QUANTIZED, FLOAT))

    @property
    def total_loss_increase(self) -> float:
        """What all of these layers lose together where they are quantized."""
        return sum(own[QUANTIZED] for own in self.loss_increase.values())


def decide_layers(
    layers: LayerSensitivity,
    mixed: MixedModel,
    costs: WidthCosts,
    grid: Mapping[str, Sequence[Value]],
    most: int,
    deadline: float,
    progress: Progress,
    title: str,
) -> DecidedLayers:
    """Choose the layers that are worth a decision, and find which decisions meet in a kernel.

    They are those that are faster in float, and then those that lose most. What is measured for
    each grows with the widths that it reads and writes; a layer for which no time is left until a
    deadline stays quantized.
    """
    base = costs.at({}).kernels.seconds
    start, changes = time.monotonic(), {}
    for done, name in enumerate(layers.loss_increases):
        progress(title, done, len(layers.loss_increases), f"{name} in float")
        if time.monotonic() > deadline:
            break
        decision = decision_of(name)
        changes[name] = costs.at({decision: FLOAT}).kernels.seconds - base
    seconds_each = (time.monotonic() - start) / max(1, len(changes))
    total = sum(layers.loss_increases.values())
    worth = [
        name
        for name, change in changes.items()
        if layers.loss_increases[name] > SMALL_LOSS_SHARE * total
        or change < -MUCH_FASTER_SHARE * base
    ]
    worth.sort(
        key=lambda name: (changes[name] >= -MUCH_FASTER_SHARE * base, -layers.loss_increases[name])
    )
    chosen: list[str] = []
    scopes: list[tuple[str, ...]] = []
    left = deadline - time.monotonic()
    for name in worth[:most]:
        decision = decision_of(name)
        groups = sorted(mixed.groups_of(decision) & grid.keys())
        # Kernels of more than two groups of channels, as after joins, are not looked at together.
        own = [(decision, *groups)] if len(groups) < 3 else [(decision, g) for g in groups]
        met = [other for other in chosen if mixed.meet(other, decision)]
        own += [(other, decision) for other in met]
        left -= seconds_each * sum(prod(len(grid.get(d, (FLOAT,))) for d in s) for s in own)
        if left < 0:
            break
        chosen.append(decision)
        scopes += own
    names = tuple(name for name in worth if decision_of(name) in chosen)
    return DecidedLayers(
        names,
        {decision_of(name): {QUANTIZED: layers.loss_increases[name], FLOAT: 0.0} for name in names},
        scopes,
    )
