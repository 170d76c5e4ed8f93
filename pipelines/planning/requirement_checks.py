"""Refuses stages and gates whose libraries, device, data or sensible limits are missing."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import export  # noqa: F401 - adds the runtimes that it can open
from compress.common.errors import CompressError, PipelineInvalid, Unavailable
from compress.core.gate_kinds.baselines import BASELINES
from compress.core.gates import unlikely_points
from compress.core.metrics import FRACTIONS
from compress.core.stage import members_of
from compress.quantization.stages.mixed_precision import QuantizeMixed
from pipelines.config.validation_errors import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Set

    from compress.common.requirements import Requirement
    from compress.core.loss import Loss
    from compress.core.task import Task
    from pipelines.config.pipeline import PipelineConfig
    from pipelines.planning.plan import PlannedStage


def missing_programs(planned: Iterable[PlannedStage]) -> tuple[str, ...]:
    """Return a line for each missing program; no error, as it may be installed before its stage."""
    return tuple(
        f"{p.name} will stop: {requirement.what} was not found; {requirement.install} "
        "(the stages before it run and are kept)"
        for p in planned
        for requirement in p.stage.all_requirements()
        if requirement.program and requirement.missing()
    )


def check_needs(pipeline: PipelineConfig, planned: Iterable[PlannedStage]) -> None:
    """Refuse stages that lack a library, data or a device.

    Raises:
        PipelineInvalid: the file has no data, or a metric that does not suit a gate.
        Unavailable: a library or the device is missing.
    """
    _refuse_missing(pipeline.model.requirements, pipeline.place("model"))
    if pipeline.tracker:
        _refuse_missing(pipeline.tracker.requirements, pipeline.place("tracker"))
    names = {stage.title for stage in pipeline.stages}
    for p in planned:
        where = f"{pipeline.place('stages', p.index)} ({p.name})"
        if p.stage.needs_data and pipeline.data is None:
            raise PipelineInvalid(f"{where}: needs data, and the file has no `data:` section")
        for i, gate in enumerate(p.stage.gates):
            gate_place = pipeline.place("stages", p.index, "gates", i)
            problems = map(gate.unsuitable_artifact, members_of(p.stage.writes()))
            problem = next(filter(None, problems), "")
            if gate.needs_data and pipeline.data is None:
                problem = "needs data, and the file has no `data:` section"
            if problem:
                raise PipelineInvalid(f"{gate_place} ({gate.gate}): {problem}")
            _refuse_missing(gate.requirements, f"{gate_place} ({gate.gate})")
            if gate.against in BASELINES and gate.against not in names:
                for need in BASELINES[gate.against].requirements:
                    if need.missing():
                        raise Unavailable(
                            f"{gate_place}: against {gate.against} needs {need.what}, which is "
                            f"not here; {need.install}"
                        )
        if pipeline.metric is not None:
            check_metric(pipeline, p, pipeline.metric.name)
        # Of programs it is only warned: they may be installed before their stage runs.
        _refuse_missing((r for r in p.stage.all_requirements() if not r.program), where)
    if pipeline.device != "cpu":
        # A plan for the CPU is checked without it, within a second.
        import torch

        index = int(pipeline.device.partition(":")[2] or 0)
        if index >= torch.cuda.device_count():
            raise Unavailable(
                f"{pipeline.place('device')}: {pipeline.device!r} asked for and PyTorch "
                f"{torch.__version__} sees {torch.cuda.device_count()} CUDA devices; use "
                "`device: cpu`"
            )


def _refuse_missing(requirements: Iterable[Requirement], where: str) -> None:
    for need in requirements:
        if need.missing():
            raise Unavailable(f"{where}: needs {need.what}, which is not installed; {need.install}")


def check_runtime(pipeline: PipelineConfig, index: int, number: int, earlier: Set[str]) -> None:
    """Refuse an `against` that names neither an earlier stage nor a runtime of the float model.

    Args:
        pipeline: the pipeline.
        index: position of the stage.
        number: position of the gate in the stage.
        earlier: names of the stages before it, and `source`.
    """
    gate = pipeline.stages[index].gates[number]
    name = str(gate.against)
    where = pipeline.place("stages", index, "gates", number, "against")
    if name not in BASELINES or not gate.allows_runtime:
        known = {*earlier, *(BASELINES if gate.allows_runtime else ())}
        raise PipelineInvalid(
            f"{where}: no earlier stage is named {name!r}; {did_you_mean(name, known)}"
        )
    # The stage would be meant as likely as the runtime.
    if name in {stage.title for stage in pipeline.stages}:
        raise PipelineInvalid(
            f"{where}: {name!r} is a runtime, and a stage that is not earlier has that name; "
            "rename the stage"
        )
    takes = BASELINES[name].kinds | BASELINES[name].reads
    if pipeline.model.kind not in takes:
        raise PipelineInvalid(
            f"{where}: {name} runs {' and '.join(sorted(takes))} models, and this one comes in as "
            f"{pipeline.model.kind}; name an earlier stage, or `source`"
        )


def check_metric(pipeline: PipelineConfig, planned: PlannedStage, metric: str) -> None:
    """Refuse limits of a stage that do not fit the metric's direction or unit."""
    stage = pipeline.place("stages", planned.index)
    if isinstance(planned.stage, QuantizeMixed) and metric in FRACTIONS:
        problem = unlikely_points(planned.stage.max_drop_points)
        if problem:
            raise PipelineInvalid(f"{stage} ({planned.name}): max_drop_points: {problem}")
    for i, gate in enumerate(planned.stage.gates):
        if problem := gate.unsuitable_metric(metric):
            where = pipeline.place("stages", planned.index, "gates", i)
            raise PipelineInvalid(f"{where} ({gate.gate}): {problem}")


@contextmanager
def explained_task(task: Task | None, reason: str) -> Iterator[None]:
    """Append to errors what the task was inferred from; nothing where the reason is empty."""
    try:
        yield
    except CompressError as error:
        if task is None or not reason:
            raise
        raise type(error)(f"{error} (task: {task.name}, {reason})") from error


def fit_to_task(
    pipeline: PipelineConfig, planned: tuple[PlannedStage, ...], task: Task | None
) -> tuple[PlannedStage, ...]:
    """Return the stages without default gates that do not suit the task; refuse those of the file.

    Raises:
        PipelineInvalid: a gate of the file does not suit the task.
    """
    if task is None:
        return planned
    fitted = tuple(replace(p, stage=p.stage.for_task(task)) for p in planned)
    for p in fitted:
        for i, gate in enumerate(p.stage.gates):
            if problem := gate.unsuitable_task(task):
                where = pipeline.place("stages", p.index, "gates", i)
                raise PipelineInvalid(f"{where} ({gate.gate}): {problem}")
    return fitted


def check_loss(pipeline: PipelineConfig, planned: Iterable[PlannedStage], loss: Loss) -> None:
    """Refuse stages whose settings do not fit the loss."""
    for p in planned:
        try:
            p.stage.check_loss(loss)
        except CompressError as error:
            where = f"{pipeline.place('stages', p.index)} ({p.name})"
            raise PipelineInvalid(f"{where}: {error}") from error
