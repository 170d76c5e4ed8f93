"""Which of the smaller models a search looks for next, and which it trains in the time left."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

from compress.common.sealed_json import read_state, write_state
from compress.pipelines.auto.candidates import Candidate
from compress.pipelines.auto.front import Front, missed_limits

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from compress.pipelines.auto.candidates import CheckedModel
    from compress.pipelines.auto.search_state import Programmes, SearchState

MAX_CHECKS_AT_LIMIT = 5
"""Models that are checked at the asked latency before other latencies are looked at."""
NARROW_GAP = 1.03
"""Ratio of two latencies between which no further model is looked for."""
WEIGHT_BEHIND_BAD = 0.5
"""Weight of a gap of latencies whose slower end loses too much."""
AIMED_SHARE = 0.99
"""Share of the asked latency that the solver aims at until a model keeps to it, as half of all
models are slower than predicted. From then on it aims at all of it: the best one may be predicted
at the very limit."""
MAX_TRAINED_AT_ONCE = 6
"""Models of which successive halving trains the best to the end."""
HALVINGS_FILE = "halvings.json"
"""In the results' folder: the models of each successive halving, with which a stopped search goes
on."""

Contenders: TypeAlias = list[tuple[Candidate, float | None]]
"""Models, and their predicted latencies."""


def latency_targets(state: SearchState) -> list[float]:
    """Return the predicted latencies to look for models at, the most wanted first."""
    asked_ms = state.asked_ms
    found = sorted(state.offered(), key=lambda model: model.latency_ms)
    targets = []
    if asked_ms is not None:
        near = [m for m in found if m.predicted_ms and m.latency_ms <= 1.1 * asked_ms]
        if len(near) < MAX_CHECKS_AT_LIMIT:
            targets.append(aimed_at(found, asked_ms))
    good = [model for model in found if state.is_good(model)]
    # A metric on some hundred samples has steps, and a model that loses a sample too many may
    # have a faster neighbour that does not: so wherever nothing was checked yet, and most
    # where the slower end of a gap is good.
    fastest = good[0].latency_ms if good else math.inf
    faster = [model for model in found if model.latency_ms <= fastest]
    below = [(state.smallest_ms(), False)]
    below += [(model.latency_ms, state.is_good(model)) for model in faster]
    targets += _middles(
        (a, b, 1.0 if is_good_end else WEIGHT_BEHIND_BAD)
        for (a, _), (b, is_good_end) in pairwise(below)
    )
    # Then where the front is thinnest.
    front = [model.latency_ms for model in Front.pareto(good)]
    return targets + _middles((a, b, 1.0) for a, b in pairwise(front))


def aimed_at(checked: Iterable[CheckedModel], asked_ms: float) -> float:
    """Return the predicted latency that models for an asked one are solved for."""
    keeps_to_it = any(m.predicted_ms and m.latency_ms <= asked_ms for m in checked)
    return asked_ms if keeps_to_it else AIMED_SHARE * asked_ms


def _middles(gaps: Iterable[tuple[float, float, float]]) -> list[float]:
    """Return the middle of each gap between two latencies that is not narrow, the widest first.

    A gap is a lower and an upper end, and the weight of its width.
    """
    wide = [(weight * math.log(b / a), a, b) for a, b, weight in gaps if b / a > NARROW_GAP]
    return [math.sqrt(a * b) for _, a, b in sorted(wide, reverse=True)]


@dataclass
class Recovery:
    """Trains models of a search by `space.recovery`."""

    state: SearchState
    programmes: Programmes
    ends: list[int]
    """Epochs of training after which some of the models are dropped."""
    file: Path
    key: str
    """What tells this search from others."""
    begun: list[Contenders] = field(default_factory=list)
    """Models of the successive halvings that have begun, by an earlier search too."""
    _done: int = 0
    """How many of these this search has come to the end of."""
    _seconds_per_epoch: float = 0.0
    """Of the slowest model so far, with its export and check."""

    def __post_init__(self) -> None:
        self.begun = read_state(self.file, self.key, list[Contenders]) or []

    def train(self, deadline: float) -> None:
        """Train models until a deadline on the clock of :func:`time.monotonic`, or none is left."""
        is_left = True
        while is_left and time.monotonic() < deadline:
            if not self.state.loss_decides:
                is_left = self._train_fastest(deadline)
                continue
            if self._done == len(self.begun):
                contenders = self._contenders()
                if not contenders:
                    break
                self.begun.append(contenders)
                write_state(self.file, self.key, self.begun)
            # Of one that an earlier search has begun, what was trained is not trained again.
            is_left = self._train_best(self.begun[self._done], deadline)
            self._done += 1

    def _contenders(self) -> Contenders:
        """Return the cut models within the limits that lose least, and are not trained yet.

        The best is the first: where there is time for few, these are trained. All are in the order
        of their predicted losses, also those that were checked: predictions add up what single cuts
        lose, and are far above what a model of many cuts is measured to lose.
        """
        state = self.state
        offered = state.offered()
        known = self._untrained(model for model in state.checked.values() if model.trained)
        known.update(
            model.candidate
            for model in offered
            if missed_limits(state.settings.limits, model, but="max_drop")
        )
        target_ms = None if state.asked_ms is None else aimed_at(offered, state.asked_ms)
        found: Contenders = []
        while len(found) < MAX_TRAINED_AT_ONCE:
            solved = state.solve(self.programmes, target_ms, [*known])
            if solved is None or not solved.candidate.is_smaller:
                break
            known.add(solved.candidate)
            found.append((solved.candidate, solved.predicted_ms))
        return found

    def _train_fastest(self, deadline: float) -> bool:
        """Train a model that is faster than the fastest good one, until it is good itself.

        The first is as fast as can be, as nothing else need be trained where this one is good. Each
        further one is halfway to the slowest that was trained to the end in vain, so that the
        fastest good one is found as by bisection. Returns whether there was one and time for it.
        """
        offered = self.state.offered()
        slowest_ms = max(model.latency_ms for model in offered)
        good = (model.latency_ms for model in offered if self.state.is_good(model))
        best_ms = min(good, default=slowest_ms)
        over = [m for m in offered if m.trained == self.ends[-1] or self.state.is_good(m)]
        vain = [m.latency_ms for m in over if m.trained and m.latency_ms < best_ms]
        target_ms = NARROW_GAP * self.state.smallest_ms()
        if vain:  # halfway on a logarithmic scale, as latencies differ by factors
            target_ms = math.sqrt(best_ms * max(vain))
        if best_ms < NARROW_GAP * max(vain, default=target_ms):
            return False
        known = self._untrained(model for model in over if model.trained)
        solved = self.state.solve(self.programmes, target_ms, [*known])
        while solved is None and target_ms * NARROW_GAP < best_ms:  # none that fast is small enough
            target_ms = math.sqrt(best_ms * target_ms)
            solved = self.state.solve(self.programmes, target_ms, [*known])
        if solved is None or not solved.candidate.is_smaller:
            return False
        for end in self.ends:
            trained = replace(solved.candidate, trained=end)
            if time.monotonic() < deadline:
                self.state.check(trained, solved.predicted_ms)
            found = self.state.checked.get(trained.name)
            if found is None or self.state.is_good(found):
                break
        return True

    def _train_best(self, contenders: Contenders, deadline: float) -> bool:
        """Train models by successive halving; return whether there was one and time for it.

        Only as many begin as the time allows to train to the end, by how long the first takes.
        """
        begin, before = time.monotonic(), 0
        for end in self.ends:
            reached: Contenders = []
            for candidate, predicted_ms in contenders:
                start = time.monotonic()
                if start + self._seconds_per_epoch * (end - before) > deadline:
                    break
                if reached and not before:
                    epochs = (deadline - begin) / max(self._seconds_per_epoch, 1e-9)
                    if len(reached) >= models_to_begin(len(contenders), epochs, self.ends):
                        break
                trained = replace(candidate, trained=end)
                self.state.check(trained, predicted_ms)
                taken = (time.monotonic() - start) / (end - before)
                self._seconds_per_epoch = max(self._seconds_per_epoch, taken)
                if trained.name in self.state.checked:
                    reached.append((candidate, predicted_ms))
            if not reached:
                return end > self.ends[0]
            models = [self.state.checked[replace(one, trained=end).name] for one, _ in reached]
            order = sorted((model.loss_order, i) for i, model in enumerate(models))
            contenders = [reached[i] for _, i in order[: math.ceil(len(order) / 2)]]
            before = end
        return True

    def _untrained(self, models: Iterable[CheckedModel]) -> set[Candidate]:
        """Return models as they are before training, and what is never trained."""
        whole = {Candidate(format, runtime=runtime) for format, runtime, _ in self.state.models}
        before = {replace(model.candidate, trained=0) for model in models}
        return before | {*self.state.failed} | whole


def models_to_begin(most: int, epochs: float, ends: Sequence[int]) -> int:
    """Return with how many of `most` models a successive halving takes so many epochs at most.

    `epochs` are those of all models together; after each of `ends` the better half goes on.
    """
    for count in range(most, 1, -1):
        needed, left, before = 0, count, 0
        for end in ends:
            needed += left * (end - before)
            left, before = math.ceil(left / 2), end
        if needed <= epochs:
            return count
    return 1
