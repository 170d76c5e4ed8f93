"""Compare the labels of the integer graph with those of the trained, fake-quantized model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from compress.common.errors import StageFailed
from compress.common.forward import flatten_outputs
from compress.common.tensor_difference import largest_difference
from compress.core.metrics.labels import predicted_labels
from compress.quantization.numeric_debug.fidelity_report import LabelParity
from compress.quantization.pt2e.quantizer import LINEAR
from compress.quantization.qat.fake_quantize import FakeQuantize, WeightFakeQuantize

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from compress.common.forward import Predictor
    from compress.core.objectives.task import Task
    from compress.quantization.qat.fake_model import FakeQuantizedModel

aten = torch.ops.aten
SHAPE_ONLY = {aten.clone.default, aten.view.default, aten._unsafe_view.default}


def compare_labels(trained: torch.Tensor, integer: torch.Tensor, step: float | None) -> LabelParity:
    """Count the labels that differ between two models' class scores, `(samples, classes, …)`.

    `step` is the last quantization step, in units of the outputs.

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
    task: Task | None = None,
) -> LabelParity | None:
    """Compare a trained model, in eval mode, with its integer graph, on batches of inputs.

    None where outputs are no class scores. `step` is the last quantization step. The task says on
    which axis the classes are; without one on axis 1.
    """
    if task is not None and task.labels != "class":
        return None
    total: LabelParity | None = None
    with torch.no_grad():
        for batch in inputs:
            expected, actual = flatten_outputs(trained(*batch))[0], integer(*batch)[0]
            if task is not None:
                expected, actual = task.classes_first(expected), task.classes_first(actual)
            if expected.dim() < 2 or expected.shape[1] < 2:
                return None
            parity = compare_labels(expected, actual, step)
            total = parity if total is None else total.merge(parity)
    return total


def last_step(model: FakeQuantizedModel) -> float | None:
    """Return how far one step of the last quantization can move the margin between two outputs.

    Where outputs are quantized it is their scale; where a linear layer computes them, the scale of
    its input times the largest difference of two weights of one input. None elsewhere.
    """
    graph = model.graph
    outputs = next(iter(reversed(graph.graph.nodes))).args[0]
    node: Node = outputs[0] if isinstance(outputs, tuple | list) else outputs
    while node.target in SHAPE_ONLY:
        node = node.args[0]  # type: ignore[assignment]
    if node.target is LINEAR:
        source, weight = (_fake_quantizer(model, part) for part in node.args[:2])
        if isinstance(weight, WeightFakeQuantize) and source is not None:
            name = node.args[1].args[0].target  # type: ignore[union-attr]
            weight_OI = weight.quantized(graph.get_parameter(str(name)).detach())
            spread = (weight_OI.amax(0) - weight_OI.amin(0)).max()
            return float((source.scale * spread).detach())
        return None
    last = _fake_quantizer(model, node)
    return None if last is None else float(last.scale.detach())


def _fake_quantizer(model: FakeQuantizedModel, node: object) -> FakeQuantize | None:
    if not (isinstance(node, Node) and node.op == "call_module"):
        return None
    module = model.graph.get_submodule(str(node.target))
    return module if isinstance(module, FakeQuantize) else None
