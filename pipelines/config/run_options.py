"""Options of one run, declared once for the command line, the Python API and the runner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from compress.core.progress import Progress, silent

if TYPE_CHECKING:
    from compress.pipelines.results.schema import Report

EngineName: TypeAlias = Literal["local", "ray"]
Judging: TypeAlias = Literal["full", "quick"]


@dataclass(frozen=True)
class RunOptions:
    """What to run again, where to run it, and who is notified."""

    start: str | None = None
    """Stage that runs again whatever the store holds, with all stages made from its artifact."""
    until: str | None = None
    """Last stage: only this one and those that it needs are run."""
    force: bool = False
    """Whether every stage runs again."""
    jobs: int | None = None
    """Branches run at a time, each in its own process where there is more than one; by default one,
    and with Ray as many as the cluster has cores."""
    engine: EngineName = "local"
    """What runs branches: this machine, or a Ray cluster."""
    store: str | None = None
    """URL of a store that is shared with other machines."""
    cache: Path | None = None
    """Folder of the stages' cached results; by default `.store` in that of the run's."""
    test: bool = True
    """Whether the last model is measured on `test`, where the data has such a split."""
    measured: Literal["all", "last", "none"] = "all"
    """Of which models metric, latency and memory are measured: the input model and all stages, the
    input model and the last stage, or none. Gates are evaluated in any case."""
    judge: Judging | None = None
    """How much is measured, `full` or `quick`; by default what the pipeline says."""
    profile: bool = False
    """Whether the report counts what each stage costs: CPU seconds, traces, calls of models, bytes
    hashed, read and written, processes."""
    progress: Progress = silent
    """Receives the progress of each task of a stage."""
    announce: Callable[[str], None] = lambda line: None
    """Receives one line per event that a user should see."""
    finished: Callable[[Report], None] = lambda report: None
    """Receives the report once it is written, also that of a refused or failed run."""
