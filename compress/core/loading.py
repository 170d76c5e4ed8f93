"""How samples are read and put together into batches."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from compress.core.settings import Settings


class Loading(Settings):
    """How samples are read; the number of workers never changes a batch."""

    workers: Annotated[int, Field(ge=0)] = 0
    """Processes that read samples ahead, beside each training process; 0 reads in that process."""
    persistent_workers: bool = True
    """Whether workers live on from epoch to epoch, or are started for each."""
    prefetch_factor: Annotated[int, Field(gt=0)] = 2
    """Batches that each worker reads ahead."""
    pin_memory: bool = True
    """Whether batches wait in page-locked memory, where there is an accelerator to copy them to."""
    bucket_by: str | None = None
    """Input of a mapping sample (`input_ids`, say) by whose length training puts batches together,
    so that less is padded; every sample is read once to learn its length."""
    pad_values: dict[str, int | float] = {}
    """What fills up shorter inputs of mapping samples; 0 by default, and -100 for `labels`."""
