"""A quantized graph run beside its float model: answers, labels, and layer by layer.

What each of the user's layers loses is found in two ways. As the graph runs, a layer's result
carries the noise of all layers before it. To see which layer is at fault, the graph is run once
more, and each layer is given what the float model has there; what is then lost, it loses itself.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from compress.common.errors import StageFailed
from compress.common.forward import flatten_outputs
from compress.core.context import COMPARED_BATCHES
from compress.quantization.numeric_debug.fidelity_report import (
    Fidelity,
    LayerFidelity,
    MetricPair,
    OutputFidelity,
)
from compress.quantization.numeric_debug.layer_outputs import (
    GraphLayerOutputs,
    LayerOutputRecorder,
    layer_calls,
)
from compress.quantization.numeric_debug.sqnr import Deviation
from compress.quantization.pt2e.module_names import module_names

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from torch import fx, nn

    from compress.common.signature import Signature
    from compress.core.context import Context
    from compress.core.metrics import Metric
    from compress.quantization.numeric_debug.layer_outputs import Followed

SAMPLES = 256
LARGEST_BATCH = 64
SEEDED_ROWS = 8
"""Rows of a batch where there is no data."""
HELD_BYTES = 2**26
"""What the results of all layers may take, which are held for one batch at a time."""


def compare(
    module: nn.Module,
    graph: fx.GraphModule,
    signature: Signature,
    context: Context,
    rescaled: Collection[str] = (),
) -> Fidelity:
    """Return how near a quantized graph stays to its float model.

    A seeded sample of at most 256 samples of `val` is answered once by the module and twice by the
    graph, on the CPU; without data a few seeded inputs are.

    Args:
        module: the float model in eval mode; it is left with hooks.
        graph: the quantized model.
        signature: the interface of both.
        context: data, metric and seed.
        rescaled: modules whose results have other scales in the graph, and are not compared.

    Raises:
        StageFailed: the graph gives other numbers of outputs, or some that are not finite.
    """
    layers = {n: call for n, call in layer_calls(graph, module).items() if call[0] not in rescaled}
    in_graph = {name for node in graph.graph.nodes for name in module_names(node)}
    reference = LayerOutputRecorder(module, {name for name, _ in layers.values()}, in_graph)
    # Ranges of a whole call depend on its rows; such graphs are served one row at a time.
    chosen = torch.ops.quantized_decomposed.choose_qparams.tensor
    alone = any(node.target is chosen for node in graph.graph.nodes)
    followed = GraphLayerOutputs(graph, layers)
    return compare_followed(reference, followed, signature, context, one_by_one=alone)


def compare_followed(
    reference: LayerOutputRecorder,
    followed: Followed,
    signature: Signature,
    context: Context,
    *,
    one_by_one: bool = False,
) -> Fidelity:
    """Return how near a quantized model stays to its float model, as :func:`compare` does.

    Args:
        reference: the float model.
        followed: the quantized model.
        signature: the interface of both.
        context: data, metric and seed.
        one_by_one: whether each sample is a call of its own.

    Raises:
        StageFailed: it gives other numbers of outputs, or some that are not finite.
    """
    found, sample = _Found(), _Sample.of(signature, context, one_by_one=one_by_one)
    with torch.inference_mode():
        for inputs, target in sample.batches(reference):
            expected, values = reference(*inputs), reference.values
            answers = followed(inputs, values, found.layers, given=False)
            found.add(expected, flatten_outputs(answers), target)
            followed(inputs, values, found.own, given=True)
            context.progress("compare with the float model", found.samples, len(sample))
    found.refuse_unless_finite(signature)
    return found.summarize(signature, context)


@dataclass
class Labels:
    """Counts equal labels."""

    equal: int = 0
    total: int = 0
    told_by_targets: bool = True
    """Whether every target was a label for each that the model gives."""

    def add(self, expected: torch.Tensor, found: torch.Tensor, target: torch.Tensor | None) -> None:
        """Take in a batch's first outputs."""
        if expected.dim() < 2 or expected.shape[1] < 2 or not expected.is_floating_point():
            self.told_by_targets = False
            return
        right, there = expected.argmax(1), found.argmax(1)
        self.equal += int((right == there).sum())
        self.total += right.numel()
        self.told_by_targets &= (
            target is not None and not target.is_floating_point() and target.shape == right.shape
        )

    def agreement(self, metric: Metric) -> float | None:
        """Return the share of equal labels; None where outputs are no scores of classes."""
        known = self.total and (self.told_by_targets or metric.name == "fidelity")
        return round(self.equal / self.total, 6) if known else None


@dataclass
class Scored:
    """Keeps first outputs and targets for the metric, as long as they are small."""

    answers: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    targets: list[torch.Tensor] = field(default_factory=list)
    held: int = 0
    whole: bool = True

    def add(self, expected: torch.Tensor, found: torch.Tensor, target: torch.Tensor | None) -> None:
        """Take in a batch's first outputs."""
        self.held += expected.nbytes + found.nbytes
        self.whole &= target is not None and self.held <= HELD_BYTES
        if self.whole and target is not None:
            self.answers.append((expected, found))
            self.targets.append(target)

    def pair(self, metric: Metric) -> MetricPair | None:
        """Return the metric of both models; None where it cannot be measured."""
        if not self.whole or not self.targets or metric.name == "fidelity":
            return None
        try:
            target = torch.cat(self.targets)
            before, after = (
                metric.score(torch.cat(side), target) for side in zip(*self.answers, strict=True)
            )
        except Exception:  # noqa: BLE001 - a metric of the user's may raise any
            return None
        if not (math.isfinite(before) and math.isfinite(after)):
            return None
        return MetricPair(name=metric.name, before=round(before, 6), after=round(after, 6))


