"""The jackknife: how sure metrics are that are functions of sums over samples, such as f1.

Samples are divided into groups, and the metric is computed without each of them (Miller, "The
jackknife: a review", 1974). All it takes are the sums of each group, which the pass over the split
adds anyway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.common.errors import StageFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    import torch
    from numpy.typing import NDArray

GROUPS = 200
"""Groups of a split at most: their variance is then known to some 5 %."""


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


def pseudo_values(
    value: float,
    sums: Sequence[torch.Tensor],
    add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    compute: Callable[[torch.Tensor], float],
) -> NDArray[np.float64] | None:
    """Return what each group adds to a metric, `(groups,)`: numbers whose mean is the metric.

    None where the metric is not defined without one of the groups.

    Args:
        value: the metric of all groups.
        sums: the sums of each group.
        add: returns the sums of the samples of both.
        compute: returns the metric of some sums.
    """
    import numpy as np

    if len(sums) < 2:
        return None
    after = [sums[-1]]
    for own in reversed(sums[1:-1]):
        after.append(add(own, after[-1]))
    before: torch.Tensor | None = None
    values = []
    try:
        for own in sums:
            rest = [part for part in (before, after.pop() if after else None) if part is not None]
            values.append(compute(add(*rest) if len(rest) > 1 else rest[0]))
            before = own if before is None else add(before, own)
    except StageFailed:
        return None
    without = np.array(values)
    if not np.isfinite(without).all():
        return None
    parts: NDArray[np.float64] = value + (len(sums) - 1) * (without.mean() - without)
    return parts
