"""Errors of the latency models, and how far the solver and Optuna's TPE are from the optimum."""

from __future__ import annotations

import json
import math
import random
import statistics
import warnings
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from compress.pipelines.auto.cost_models import (
    FLOAT,
    QUANTIZED,
    FormatModel,
    decision_of,
)
from compress.pipelines.auto.search import AIMED_SHARE
from compress.profiling.interaction_sum import InteractionSum
from compress.pruning.latency.solver import Limit, Programme

if TYPE_CHECKING:
    from auto_search.spaces import Space

BUDGETS = (0.75, 0.6, 0.5, 0.4, 0.3)
"""Places between the latencies of the fastest model and of the whole one."""
CHECKS, TRIALS = (1, 2, 3, 5, 10), (25, 50)
LOSSES = ("distance", "cross_entropy")
SEEDS = range(5)
"""Of TPE, whose median regret is shown."""
CORRECTED_BY = 5
"""Models whose latencies correct the prediction before its errors are counted."""


class Truth(NamedTuple):
    """What a model turned out to have."""

    latency_ms: float
    distance: float | None
    """Squared distance of the outputs from the float model's, relative to these: what a search
    decides by among models of one drop of the metric."""
    cross_entropy: float | None
    """On `val`. Losses are None where the build has not made them."""


@dataclass
class Kind:
    """One model in one format: its decisions, and the truth of each choice."""

    name: str
    """What it is, as `int8_dynamic without layers.0`."""
    grid: dict[str, tuple]
    """Decision → its values, the model's own first."""
    loss_increase: dict[str, dict]
    latency_ms: InteractionSum
    truth: dict[tuple, Truth]
    """By the values of all decisions, in their order."""

    @classmethod
    def from_content(cls, content) -> Kind:
        """Read what the build has written."""
        grid = {group: tuple(widths) for group, widths in content["grid"].items()}
        loss_increase = {group: dict.fromkeys(widths, 0.0) for group, widths in grid.items()}
        for group, width, value in content.get("harms", []):
            loss_increase[group][width] = value
        for layer in content["layers"]:
            grid[decision_of(layer)] = QUANTIZED, FLOAT
            value = content.get("layer_harms", {}).get(layer, 0.0)
            loss_increase[decision_of(layer)] = {QUANTIZED: value, FLOAT: 0.0}
        terms: dict[tuple, dict[tuple, float]] = {}
        for scope, values, change in content["terms"]:
            terms.setdefault(tuple(scope), {})[tuple(values)] = change
        losses = [content.get(loss, [None] * len(content["latency_ms"])) for loss in LOSSES]
        truths = zip(content["latency_ms"], *losses, strict=True)
        truth = dict(zip(product(*grid.values()), map(Truth._make, truths), strict=True))
        name = f"{content['format']} {content['name']}".strip()
        return cls(name, grid, loss_increase, InteractionSum(content["base_ms"], terms), truth)

    @property
    def whole(self) -> Truth:
        """The truth of the model itself."""
        return next(iter(self.truth.values()))

    @cached_property
    def choices(self) -> list[dict]:
        """All choices."""
        return [dict(zip(self.grid, values, strict=True)) for values in self.truth]

    def truth_of(self, choice) -> Truth:
        """Return what a choice turns out to have."""
        return self.truth[tuple(choice[decision] for decision in self.grid)]


def compare(space: Space) -> None:
    """Print errors of the latency model, and regrets of the solver and of TPE."""
    content = json.loads(space.file.read_text())
    kinds = [Kind.from_content(one) for one in content["models"]]
    print(f"\n{space.name}: {space.title}; {sum(len(kind.truth) for kind in kinds)} models")
    errors = {kind.name: _errors(kind) for kind in kinds}
    errors["all"] = [error for own in errors.values() for error in own]
    for name, own in errors.items():
        close = 100 * sum(error <= 0.1 for error in own) / len(own)
        mean, largest = 100 * statistics.fmean(own), 100 * max(own)
        print(
            f"latency of {len(own)} models, {name}: mean error {mean:.1f} %, largest "
            f"{largest:.1f} %, {close:.1f} % within 10 %"
        )
    every = [truth.latency_ms for kind in kinds for truth in kind.truth.values()]
    whole_ms, fastest_ms = kinds[0].whole.latency_ms, min(every)
    print(f"the whole model takes {whole_ms:.3g} ms, the fastest one {fastest_ms:.3g} ms")
    head = [f"{n} checks" for n in CHECKS] + [f"TPE, {n} trials" for n in TRIALS]
    for loss in LOSSES:
        if getattr(kinds[0].whole, loss) is None:
            continue
        print(f"\n| regret in {loss.replace('_', ' ')} | {' | '.join(head)} |")
        print("|---" * (len(head) + 1) + "|")
        for share in BUDGETS:
            limit_ms = fastest_ms + share * (whole_ms - fastest_ms)
            found = [
                *_solver_regrets(kinds, limit_ms, loss),
                *_tpe_regrets(kinds, limit_ms, loss),
            ]
            print(f"| {share} | {' | '.join(map(_shown, found))} |", flush=True)


