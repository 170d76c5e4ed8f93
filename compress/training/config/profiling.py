"""Settings of tracing, memory snapshots and trackers; none of them changes the result."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from compress.common.config import Count, Settings
from compress.common.requirements import Requirement

DEFAULT_TRACED_STEPS = 3
TRACKER_REQUIREMENTS = {
    "tensorboard": Requirement(what="tensorboard", install="pip install -e '.[tensorboard]'"),
    "mlflow": Requirement(what="mlflow", install="pip install -e '.[mlflow]'"),
}


class Profile(Settings):
    """What is recorded of a training; the result stays the same.

    A stage whose artifact comes from the cache is not trained, and nothing is recorded: run it
    again with `--from`.
    """

    trace: bool | Count = False
    """Steps recorded by torch.profiler, after one skipped and one warm-up step; `true` is 3.
    Each process writes `profiles/<stage>/trace-rank0.json` beside the report, to be opened in
    Perfetto, or in Chrome at chrome://tracing."""
    memory: bool = False
    """Whether CUDA allocations are recorded, in `profiles/<stage>/memory-rank0.pickle`; it opens at
    pytorch.org/memory_viz."""
    tracker: Literal["none", "tensorboard", "mlflow"] = "none"
    """Where loss, metric, learning rate, speed and memory of each epoch are written."""
    tracking_uri: str | None = None
    """Folder of `tensorboard`, or folder or address of `mlflow`; a folder is relative to that of
    the report, `tracking` by default."""

    @model_validator(mode="after")
    def _tracker_is_named(self) -> Self:
        if self.tracking_uri is not None and self.tracker == "none":
            raise ValueError("tracking_uri is for tracker: tensorboard or mlflow; set one")
        return self

    @property
    def traced_steps(self) -> int:
        """Number of steps that are recorded."""
        return DEFAULT_TRACED_STEPS if self.trace is True else int(self.trace)

    @property
    def requirements(self) -> tuple[Requirement, ...]:
        """Packages that the tracker needs."""
        return () if self.tracker == "none" else (TRACKER_REQUIREMENTS[self.tracker],)
