"""Which layers leave the integers, so that the metric is kept at the least cost.

After the accuracy-aware training-free loop of NNCF (Kozlov et al., "Neural Network Compression
Framework for fast model inference", 2020), with layers ranked by what rounding each alone does to
the answers, as in HAWQ (Dong et al., "HAWQ: Hessian AWare Quantization of Neural Networks with
Mixed-Precision", 2019), where the Hessian stands for that.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from compress.common.errors import StageFailed
from compress.quantization.mixed_precision.bit_candidates import FLOAT, WIDE, Candidates

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from compress.quantization.mixed_precision.sensitivity import AccuracyLoss, SensitivityMeter

Formats = dict[str, str]
"""Layer → observer of what it reads, `uint16` or `float`; others have the usual observer."""


class OutOfTime(Exception):
    """The time is over before the next candidate."""


@dataclass
class Search:
    """One search, and what it has found so far."""

    candidates: Candidates
    observe: Callable[[str], None]
    """Calibrates with another observer, once it is needed."""
    judge: SensitivityMeter
    max_drop_points: float
    fallback: tuple[str, ...]
    costs: Mapping[str, float]
    deadline: float
    """On the clock of :func:`time.monotonic`."""
    harms: dict[str, AccuracyLoss] = field(default_factory=dict)
    """What each layer does alone, in the best format in which it is rounded."""
    observers: Formats = field(default_factory=dict)
    """Layers for which another observer than the usual one does less harm."""
    met: Formats | None = None
    """The cheapest choice so far that keeps the metric."""
    stopped: bool = False
    """Whether the time was over before the search was."""
    _drops: dict[frozenset[tuple[str, str]], float] = field(default_factory=dict)

    def run(self) -> Formats:
        """Return the formats that keep the metric.

        Raises:
            StageFailed: none was found; the message names the best.
        """
        try:
            self._run()
        except OutOfTime:
            self.stopped = True
        if self.met is None:
            raise StageFailed(self._why_not())
        return self.met

    @property
    def evaluations(self) -> int:
        """How many candidates were held against `max_drop_points`."""
        return len(self._drops)

    def drop(self, formats: Formats) -> float:
        """Return by how many points the metric is worse with these formats, measured once.

        Raises:
            OutOfTime: so it is.
        """
        key = frozenset(formats.items())
        if key not in self._drops:
            self._refuse_when_late()
            self._drops[key] = self.judge.drop(self.candidates.build(formats).graph)
        return self._drops[key]

    def _run(self) -> None:
        if self._keeps({}):
            return
        self._rank()
        if self.observers and self._keeps(dict(self.observers)):
            return
        order = self._order()
        for chosen in [c for c in (FLOAT, WIDE) if c in self.fallback]:
            count = self._smallest_prefix(order, chosen)
            given = dict.fromkeys(order[:count], chosen) or self._other_choice(order, chosen)
            if given:
                left = self._give_back(given)
                if chosen == FLOAT and WIDE in self.fallback:
                    self._narrow(left)
                return

    def _keeps(self, formats: Formats) -> bool:
        kept = self.drop(formats) <= self.max_drop_points
        if kept:
            self.met = formats
        return kept

    def _rank(self) -> None:
        """Find what rounding each layer alone does, with each observer there is."""
        names = self.candidates.layers
        others = [chosen for chosen in self.fallback if chosen not in (FLOAT, WIDE)]
        for observer in others:
            self.observe(observer)
        for done, name in enumerate(names, 1):
            alone = {other: FLOAT for other in names if other != name}
            self.harms[name] = self._harm(alone)
            for observer in others:
                harm = self._harm({**alone, name: observer})
                if harm < self.harms[name]:
                    self.harms[name], self.observers[name] = harm, observer
            self.judge.context.progress("rank layers", done, len(names), name)

    def _harm(self, formats: Formats) -> AccuracyLoss:
        self._refuse_when_late()
        return self.judge.harm(self.candidates.build(formats).graph)

    def _order(self) -> list[str]:
        """Return the layers, those first whose return to float mends most for what it costs."""
        return sorted(
            self.candidates.layers,
            key=lambda name: self.harms[name].over(self.costs[name]),
            reverse=True,
        )

    def _smallest_prefix(self, order: Sequence[str], chosen: str) -> int:
        """Return how many layers need a format; 0 where no number of them keeps the metric."""
        most = len(order) - (chosen == FLOAT)  # something must stay in integers
        low, high = 0, 1
        while high <= most and not self._keeps(self._with(dict.fromkeys(order[:high], chosen))):
            low, high = high, min(2 * high, most) if high < most else most + 1
        if high > most:
            return 0
        while high - low > 1:
            middle = (low + high) // 2
            kept = self._keeps(self._with(dict.fromkeys(order[:middle], chosen)))
            low, high = (low, middle) if kept else (middle, high)
        return high

    def _other_choice(self, order: Sequence[str], chosen: str) -> Formats:
        """Return other layers that a format keeps the metric with, where bisection found none.

        Prefixes that it passed over, as more layers in float may do worse; then all layers but one,
        as the one that does harm may be the dearest by far, and ranked last.
        """
        prefixes = [list(order[:count]) for count in range(1, len(order))]
        all_but_one = [[n for n in order if n != kept] for kept in reversed(order)]
        for names in filter(None, prefixes + all_but_one):
            given = dict.fromkeys(names, chosen)
            if self._keeps(self._with(given)):
                return given
        return {}

    def _give_back(self, given: Formats) -> Formats:
        """Round layers again one by one, while the metric is kept; the dearest for its harm first.

        The prefix is the smallest one, and a smaller set may still be found within it.

        Returns:
            The layers that need what they were given.
        """
        left = given
        for name in reversed(given):
            fewer = {other: chosen for other, chosen in left.items() if other != name}
            if fewer and self._keeps(self._with(fewer)):
                left = fewer
        return left

    def _narrow(self, floats: Formats) -> None:
        """Let layers in float read 16 bits instead, one by one, while the metric is kept."""
        left = floats
        for name in reversed(floats):
            narrower = {**left, name: WIDE}
            if self._keeps(self._with(narrower)):
                left = narrower

    def _with(self, given: Formats) -> Formats:
        return {**self.observers, **given}

    def _refuse_when_late(self) -> None:
        if self._drops and time.monotonic() > self.deadline:
            raise OutOfTime

    def _why_not(self) -> str:
        best = min(self._drops, key=lambda key: self._drops[key])
        floats = [name for name, chosen in best if chosen == FLOAT]
        count = len(self.candidates.layers)
        told = (
            f"max_drop_points {self.max_drop_points:g} is not met: the best of "
            f"{self.evaluations} candidates loses {self._drops[best]:.4g} points of "
            f"{self.judge.metric} with {len(floats)} of {count} layers in float"
        )
        if self.stopped:
            return f"{told}; the time was over, raise `minutes` or `max_drop_points`"
        if FLOAT not in self.fallback:
            return f"{told}; add `float` to `fallback`, or raise `max_drop_points`"
        mend = "raise `max_drop_points` or use another stage"
        return f"{told}; no choice that was tried keeps it, {mend}"

    def facts(self, formats: Formats) -> dict[str, Any]:
        """Return what was found, for the manifest."""
        layers = [
            {
                "module": name,
                "format": formats.get(name, next(iter(self.candidates.ranges))),
                "sensitivity": self.harms[name].metric_drop() if name in self.harms else None,
                "cost": round(self.costs[name], 4),
            }
            for name in (self._order() if len(self.harms) == len(self.costs) else self.costs)
        ]
        return {
            "metric": self.judge.metric,
            "before": round(self.judge.before, 6),
            "drop_all_quantized_points": self._reported_drop(self._drops[frozenset()]),
            "drop_points": self._reported_drop(self.drop(formats)),
            "evaluations": self.evaluations,
            "stopped_by_time": self.stopped,
            "layers": layers,
        }

    @staticmethod
    def _reported_drop(drop: float) -> float | None:
        """Return a drop as JSON takes it; None where the outputs were not finite."""
        return None if drop == float("inf") else round(drop, 6)
