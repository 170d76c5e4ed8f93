"""Settings of the data loader."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from compress.common.config import Count, Settings
from compress.common.factories import Reference


class Loading(Settings):
    """How samples are read; the number of workers never changes a batch."""

    workers: Annotated[int, Field(ge=0)] = 0
    """Processes that read samples ahead, beside each training process; 0 reads in that process."""
    persistent_workers: bool = True
    """Whether workers live on from epoch to epoch, or are started for each."""
    prefetch_factor: Count = 2
    """Batches that each worker reads ahead."""
    pin_memory: bool = True
    """Whether batches wait in page-locked memory, where there is an accelerator to copy them to."""
    bucket_by: str | None = None
    """Input of a mapping sample (`input_ids`, say) by whose length training puts batches together,
    so that less is padded; every sample is read once to learn its length."""
    pad_values: dict[str, int | float] = {}
    """What fills up shorter inputs of mapping samples; 0 by default, and -100 for `labels`."""
    collate_fn: Reference | None = None
    """Your function that makes a batch of a list of samples, `module:callable`. It returns what one
    sample is, with a batch axis: `(x, y)`, `((x1, x2), y)` or a mapping of tensors with `labels`.
    """
    cache: str | None = None
    """Folder, relative to the pipeline file, in which each sample is kept once it is read, for all
    processes and later runs; for slow datasets that give the same sample each time. At the start of
    a run a few samples are read anew, so that other data are noticed; the folder may be removed."""

    @model_validator(mode="after")
    def _has_one_way_to_pad(self) -> Self:
        if self.collate_fn and self.pad_values:
            raise ValueError(
                f"found pad_values and collate_fn {self.collate_fn!r}, which pads by itself; "
                "leave one of them out"
            )
        return self

    def resolve_paths(self, folder: Path) -> Self:
        """Return the same settings with paths relative to a folder."""
        if self.cache is None:
            return self
        return self.model_copy(update={"cache": str((folder / self.cache).absolute())})
