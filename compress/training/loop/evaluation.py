"""The metric on `val`: each rank evaluates a share, and the value is that of one process."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from compress.artifacts.artifact import Artifact
from compress.common.errors import StageFailed
from compress.common.forward import flatten_outputs
from compress.core.metrics import predict_batches, predicted_decisions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from compress.core.metrics import Metric
    from compress.data.batch import Batch
    from compress.training.distributed.base import Strategy
    from compress.training.loop.job import Job


def evaluate(job: Job, module: torch.nn.Module, strategy: Strategy) -> float | None:
    """Compute a module's metric on all samples of `val`; None without that split.

    Raises:
        StageFailed: there are no targets, or the value is not finite.
    """
    if "val" not in job.data.datasets:
        return None
    strategy.broadcast_buffers_(module)
    module.eval()
    outputs, targets = _predict_share(job, module, strategy)
    strategy.release_buffers_(module)
    value = reduce_metric(job.metric, outputs, targets, strategy)
    if not math.isfinite(value):
        raise StageFailed(f"metric {job.metric.name} on 'val' is {value}")
    return value


def reduce_metric(
    metric: Metric, outputs: torch.Tensor, targets: torch.Tensor, strategy: Strategy
) -> float:
    """Compute a metric over the shares of all ranks; sample ``i`` lies on rank ``i % ranks``.

    A mean over samples is reduced as sum and count; any other metric needs all outputs.
    """
    if strategy.ranks == 1:
        return metric.score(outputs, targets)
    if metric.is_mean:
        summed = metric.sum_and_count(outputs, targets) if len(targets) else None
        total, samples = strategy.sum_over_ranks(summed or (0.0, 0))
        return total / samples if samples else math.nan
    shares = strategy.gather_shares((outputs, targets))
    value = 0.0
    if shares is not None:
        value = metric.score(
            _interleaved([share[0] for share in shares]),
            _interleaved([share[1] for share in shares]),
        )
    return strategy.sum_over_ranks([value])[0]


def _predict_share(
    job: Job, module: torch.nn.Module, strategy: Strategy
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the first output and the target of each sample of this rank's share of `val`.

    Every rank runs the same number of batches, because a sharded model's forward is a collective;
    shorter shares are padded with sample 0, whose outputs are dropped.
    """
    dataset = job.data.split("val")
    samples = len(dataset)  # type: ignore[arg-type]  # Splits admits sized datasets only
    share = range(strategy.rank, samples, strategy.ranks)
    longest = -(-samples // strategy.ranks)
    padded = [*share, *[0] * (longest - len(share))]

    def batches() -> Iterator[Batch]:
        return job.data.read("val", padded, job.data.batch_size)

    def predict(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Not inference mode: FSDP reuses the gathered weights in the next training step.
        with torch.no_grad():
            return flatten_outputs(module(*(x.to(job.device) for x in inputs)))

    outputs, targets = predict_batches(predict, batches())
    if job.metric.name == "fidelity":
        threads = torch.get_num_threads()
        opened = (
            Artifact.from_directory(job.reference).open(job.device, threads)
            if job.reference
            else None
        )
        with opened or nullcontext() as reference:
            if reference is None:
                raise StageFailed("metric fidelity needs a reference model")
            targets = predicted_decisions(predict_batches(reference, batches())[0])
    if targets is None:
        raise StageFailed(f"metric {job.metric.name} needs targets and split 'val' has none")
    return outputs[: len(share)], targets[: len(share)]


def _interleaved(shares: list[torch.Tensor]) -> torch.Tensor:
    """Merge the ranks' shares in the order of the samples."""
    merged = shares[0].new_empty((sum(map(len, shares)), *shares[0].shape[1:]))
    for rank, share in enumerate(shares):
        merged[rank :: len(shares)] = share
    return merged
