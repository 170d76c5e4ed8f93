"""Indicators from the loss of each epoch of a training: whether it still fell, or rose again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compress.artifacts.artifact import Artifact

LAST_PART = 0.25
"""Share of the epochs, at the end, in which a converged training learns little."""
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
