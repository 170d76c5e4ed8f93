"""Hyper-parameters shared by training, fine-tuning and distillation."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from compress.core.settings import Fraction, Settings

Positive = Annotated[float, Field(gt=0)]

DEFAULT_LEARNING_RATE = {"sgd": 0.1, "adamw": 2e-3}
DEFAULT_WEIGHT_DECAY = {"sgd": 5e-4, "adamw": 0.05}


class Parallel(Settings):
    """How training is spread over processes."""

    strategy: Literal["ddp"] = "ddp"
    """`ddp`: every process holds the whole model and its share of each batch."""
    processes: Annotated[int, Field(gt=0)] = 1
    """Number of processes on this machine; 1 trains in the calling process."""
    communication: Literal["none", "fp16", "bf16", "powersgd", "topk", "int8"] = "none"
    """How gradients are compressed on their way between processes: not at all (`none`), to 16 bits
    (`fp16`, `bf16`), to int8 (`int8`), to two thin matrices (`powersgd`), or to their largest
    entries (`topk`). The last three add to each gradient what was lost of the one before it."""
    powersgd_rank: Annotated[int, Field(gt=0)] = 4
    """Columns of the matrices of `powersgd`."""
    topk_fraction: Annotated[float, Field(gt=0, le=1)] = 0.01
    """Share of each gradient's entries that `topk` sends."""


class Training(Settings):
    """How weights are trained; `epochs` alone is enough."""

    epochs: Annotated[int, Field(gt=0)]
    """Passes over the `train` split."""
    batch_size: Annotated[int, Field(gt=0)] = 64
    """Samples per step, over all processes together. An incomplete last batch is left out."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """`sgd` with momentum, or `adamw`."""
    learning_rate: Positive | None = None
    """Highest learning rate; by default 0.1 for `sgd` and 0.002 for `adamw`."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of `sgd`."""
    nesterov: bool = True
    """Whether the momentum of `sgd` is Nesterov's."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Decay of matrices and kernels; by default 0.0005 for `sgd` and 0.05 for `adamw`."""
    schedule: Literal["onecycle", "cosine", "constant"] = "onecycle"
    """Learning rate over time: `onecycle` rises, then falls; `cosine` falls; `constant` stays."""
    label_smoothing: Fraction = 0.1
    """Share of the target that is spread over all classes."""
    clip_norm: Positive | None = None
    """Largest norm of the whole gradient; no limit by default."""
    keep: Literal["best", "last"] = "best"
    """Which weights are kept: those `best` by the metric on `val`, or the `last`."""
    parallel: Parallel = Parallel()
    """How training is spread over processes."""

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
        processes = self.parallel.processes
        if self.batch_size % processes:
            below = self.batch_size - self.batch_size % processes
            raise ValueError(
                f"batch_size {self.batch_size} does not divide over {processes} processes; "
                f"use {f'{below} or ' if below else ''}{below + processes}"
            )
        if self.optimizer == "sgd" and self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0; set nesterov: false")
        return self

    @property
    def peak_learning_rate(self) -> float:
        """The highest learning rate, the optimizer's default where none is set."""
        return self.learning_rate or DEFAULT_LEARNING_RATE[self.optimizer]

    @property
    def decay(self) -> float:
        """The weight decay, the optimizer's default where none is set."""
        if self.weight_decay is None:
            return DEFAULT_WEIGHT_DECAY[self.optimizer]
        return self.weight_decay

    def hyper_parameters(self) -> Training:
        """Return these settings alone, without what a stage adds to them."""
        return Training.model_validate(
            {name: getattr(self, name) for name in Training.model_fields}
        )
