"""How far a quantized graph's outputs move where its sums are rounded otherwise.

A float that differs in its last bit may round to the next integer, and in an ill-conditioned
network such flips grow from layer to layer: a ResNet-50 of seeded weights moves by 0.46 of its
outputs' spread. A right int8 file differs from its graph by as much, as a runtime sums in another
order. This yardstick is made of the graph and its float model alone; no export can change it.
"""

from __future__ import annotations

import logging
import math
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from compress.artifacts.graph_model import GraphModel
from compress.common.errors import StageFailed
from compress.common.forward import accept_any_batch, torch_predictor
from compress.common.tensor_difference import measured
from compress.core.gates.baselines import nearest_float_model
from compress.export.parity.sample_parity import SampleErrors, problem_of
from compress.graph.constant_folding import fold_constants_
from compress.profiling.output_summary import error_scale

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import fx

    from compress.artifacts.artifact import Artifact
    from compress.common.forward import Predictor
    from compress.core.context import Context
    from compress.export.parity.sample_parity import Tolerance

    Tensors = tuple[torch.Tensor, ...]

logger = logging.getLogger(__name__)

# float32 has 24 bits: the two last ones of a number at the end of a quantizer's range, which is
# what sums in another order differ by. Of 8 bits, 2^-16 of a step.
LAST_BITS = 2.0**-24
"""Change of a quantizer's input, as a share of the quantizer's range."""
# Of right ONNX and TorchScript files of networks with up to 50 layers, the error was 0.25 to 1.0 of
# the noise.
FACTOR = 1.25
"""How many times the noise a right export may differ from its graph, and a margin for few rows."""
# Where the error is 0.7 of the spread, the graph explains half of the export's variance. Outputs
# at chance have 1.4, and constant ones 1.
LARGEST_SPREAD = 0.7
"""Largest error of an export, whatever the noise is."""
LARGEST_CHANGES = 0.5
"""Largest share of changed labels, whatever the noise is."""
# Graph and file are two draws of the same rounding, so they are equally far from the float model:
# of right files the ratio was 0.99 to 1.01. A zero point that is off by 1 in one layer of a
# ResNet-50 gives 1.1 to 1.24, a scale that is off by a tenth over 2.
FLOAT_RATIO = 1.1
"""How many times further from the float model than its graph a right export may be, and a margin
for few rows."""


