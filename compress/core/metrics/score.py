"""A metric's value with what each part of a split adds to it, and 95 % intervals from these."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from compress.common.errors import StageFailed
from compress.common.lazy_modules import np, torch
from compress.core.bounds import mean_bound, paired_bound, paired_statistic
from compress.core.verdict import Bound, Uncertainty
from compress.profiling.output_summary import OutputSummary

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pydantic import JsonValue

CONFIDENCE = 0.95
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


@dataclass(frozen=True, eq=False)
class Score:
    """The metric of a model on a split."""

    value: float
    samples: int
    """Samples that have a target."""
    parts: NDArray[np.float64] | None = None
    """What each sample, or group of samples, adds to the value, `(parts,)`: numbers whose mean is
    the value. None for metrics that no sums over samples give."""
    are_hits: bool = False
    """Whether the parts are samples that are either right or wrong, 1 or 0."""
    are_shares: bool = False
    """Whether the parts are numbers from 0 to 1, one of each sample, whose mean the value is."""
    outputs: tuple[OutputSummary, ...] = ()
    """A summary of each of the model's outputs on the split, whether the metric reads it or not."""

    @classmethod
    def from_sums(
        cls,
        value: float,
        sums: NDArray[np.float64],
        *,
        is_exponential: bool = False,
        is_fraction: bool = False,
    ) -> Score:
        """Create the score of a mean from each sample's sum and its divisor, `(2, samples)`.

        The divisor is one, or a text's labels; with `is_exponential` the value is exp of the mean,
        and with `is_fraction` each sample's is between 0 and 1.
        """
        parts, counts = sums
        are_hits = bool(np.isin(parts, (0, 1)).all() and (counts == 1).all())
        are_shares = is_fraction and bool((counts == counts[:1]).all())
        if not are_hits:
            # A ratio of sums, linearized: the infinitesimal jackknife.
            parts = (parts - parts.sum() / counts.sum() * counts) / counts.mean()
            parts = value + parts * (value if is_exponential else 1)
        return cls(value, len(parts), parts, are_hits, are_shares)

    def uncertainty(self) -> Uncertainty:
        """Return the interval of the value itself."""
        interval = None
        if self.parts is not None and self.are_hits:
            interval = proportion_interval(int(self.parts.sum()), self.samples)
        elif self.parts is not None:
            interval = _mean_interval(self.value, self.parts)
        return Uncertainty(samples=self.samples, interval=interval)

    def change_to(self, after: Score) -> Uncertainty:
        """Return the interval of the difference to another model's value on the same samples."""
        first, second, samples = self.parts, after.parts, after.samples
        if first is None or second is None or first.shape != second.shape:
            return Uncertainty(samples=samples)
        change = second - first
        if self.are_hits and after.are_hits:
            lost, gained = int((change < 0).sum()), int((change > 0).sum())
            paired = paired_interval(gained, lost, samples)
            return Uncertainty(samples=samples, interval=paired, lost=lost, gained=gained)
        interval = _mean_interval(after.value - self.value, change)
        return Uncertainty(samples=samples, interval=interval)

    def drop_bound(self, after: Score, confidence: float) -> Bound:
        """Return the upper bound of how many points worse another model's value is.

        Raises StageFailed where the value is no mean of one number between 0 and 1 of each sample.
        """
        if not (self.are_shares and after.are_shares and self.samples == after.samples):
            raise StageFailed(
                "confidence takes a metric that is a mean of one number between 0 and 1 of each "
                "sample; these have different numbers of labels. Use max_disagreement, or leave "
                "confidence out"
            )
        assert self.parts is not None
        assert after.parts is not None
        drop, samples = self.parts - after.parts, self.samples
        if self.are_hits and after.are_hits:
            method = "exact unconditional test of paired samples"
            lost, gained = int((drop > 0).sum()), int((drop < 0).sum())
            bound = paired_bound(lost, gained, samples, confidence)
        else:
            method, bound = "betting on a bounded mean", mean_bound(drop, confidence)
        return Bound(
            value=100 * bound,
            measured=100 * float(drop.mean()),
            samples=samples,
            changed=int((drop != 0).sum()),
            confidence=confidence,
            method=method,
        )

    def to_json(self) -> JsonValue:
        """Return it in a form that JSON can hold."""
        parts = None
        if self.parts is not None:
            content = np.ascontiguousarray(self.parts).tobytes()
            parts = base64.b85encode(zlib.compress(content)).decode()
        outputs: JsonValue = [summary.model_dump(mode="json") for summary in self.outputs]
        return [self.value, self.samples, parts, self.are_hits, outputs, self.are_shares]

    @classmethod
    def from_json(cls, content: Any) -> Score:
        """Restore what :meth:`to_json` returned."""
        value, samples, parts, are_hits, outputs, *are_shares = content
        if parts is not None:
            parts = np.frombuffer(zlib.decompress(base64.b85decode(parts)))
        summaries = tuple(map(OutputSummary.model_validate, outputs))
        # Of a version without such numbers only samples that are right or wrong are known to be.
        return cls(value, samples, parts, are_hits, (are_shares or [are_hits])[0], summaries)


