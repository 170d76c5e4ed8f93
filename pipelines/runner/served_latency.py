"""Where a model that is pruned to a target of latency will be served, as later stages say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from compress.core.stage import members_of
from compress.distillation.stage import Distill
from compress.export.common.runtime import PredictedRuntime
from compress.export.fastest.stage import ExportFastest
from compress.pipelines.config.model_spec import SOURCE
from compress.pipelines.system.machine_info import machine
from compress.pruning.prune_channels import PruneChannels
from compress.pruning.prune_weights import PruneWeights
from compress.quantization.stages.dynamic import QuantizeDynamic
from compress.quantization.stages.static import QuantizeStatic
from compress.quantization.stages.weight_only import QuantizeWeights
from compress.training.stage import Train

if TYPE_CHECKING:
    from compress.core.context import ServedLatency
    from compress.core.stage import Stage
    from compress.pipelines.config.pipeline import PipelineConfig
    from compress.pipelines.planning.plan import PlannedStage
    from compress.pipelines.runner.run_state import RunState

    AnyStage = Stage[Any, Any]

CALIBRATED_ON = 32
"""Samples with which models are quantized: their speed is looked at, not their answers."""


class Served(NamedTuple):
    """What happens to a pruned model until it is served."""

    runtime: PredictedRuntime
    stages: tuple[AnyStage, ...]
    """Those that quantize it, with settings that cost little time and lead to the same kernels."""


def served_latency(planned: PlannedStage, state: RunState) -> ServedLatency | None:
    """Return how fast a stage's result will be in the runtime of a later stage.

    None for stages without a target of latency, and where no later stage exports to a runtime that
    has tables.
    """
    served = _served(planned, state.pipeline)
    if served is None:
        return None
    from compress.export.latency.kernels import TABLES
    from compress.export.latency.served_latency import OnnxLatency

    weights = [stage for stage in served.stages if isinstance(stage, QuantizeWeights)]
    return OnnxLatency(
        served.runtime,
        served.stages,
        state.store.root / TABLES.name,
        machine(),
        # Zero points of 4 bits stand two in a byte, and each group of inputs has one.
        width_multiple=2 * weights[0].group_size if weights else 1,
    )


def latency_parts(planned: PlannedStage, state: RunState) -> dict[str, Any]:
    """Return the part of a cache key that covers a target of latency; empty without one."""
    if not _has_latency_target(planned.stage):
        return {}
    pipeline, served = state.pipeline, _served(planned, state.pipeline)
    conditions = {"machine": machine(), "threads": pipeline.threads, "device": pipeline.device}
    if served is not None:
        stages = [{"stage": one.stage, **one.own_settings()} for one in served.stages]
        conditions["served"] = {"runtime": served.runtime, "stages": stages}
    return {"latency": conditions}


def _has_latency_target(stage: AnyStage) -> bool:
    target = stage.target if isinstance(stage, PruneChannels) else None
    return target is not None and target.latency is not None


def _served(planned: PlannedStage, pipeline: PipelineConfig) -> Served | None:
    """Return the first later stage that exports the result, and what quantizes it before."""
    if not _has_latency_target(planned.stage) or pipeline.device != "cpu":
        return None
    # All of the pipeline's, also those that `--until` leaves out.
    names = [stage.title for stage in pipeline.stages]
    inputs = dict(zip(names, [SOURCE, *names], strict=False))
    inputs |= {stage.title: stage.input for stage in pipeline.stages if stage.input}
    stages = {stage.title: stage for stage in pipeline.stages}
    for export in pipeline.stages:
        runtime = _runtime(export)
        between: list[AnyStage] = []
        name = inputs[export.title]
        while name not in (SOURCE, planned.name):
            between.insert(0, stages[name])
            name = inputs[name]
        quantizing = _quantizing(between)
        if runtime is not None and name == planned.name and quantizing is not None:
            return Served(runtime, quantizing)
    return None


def _runtime(export: AnyStage) -> PredictedRuntime | None:
    """Return the runtime with tables that a stage exports to, if it is installed."""
    if any(need.missing() for need in export.all_requirements()):
        return None
    kinds: Any = [kind.kind for kind in members_of(export.writes())]
    if isinstance(export, ExportFastest):
        kinds = export.runtimes
    return next((kind for kind in kinds if kind in get_args(PredictedRuntime)), None)


def _quantizing(between: list[AnyStage]) -> tuple[AnyStage, ...] | None:
    """Return the stages that change kernels, made quick; None where one changes sizes too."""
    changing: list[AnyStage] = []
    for stage in between:
        if isinstance(stage, QuantizeStatic):
            quick: dict[str, Any] = {"rounding": "nearest", "bias_correction": False}
            quick["calibration_samples"] = min(CALIBRATED_ON, stage.calibration_samples)
            changing.append(stage.model_copy(update=quick))
        elif isinstance(stage, QuantizeWeights):
            method = "hqq" if stage.method == "hqq" else "rtn"
            changing.append(stage.model_copy(update={"method": method}))
        elif isinstance(stage, QuantizeDynamic):
            changing.append(stage)
        elif isinstance(stage, Distill):
            if stage.student is not None:
                return None
        elif not isinstance(stage, Train | PruneWeights):
            return None
    return tuple(changing)
