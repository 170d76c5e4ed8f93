"""Whether an exported model answers like its source on real samples.

Random inputs do not tell everything: a network with large biases answers nearly the same to all of
them, and a lowering that is at chance on data then seems close. So errors are held against how much
the answers differ from sample to sample, and labels are compared.

Answers may be infinite, as masked scores are, or NaN: an export that is so at the same places
answers like its source, and only the other places are measured.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from compress.common.errors import StageFailed
from compress.common.tensor_difference import columns, equally_not_finite, largest, measured

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from compress.common.forward import Predictor
    from compress.core.context import Context

logger = logging.getLogger(__name__)

Outputs = tuple[torch.Tensor, ...]

SAMPLES = 128
"""Samples of `val` that are compared."""
FLOAT_ERROR = 1e-2
"""Largest error, relative to the answers' spread, of a model that computes in floats."""
ROUNDED_ERROR = 0.3
"""The same with integer activations; an answer at chance has an error of 1 or more."""
FLOAT_CHANGES = 0.01
"""Largest fraction of labels that may change, near-ties left out."""
ROUNDED_CHANGES = 0.05
NEAR_TIE = 0.05
"""Distance of two classes, as a share of that of best and worst, below which either may win."""
NOTHING_FINITE = "all answers of the source are infinite or NaN: nothing can be compared"
ELSEWHERE = "the exported model is infinite or NaN at other places than the source"
NO_SPREAD = 0.01
"""Spread, relative to the answers' norm, below which they hardly differ: the norm counts then."""


@dataclass
class Sums:
    """What an output adds up to over the batches compared so far."""

    error: float = 0.0
    spread: float = 0.0
    norm: float = 0.0
    measured: int = 0
    left_out: int = 0
    """Elements that are the same infinity in both, or NaN in both."""
    nan: int = 0

    def add(self, expected: torch.Tensor, got: torch.Tensor) -> None:
        """Take a batch into account."""
        for some_BN, theirs_BN in columns(expected, got):
            equal = equally_not_finite(some_BN, theirs_BN)
            a, b = measured(some_BN, theirs_BN)
            mean = a.sum(0) / (~equal).sum(0).clamp(min=1)
            self.error += float((b - a).square_().sum())
            self.spread += float((a - mean).masked_fill_(equal, 0).square_().sum())
            self.norm += float(a.square().sum())
            self.measured += int((~equal).sum())
            self.left_out += int(equal.sum())
            self.nan += int((equal & some_BN.isnan()).sum())

    @property
    def relative_error(self) -> float:
        """Error relative to the spread of the answers; NaN where one side alone is not finite."""
        scale = self.spread if self.spread > NO_SPREAD**2 * self.norm else self.norm
        return float((self.error / max(scale, 1e-18)) ** 0.5)


@dataclass
class SampleErrors:
    """How far two models are apart on the samples compared so far."""

    samples: int = 0
    changed: int = 0
    """Samples whose label is clearly another one."""
    outputs: list[Sums] = field(default_factory=list)

    def add(self, expected: Outputs, got: Outputs) -> None:
        """Take a batch into account."""
        self.outputs = self.outputs or [Sums() for _ in expected]
        for sums, a, b in zip(self.outputs, expected, got, strict=True):
            sums.add(a, b)
        if _are_classes(expected[0]):
            self._count_changes(expected[0], got[0])

    def _count_changes(self, expected_BC: torch.Tensor, got_BC: torch.Tensor) -> None:
        """Count the samples whose best class is another one, and no near-tie."""
        best_B1, taken_B1 = (x.argmax(1, keepdim=True) for x in (expected_BC, got_BC))
        lost_B1 = expected_BC.gather(1, best_B1) - expected_BC.gather(1, taken_B1)
        known_BC = expected_BC.isfinite()
        highest_B1 = expected_BC.where(known_BC, -torch.inf).amax(1, keepdim=True)
        lowest_B1 = expected_BC.where(known_BC, torch.inf).amin(1, keepdim=True)
        range_B1 = (highest_B1 - lowest_B1).clamp(min=0)
        self.changed += int((lost_B1 > NEAR_TIE * range_B1).sum())

    @property
    def nothing_finite(self) -> bool:
        """Whether there are answers, and none that can be measured."""
        left_out = any(sums.left_out for sums in self.outputs)
        return left_out and not any(sums.measured for sums in self.outputs)

    @property
    def relative_error(self) -> float:
        """That of the worst output; NaN where one side alone is not finite."""
        return largest(sums.relative_error for sums in self.outputs)


def check_on_samples(
    expected: Predictor, got: Predictor, batches: Iterable[Outputs], *, rounded: bool = False
) -> SampleErrors:
    """Compare two models on real inputs.

    Args:
        expected: the source model.
        got: the exported one.
        batches: inputs.
        rounded: whether the models compute in integers.

    Raises:
        StageFailed: answers, or the labels of classes, differ.
    """
    found = SampleErrors()
    for inputs in batches:
        answers, theirs = (tuple(t.cpu() for t in p(*inputs)) for p in (expected, got))
        found.add(answers, theirs)
        found.samples += len(inputs[0])
    problem = _problem(found, rounded=rounded) if found.samples else ""
    if problem:
        raise StageFailed(f"on {found.samples} samples of `val` {problem}")
    nan = sum(sums.nan for sums in found.outputs)
    if nan:
        logger.warning(
            "on %d samples of `val` %d of the source's answers are NaN, and the exported model's "
            "too: these tell nothing of the export",
            *(found.samples, nan),
        )
    return found


def val_inputs(context: Context) -> Iterator[Outputs]:
    """Yield the inputs of the first samples of ``val``; none where there is no data."""
    if context.data is not None and "val" in context.data.datasets:
        for batch in context.data.batches("val", limit=SAMPLES):
            yield batch.inputs


def _problem(found: SampleErrors, *, rounded: bool) -> str:
    largest = ROUNDED_ERROR if rounded else FLOAT_ERROR
    most = ROUNDED_CHANGES if rounded else FLOAT_CHANGES
    if found.nothing_finite:
        return NOTHING_FINITE
    if not math.isfinite(found.relative_error):
        return ELSEWHERE
    if not found.relative_error <= largest:
        return (
            f"the exported model's answers differ from the source's by {found.relative_error:.2g} "
            f"of their spread, expected at most {largest:g}"
        )
    if found.changed > most * found.samples:
        return (
            f"the exported model gives {found.changed} other labels than the source that are no "
            f"near-ties, expected at most {int(most * found.samples)}"
        )
    return ""


def _are_classes(output: torch.Tensor) -> bool:
    return output.dim() == 2 and output.shape[1] > 1 and output.is_floating_point()
