"""The metric on `val`: each rank evaluates a share, and the value is that of one process."""

from __future__ import annotations

import math
from array import array
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from compress.artifacts.artifact import Artifact
from compress.common.errors import StageFailed
from compress.common.forward import flatten_outputs
from compress.core.metrics import predicted_decisions
from compress.training.loop.train_state import autocast

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from compress.common.forward import Predictor
    from compress.core.metrics import Metric
    from compress.training.distributed.base import Strategy
    from compress.training.loop.job import Job


def evaluate(job: Job, module: torch.nn.Module, strategy: Strategy) -> float | None:
    """Compute a module's metric on all samples of `val`; None without that split."""
    if "val" not in job.data.datasets:
        return None
    # Buffers such as BatchNorm's follow each process's own batches; all evaluate with rank 0's.
    strategy.broadcast_buffers_(module)
    module.eval()
    samples = len(job.data.split("val"))  # type: ignore[arg-type]  # Splits admits sized datasets only
    share = range(strategy.rank, samples, strategy.ranks)
    # Every rank runs the same number of batches, because a sharded model's forward is a collective;
    # shorter shares are padded with sample 0, whose outputs are dropped.
    longest = -(-samples // strategy.ranks)
    padded = array("q", share)
    padded.extend([0] * (longest - len(share)))

    def predict(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Weights that FSDP gathers in bf16 meet float32 buffers under autocast only. Not inference
        # mode: FSDP reuses the gathered weights in the next training step.
        rounded = job.training.gathers_rounded
        precision = autocast(job.training, job.device) if rounded else nullcontext()
        with torch.no_grad(), precision:
            return flatten_outputs(module(*(x.to(job.device) for x in inputs)))

    meter = _Meter(job.metric, strategy.ranks)
    remaining = len(share)
    with _reference(job) as reference:
        for batch in job.data.read("val", padded, job.data.batch_size):
            outputs, targets = predict(*batch.inputs)[0].cpu(), batch.target
            if reference is not None:
                targets = predicted_decisions(reference(*batch.inputs)[0].cpu())
            if targets is None:
                raise StageFailed(
                    f"metric {job.metric.name} needs targets and split 'val' has none"
                )
            meter.update(outputs[:remaining], targets[:remaining])
            remaining = max(0, remaining - len(outputs))
    strategy.release_buffers_(module)
    value = meter.compute(strategy)
    if not math.isfinite(value):
        raise StageFailed(f"metric {job.metric.name} on 'val' is {value}")
    return value


def _reference(job: Job) -> AbstractContextManager[Predictor | None]:
    """Load the model that `fidelity` compares with; None for other metrics."""
    if job.metric.name != "fidelity":
        return nullcontext()
    if job.reference is None:
        raise StageFailed("metric fidelity needs a reference model")
    artifact = Artifact.from_directory(job.reference)
    return artifact.open(job.device, torch.get_num_threads())


class _Meter:
    """A metric batch by batch: outputs are kept only where it needs those of all batches."""

    def __init__(self, metric: Metric, ranks: int) -> None:
        self.metric, self.total, self.samples = metric, 0.0, 0.0
        # Its state is that of one process: over several ranks it gets all outputs.
        self.torchmetric = metric.torchmetric() if metric.is_torchmetric and ranks == 1 else None
        self.outputs: list[torch.Tensor] = []
        self.targets: list[torch.Tensor] = []

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Add a batch of this rank's share; it may be empty."""
        summed = self.metric.sum_and_count(outputs, targets) if len(targets) else None
        if summed is not None:
            self.total, self.samples = self.total + summed[0], self.samples + summed[1]
        elif self.torchmetric is not None:
            self.torchmetric.update(outputs, targets)
        elif not self.metric.is_mean:
            self.outputs.append(outputs)
            self.targets.append(targets)

    def compute(self, strategy: Strategy) -> float:
        """Return the metric over all ranks' shares; sample ``i`` lies on rank ``i % ranks``."""
        if self.metric.is_mean:
            total, samples = strategy.sum_over_ranks((self.total, self.samples))
            return total / samples if samples else math.nan
        if self.torchmetric is not None:
            return float(self.torchmetric.compute())
        shares = strategy.gather_shares((torch.cat(self.outputs), torch.cat(self.targets)))
        value = 0.0
        if shares is not None:
            value = self.metric.score(
                _interleaved([share[0] for share in shares]),
                _interleaved([share[1] for share in shares]),
            )
        # Only the first share's processes have the value; the sum gives it to all.
        return strategy.sum_over_ranks([value])[0]


def _interleaved(shares: list[torch.Tensor]) -> torch.Tensor:
    """Merge the ranks' shares in the order of the samples."""
    merged = shares[0].new_empty((sum(map(len, shares)), *shares[0].shape[1:]))
    for rank, share in enumerate(shares):
        merged[rank :: len(shares)] = share
    return merged
