"""Causes of a metric that a training does not reach: what they measure, and what mends them.

Thresholds were set on half of the injected faults of `benchmarks/explain.py`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from compress.artifacts.eager_model import EagerModel
from compress.common.forward import flatten_outputs
from compress.core.diagnosis.cause import Cause, RefusedStage, Repair
from compress.core.diagnosis.layer_diagnosis import UNLIKE, WHY, RerunStage
from compress.training.config.training import DEFAULT_LEARNING_RATE, Training
from compress.training.objectives.objective import TargetLoss
from compress.training.stage import Train

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.core.stage import Stage

    Refused = RefusedStage[Any]

LAST_PART = 0.25  # share of the epochs, at the end, in which a converged training learns little
LEAST_FALL = 0.05
"""Share of the first epoch's loss: a training whose loss never fell by more has learnt nothing."""


def recorded_losses(artifact: Artifact) -> list[float]:
    """Return the mean loss of each epoch of the training that made an artifact; empty without."""
    history: Any = artifact.manifest.facts.get("history") or []
    return [
        float(epoch["loss"]) for epoch in history if epoch["epoch"] and epoch["loss"] is not None
    ]


def fall_at_the_end(losses: Sequence[float]) -> float:
    """Return the share of the whole fall of the loss that the last quarter of the epochs brought.

    1 for a single epoch, after which nothing is known of the next one.
    """
    if len(losses) < 2:
        return 1.0
    fall = losses[0] - min(losses)
    if fall <= 0:
        return 0.0
    last = max(1, round(LAST_PART * len(losses)))
    before = min(losses[: len(losses) - last])
    return max(0.0, before - losses[-1]) / fall


def largest_rise(losses: Sequence[float]) -> float:
    """Return by how much the loss rose above its lowest so far, as a share of its whole fall.

    1 where it hardly fell at all.
    """
    if len(losses) < 2:
        return 0.0
    fall = losses[0] - min(losses)
    if fall < LEAST_FALL * abs(losses[0]):
        return 1.0
    lowest, rise = losses[0], 0.0
    for loss in losses[1:]:
        rise = max(rise, loss - lowest)
        lowest = min(lowest, loss)
    return rise / fall


TRAINING_STAGES = (
    "train",
    "distill",
    "quantize_aware_training",
    "prune_channels",
    "prune_weights",
    "prune_layers",
)
"""Stages that train, or fine-tune if `finetune` is set."""
LOSS_SAMPLES = 512  # samples on which the loss before the training is measured
MORE_EPOCHS = 3
LOWER_RATE = 10.0


def training_of(stage: Stage[Any, Any]) -> Training | None:
    """Return the settings by which a stage trains; None where it does not."""
    settings: Any = stage
    found = settings if isinstance(settings, Training) else getattr(stage, "finetune", None)
    return found if isinstance(found, Training) else None


