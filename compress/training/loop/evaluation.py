"""The metric on `val`, each rank evaluating a share, and what follows from it: which epoch is best.

Early stopping keeps no state, so that a resumed training decides as an uninterrupted one.
"""

from __future__ import annotations

from array import array
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from compress.artifacts.artifact import Artifact
from compress.common.errors import StageFailed
from compress.common.forward import flatten_outputs, plain_attention
from compress.data.targets import select
from compress.training.loop.train_state import autocast

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from compress.common.forward import Predictor
    from compress.core.metrics import Metric
    from compress.training.checkpoint import Epoch
    from compress.training.config.training import Training
    from compress.training.distributed.base import Strategy
    from compress.training.loop.job import Job


def evaluate(job: Job, module: torch.nn.Module, strategy: Strategy) -> float | None:
    """Compute a module's metric on all samples of `val`; None without that split or a metric."""
    if "val" not in job.data.datasets or not job.metric.is_measured:
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
        with torch.no_grad(), precision, plain_attention():
            return flatten_outputs(module(*(x.to(job.device) for x in inputs)))

    meter = job.metric.meter()
    remaining = len(share)
    with _reference(job) as reference:
        for batch in job.data.read("val", padded, job.data.batch_size):
            own = slice(remaining)
            remaining = max(0, remaining - len(batch))
            # A function of all outputs gets those of all ranks in order: none may be left out.
            adds = strategy.ranks == 1 or not meter.keeps_outputs
            if adds and job.metric.passes_over(batch):
                predict(*batch.inputs)  # the other ranks' forward may wait for this one
                continue
            targets = job.metric.targets_of(batch, "val", reference)
            for inputs, known in job.metric.parts(batch.inputs, targets):
                outputs = predict(*inputs)
                meter.update(job.metric.outputs_read(outputs, own), select(known, own))
    strategy.release_buffers_(module)
    shares, value = strategy.gather_shares(meter.state()), 0.0
    if shares is not None:
        meter.add_shares_(shares)
        value = meter.compute()
    # Only the first share's processes have the value; the sum gives it to all.
    return job.metric.require_finite(strategy.sum_over_ranks([value])[0], "val")


def _reference(job: Job) -> AbstractContextManager[Predictor | None]:
    """Load the model that `fidelity` compares with; None for other metrics."""
    if not job.metric.needs_reference:
        return nullcontext()
    if job.reference is None:
        raise StageFailed("metric fidelity needs a reference model")
    artifact = Artifact.from_directory(job.reference)
    return artifact.open(job.device, torch.get_num_threads())


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
