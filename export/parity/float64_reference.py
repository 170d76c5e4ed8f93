"""The source in float64: tells an export's error from what float32 itself is off."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from compress.artifacts.eager_model import EagerModel
from compress.common.forward import run_in_eval
from compress.common.tensor_difference import largest
from compress.export.parity.rounding_noise import FACTOR, LARGEST_SPREAD

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.common.forward import Predictor
    from compress.export.parity.rounding_noise import RoundingNoise

    Tensors = tuple[torch.Tensor, ...]

ERROR_FACTOR = 4.0
"""How many times the source's own error an export may have: each sums in another order."""
NUDGE = 1e-6
"""Relative change of the inputs, some ulps of float32, at which no output should jump."""


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

        A quantized graph also where its own sums, rounded otherwise, are as far from it.

        `limit`: error, relative to the norm, that is allowed besides.
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
    return [
        float(torch.linalg.vector_norm(t.cpu().double().where(mask.cpu(), 0)))
        for t, mask in zip(tensors, where, strict=True)
    ]


def _nudged(inputs: Tensors, sign: int) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return tuple(
        x
        + sign * NUDGE * float(x.abs().max() or 1) * torch.randn(x.shape, generator=generator).to(x)
        if x.is_floating_point() and x.numel()
        else x
        for x in inputs
    )
