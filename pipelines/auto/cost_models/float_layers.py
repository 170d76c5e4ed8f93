"""Which layers of a quantized format may be left in float, and what each of them loses in it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Protocol

from compress.common.errors import StageFailed
from compress.common.forward import accept_any_batch, split_batches
from compress.common.sealed_json import read_state, write_state
from compress.export.latency.float_layers import (
    FLOAT,
    MixedModel,
    is_float,
    leave_float,
    weighted_layers,
)
from compress.export.onnx.proto_io import read, write
from compress.export.onnx.session import session_predictor
from compress.pipelines.auto.candidates import Candidate
from compress.pruning.depth.output_error import OutputErrorMeter
from compress.quantization.mixed_precision.bit_candidates import weighted_layers as layers_of_module

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from compress.artifacts.artifact import Artifact
    from compress.artifacts.eager_model import EagerModel
    from compress.core.context import Context
    from compress.core.progress import Progress
    from compress.core.val_halves import HalfOfVal
    from compress.export.latency.resizing import ResizableModel
    from compress.export.latency.width_costs import WidthCosts
    from compress.pipelines.auto.candidates import CheckedModel
    from compress.profiling.interaction_sum import Value

QUANTIZED = "quantized"
"""Value of the decision about a layer that is not put back to float."""
COMPARED_ON = 64
"""Samples on which the outputs of a model with one quantized layer are compared; `quantize_mixed`
ranks layers by as many."""
SMALL_HARM = 0.02
"""Share of a format's loss that a layer must have, or be faster in float, to be decided."""
MUCH_FASTER = 0.02
"""Share of the time of all kernels by which a layer must be faster in float."""
SHARE = 0.15
"""Share of the search's time for one format's layers."""
FILE = "layers.json"
"""In the results' folder: what quantizing single layers loses."""


def decision_of(layer: str) -> str:
    """Return the name of the decision about a layer's format; groups of channels have others."""
    return f"format of {layer}"


@dataclass(frozen=True)
class LayerHarms:
    """What single layers of a quantized format lose."""

    file: Path
    """The ONNX file of the whole model in this format."""
    numbers: Mapping[str, tuple[int, ...]]
    """Layer → its numbers among the layers with weights; several where it is called several
    times."""
    harms: Mapping[str, float]
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
    harm: Mapping[str, Mapping[Value, float]]
    """Decision → quantized or float → what is lost so."""
    scopes: Sequence[tuple[str, ...]]
    """Decisions that meet in a kernel."""
    unsuitable: str = ""
    """Why there can be none."""

    @property
    def grid(self) -> dict[str, tuple[Value, ...]]:
        """The values of each decision."""
        return dict.fromkeys(self.harm, (QUANTIZED, FLOAT))

    @property
    def total_harm(self) -> float:
        """What all of these layers lose together where they are quantized."""
        return sum(own[QUANTIZED] for own in self.harm.values())


class FloatModel(Protocol):
    """What this module uses of `Judge`, whose module imports this one by its tables."""

    out: Path
    model: EagerModel
    context: Context
    decided_on: HalfOfVal

    def artifact(self, candidate: Candidate) -> Artifact:
        """Return the file of a candidate that was built."""


def measure_layer_harms(judge: FloatModel, whole: CheckedModel, deadline: float) -> LayerHarms:
    """Measure what quantizing each layer alone loses.

    The file of the whole quantized model is taken with all other layers put back to float, so that
    no model is quantized or exported for it. Losses are scaled such that their sum is that of the
    whole model.

    Args:
        judge: the float model and its data.
        whole: the model with all layers quantized, in any runtime.
        deadline: on the clock of :func:`time.monotonic`; layers that were not measured by then are
            left out.

    Raises:
        StageFailed: its ONNX file has other layers than the model.
    """
    file = judge.out / FILE
    key = judge.model.digest
    known = read_state(file, key, dict[str, float]) or {}
    return _measure(judge, whole, known, lambda: write_state(file, key, known), deadline)


def _measure(
    judge: FloatModel,
    whole: CheckedModel,
    known: dict[str, float],
    save: Callable[[], None],
    deadline: float,
) -> LayerHarms:
    """Measure the layers that are not known yet, and scale them."""
    model, format = judge.model, whole.format
    artifact = judge.artifact(Candidate(format))
    file = artifact.payload_path
    quantized = read(file, weights=True)
    nodes, layers = weighted_layers(quantized), layers_of_module(model.load(), model.signature)
    if len(nodes) != len(layers):
        raise StageFailed(f"the file has {len(nodes)} layers with weights, not {len(layers)}")
    numbers: dict[str, tuple[int, ...]] = {}
    for number, (node, layer) in enumerate(zip(nodes, layers, strict=True)):
        if layer.name is not None and not is_float(node):
            numbers[layer.name] = (*numbers.get(layer.name, ()), number)
    integers = [number for number, node in enumerate(nodes) if not is_float(node)]
    weights = {number: layers[number].weight.float().numpy() for number in integers}
    half = replace(judge.context, data=judge.decided_on.data)
    meter = OutputErrorMeter(model.load(), model.signature, half, "outputs", COMPARED_ON)
    size = judge.context.judged_batch_size(artifact)
    with TemporaryDirectory(prefix="compress-layers-") as folder:
        alone = Path(folder) / "model.onnx"
        for done, (name, own) in enumerate(numbers.items()):
            judge.context.progress(f"layers in {format}", done, len(numbers), name)
            key = f"{format}/{name}"
            if key in known:
                continue
            if time.monotonic() > deadline:
                break
            others = [number for number in integers if number not in own]
            write(leave_float(quantized, others, weights), alone)
            predict = session_predictor(alone, judge.context.threads)
            predict = accept_any_batch(predict, model.signature)
            predict = predict if size is None else split_batches(predict, size)
            known[key] = meter.measure_predictor(predict).distance ** 2
            save()
    harms = {n: known[f"{format}/{n}"] for n in numbers if f"{format}/{n}" in known}
    total = sum(harms.values())
    is_complete = len(harms) == len(numbers)
    scale = whole.loss / total if total and (is_complete or total > whole.loss) else 1.0
    return LayerHarms(
        file,
        {name: numbers[name] for name in harms},
        {name: scale * harm for name, harm in harms.items()},
    )


def decide_layers(
    layers: LayerHarms,
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
    for done, name in enumerate(layers.harms):
        progress(title, done, len(layers.harms), f"{name} in float")
        if time.monotonic() > deadline:
            break
        decision = decision_of(name)
        changes[name] = costs.at({decision: FLOAT}).kernels.seconds - base
    seconds_each = (time.monotonic() - start) / max(1, len(changes))
    total = sum(layers.harms.values())
    worth = [
        name
        for name, change in changes.items()
        if layers.harms[name] > SMALL_HARM * total or change < -MUCH_FASTER * base
    ]
    worth.sort(key=lambda name: (changes[name] >= -MUCH_FASTER * base, -layers.harms[name]))
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
        {decision_of(name): {QUANTIZED: layers.harms[name], FLOAT: 0.0} for name in names},
        scopes,
    )