def _errors(kind: Kind) -> list[float]:
    """Return the relative errors of the predicted latencies, one factor corrected for all."""
    pairs = [(kind.latency_ms(choice), kind.truth_of(choice).latency_ms) for choice in kind.choices]
    known = [pairs[0], *random.Random(0).sample(pairs, CORRECTED_BY - 1)]
    factor = statistics.median(measured / predicted for predicted, measured in known)
    return [abs(factor * predicted / measured - 1) for predicted, measured in pairs]


def _solver_regrets(kinds: list[Kind], limit_ms: float, loss: str) -> list[float | None]:
    """Check what the solver proposes, correct the models, and solve again.

    As in a search, the whole model in each format is known before the first check.
    """
    optimum = _optimum(kinds, limit_ms, loss)
    models = [FormatModel("float", kind.latency_ms, kind.latency_ms) for kind in kinds]
    programmes = [Programme(kind.grid, kind.loss_increase) for kind in kinds]
    for kind, model, programme in zip(kinds, models, programmes, strict=True):
        model.correct(model.latency_ms(kind.choices[0]), kind.whole.latency_ms)
        model.loss_increase = (kind.whole.distance or 0.0) - programme.total_loss_increase(
            kind.choices[0]
        )
    checked: list[list[dict]] = [[] for _ in kinds]
    best: float | None = None
    regrets: list[float | None] = []
    for number in range(1, max(CHECKS) + 1):
        solved = []
        target_ms = AIMED_SHARE * limit_ms if best is None else limit_ms
        for i, (model, programme) in enumerate(zip(models, programmes, strict=True)):
            choice = programme.solve([Limit(model.corrected(), target_ms)], checked[i])
            if choice is not None:
                solved.append(
                    (programme.total_loss_increase(choice) + model.loss_increase, i, choice)
                )
        if solved:
            _, i, choice = min(solved, key=lambda one: one[:2])
            checked[i].append(choice)
            truth = kinds[i].truth_of(choice)
            models[i].correct(models[i].latency_ms(choice), truth.latency_ms)
            if truth.latency_ms <= limit_ms:
                best = min(math.inf if best is None else best, getattr(truth, loss))
        if number in CHECKS:
            regrets.append(None if best is None else best - optimum)
    return regrets


def _tpe_regrets(kinds: list[Kind], limit_ms: float, loss: str) -> list[float | None]:
    """Return the median regret of Optuna's TPE, which gets by how much the limit is missed."""
    try:
        import optuna
    except ImportError:
        return [None] * len(TRIALS)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    optimum, by_name = _optimum(kinds, limit_ms, loss), {kind.name: kind for kind in kinds}
    found: list[list[float]] = [[] for _ in TRIALS]
    for seed in SEEDS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # Optuna 5 renames constraints_func
            sampler = optuna.samplers.TPESampler(
                seed=seed, constraints_func=lambda trial: (trial.user_attrs["over"],)
            )
        study = optuna.create_study(sampler=sampler)
        best = float("inf")
        for number in range(1, max(TRIALS) + 1):
            trial = study.ask()
            kind = by_name[trial.suggest_categorical("model", [*by_name])]
            choice = {d: trial.suggest_categorical(d, [*own]) for d, own in kind.grid.items()}
            truth = kind.truth_of(choice)
            trial.set_user_attr("over", truth.latency_ms / limit_ms - 1)
            study.tell(trial, getattr(truth, loss))
            if truth.latency_ms <= limit_ms:
                best = min(best, getattr(truth, loss))
            if number in TRIALS:
                found[TRIALS.index(number)].append(best - optimum)
    return [statistics.median(own) for own in found]


def _optimum(kinds: list[Kind], limit_ms: float, loss: str) -> float:
    every = (truth for kind in kinds for truth in kind.truth.values())
    return min(getattr(truth, loss) for truth in every if truth.latency_ms <= limit_ms)


def _shown(regret: float | None) -> str:
    return "–" if regret is None else f"{regret:.4f}"
