"""What is known of each sample once it was read: its identity, the range of its labels, NaN."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from compress.common.errors import PipelineInvalid
from compress.data.batch import IGNORED_LABEL
from compress.data.targets import flatten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from compress.data.targets import Targets

FACTS = np.dtype(
    [
        ("identity", np.uint64, 2),
        ("low", np.int64),
        ("high", np.int64),
        ("labelled", np.bool_),
        ("nan", np.bool_),
    ]
)
"""Of a sample: a hash that does not depend on how numbers are stored, its smallest and largest
label that is not ignored (none where the first exceeds the second), whether it has a target, and
whether an input holds NaN."""
PLACE = np.uint64(0x9E3779B97F4A7C15)
"""By what the hash of earlier tensors of a sample is multiplied: 2⁶⁴ over the golden ratio, odd."""
CHUNK = 2**21
"""Numbers of samples in memory that are hashed together, at most."""


@dataclass(frozen=True)
class SplitFacts:
    """Facts of the samples of a split that were read."""

    indices: Sequence[int]
    rows: NDArray[np.void]
    """Of type :data:`FACTS`, one for each index."""

    def first(self, is_meant: NDArray[np.bool_]) -> int | None:
        """Return the index of the first sample that is meant; None where there is none."""
        found = np.flatnonzero(is_meant)
        return self.indices[int(found[0])] if len(found) else None

    def shared_with(self, other: SplitFacts) -> int:
        """Return how many of the samples are in another split, too."""
        # A hash is a row of two numbers, and isin compares scalars.
        pair = [("a", np.uint64), ("b", np.uint64)]
        one, two = (
            np.ascontiguousarray(facts.rows["identity"]).view(pair).ravel()
            for facts in (self, other)
        )
        return int(np.isin(one, two).sum())

    def check_labels(self, split: str, classes: int) -> None:
        """Raise PipelineInvalid for a label that a model of so many classes does not have.

        A model that answers yes or no has one class.
        """
        low, high = self.rows["low"], self.rows["high"]
        index = self.first((low <= high) & ((low < 0) | (high >= max(classes, 2))))
        if index is None:
            return
        row = self.rows[self.indices.index(index)]
        wrong = row["low"] if row["low"] < 0 else row["high"]
        raise PipelineInvalid(
            f"split {split!r}, sample {index}: {out_of_range(int(wrong), classes)}"
        )


def out_of_range(label: int, classes: int) -> str:
    """Return the error of a label that is none of a number of classes; one means yes or no."""
    if classes == 1:
        return (
            f"label {label} is out of range: the model answers yes or no, 0 or 1 ({IGNORED_LABEL} "
            "is left out); for numbers use mse, l1 or smooth_l1 (with floats), for more than two "
            "classes one output for each"
        )
    return (
        f"label {label} is out of range: the model has {classes} classes, 0 to {classes - 1} "
        f"({IGNORED_LABEL} is left out); give it as many classes as there are labels, or number "
        "them from 0"
    )


def facts_of_sample(inputs: Sequence[torch.Tensor], target: Targets | None) -> NDArray[np.void]:
    """Return the facts of one sample, `(1,)`."""
    leaves = flatten(target)[0]
    return facts_of_rows([x.unsqueeze(0) for x in inputs], [y.unsqueeze(0) for y in leaves])


def facts_of_rows(
    inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
) -> NDArray[np.void]:
    """Return the facts of samples that lie on axis 0 of tensors, `(samples,)`."""
    columns = [x.detach().cpu() for x in (*inputs, *targets)]
    samples = max(map(len, columns))
    facts = np.zeros(samples, FACTS)
    size = max(1, CHUNK // max(1, sum(x.numel() for x in columns) // max(1, samples)))
    for start in range(0, samples, size):
        rows = [x[start : start + size] for x in columns]
        _fill(facts[start : start + size], rows[: len(inputs)], rows[len(inputs) :])
    return facts


def _fill(
    facts: NDArray[np.void], inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
) -> None:
    """Write the facts of some samples."""
    numbers = [x.float() if x.is_floating_point() else x for x in inputs]
    # As float64, in which 1 of any type is the same.
    numbers += [(y.float() if y.is_floating_point() else y).double() for y in targets]
    identity = np.zeros((len(facts), 2), np.uint64)
    for x in numbers:
        content = x.reshape(len(x), -1).contiguous().view(torch.uint8).numpy()
        content = np.pad(content, ((0, 0), (0, -content.shape[1] % 8)))
        words = np.ascontiguousarray(content).view(np.uint64)
        weights = _odd_numbers(words.shape[1])
        shape = np.uint64(hash(tuple(x.shape[1:])) & (2**63 - 1))
        # Not a matrix product, which numpy computes 200 times as slowly for integers.
        sums = np.stack([(words * row).sum(1) for row in weights], 1)
        identity = identity * PLACE + sums + shape
    facts["identity"] = identity
    facts["low"], facts["high"], facts["labelled"] = np.iinfo(np.int64).max, -1, bool(targets)
    for x in numbers[: len(inputs)]:
        if x.is_floating_point():
            # By numpy: torch's threads wait for each other on a busy machine.
            facts["nan"] |= np.isnan(x.reshape(len(x), -1).numpy()).any(1)
    if len(targets) != 1 or not targets[0][:1].numel():
        return
    labels = targets[0].reshape(len(facts), -1)
    if labels.is_floating_point():
        facts["labelled"] = ~labels.isnan().all(1).numpy()
        return
    labels = labels.long()
    is_known = labels != IGNORED_LABEL
    facts["labelled"] = is_known.any(1).numpy()
    facts["low"] = labels.where(is_known, np.iinfo(np.int64).max).amin(1).numpy()
    facts["high"] = labels.where(is_known, np.iinfo(np.int64).min).amax(1).numpy()


@lru_cache(maxsize=8)
def _odd_numbers(count: int) -> NDArray[np.uint64]:
    """Return random odd numbers, `(2, count)`: a sum of words times these is their hash."""
    random = np.random.default_rng(0)
    numbers: NDArray[np.uint64] = random.integers(0, 2**64, (2, count), np.uint64, endpoint=False)
    return numbers | np.uint64(1)