def proportion_interval(hits: int, samples: int) -> tuple[float, float]:
    """Return the interval of a share of samples (Wilson, 1927)."""
    middle = (hits + Z**2 / 2) / (samples + Z**2)
    reach = Z / (samples + Z**2) * math.sqrt(hits * (samples - hits) / samples + Z**2 / 4)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def paired_interval(gained: int, lost: int, samples: int) -> tuple[float, float]:
    """Return the interval of the difference of two shares of the same samples.

    The score interval of Tango ("Equivalence test and confidence interval for the difference in
    proportions for the paired-sample design", 1998). It contains 0 where McNemar's test finds no
    difference, and also where no sample changes there is one.
    """

    def end(inside: float, outside: float) -> float:
        for _ in range(60):  # until the interval's width is below a float's rounding
            middle = (inside + outside) / 2
            if abs(paired_statistic(gained, lost, samples, middle)) <= Z:
                inside = middle
            else:
                outside = middle
        return inside

    measured = (gained - lost) / samples
    return end(measured, -1.0), end(measured, 1.0)


def _mean_interval(value: float, parts: NDArray[np.float64]) -> tuple[float, float] | None:
    """Return the interval of the mean of parts (by Student's t); None where they are all equal."""
    from scipy.special import stdtrit

    count = len(parts)
    if count < 2 or parts.min() == parts.max():
        return None
    error = float(parts.std(ddof=1)) / math.sqrt(count)
    reach = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * error
    return value - reach, value + reach


def pseudo_values(
    value: float,
    sums: Sequence[torch.Tensor],
    add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    compute: Callable[[torch.Tensor], float],
) -> NDArray[np.float64] | None:
    """Return what each group adds to a metric, `(groups,)`: numbers whose mean is the metric.

    The jackknife: samples are divided into groups, and the metric is computed without each of them
    (Miller, "The jackknife: a review", 1974). None where it is not defined without one.
    `value` is that of all groups; `compute` returns the metric of some sums.
    """
    if len(sums) < 2:
        return None
    try:
        before = list(accumulate(sums[:-1], add))
        after = list(accumulate(sums[:0:-1], lambda later, own: add(own, later)))[::-1]
        inner = map(add, before[:-1], after[1:])
        return jackknifed(value, [*map(compute, (after[0], *inner, before[-1]))])
    except StageFailed:
        return None


def jackknifed(value: float, without: Sequence[float]) -> NDArray[np.float64] | None:
    """Return what each group adds to a metric, from its values without each; None for NaN."""
    values = np.array(without)
    if not np.isfinite(values).all():
        return None
    parts: NDArray[np.float64] = value + (len(values) - 1) * (values.mean() - values)
    return parts
