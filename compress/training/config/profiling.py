"""Settings of traces, step logs, trackers and callbacks; none of them changes the result."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from compress.common.config import Count, Positive, Settings
from compress.common.factories import Reference
from compress.common.requirements import Requirement, pip_install

DEFAULT_TRACED_STEPS = 3
TRACKER_REQUIREMENTS = {
    "tensorboard": Requirement(what="tensorboard", install=pip_install("tensorboard")),
    "mlflow": Requirement(what="mlflow", install=pip_install("mlflow")),
}


class Trace(Settings):
    """Which steps torch.profiler records, as `torch.profiler.schedule` counts them, and what."""

    wait: Annotated[int, Field(ge=0)] = 1
    """Steps at the start that are not recorded."""
    warmup: Count = 1
    """Steps after them in which the profiler runs and its records are dropped."""
    active: Count = DEFAULT_TRACED_STEPS
    """Steps that are recorded."""
    memory: bool = False
    """Whether each operator's allocations are recorded."""
    shapes: bool = False
    """Whether the shapes of each operator's inputs are recorded."""
    stack: bool = False
    """Whether the Python source line of each operator is recorded; slow."""


class Profile(Settings):
    """What is recorded of a training; the result stays the same.

    A stage whose artifact comes from the cache is not trained, and nothing is recorded: run it
    again with `--from`.
    """

    trace: bool | Count | Trace = False
    """Steps recorded by torch.profiler, after one skipped and one warm-up step; `true` is 3, and
    a mapping sets more. Each process writes `profiles/<stage>/trace-rank0.json` beside the report,
    to be opened in Perfetto, or in Chrome at chrome://tracing; the report lists the operators that
    took most time."""
    memory: bool = False
    """Whether CUDA allocations are recorded, in `profiles/<stage>/memory-rank0.pickle`; it opens at
    pytorch.org/memory_viz."""
    log_every: Count | None = None
    """Steps between reports of loss, learning rate, gradient norm and throughput to console, log
    and tracker; by default each epoch is reported alone."""
    peak_flops: Positive | None = None
    """Peak floating-point operations per second of each process's device, for the model FLOPs
    utilization (MFU) of `log_every`; by default known for some GPUs with `bf16` or `fp16`."""
    tracker: Literal["none", "tensorboard", "mlflow"] = "none"
    """Where loss, metric, learning rate, speed and memory of each epoch are written, and the steps
    of `log_every`."""
    tracking_uri: str | None = None
    """Folder of `tensorboard`, or folder or address of `mlflow`; a folder is relative to that of
    the report, `tracking` by default."""

    @model_validator(mode="after")
    def _tracker_is_named(self) -> Self:
        if self.tracking_uri is not None and self.tracker == "none":
            raise ValueError("tracking_uri is for tracker: tensorboard or mlflow; set one")
        return self

    @model_validator(mode="after")
    def _peak_is_used(self) -> Self:
        if self.peak_flops is not None and self.log_every is None:
            raise ValueError("peak_flops is for the MFU of log_every; set log_every, such as 10")
        return self

    @property
    def trace_settings(self) -> Trace | None:
        """Which steps are traced, and how; None without a trace."""
        if isinstance(self.trace, Trace) or not self.trace:
            return self.trace or None
        return Trace() if self.trace is True else Trace(active=self.trace)

    @property
    def requirements(self) -> tuple[Requirement, ...]:
        """Packages that the tracker needs."""
        return () if self.tracker == "none" else (TRACKER_REQUIREMENTS[self.tracker],)


class Callbacks(Settings):
    """Functions of the user's that training calls, in the process that started it."""

    on_step_end: Reference | None = None
    """`module:callable`, called with a mapping after each optimizer step: `step` from 1, `epoch`,
    `loss`, `learning_rate`, `gradient_norm`, `samples_per_second` and more."""
    on_epoch_end: Reference | None = None
    """`module:callable`, called with a mapping after each epoch: `epoch` from 1, `loss`, `metric`,
    `learning_rate`, `samples_per_second` and more."""
