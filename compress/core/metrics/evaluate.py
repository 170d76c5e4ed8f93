"""Measures a model's metric on a split."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.common.errors import StageFailed
from compress.common.forward import first_output
from compress.core.metrics.score import Score
from compress.core.objectives.task import LabelOutOfRange, has_target
from compress.core.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from compress.common.forward import Outputs, Predictor
    from compress.core.metrics.metric import Metric
    from compress.data.splits import Splits
    from compress.data.targets import Targets


GROUPS = 200
"""Groups of a split at most, for the jackknife: their variance is then known to some 5 %."""


def evaluate(
    predict: Predictor,
    splits: Splits,
    split: str,
    metric: Metric,
    reference: Predictor | None = None,
    progress: Progress = silent,
    batch_size: int | None = None,
) -> Score:
    """Compute a model's metric on a split, or raise StageFailed; `reference` is for `fidelity`."""
    import torch

    # Once: of a few targets, as of a batch, the kind may be another.
    metric = metric.with_inferred_loss(splits)
    meter = metric.meter()
    by_sample: list[torch.Tensor] | None = []
    done, known, total = 0, 0, len(splits.split(split))  # type: ignore[arg-type]  # Splits admits sized datasets only
    for batch in splits.batches(split, batch_size):
        done += len(batch)
        if metric.passes_over(batch):
            predict(*batch.inputs)  # of all rows the outputs are summarized
            progress(f"evaluate on {split}", done, total)
            continue
        targets = metric.targets_of(batch, split, reference)
        known += int(has_target(targets).sum())
        first = done - len(batch)
        sums: list[torch.Tensor | None] = []
        for inputs, known_targets in metric.parts(batch.inputs, targets):
            read = metric.outputs_read(predict(*inputs))
            for group, start, outputs, own in _by_group(metric, read, known_targets, first, total):
                try:
                    sums.append(meter.update(outputs, own, group))
                except LabelOutOfRange as error:
                    where = f"split {split!r}, sample {first + start + error.row}"
                    raise StageFailed(f"{where}: {error}") from error
        added = [x for x in sums if x is not None and x.shape[1] == len(batch)]
        if by_sample is not None and added and len(added) == len(sums):
            by_sample.append(torch.stack(added).sum(0))
        else:
            by_sample = None
        progress(f"evaluate on {split}", done, total)
    value = metric.require_finite(meter.compute(), split)
    if not by_sample:
        return Score(value, known, meter.pseudo_values())
    sums_2N = torch.cat(by_sample, 1)
    labelled = sums_2N[:, sums_2N[1] > 0].numpy()
    return Score.from_sums(value, labelled, is_exponential=metric.is_exponential)


def _by_group(
    metric: Metric, outputs: Outputs, targets: Targets, first: int, samples: int
) -> Iterator[tuple[int | None, int, Outputs, Targets]]:
    """Yield a batch in parts of one group of samples each: the group, its first row, and the rows.

    The batch begins with sample `first` of a split's `samples`. It stays whole, without a group, if
    the metric needs no groups, or its outputs have other rows than the targets.
    """
    from compress.data.targets import select

    rows = len(first_output(outputs)) if metric.adds_states else 0
    if not (rows and rows == len(has_target(targets))):
        yield None, 0, outputs, targets
        return
    for group, own in groups_of_batch(first, rows, samples):
        yield group, own.start, first_output(outputs)[own], select(targets, own)


def groups_of_batch(first: int, rows: int, samples: int) -> Iterator[tuple[int, slice]]:
    """Yield the groups that a batch has rows of, and these rows.

    Args:
        first: number of the batch's first sample in the split.
        rows: samples of the batch.
        samples: samples of the split.
    """
    count, start = min(GROUPS, samples), 0
    while start < rows:
        group = (first + start) * count // samples
        end = min(rows, -(-(group + 1) * samples // count) - first)
        yield group, slice(start, end)
        start = end
