"""Refuses stages and gates whose libraries, device, data or sensible limits are missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.common.errors import CompressError, PipelineInvalid, Unavailable
from compress.core.gates import unlikely_points
from compress.core.metrics import FRACTIONS
from compress.quantization.stages.mixed_precision import QuantizeMixed
from pipelines.planning.gate_targets import refuse_missing_runtime

if TYPE_CHECKING:
    from collections.abc import Iterable

    from compress.core.loss import Loss
    from pipelines.config.pipeline import PipelineConfig
    from pipelines.planning.plan import PlannedStage


def missing_programs(planned: Iterable[PlannedStage]) -> tuple[str, ...]:
    """Return a line for each missing program; no error, as it may be installed before its stage."""
    return tuple(
        f"{p.name} will stop: {requirement.what} is not on the PATH; {requirement.install} "
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
    parts = {"model": pipeline.model, "tracker": pipeline.tracker}
    for key, requirement in (
        (k, r) for k, part in parts.items() if part for r in part.requirements
    ):
        if requirement.missing():
            raise Unavailable(
                f"{pipeline.place(key)}: needs {requirement.what}, which is not installed; "
                f"{requirement.install}"
            )
    for p in planned:
        where = f"{pipeline.place('stages', p.index)} ({p.name})"
        if p.stage.needs_data and pipeline.data is None:
            raise PipelineInvalid(f"{where}: needs data, and the file has no `data:` section")
        _check_gates(pipeline, p)
        if pipeline.metric is not None:
            check_metric(pipeline, p, pipeline.metric.name)
        for requirement in p.stage.all_requirements():
            if not requirement.program and requirement.missing():
                raise Unavailable(
                    f"{where}: needs {requirement.what}, which is not installed; "
                    f"{requirement.install}"
                )
    if pipeline.device != "cpu":
        _check_device(pipeline)


def _check_gates(pipeline: PipelineConfig, planned: PlannedStage) -> None:
    for i, gate in enumerate(planned.stage.gates):
        where = pipeline.place("stages", planned.index, "gates", i)
        if gate.needs_data and pipeline.data is None:
            raise PipelineInvalid(
                f"{where} ({gate.gate}): needs data, and the file has no `data:` section"
            )
        if problem := gate.unsuitable_artifact(planned.stage.writes()):
            raise PipelineInvalid(f"{where} ({gate.gate}): {problem}")
        refuse_missing_runtime(pipeline, gate, where)


def check_metric(pipeline: PipelineConfig, planned: PlannedStage, metric: str) -> None:
    """Refuse limits of a stage that do not fit the metric's direction or unit.

    Raises:
        PipelineInvalid: it says what to write.
    """
    stage = pipeline.place("stages", planned.index)
    if isinstance(planned.stage, QuantizeMixed) and metric in FRACTIONS:
        problem = unlikely_points(planned.stage.max_drop_points)
        if problem:
            raise PipelineInvalid(f"{stage} ({planned.name}): max_drop_points: {problem}")
    for i, gate in enumerate(planned.stage.gates):
        if problem := gate.unsuitable_metric(metric):
            where = pipeline.place("stages", planned.index, "gates", i)
            raise PipelineInvalid(f"{where} ({gate.gate}): {problem}")


def check_loss(pipeline: PipelineConfig, planned: Iterable[PlannedStage], loss: Loss) -> None:
    """Refuse stages whose settings do not fit the loss.

    Raises:
        PipelineInvalid: one does not.
    """
    for p in planned:
        try:
            p.stage.check_loss(loss)
        except CompressError as error:
            where = f"{pipeline.place('stages', p.index)} ({p.name})"
            raise PipelineInvalid(f"{where}: {error}") from error


def _check_device(pipeline: PipelineConfig) -> None:
    import torch

    index = int(pipeline.device.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        raise Unavailable(
            f"{pipeline.place('device')}: {pipeline.device!r} asked for and PyTorch "
            f"{torch.__version__} sees {torch.cuda.device_count()} CUDA devices; use `device: cpu`"
        )
