"""The sample of the data on which ranges and corrections are estimated."""

from __future__ import annotations

from dataclasses import dataclass
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
class CalibrationData:
    """A seeded sample of the data; iterating it again yields the same batches."""

    data: Splits
    samples: int
    seed: int

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches; one at a time is held in memory."""
        return self.data.calibration(self.samples, self.seed)

    @classmethod
    def from_context(cls, samples: int, signature: Signature, context: Context) -> CalibrationData:
        """Draw a sample, in batches of the model's size where that is fixed.

        Raises:
            StageFailed: there is no data, or too little, or the sample does not fill the model's
                batches.
        """
        data = context.need_data("calibration")
        if signature.batch_axis is None and signature.inputs[0].shape:
            batch_size = int(signature.inputs[0].shape[0])
            if samples % batch_size:
                raise StageFailed(
                    f"calibration_samples is {samples} and the model takes batches of "
                    f"{batch_size}; make it a multiple"
                )
            data = data.replaced(batch_size=batch_size)
        calibration = cls(data, samples, context.seed)
        iter(calibration)  # refuses more samples than there are, before a model is traced
        return calibration


def require_varying(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield batches; raise StageFailed at the end where all samples were equal."""
    reference: tuple[torch.Tensor, ...] | None = None
    count, differ = 0, False
    for batch in batches:
        if reference is None:
            reference = tuple(x[:1].clone() for x in batch.inputs)
        count += len(batch)
        differ = differ or any(
            x.shape[1:] != y.shape[1:] or not bool((x == y).all())
            for x, y in zip(batch.inputs, reference, strict=True)
        )
        yield batch
    if not differ:
        raise StageFailed(
            f"calibration: all {count} samples are equal, expected samples that vary; mend the data"
        )
