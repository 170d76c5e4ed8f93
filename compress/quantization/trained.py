"""Whether the integer graph answers as the model that was trained."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from compress.core.difference import largest_difference
from compress.core.eager import flatten_outputs
from compress.core.errors import StageFailed
from compress.core.metrics import labels_of
from compress.quantization.fake import FakeQuantize, WeightGrid
from compress.quantization.quantizer import LINEAR
from compress.quantization.sameness import Sameness

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from compress.core.artifact import Predictor
    from compress.quantization.fake_model import FakeQuantized

aten = torch.ops.aten
PASSED = {aten.clone.default, aten.view.default, aten._unsafe_view.default}


def sameness(trained: torch.Tensor, integer: torch.Tensor, step: float | None) -> Sameness:
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
    differs = labels_of(trained) != labels_of(integer)
    top = trained.topk(2, dim=1).values
    margins = (top[:, 0] - top[:, 1])[differs]
    return Sameness(
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
) -> Sameness | None:
    """Compare a trained model with its integer graph; None where outputs are no classes.

    Args:
        trained: the fake-quantized model, in eval mode.
        integer: the integer graph.
        inputs: batches of inputs.
        step: the last step of rounding as the outputs see it.
    """
    found: Sameness | None = None
    with torch.no_grad():
        for batch in inputs:
            outputs, others = flatten_outputs(trained(*batch))[0], integer(*batch)[0]
            if outputs.dim() < 2 or outputs.shape[1] < 2:
                return None
            same = sameness(outputs, others, step)
            found = same if found is None else found.and_of(same)
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
        if isinstance(weight, WeightGrid) and source is not None:
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
