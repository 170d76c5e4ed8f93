"""R², the coefficient of determination, by sums that add up over batches and processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.common.errors import StageFailed
from compress.core.objectives.targets import match_to_loss

if TYPE_CHECKING:
    import torch


def r2_sums(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return samples, mean and spread of the targets, and squared error: `(4, outputs)`, float64.

    The spread is the sum of squared distances to the mean.
    """
    import torch

    outputs, targets = (
        x.double().reshape(len(x), -1) for x in match_to_loss("mse", outputs, targets)
    )
    mean = targets.mean(0)
    spread, error = (targets - mean).square().sum(0), (outputs - targets).square().sum(0)
    return torch.stack([torch.full_like(mean, len(targets)), mean, spread, error])


def add_r2(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the sums over the samples of both; raise StageFailed where samples differ in size."""
    import torch

    if a.shape != b.shape:
        raise StageFailed(
            f"metric r2: samples of a batch have {a.shape[1]} outputs and of another {b.shape[1]}; "
            "pad all samples to one length, or use mse or mae"
        )
    # Chan, Golub and LeVeque (1979): sums of squares alone lose digits where the mean is large.
    (samples_a, mean_a, *sums_a), (samples_b, mean_b, *sums_b) = a, b
    samples, apart = samples_a + samples_b, mean_b - mean_a
    spread, error = (x + y for x, y in zip(sums_a, sums_b, strict=True))
    spread += apart.square() * samples_a * samples_b / samples
    return torch.stack([samples, mean_a + apart * samples_b / samples, spread, error])


def r2(sums: torch.Tensor) -> float:
    """Return R², one minus the residuals' share of the targets' variance, averaged over outputs."""
    _, _, spread, error = sums
    if not bool((spread > 0).all()):
        raise StageFailed("metric r2: the targets of an output are all equal; use mse or mae")
    return float((1 - error / spread).mean())
