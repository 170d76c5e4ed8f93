"""How far arithmetic alone moves a source: what an export's error is told from.

:class:`Float64Reference` tells it from what float32 itself is off. :class:`RoundingNoise` tells the
error of an int8 file from how far its graph's outputs move where its sums are rounded otherwise. A
float that differs in its last bit may round to the next integer, and in an ill-conditioned
network such flips grow from layer to layer: a ResNet-50 of seeded weights moves by 0.46 of its
outputs' spread. A right file differs from its graph by as much, as a runtime sums in another order.
Both are made of the source and its float model alone; no export can change them.
"""

from __future__ import annotations

import logging
import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.errors import StageFailed
from compress.common.forward import accept_any_batch, run_in_eval, torch_predictor
from compress.common.tensor_difference import largest
from compress.core.gates.baselines import nearest_float_model

if TYPE_CHECKING:
    import torch
    from torch import fx

    from compress.artifacts.artifact import Artifact
    from compress.common.forward import Predictor
    from compress.core.context import Context

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
ERROR_FACTOR = 4.0
"""How many times the source's own error an export may have: each sums in another order."""
NUDGE = 1e-6
"""Relative change of the inputs, some ulps of float32, at which no output should jump."""


class RoundingNoise:
    """A quantized graph whose sums are rounded otherwise, and the model that it was made of.

    Both are opened once an export is out of the fixed tolerance, and only then.
    """

    def __init__(self, source: GraphModel, context: Context) -> None:
        self._source, self._context, self.threads = source, context, context.threads

    @cached_property
    def _disturbed(self) -> fx.GraphModule | None:
        """The graph with noise before each of its quantizers; None where it has none."""
        import torch

        from compress.graph.constant_folding import fold_constants_

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
        with torch_predictor(module, "cpu", self.threads) as predict:
            return accept_any_batch(predict, self._source.signature)(*inputs)

    @cached_property
    def float_model(self) -> Artifact | None:
        """The model that the graph was made from; None where it is not known here."""
        try:
            found = nearest_float_model(self._source, self._context)
        except StageFailed:
            return None  # the graph was made elsewhere
        return None if found.digest == self._source.digest else found


# The margins are of what the graph itself does: an export cannot widen them.
def margin(squared_B: torch.Tensor) -> float:
    """Return two standard deviations of a sum over rows as these."""
    rows = len(squared_B)
    return 2 * float(squared_B.std()) * rows**0.5 if rows > 1 else 0.0


def count_margin(changed: int) -> float:
    """Return two standard deviations of the difference of two such counts (Poisson's)."""
    return 2 * math.sqrt(2 * changed)


def noise_of(source: Artifact, context: Context) -> RoundingNoise | None:
    """Return the rounding noise of a quantized graph; None of other models."""
    return RoundingNoise(source, context) if isinstance(source, GraphModel) else None


def is_quantizer(node: fx.Node) -> bool:
    """Whether a node rounds an activation to integers with one scale, or one for each row."""
    # Those of weights, with a scale for each channel, are folded: they round the same anywhere.
    name = str(node.target)
    return node.op == "call_function" and name.startswith(
        ("quantized_decomposed.quantize_per_tensor", "quantized_decomposed.quantize_per_token")
    )


class Float64Reference:
    """Decides whether float32 arithmetic alone explains an export's error, once one was found."""

    def __init__(
        self, source: Artifact, expected: Predictor, noise: RoundingNoise | None = None
    ) -> None:
        self._source = source if isinstance(source, EagerModel) else None
        self._expected, self._noise = expected, noise
        self._double: torch.nn.Module | None = None

    def explains(self, inputs: Tensors, exported: Tensors, limit: float) -> bool:
        """Whether an export is about as near to float64 as its source, or the source jumps here.

        A quantized graph also where its own sums, rounded otherwise, are as far from it. `limit` is
        the error, relative to the norm, that is allowed besides.
        """
        expected = self._expected(*inputs)
        if [t.shape for t in expected] != [t.shape for t in exported]:
            return False
        finite = tuple(t.isfinite() for t in expected)
        exact = self.exact(inputs)
        if exact is not None:
            both = tuple(f & e.isfinite() for f, e in zip(finite, exact, strict=True))
            source_errors, errors = _errors(exact, expected, both), _errors(exact, exported, both)
            if all(
                error <= ERROR_FACTOR * of_source + limit * norm
                for error, of_source, norm in zip(
                    errors, source_errors, _norms(exact, both), strict=True
                )
            ):
                return True
        errors, norms = _errors(expected, exported, finite), _norms(expected, finite)
        nudged = [_errors(expected, self._expected(*_nudged(inputs, s)), finite) for s in (1, -1)]
        jumps = [ERROR_FACTOR * largest(pair) for pair in zip(*nudged, strict=True)]
        rounded = self._noise.outputs(*inputs) if self._noise is not None else None
        if rounded is not None:
            jumps = [
                min(max(jump, FACTOR * noise), LARGEST_SPREAD * norm)
                for jump, noise, norm in zip(
                    jumps, _errors(expected, rounded, finite), norms, strict=True
                )
            ]
        return all(
            (math.isfinite(jump) and error <= jump) or error <= limit * norm
            for error, jump, norm in zip(errors, jumps, norms, strict=True)
        )

    def finds_only_noise(self, inputs: Tensors, exported: Tensors, limit: float) -> bool:
        """Whether an export differs from its source only in outputs that float32 gets wrong itself.

        Those are outputs whose error against float64 is, in the source too, over `limit` of the
        norm, as where a normalisation divides a constant's rounding error by almost nothing.
        """
        exact = self.exact(inputs)
        if exact is None:
            return False
        expected = self._expected(*inputs)
        both = tuple(a.isfinite() & b.isfinite() for a, b in zip(expected, exact, strict=True))
        return all(
            error <= limit * expected_norm or own_error > limit * exact_norm
            for error, expected_norm, own_error, exact_norm in zip(
                _errors(expected, exported, both),
                _norms(expected, both),
                _errors(exact, expected, both),
                _norms(exact, both),
                strict=True,
            )
        )

    def exact(self, inputs: Tensors) -> Tensors | None:
        """Return the outputs in float64; None where the source cannot be run so."""
        if self._source is None:
            return None
        try:
            if self._double is None:
                self._double = self._source.load().double()
            return run_in_eval(
                self._double, tuple(x.double() if x.is_floating_point() else x for x in inputs)
            )
        except Exception:  # noqa: BLE001 - code that names float32 cannot run in float64
            return None


def _errors(expected: Tensors, outputs: Tensors, where: Tensors) -> list[float]:
    """Return the norm of each output's error, over the elements of a mask."""
    pairs = zip(expected, outputs, strict=True)
    return _norms(tuple(b.cpu().double() - a.cpu().double() for a, b in pairs), where)


def _norms(tensors: Tensors, where: Tensors) -> list[float]:
    """Return the norm of each tensor, over the elements of a mask."""
    import torch

    return [
        float(torch.linalg.vector_norm(t.cpu().double().where(mask.cpu(), 0)))
        for t, mask in zip(tensors, where, strict=True)
    ]


def _nudged(inputs: Tensors, sign: int) -> Tensors:
    import torch

    generator = torch.Generator().manual_seed(0)
    return tuple(
        x
        + sign * NUDGE * float(x.abs().max() or 1) * torch.randn(x.shape, generator=generator).to(x)
        if x.is_floating_point() and x.numel()
        else x
        for x in inputs
    )
