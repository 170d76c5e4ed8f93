"""The interface of what runs several stages at a time, and the choice of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from compress.common.errors import PipelineInvalid
from compress.common.requirements import Requirement, pip_install, require_all
from compress.pipelines.executors.engines import ProcessPool

if TYPE_CHECKING:
    from compress.core.progress import Progress
    from compress.pipelines.config.pipeline import PipelineConfig
    from compress.pipelines.config.run_options import EngineName
    from compress.pipelines.executors.task import StageTask, TaskResult
    from compress.pipelines.store.local import Store

RAY = Requirement(what="ray", install=f"{pip_install('ray')}, or leave --engine out")


class Engine(Protocol):
    """Runs several stages at a time, in other processes or on other machines."""

    @property
    def places(self) -> int:
        """How many stages it runs at a time."""
        ...

    def submit(self, task: StageTask) -> None:
        """Start a stage; at most `places` at a time."""
        ...

    def next(self) -> TaskResult:
        """Wait until a submitted stage has finished or failed."""
        ...

    def close(self) -> None:
        """Stop the stages that still run."""
        ...


def check_engine(pipeline: PipelineConfig, name: EngineName) -> None:
    """Refuse an engine that is not installed, or a GPU, which was not tried with Ray."""
    if name == "ray":
        require_all([RAY], "--engine ray")
    if name == "ray" and pipeline.device != "cpu":
        raise PipelineInvalid(
            f"{pipeline.place('device')}: --engine ray runs on `device: cpu` alone, found "
            f"{pipeline.device!r}; use --jobs"
        )


def engine_for(
    name: EngineName, jobs: int | None, store: Store, progress: Progress
) -> Engine | None:
    """Start what runs several stages at a time; None where this process runs one after another."""
    if name == "ray":
        from compress.pipelines.executors.ray import RayTasks

        return RayTasks.on_cluster(jobs, store.root)
    return ProcessPool(jobs, progress, store.lock) if jobs and jobs > 1 else None