def with_training(stage: Stage[Any, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings of a stage that change those by which it trains; None removes one."""
    training = training_of(stage)
    if training is None or not hasattr(stage, "finetune"):
        return settings
    written = training.model_dump(mode="json", exclude_unset=True) | settings
    return {"finetune": {name: value for name, value in written.items() if value is not None}}


OVERFIT_POINTS = 3.0  # by which a model must be better on `train` than on `val`


def _cause(
    key: str,
    limit: float,
    text: str,
    of_training: Callable[[RerunStage, list[float]], float | None],
    changes: Callable[[Training], list[dict[str, Any]]] = lambda training: [],
    recovered_share: Callable[[Refused, Sequence[str]], float | None] | None = None,
) -> Cause:
    """Return a cause in how a stage trains, given its value by the loss of each epoch.

    Without `recovered_share`, the stage is trained again with the first of the changes.
    """

    def measure(refused: Refused, layer: str) -> float | None:
        if layer or training_of(refused.stage) is None or refused.rerun is None:
            return None
        losses = recorded_losses(refused.after)
        return of_training(refused.rerun, losses) if losses else None

    def share(refused: Refused, layers: Sequence[str]) -> float | None:
        training, rerun = training_of(refused.stage), refused.rerun
        if training is None or rerun is None:
            return None
        for settings in changes(training)[:1]:
            times = settings.get("epochs", training.epochs) / training.epochs
            return rerun.recovered_share(with_training(refused.stage, settings), times)
        return None

    def repairs(refused: Refused, layers: Sequence[str]) -> tuple[Repair, ...]:
        training = training_of(refused.stage)
        if training is None:
            return ()
        written = training.model_dump(mode="json")
        return tuple(
            Repair(with_training(refused.stage, settings), 4)
            for settings in changes(training)
            if any(written.get(name) != value for name, value in settings.items())
        )

    returned = recovered_share or share
    return Cause(key, TRAINING_STAGES, limit, text, measure, returned, repairs)


def _share_in_range(refused: Refused, layers: Sequence[str]) -> float | None:
    """Return the share that returns where `val` is brought to the range of `train`."""
    rerun = refused.rerun
    return None if rerun is None or rerun.missing <= 0 else rerun.share_in_range()


def _largest_rise(rerun: RerunStage, losses: list[float]) -> float | None:
    if not is_underfit(rerun):  # the model has learnt `train` well enough
        return None
    start = loss_before(rerun)
    return largest_rise(losses if start is None else [start, *losses])


def _rates(training: Training) -> tuple[float, float]:
    """Return the highest learning rate, and the optimizer's default."""
    usual = DEFAULT_LEARNING_RATE[training.optimizer]
    # A stage may have a default of its own.
    return training.hyper_parameters().learning_rate or usual, usual


def _lower_rates(training: Training) -> list[dict[str, Any]]:
    rate, usual = _rates(training)
    default: list[dict[str, Any]] = [{"learning_rate": None}] if rate > LOWER_RATE * usual else []
    lower = [{"learning_rate": rate / by} for by in (LOWER_RATE, LOWER_RATE**2, 3.0)]
    return [*default, *lower, {"clip_norm": 1.0}]


def _longer(training: Training) -> list[dict[str, Any]]:
    """Return more epochs, and a higher rate where it is low."""
    found: list[dict[str, Any]] = [
        {"epochs": by * training.epochs} for by in (MORE_EPOCHS, MORE_EPOCHS**2)
    ]
    rate, usual = _rates(training)
    if rate < usual / LOWER_RATE:
        found.insert(0, {"learning_rate": None})
    elif rate < usual:
        found.append({"learning_rate": None})
    return [*found, {"learning_rate": 3 * rate}]


def _regularized(training: Training) -> list[dict[str, Any]]:
    """Return what regularizes; none of them is sure to help."""
    decay = 10 * (training.weight_decay or 5e-4)
    return [{"weight_decay": decay}, {"ema_decay": 0.99}, {"early_stopping": 3}]


def loss_before(rerun: RerunStage) -> float | None:
    """Return the loss on some samples of `train` before the first step; None where it is another.

    A first epoch of too long steps is followed by a fall alone.
    """
    stage, model = rerun.stage, rerun.before
    if not (isinstance(stage, Train) and isinstance(model, EagerModel)):
        return None
    loss = TargetLoss.for_training(stage, rerun.context, model.signature).prepare("cpu")
    data, module = rerun.context.need_data(WHY), model.load().train()
    losses = []
    with torch.no_grad():
        for batch in data.batches("train", stage.batch_size, LOSS_SAMPLES):
            losses.append(float(loss(flatten_outputs(module(*batch.inputs)), batch)))
    return statistics.fmean(losses)


def is_underfit(rerun: RerunStage) -> bool:
    """Whether the metric misses on `train` as well what the gate asks for on `val`.

    A model that is a little better on `train` may still be undertrained.
    """
    return rerun.missing > 0 and (
        rerun.gap is None or rerun.gap < max(rerun.missing, OVERFIT_POINTS)
    )


CAUSES = (
    # The model is trained on inputs that are scaled otherwise than those of use.
    _cause(
        "train_unlike_val",
        UNLIKE,
        "train unlike val (inputs are {value:.3g} times as wide, as narrow or shifted; "
        "limit {limit:g})",
        lambda rerun, losses: rerun.train_unlikeness,
        recovered_share=_share_in_range,
    ),
    # The loss rises again, or never falls: the steps are too long.
    _cause(
        "learning_rate_too_high",
        0.5,
        "diverged, learning rate too high (the loss rises by {value:.0%} of what it falls; "
        "limit {limit:.0%})",
        _largest_rise,
        _lower_rates,
    ),
    # The loss was still falling when the training ended.
    _cause(
        "not_converged",
        0.05,
        "not converged (the last quarter of the epochs brought {value:.0%} of the loss's fall; "
        "limit {limit:.0%})",
        lambda rerun, losses: fall_at_the_end(losses) if is_underfit(rerun) else None,
        _longer,
    ),
    # The model is far better on `train` than on `val`. More data is what is missing, and there is
    # none, so it is not known what would return.
    _cause(
        "overfit",
        OVERFIT_POINTS,
        "overfit (the metric on train is {value:.3g} points better than on val; limit {limit:g})",
        lambda rerun, losses: None if is_underfit(rerun) else rerun.gap,
        _regularized,
        lambda refused, layers: None,
    ),
)
"""Where two of them explain as much, the one that stands first is named first."""
