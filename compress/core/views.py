"""Views: `train` as a training sees it, rebuilt in every process from what can be pickled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch.utils.data import ConcatDataset, Dataset

from compress.core.batch import LABELS, adapt

if TYPE_CHECKING:
    from compress.core.data import Splits

UNLABELLED = "unlabelled"


class View(Protocol):
    """Turns the dataset of `train` into another one; small enough to be sent to other processes."""

    def __call__(self, splits: Splits, dataset: Dataset[Any]) -> Dataset[Any]:
        """Return the dataset that is seen."""
        ...


@dataclass(frozen=True)
class WithUnlabelled:
    """`train`, and after it the samples of `unlabelled`, whose labels are taken away if any."""

    def __call__(self, splits: Splits, dataset: Dataset[Any]) -> Dataset[Any]:
        """Return both as one."""
        return ConcatDataset([dataset, WithoutLabels(splits.stored(UNLABELLED))])


class WithoutLabels(Dataset[Any]):
    """A dataset's samples without what was to be predicted."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # Splits admits sized datasets only

    def __getitem__(self, index: int) -> Any:
        sample = self.dataset[index]
        if hasattr(sample, "keys"):
            return {name: sample[name] for name in sample if name != LABELS}
        return (adapt(sample)[0],)


def with_unlabelled(splits: Splits) -> Splits:
    """Return the splits with `unlabelled` beside `train`, or as they are without that split."""
    return splits.seen_through(WithUnlabelled()) if UNLABELLED in splits.datasets else splits
