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
from compress.core.gates.baselines import nearest_float_model
from compress.export.parity.sample_parity import SampleErrors, problem_of
from compress.graph.constant_folding import fold_constants_

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
        noise = SampleErrors()
        for inputs in batches:
            disturbed = self.outputs(*inputs)
            if disturbed is None:
                return None
            noise.add(len(inputs[0]), expected(*inputs), disturbed)
        spreads = []
        for sums in noise.outputs:
            squared_B = torch.cat(sums.by_row)
            most = FACTOR**2 * float(squared_B.sum()) + 2**0.5 * margin(squared_B)
            allowed = min(LARGEST_SPREAD, sums.relative(most)) if math.isfinite(most) else 0.0
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
        graph, disturbed, export = found = SampleErrors(), SampleErrors(), SampleErrors()
        with self._float_model.open(threads=self._context.threads) as predict:
            predict = accept_any_batch(predict, self._float_model.signature)
            for inputs in batches:
                outputs = predict(*inputs)
                answers = expected(*inputs), self.outputs(*inputs) or (), exported(*inputs)
                if [t.shape for t in outputs] != [t.shape for t in answers[0]]:
                    return ""  # it answers otherwise: nothing can be compared
                for errors, own in zip(found, answers, strict=True):
                    errors.add(len(inputs[0]), outputs, tuple(t.cpu() for t in own))
        spreads = []
        for own, other, of in zip(*(e.outputs for e in found), strict=True):
            own_B, other_B = torch.cat(own.by_row), torch.cat(other.by_row)
            furthest = max(float(own_B.sum()), float(other_B.sum()))
            spreads.append(of.relative(FLOAT_RATIO**2 * furthest + margin(other_B - own_B)))
        changed = max(graph.changed, disturbed.changed)
        slack = max(fixed.label_changes * graph.samples, count_margin(changed))
        logger.info(
            "from the float model the graph differs by %.2g of the spread, and the export by %.2g",
            *(graph.relative_error, export.relative_error),
        )
        allowed_changes = (changed + slack) / graph.samples
        problem = problem_of(export, spreads, allowed_changes, "the float model")
        return problem and f"{problem}, which is how far its graph is"


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
