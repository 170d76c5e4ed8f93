"""The samples that ranges and corrections are found on, read anew as often as needed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from compress.common.errors import StageFailed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

    from compress.common.signature import Signature
    from compress.core.context import Context
    from compress.data.batch import Batch
    from compress.data.splits import Splits


@dataclass(frozen=True)
class Calibration:
    """A seeded sample of the data; each time it is iterated it gives the same batches again."""

    data: Splits
    samples: int
    seed: int

    def __iter__(self) -> Iterator[Batch]:
        """Give the batches; one at a time is held in memory."""
        return self.data.calibration(self.samples, self.seed)

    @classmethod
    def of(cls, samples: int, signature: Signature, context: Context) -> Calibration:
        """Return the sample, in batches of the model's size where that is fixed.

        Raises:
            StageFailed: there is no data, or too little, or the sample does not fill the model's
                batches.
        """
        data = context.need_data("calibration")
        if signature.batch_axis is None and signature.inputs[0].shape:
            fixed = int(signature.inputs[0].shape[0])
            if samples % fixed:
                raise StageFailed(
                    f"calibration_samples is {samples} and the model takes batches of {fixed}; "
                    "make it a multiple"
                )
            data = replace(data, batch_size=fixed)
        calibration = cls(data, samples, context.seed)
        iter(calibration)  # refuses more samples than there are, before a model is traced
        return calibration


def varied(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield batches; only their first sample is kept.

    Raises:
        StageFailed: at the end, where all samples were equal.
    """
    first: tuple[torch.Tensor, ...] | None = None
    seen, differ = 0, False
    for batch in batches:
        if first is None:
            first = tuple(x[:1].clone() for x in batch.inputs)
        seen += len(batch)
        differ = differ or any(
            x.shape[1:] != y.shape[1:] or not bool((x == y).all())
            for x, y in zip(batch.inputs, first, strict=True)
        )
        yield batch
    if not differ:
        raise StageFailed(
            f"calibration: all {seen} samples are equal, expected samples that vary; mend the data"
        )
