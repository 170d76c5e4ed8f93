"""Metrics of a user's own: a function of all outputs, and classes that take batches."""

import torch
from torchmetrics import Metric, PearsonCorrCoef


def weighted_by_position(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Return another value for each order of the samples."""
    position = torch.arange(len(outputs)).reshape(-1, *[1] * (outputs.dim() - 1))
    return float((outputs.double() * position).sum() - targets.double().sum())


class MeanOfBatches(Metric):
    """Has a state for each batch: lists of other lengths in other processes."""

    higher_is_better = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("largest", default=[], dist_reduce_fx=None)

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.largest.extend(outputs.amax(1))

    def compute(self) -> torch.Tensor:
        return torch.stack(self.largest).double().mean()


class Composed(Metric):
    """Is computed from another metric, whose states are no sums."""

    higher_is_better = True

    def __init__(self) -> None:
        super().__init__()
        self.correlation = PearsonCorrCoef(3)

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.correlation.update(outputs, targets)

    def compute(self) -> torch.Tensor:
        return self.correlation.compute().mean()