class RoundingNoise:
    """A quantized graph whose sums are rounded otherwise, and the model that it was made of.

    Both are opened once an export is out of the fixed tolerance, and only then.
    """

    def __init__(self, source: GraphModel, context: Context) -> None:
        self._source, self._context = source, context

    @cached_property
    def _disturbed(self) -> fx.GraphModule | None:
        """The graph with noise before each of its quantizers; None where it has none."""
        module: Any = self._source.load()
        fold_constants_(module)
        generator = torch.Generator().manual_seed(0)

        def disturb(
            x: torch.Tensor, scale: torch.Tensor | float, least: int, most: int
        ) -> torch.Tensor:
            drawn = 2 * torch.rand(x.shape, generator=generator) - 1
            return x + (LAST_BITS * (most - least) * scale * drawn).to(x.dtype)

        quantizers = [n for n in module.graph.nodes if is_quantizer(n)]
        for node in quantizers:
            x, scale, _, least, most, *_ = node.args
            with module.graph.inserting_before(node):
                node.replace_input_with(
                    x, module.graph.call_function(disturb, (x, scale, least, most))
                )
        module.recompile()
        return module if quantizers else None

    def outputs(self, *inputs: torch.Tensor) -> Tensors | None:
        """Return what the graph answers with other last bits; None where it rounds nothing."""
        module = self._disturbed
        if module is None:
            return None
        with torch_predictor(module, "cpu", self._context.threads) as predict:
            return accept_any_batch(predict, self._source.signature)(*inputs)

    @cached_property
    def _float_model(self) -> Artifact | None:
        try:
            found = nearest_float_model(self._source, self._context)
        except StageFailed:
            return None  # the graph was made elsewhere
        return None if found.digest == self._source.digest else found

    def limits(
        self, expected: Predictor, batches: Sequence[Tensors], fixed: Tolerance
    ) -> SampleLimits | None:
        """Measure the noise on samples, and return what it allows; None where there is none."""
        noise, rows = SampleErrors(), list[list[torch.Tensor]]()
        for inputs in batches:
            disturbed = self.outputs(*inputs)
            if disturbed is None:
                return None
            outputs = expected(*inputs)
            noise.add(len(inputs[0]), outputs, disturbed)
            rows.append(squared_by_row(outputs, disturbed))
        spreads = []
        for sums, parts in zip(noise.outputs, zip(*rows, strict=True), strict=True):
            squared = torch.cat(parts)
            most = FACTOR**2 * float(squared.sum()) + 2**0.5 * margin(squared)
            spread = (most / max(error_scale(sums.spread, sums.norm), 1e-18)) ** 0.5
            allowed = min(LARGEST_SPREAD, spread) if math.isfinite(spread) else 0.0
            spreads.append(max(fixed.spread, allowed))
        changed = FACTOR * noise.changed + count_margin(noise.changed)
        changes = min(LARGEST_CHANGES, changed / noise.samples)
        return SampleLimits(noise, tuple(spreads), max(fixed.label_changes, changes))

    def float_problem(
        self,
        expected: Predictor,
        exported: Predictor,
        batches: Sequence[Tensors],
        fixed: Tolerance,
    ) -> str:
        """Return how an export is further from the float model than its graph; empty if it is not.

        As far as the graph is where its own sums are rounded in either way.
        """
        if self._float_model is None:
            return ""
        names = ("graph", "disturbed", "export")
        errors = {name: SampleErrors() for name in names}
        rows = {name: list[list[torch.Tensor]]() for name in names}
        with self._float_model.open(threads=self._context.threads) as predict:
            predict = accept_any_batch(predict, self._float_model.signature)
            for inputs in batches:
                outputs = predict(*inputs)
                answers = (expected(*inputs), self.outputs(*inputs) or (), exported(*inputs))
                for name, found in zip(names, answers, strict=True):
                    on_cpu = tuple(t.cpu() for t in found)
                    errors[name].add(len(inputs[0]), outputs, on_cpu)
                    rows[name].append(squared_by_row(outputs, on_cpu))
        spreads = []
        columns = zip(*(zip(*rows[name], strict=True) for name in names), strict=True)
        for sums, parts in zip(errors["export"].outputs, columns, strict=True):
            graph, disturbed, _ = map(torch.cat, parts)
            furthest = max(float(graph.sum()), float(disturbed.sum()))
            most = FLOAT_RATIO**2 * furthest + margin(disturbed - graph)
            spreads.append((most / max(error_scale(sums.spread, sums.norm), 1e-18)) ** 0.5)
        changed = max(errors["graph"].changed, errors["disturbed"].changed)
        changes = changed / errors["graph"].samples
        slack = max(fixed.label_changes, count_margin(changed) / errors["graph"].samples)
        logger.info(
            "from the float model the graph differs by %.2g of the spread, and the export by %.2g",
            *(errors["graph"].relative_error, errors["export"].relative_error),
        )
        problem = problem_of(errors["export"], spreads, changes + slack, "the float model")
        return problem and f"{problem}, which is how far its graph is"


def squared_by_row(expected: Tensors, got: Tensors) -> list[torch.Tensor]:
    """Return the squared error of each row, of each output."""
    squared = []
    for pair in zip(expected, got, strict=True):
        a, b = measured(*pair)
        squared.append((b - a).square_().reshape(len(a) if a.dim() else 1, -1).sum(1))
    return squared


# The margins are of what the graph itself does: an export cannot widen them.
def margin(squared_B: torch.Tensor) -> float:
    """Return two standard deviations of a sum over rows as these."""
    rows = len(squared_B)
    return 2 * float(squared_B.std()) * rows**0.5 if rows > 1 else 0.0


def count_margin(changed: int) -> float:
    """Return two standard deviations of the difference of two such counts (Poisson's)."""
    return 2 * (2 * changed) ** 0.5


def noise_of(source: Artifact, context: Context) -> RoundingNoise | None:
    """Return the rounding noise of a quantized graph; None of other models."""
    return RoundingNoise(source, context) if isinstance(source, GraphModel) else None


class SampleLimits(NamedTuple):
    """What the noise that was measured on samples allows."""

    noise: SampleErrors
    spreads: tuple[float, ...]
    """Largest error of each output, relative to its spread."""
    label_changes: float
    """Share of the samples."""


def is_quantizer(node: fx.Node) -> bool:
    """Whether a node rounds an activation to integers with one scale, or one for each row."""
    # Those of weights, with a scale for each channel, are folded: they round the same anywhere.
    name = str(node.target)
    return node.op == "call_function" and name.startswith(
        ("quantized_decomposed.quantize_per_tensor", "quantized_decomposed.quantize_per_token")
    )
