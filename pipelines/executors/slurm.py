"""A batch script that runs a pipeline on the nodes of a Slurm cluster."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from compress.common.config import Count, Settings
from compress.common.errors import PipelineInvalid
from compress.pipelines.config.pipeline import PipelineConfig
from compress.pipelines.system.templates import render_template
from compress.training.config.parallel import Parallel


class Cluster(Settings):
    """Resources of a Slurm job."""

    nodes: Count = 1
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    cpus_per_node: Count | None = None
    """By default 8 for each GPU, or 8 without one."""
    hours: Count = 24
    warning_seconds: Count = 120
    """Seconds before the time limit at which the job stops and is queued again."""

    @property
    def processes(self) -> int:
        """Training processes of a node: one for each GPU."""
        return max(1, self.gpus_per_node)


def write_script(script: Path, pipeline: Path, out: Path, cluster: Cluster) -> list[str]:
    """Write the batch script; return which settings of the pipeline file do not fit the job."""
    to_do = [f"to do: {line}" for line in unmet_settings(pipeline, cluster)]
    settings = cluster.model_dump()
    settings["cpus_per_node"] = cluster.cpus_per_node or 8 * cluster.processes
    content = render_template(
        "slurm.sh.jinja",
        script=script.name,
        name=pipeline.stem.replace(" ", "-"),
        pipeline=pipeline.name,
        pipeline_quoted=shlex.quote(str(pipeline)),
        out_quoted=shlex.quote(str(out)),
        **settings,
    )
    try:
        with script.open("x", encoding="utf-8") as stream:
            stream.write(content)
    except FileExistsError:
        raise PipelineInvalid(
            f"{script} exists and is not overwritten; name another with --script, or remove it"
        ) from None
    except OSError as error:
        raise PipelineInvalid(f"{script} cannot be written ({error.strerror})") from None
    return to_do


def unmet_settings(pipeline: Path, cluster: Cluster) -> Iterator[str]:
    """Yield a line for each setting of the pipeline file that does not fit the job."""
    wanted = f"nodes: {cluster.nodes}, processes: {cluster.processes}"
    if not pipeline.exists():
        yield f"{pipeline} is not there yet; give its trainings parallel: {{{wanted}}}"
        return
    content = PipelineConfig.from_yaml(pipeline)
    for stage in content.stages:
        for path, part in stage.nested():
            if not isinstance(part, Parallel):
                continue
            # Without GPUs any number of processes may share a node's cores.
            processes = cluster.processes if cluster.gpus_per_node else part.processes
            if (part.nodes, part.processes) != (cluster.nodes, processes):
                yield f"{pipeline}, stage {stage.title}: put {'.'.join(path)}: {{{wanted}}}"
    if cluster.gpus_per_node and content.device == "cpu":
        yield f"{pipeline}: put device: cuda, or the GPUs stay idle"
