"""What an integer graph says about how far it gives the labels it was trained for; no torch.

Whether the integer graph answers as the model that was trained.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from compress.common.config import Settings
from compress.common.errors import StageFailed
from compress.common.forward import flatten_outputs
from compress.common.tensor_difference import largest_difference
from compress.core.metrics import predicted_labels
from compress.quantization.pt2e.quantizer import LINEAR
from compress.quantization.qat.fake_quantize import FakeQuantize, WeightFakeQuantize

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from compress.common.forward import Predictor
    from compress.quantization.qat.fake_model import FakeQuantized

LARGEST_SHARE = 0.005
"""Of labels that differ and are no near-ties; more, and the graph is another model."""


class LabelParity(Settings):
    """A trained model that rounds in floats beside the integer graph made of it."""

    labels: int
    """How many were compared."""
    differing: int
    """Of these, how many differ."""
    near_ties: int | None
    """Of these, those where the trained model's two largest outputs lie within `last_step` of each
    other; None where no such step can be told."""
    last_step: float | None
    """The last step of rounding as the outputs see it."""
    largest_difference: float
    """Of outputs."""

    def merge(self, more: LabelParity) -> LabelParity:
        """Return what holds of these samples and of more."""
        ties = None
        if self.near_ties is not None and more.near_ties is not None:
            ties = self.near_ties + more.near_ties
        return LabelParity(
            labels=self.labels + more.labels,
            differing=self.differing + more.differing,
            near_ties=ties,
            last_step=self.last_step,
            largest_difference=max(self.largest_difference, more.largest_difference),
        )

    def line(self) -> str:
        """Return the comparison in one line."""
        equal = f"{self.labels - self.differing} of {self.labels} labels as trained"
        if not self.differing:
            return equal
        if self.near_ties is None:
            return f"{equal}; the last quantization step is not known"
        step = f"margins below the last quantization step, {self.last_step:.3g}"
        return f"{equal}; near-ties ({step}): {self.near_ties} of {self.differing}"

    def refuse_another_model(self) -> None:
        """Refuse a graph whose labels differ where the trained model is sure of its own.

        Raises:
            StageFailed: it is another model.
        """
        unlike = self.differing - (self.near_ties or 0)
        if unlike > max(1.0, LARGEST_SHARE * self.labels):
            raise StageFailed(
                f"the integer graph gives {self.differing} of {self.labels} labels otherwise than "
                f"the trained model, {unlike} of them no near-ties; expected at most "
                f"{LARGEST_SHARE:.1%} such"
            )


aten = torch.ops.aten
PASSED = {aten.clone.default, aten.view.default, aten._unsafe_view.default}


def sameness(trained: torch.Tensor, integer: torch.Tensor, step: float | None) -> LabelParity:
    """Return how far two forms of a model give the same labels.

    Args:
        trained: the trained model's outputs for some samples.
        integer: those of another form of it.
        step: the last step of rounding as the outputs see it.

    Raises:
        StageFailed: one is NaN, or infinite where the other is not.
    """
    largest = largest_difference(trained, integer)
    if not math.isfinite(largest):
        raise StageFailed(
            "the integer graph's outputs are NaN or infinite at other places than the trained "
            "model's; leave the part that makes them in float with `exclude`"
        )
    differs = predicted_labels(trained) != predicted_labels(integer)
    top = trained.topk(2, dim=1).values
    margins = (top[:, 0] - top[:, 1])[differs]
    return LabelParity(
        labels=differs.numel(),
        differing=int(differs.sum()),
        near_ties=None if step is None else int((margins <= step).sum()),
        last_step=step,
        largest_difference=largest,
    )


def compare_with_trained(
    trained: nn.Module,
    integer: Predictor,
    inputs: Iterable[tuple[torch.Tensor, ...]],
    step: float | None,
) -> LabelParity | None:
    """Compare a trained model with its integer graph; None where outputs are no classes.

    Args:
        trained: the fake-quantized model, in eval mode.
        integer: the integer graph.
        inputs: batches of inputs.
        step: the last step of rounding as the outputs see it.
    """
    found: LabelParity | None = None
    with torch.no_grad():
        for batch in inputs:
            outputs, others = flatten_outputs(trained(*batch))[0], integer(*batch)[0]
            if outputs.dim() < 2 or outputs.shape[1] < 2:
                return None
            same = sameness(outputs, others, step)
            found = same if found is None else found.merge(same)
    return found


def last_step(model: FakeQuantized) -> float | None:
    """Return how far one step of the last rounding can move the margin between two outputs.

    Where outputs are rounded it is their step; where they are the products of a linear layer, that
    of the layer's input times the largest difference of two weights of an input. None elsewhere.
    """
    graph = model.graph
    outputs = next(iter(reversed(graph.graph.nodes))).args[0]
    node: Node = outputs[0] if isinstance(outputs, tuple | list) else outputs
    while node.target in PASSED:
        node = node.args[0]  # type: ignore[assignment]
    if node.target is LINEAR:
        source, weight = (_grid(model, part) for part in node.args[:2])
        if isinstance(weight, WeightFakeQuantize) and source is not None:
            name = node.args[1].args[0].target  # type: ignore[union-attr]
            weight_OI = weight.rounded(graph.get_parameter(str(name)).detach())
            spread = (weight_OI.amax(0) - weight_OI.amin(0)).max()
            return float((source.scale * spread).detach())
        return None
    last = _grid(model, node)
    return None if last is None else float(last.scale.detach())


def _grid(model: FakeQuantized, node: object) -> FakeQuantize | None:
    if not (isinstance(node, Node) and node.op == "call_module"):
        return None
    found = model.graph.get_submodule(str(node.target))
    return found if isinstance(found, FakeQuantize) else None
