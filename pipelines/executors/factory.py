"""Chooses what runs the stages: this process, others of this machine, or a Ray cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.common.errors import PipelineInvalid, Unavailable
from compress.common.requirements import Requirement
from pipelines.executors.process_pool import ProcessPool

if TYPE_CHECKING:
    from compress.core.progress import Progress
    from pipelines.config.pipeline import PipelineConfig
    from pipelines.config.run_options import EngineName
    from pipelines.executors.base import Engine
    from pipelines.store.local import Store

RAY = Requirement(what="ray", install="pip install -e '.[ray]', or leave --engine out")


def check_engine(pipeline: PipelineConfig, name: EngineName) -> None:
    """Refuse an engine that cannot run a pipeline here.

    Raises:
        Unavailable: Ray is not installed.
        PipelineInvalid: the pipeline runs on a GPU, which was not tried with Ray.
    """
    if name == "ray" and RAY.missing():
        raise Unavailable(f"--engine ray needs {RAY.what}, which is not installed; {RAY.install}")
    if name == "ray" and pipeline.device != "cpu":
        raise PipelineInvalid(
            f"{pipeline.place('device')}: --engine ray runs on `device: cpu` alone, found "
            f"{pipeline.device!r}; use --jobs"
        )


def engine_for(
    name: EngineName, jobs: int | None, store: Store, progress: Progress
) -> Engine | None:
    """Start what runs several stages at a time; None where this process runs one after another.

    Raises:
        StageFailed: there is no Ray cluster.
    """
    if name == "ray":
        from pipelines.executors.ray import RayTasks

        return RayTasks.on_cluster(jobs, store.root)
    return ProcessPool(jobs, progress, store.lock) if jobs and jobs > 1 else None
