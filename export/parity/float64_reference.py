"""How far float32 itself is from the truth: the source in float64, and its answers nearby."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from compress.artifacts.eager_model import EagerModel
from compress.common.forward import run_in_eval
from compress.common.tensor_difference import largest

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.common.forward import Predictor

Outputs = tuple[torch.Tensor, ...]

TIMES_TORCH = 4.0
"""How many times the source's own error a runtime may have."""
NUDGE = 1e-6
"""Relative change of the inputs, some ulps of float32, that no answer should jump at."""


class Float64Reference:
    """What excuses an export that answers otherwise than the source does in float32.

    Asked only after two models were found apart, so that nothing is computed where they agree.
    """

    def __init__(self, source: Artifact, expected: Predictor) -> None:
        self._source = source if isinstance(source, EagerModel) else None
        self._expected = expected
        self._double: torch.nn.Module | None = None

    def explains(self, inputs: Outputs, got: Outputs, limit: float) -> bool:
        """Whether an export is about as near to float64 as its source, or the source jumps here.

        Args:
            inputs: what both were asked.
            got: the export's answers.
            limit: error, relative to the norm, that is allowed besides.
        """
        answers = self._expected(*inputs)
        if [t.shape for t in answers] != [t.shape for t in got]:
            return False
        known = tuple(a.isfinite() for a in answers)
        exact = self.exact(inputs)
        if exact is not None:
            both = tuple(k & e.isfinite() for k, e in zip(known, exact, strict=True))
            mine, others = _errors(exact, answers, both), _errors(exact, got, both)
            if all(
                e <= TIMES_TORCH * m + limit * n
                for e, m, n in zip(others, mine, _norms(exact, both), strict=True)
            ):
                return True
        theirs = _errors(answers, got, known)
        beside = [_errors(answers, self._expected(*_nudged(inputs, s)), known) for s in (1, -1)]
        jumps = [largest(pair) for pair in zip(*beside, strict=True)]
        return all(
            (math.isfinite(j) and e <= TIMES_TORCH * j) or e <= limit * n
            for e, j, n in zip(theirs, jumps, _norms(answers, known), strict=True)
        )

    def exact(self, inputs: Outputs) -> Outputs | None:
        """Return the answers in float64; None where the source cannot be run so."""
        if self._source is None:
            return None
        try:
            if self._double is None:
                self._double = self._source.load().double()
            wide = (x.double() if x.is_floating_point() else x for x in inputs)
            return run_in_eval(self._double, tuple(wide))
        except Exception:  # noqa: BLE001 - code that names float32 cannot run in float64
            return None


def _errors(expected: Outputs, got: Outputs, known: Outputs) -> list[float]:
    """Return the norm of the difference of each pair, of the elements that are known."""
    differences = [b.cpu().double() - a.cpu().double() for a, b in zip(expected, got, strict=True)]
    return _norms(tuple(differences), known)


def _norms(tensors: Outputs, known: Outputs) -> list[float]:
    """Return the norm of each tensor, of the elements that are known."""
    return [
        float(torch.linalg.vector_norm(t.cpu().double().where(k.cpu(), 0)))
        for t, k in zip(tensors, known, strict=True)
    ]


def _nudged(inputs: Outputs, sign: int) -> Outputs:
    generator = torch.Generator().manual_seed(0)
    return tuple(
        x
        + sign * NUDGE * float(x.abs().max() or 1) * torch.randn(x.shape, generator=generator).to(x)
        if x.is_floating_point() and x.numel()
        else x
        for x in inputs
    )
