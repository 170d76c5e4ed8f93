"""Early stopping and the best epoch, as functions of the metrics so far."""

# Without state, so that a resumed training decides as an uninterrupted one.

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compress.core.metrics import Metric
    from compress.training.checkpoint.metadata import Epoch
    from compress.training.config.training import Training


def is_better(epoch: Epoch, kept: Epoch | None, metric: Metric) -> bool:
    """Whether an epoch's weights replace the best ones so far."""
    if kept is None or kept.metric is None or epoch.metric is None:
        return True
    gain = -metric.drop_points(kept.metric, epoch.metric)
    # Among trained epochs the later one wins a tie; the input model, epoch 0, must be beaten.
    return gain > 0 or (gain == 0 and kept.epoch > 0)


def epochs_without_gain(history: Sequence[Epoch], metric: Metric) -> list[int]:
    """Count for each epoch how many have passed since the best one; 0 is a new best."""
    best: float | None = None
    counts: list[int] = []
    for epoch in history:
        value = epoch.metric
        improved = best is None or (value is not None and metric.drop_points(best, value) < 0)
        best = value if improved else best
        counts.append(0 if improved else counts[-1] + 1)
    return counts


def is_finished(training: Training, history: Sequence[Epoch], metric: Metric) -> bool:
    """Whether all epochs are trained, or `early_stopping` epochs have brought no gain."""
    trained = sum(1 for epoch in history if epoch.epoch > 0)
    if trained >= training.epochs:
        return True
    if training.early_stopping is None or not history:
        return False
    return epochs_without_gain(history, metric)[-1] >= training.early_stopping