@dataclass
class _Found:
    """What was found so far."""

    outputs: list[Deviation] = field(default_factory=list)
    layers: dict[str, Deviation] = field(default_factory=lambda: defaultdict(Deviation))
    own: dict[str, Deviation] = field(default_factory=lambda: defaultdict(Deviation))
    labels: Labels = field(default_factory=Labels)
    scored: Scored = field(default_factory=Scored)
    samples: int = 0

    def add(
        self,
        expected: Sequence[torch.Tensor],
        found: Sequence[torch.Tensor],
        target: torch.Tensor | None,
    ) -> None:
        """Take in a batch's answers."""
        if [a.shape for a in expected] != [b.shape for b in found]:
            shapes = [[tuple(t.shape) for t in side] for side in (found, expected)]
            raise StageFailed(
                f"the quantized model's outputs have shapes {shapes[0]}, the float model's "
                f"{shapes[1]}"
            )
        self.outputs = self.outputs or [Deviation() for _ in expected]
        for deviation, a, b in zip(self.outputs, expected, found, strict=True):
            deviation.add(a, b)
        self.labels.add(expected[0], found[0], target)
        self.scored.add(expected[0], found[0], target)
        self.samples += len(expected[0]) if expected[0].dim() else 1

    def refuse_unless_finite(self, signature: Signature) -> None:
        """Refuse a graph whose answers are not finite where the float model's are."""
        for spec, deviation in zip(signature.outputs, self.outputs, strict=False):
            if not deviation.is_finite:
                first = next((n for n, d in self.layers.items() if not d.is_finite), None)
                place = f", from layer {first} on" if first else ""
                raise StageFailed(
                    f"output {spec.name} of the quantized model is NaN or infinite{place}, where "
                    "the float model's is finite; leave that part in float with `exclude`"
                )

    def summarize(self, signature: Signature, context: Context) -> Fidelity:
        """Return the figures, rounded so that they are the same however sums are split up."""
        layers = [
            LayerFidelity(
                module=name,
                sqnr_db=round(self.layers[name].sqnr_db, 1),
                own_sqnr_db=round(own.sqnr_db, 1),
            )
            for name, own in self.own.items()
        ]
        return Fidelity(
            samples=self.samples,
            split="val" if _has_val(context) else None,
            label_agreement=self.labels.agreement(context.metric),
            metric=self.scored.pair(context.metric),
            outputs=tuple(
                OutputFidelity(
                    name=spec.name, cosine=round(d.cosine, 5), sqnr_db=round(d.sqnr_db, 1)
                )
                for spec, d in zip(signature.outputs, self.outputs, strict=False)
            ),
            layers=tuple(sorted(layers, key=lambda layer: layer.own_sqnr_db)),
        )


def _has_val(context: Context) -> bool:
    return context.data is not None and "val" in context.data.datasets


@dataclass(frozen=True)
class _Sample:
    """The inputs on which both are compared, and their targets where there are any."""

    signature: Signature
    context: Context
    order: tuple[int, ...]
    """Indices into `val`; none where there is no data."""
    fixed: int | None
    """Size of a batch, where the signature fixes it or samples are asked one by one."""
    seeded_batches: int = COMPARED_BATCHES
    """Number of batches where there is no data."""

    @classmethod
    def of(cls, signature: Signature, context: Context, *, one_by_one: bool) -> _Sample:
        """Choose a seeded sample that fills batches of a fixed size; some come twice."""
        free = 1 if one_by_one else None
        fixed = free if signature.batch_axis else int(next(iter(signature.inputs[0].shape), 1))
        order: list[int] = []
        if _has_val(context) and context.data is not None:
            generator = torch.Generator().manual_seed(context.seed)
            available = len(context.data.split("val"))  # type: ignore[arg-type]
            order = torch.randperm(available, generator=generator)[:SAMPLES].tolist()
            missing = -len(order) % (fixed or 1)
            order += (order * (missing // len(order) + 1))[:missing]
        seeded_batches = COMPARED_BATCHES * (SEEDED_ROWS if fixed == free == 1 else 1)
        return cls(signature, context, tuple(order), fixed, seeded_batches)

    def __len__(self) -> int:
        """Return how many samples are compared."""
        seeded = self.signature.example(batch=self.fixed or SEEDED_ROWS)[0]
        return len(self.order) or self.seeded_batches * len(seeded)

    def batches(
        self, reference: LayerOutputRecorder
    ) -> Iterator[tuple[tuple[torch.Tensor, ...], torch.Tensor | None]]:
        """Yield batches in which the results of the reference's layers take bounded memory."""
        data = self.context.data
        if not self.order or data is None:
            rows = self.fixed or SEEDED_ROWS
            for i in range(self.seeded_batches):
                yield self.signature.example(batch=rows, seed=self.context.seed + i), None
            return
        for batch in data.read("val", self.order, self.fixed or self._rows(reference)):
            yield batch.inputs, batch.target

    def _rows(self, reference: LayerOutputRecorder) -> int:
        (first,) = self.context.data.read("val", self.order[:1], 1)  # type: ignore[union-attr]
        reference(*first.inputs)
        held = sum(value.nbytes for value in reference.values.values())
        return max(1, min(LARGEST_BATCH, HELD_BYTES // max(held, 1)))
