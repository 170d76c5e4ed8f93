"""`Job`: everything that the processes of a training need to know, as one value that pickles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from compress.training.distributed.base import steps_per_epoch

if TYPE_CHECKING:
    from pathlib import Path

    from compress.core.metrics import Metric
    from compress.data.batch import Batch
    from compress.data.splits import Splits
    from compress.training.config.training import Training
    from compress.training.objectives.objective import Constraint, Objective


@dataclass(frozen=True)
class Job:
    """A training run. Models are named by their directories, so that it pickles in a few bytes."""

    start: Path
    """Directory of the eager model whose weights are trained."""
    training: Training
    objective: Objective
    data: Splits
    metric: Metric
    reference: Path | None
    """Directory of the model that the metric `fidelity` compares with."""
    device: str
    threads: int
    """CPU threads of each process."""
    seed: int
    folder: Path
    """Directory of the checkpoints, one after every epoch."""
    accept_start: bool
    """Whether the untrained input model counts as epoch 0 and is kept if no epoch beats it."""
    code_folder: Path | None = None
    """Directory of the user's code, such as a scheduler's; None if there is no pipeline file."""
    constraint: Constraint | None = None
    """What the weights must satisfy after every step, such as a sparsity mask."""
    profiles: Path | None = None
    """Directory for traces and memory snapshots."""
    record_every: int | None = None
    """Steps between those that are reported; None if only epochs are."""
    flops_per_unit: float | None = None
    """Floating-point operations of forward and backward pass for a token, or for a sample of a
    model without tokens; None if the MFU is not reported."""
    trusted: str | None = None
    """Name of the checkpoint whose hashes the parent process has just verified."""

    @property
    def train_samples(self) -> int:
        """Number of samples in `train`; of a stream without `__len__` those that are held."""
        stream = self.data.stream
        if stream is not None and stream.samples is not None:
            return stream.samples
        return len(self.data.split("train"))  # type: ignore[arg-type]  # Splits admits sized datasets only

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch."""
        of_pass = steps_per_epoch(self.train_samples, self.training.batch_size)
        return self.training.steps_per_epoch or of_pass

    @property
    def total_steps(self) -> int:
        """Optimizer steps in all epochs."""
        return self.training.epochs * self.steps_per_epoch

    def example_batch(self) -> Batch:
        """Read a few training samples, the same ones in every process."""
        # A pipeline needs a sample for each micro-batch.
        pipeline = self.training.parallel.pipeline
        samples = min(self.train_samples, pipeline.microbatches if pipeline else 2)
        batch = next(iter(self.data.read("train", range(samples), samples, self.seed)))
        return batch.to(self.device)
