"""Metrics of models that predict numbers, and the mean of the task's loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from compress.common.errors import StageFailed
from compress.common.forward import first_output
from compress.core.metrics.metric import Metric, MetricMeter
from compress.core.objectives.loss import Loss, loss_kind
from compress.core.objectives.task import need_tensor

if TYPE_CHECKING:
    import torch

    from compress.common.forward import Outputs
    from compress.data.targets import Targets


class MeanLoss(Metric):
    """The mean of the task's loss, the user's own included."""

    higher = False
    reads_loss = True

    @property
    def reads_all_outputs(self) -> bool:
        """Whether the loss is the user's own, which gets all outputs."""
        return self.loss.is_custom

    def sums_and_counts(self, outputs: Outputs, targets: Targets) -> torch.Tensor:
        """Add up the loss of each sample's targets, and count them."""
        return self.loss.sums_and_counts(outputs, targets)


class _MeanError(Metric):
    """The mean of a distance between numbers."""

    higher = False
    of_numbers = True
    distance: ClassVar[str]
    """The loss that is averaged, whatever the task's is."""

    def sums_and_counts(self, outputs: Outputs, targets: Targets) -> torch.Tensor:
        """Add up the distances of each sample, and count them."""
        targets = need_tensor(f"metric {self.name}", targets)
        return Loss(self.distance).sums_and_counts(first_output(outputs), targets)


class MeanSquaredError(_MeanError):
    """The mean of squared errors."""

    distance = "mse"


class MeanAbsoluteError(_MeanError):
    """The mean of absolute errors."""

    distance = "l1"


class R2(Metric):
    """The coefficient of determination, by sums that add up over batches and processes."""

    in_points = of_numbers = adds_states = True

    def meter(self) -> MetricMeter:
        """Return what adds up the sums."""
        return R2Meter(self)


class R2Meter(MetricMeter):
    """Adds up :func:`r2_sums`."""

    def _add(self, outputs: Outputs, targets: Targets, group: int | None) -> None:
        sums = r2_sums(first_output(outputs), need_tensor("metric r2", targets))
        self.sums = self._added(self.sums, sums)
        self._add_group(group, sums)

    @staticmethod
    def _added(one: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
        return other if one is None else add_r2(one, other)

    def _value(self, added: torch.Tensor) -> float:
        return r2(added)


def r2_sums(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return samples, mean and spread of the targets, and squared error: `(4, outputs)`, float64.

    The spread is the sum of squared distances to the mean.
    """
    import torch

    outputs, targets = (
        x.double().reshape(len(x), -1) for x in loss_kind("mse").match(outputs, targets)
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
