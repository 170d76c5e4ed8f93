"""A metric's value with what each sample adds to it, and 95 % confidence intervals from these."""

from __future__ import annotations

import base64
import math
import zlib
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from compress.core.verdict import Uncertainty
from compress.profiling.output_summary import OutputSummary

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from pydantic import JsonValue

CONFIDENCE = 0.95
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
HALVINGS = 60
"""Of an interval, until its width is below a float's rounding."""


@dataclass(frozen=True, eq=False)
class Score:
    """The metric of a model on a split."""

    value: float
    samples: int
    """Samples that have a target."""
    sums: NDArray[np.float64] | None = None
    """What each sample adds to the sum whose mean the value is, `(2, samples)`: the sum, and what
    it is divided by (one, or a text's labels); None for metrics that are no mean over samples."""
    is_exponential: bool = False
    """Whether the value is the exponential of the mean."""
    outputs: tuple[OutputSummary, ...] = ()
    """A summary of each of the model's outputs on the split, whether the metric reads it or not."""

    @property
    def are_hits(self) -> bool:
        """Whether each sample is either right or wrong."""
        import numpy as np

        return self.sums is not None and bool(
            np.isin(self.sums, (0, 1)).all() and (self.sums[0] <= self.sums[1]).all()
        )

    def uncertainty(self) -> Uncertainty:
        """Return the interval of the value itself."""
        influence = self._influence()
        interval = None if influence is None else _mean_interval(self.value, influence)
        if self.sums is not None and self.are_hits:
            interval = proportion_interval(int(self.sums[0].sum()), self.samples)
        return Uncertainty(samples=self.samples, interval=interval)

    def change_to(self, after: Score) -> Uncertainty:
        """Return the interval of the difference to another model's value on the same samples."""
        first, second, samples = self._influence(), after._influence(), after.samples
        if first is None or second is None or first.shape != second.shape:
            return Uncertainty(samples=samples)
        if self.are_hits and after.are_hits:
            assert self.sums is not None and after.sums is not None
            change = after.sums[0] - self.sums[0]
            lost, gained = int((change < 0).sum()), int((change > 0).sum())
            interval = paired_interval(gained, lost, samples)
            return Uncertainty(samples=samples, interval=interval, lost=lost, gained=gained)
        interval_of_mean = _mean_interval(after.value - self.value, second - first)
        return Uncertainty(samples=samples, interval=interval_of_mean)

    def to_json(self) -> JsonValue:
        """Return it in a form that JSON can hold."""
        import numpy as np

        sums = None
        if self.sums is not None:
            content = np.ascontiguousarray(self.sums).tobytes()
            sums = base64.b85encode(zlib.compress(content)).decode()
        outputs: JsonValue = [summary.model_dump(mode="json") for summary in self.outputs]
        return [self.value, self.samples, sums, self.is_exponential, outputs]

    @classmethod
    def from_json(cls, content: Any) -> Score:
        """Restore what :meth:`to_json` returned."""
        import numpy as np

        value, samples, sums, is_exponential, outputs = content
        if sums is not None:
            sums = np.frombuffer(zlib.decompress(base64.b85decode(sums))).reshape(2, -1)
        summaries = tuple(map(OutputSummary.model_validate, outputs))
        return cls(value, samples, sums, is_exponential, summaries)

    def _influence(self) -> NDArray[np.float64] | None:
        """Return how far each sample moves the value, `(samples,)`: its mean is 0.

        The value is a ratio of sums, linearized (the infinitesimal jackknife).
        """
        if self.sums is None or not self.sums[1].sum():
            return None
        sums, counts = self.sums
        influence: NDArray[np.float64] = (sums - sums.sum() / counts.sum() * counts) / counts.mean()
        return influence * self.value if self.is_exponential else influence


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

    def distance(difference: float) -> float:
        """Return the score statistic of a supposed difference."""
        b = (2 * samples - gained + lost) * difference - gained - lost
        c = -lost * difference * (1 - difference)
        # The likeliest share of samples that are lost, given the difference.
        share = (math.sqrt(max(0.0, b * b - 8 * samples * c)) - b) / (4 * samples)
        variance = samples * (2 * share + difference * (1 - difference))
        found = gained - lost - samples * difference
        return found / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, found)

    def end(inside: float, outside: float) -> float:
        for _ in range(HALVINGS):
            middle = (inside + outside) / 2
            if abs(distance(middle)) <= Z:
                inside = middle
            else:
                outside = middle
        return inside

    measured = (gained - lost) / samples
    return end(measured, -1.0), end(measured, 1.0)


def _mean_interval(value: float, influence: NDArray[np.float64]) -> tuple[float, float] | None:
    """Return the interval of a mean (by Student's t) from each sample's distance to it."""
    from scipy.special import stdtrit

    samples = len(influence)
    if samples < 2:
        return None
    error = float(influence.std(ddof=1)) / math.sqrt(samples)
    reach = float(stdtrit(samples - 1, (1 + CONFIDENCE) / 2)) * error
    return value - reach, value + reach
