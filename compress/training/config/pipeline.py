"""Settings of pipeline parallelism."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from compress.common.config import Count, Settings


class Pipeline(Settings):
    """How a model is divided into stages, through which micro-batches flow."""

    stages: Annotated[int, Field(ge=2)] = 2
    """Number of stages; each is one process for every share of the batch."""
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b"] = "1f1b"
    """Order of forward and backward passes: all forward ones first (`gpipe`), alternating, which
    keeps fewer activations (`1f1b`), or alternating with two parts of the model in each process,
    which waits less and sends more (`interleaved_1f1b`)."""
    microbatches: Count = 4
    """Micro-batches into which each share of a batch is divided."""
    split: tuple[str, ...] = ()
    """Names of the modules with which the parts after the first start; by default repeated blocks
    are divided evenly."""

    @model_validator(mode="after")
    def _fits_the_schedule(self) -> Self:
        if self.split and len(self.split) != self.parts - 1:
            raise ValueError(
                f"pipeline.split has {len(self.split)} names and {self.parts} parts have "
                f"{self.parts - 1} beginnings besides the model's own"
            )
        rounds = max(1, self.microbatches // self.stages)
        if self.schedule == "1f1b" and self.microbatches < self.stages:
            raise ValueError(
                f"pipeline.schedule 1f1b needs a micro-batch for each of {self.stages} stages, "
                f"found microbatches: {self.microbatches}"
            )
        if self.schedule == "interleaved_1f1b" and self.microbatches % rounds:
            raise ValueError(
                f"pipeline.schedule interleaved_1f1b takes micro-batches in rounds of "
                f"{self.stages}, found microbatches: {self.microbatches}; use a multiple"
            )
        return self

    @property
    def parts(self) -> int:
        """The parts into which the model is divided; two for each stage of `interleaved_1f1b`."""
        return self.stages * (2 if self.schedule == "interleaved_1f1b" else 1)
