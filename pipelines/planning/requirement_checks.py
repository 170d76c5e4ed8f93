"""Refuses stages and gates whose libraries, device, data or sensible limits are missing."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress import export  # noqa: F401 - adds the runtimes that it can open
from compress.common.errors import CompressError, PipelineInvalid, Unavailable
from compress.common.requirements import require_all
from compress.core.context import Context
from compress.core.gates.accuracy import unlikely_points
from compress.core.gates.baselines import BASELINES
from compress.core.gates.gate import Gate
from compress.core.metrics import metric_class
from compress.core.stage import members_of
from compress.core.validation_errors import did_you_mean
from compress.quantization.stages.mixed_precision import QuantizeMixed
from compress.training.config.parallel import Parallel
from compress.training.launch.rank_group import need_group

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Set

    from compress.core.objectives.loss import Loss
    from compress.core.objectives.task import Task
    from compress.core.stage import Stage
    from compress.data.splits import Splits
    from compress.pipelines.config.pipeline import PipelineConfig
    from compress.pipelines.planning.plan import PlannedStage


def check_needs(pipeline: PipelineConfig, planned: Iterable[PlannedStage]) -> tuple[str, ...]:
    """Refuse stages and gates that lack a library, a device or data, before the data are loaded.

    Returns:
        A line for each missing program; no error, as it may be installed before its stage.

    Raises:
        PipelineInvalid: the file has no data, or a metric that does not suit a gate.
        Unavailable: a library or the device is missing.
    """
    require_all(pipeline.model.requirements, pipeline.place("model"))
    if pipeline.tracker:
        require_all(pipeline.tracker.requirements, pipeline.place("tracker"))
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
    names = {stage.title for stage in pipeline.stages}
    for p in planned:
        for location, name, step in _with_gates(p):
            if step.needs_data and pipeline.data is None:
                where = f"{pipeline.place(*location)} ({name})"
                raise PipelineInvalid(f"{where}: needs data, and the file has no `data:` section")
        for i, gate in enumerate(p.stage.gates):
            where = f"{pipeline.place('stages', p.index, 'gates', i)} ({gate.gate})"
            for kind in members_of(p.stage.writes()):
                if problem := gate.unsuitable_artifact(kind):
                    raise PipelineInvalid(f"{where}: {problem}")
            if gate.against in BASELINES and gate.against not in names:
                runtime = BASELINES[gate.against]
                require_all(runtime.requirements, f"{where}: against {gate.against}")
        if pipeline.metric is not None:
            check_metric(pipeline, p, pipeline.metric.name)
    return check_conditions(pipeline, planned, None)


def check_conditions(
    pipeline: PipelineConfig, planned: Iterable[PlannedStage], data: Splits | None
) -> tuple[str, ...]:
    """Refuse whatever stages and gates cannot do here, on these data if they are loaded.

    Returns:
        A line for each missing program.

    Raises:
        CompressError: of the kind that the run would end with, with the place in the file.
    """
    context = Context(root=Path(), data=data, device=pipeline.device)
    programs = []
    for p in planned:
        for path, part in p.stage.nested():
            if isinstance(part, Parallel):
                try:
                    need_group(part)
                except PipelineInvalid as error:
                    where = pipeline.place("stages", p.index, *path)
                    raise PipelineInvalid(f"{where} ({p.name}): {error}") from None
        for location, name, step in _with_gates(p):
            for unmet in step.unmet(context):
                # A gate is evaluated after hours, a stage that needs a program stops by itself.
                if not unmet.is_program or isinstance(step, Gate):
                    where = pipeline.place(*location, *unmet.setting)
                    raise unmet.error(f"{where} ({name}): {unmet.problem}")
                programs.append(
                    f"{name} will stop: {unmet.problem} (the stages before it run and are kept)"
                )
    return tuple(programs)


def _with_gates(
    planned: PlannedStage,
) -> Iterator[tuple[tuple[str | int, ...], str, Stage[Any, Any] | Gate]]:
    """Yield a stage and its gates, each after its location in the file and its name."""
    location = ("stages", planned.index)
    yield location, planned.name, planned.stage
    for i, gate in enumerate(planned.stage.gates):
        yield (*location, "gates", i), gate.gate, gate


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
    if isinstance(planned.stage, QuantizeMixed) and metric_class(metric).is_fraction:
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
