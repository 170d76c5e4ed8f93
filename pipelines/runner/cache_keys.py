"""What decides an artifact: the parts that its key hashes, its history, where it is served."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compress.artifacts.artifact import CERTIFICATE
from compress.core.stage import Stage, members_of
from compress.core.verdict import History, PastStage
from compress.distillation.stage import Distill
from compress.export.exporter import EXPORTERS
from compress.export.fastest.stage import ExportFastest
from compress.pipelines.config.model_spec import SOURCE
from compress.pipelines.system.machine_info import machine, version_of, versions
from compress.pruning.prune_channels import PruneChannels
from compress.pruning.prune_weights import PruneWeights
from compress.quantization.stages.dynamic import QuantizeDynamic
from compress.quantization.stages.static import QuantizeStatic
from compress.quantization.stages.weight_only import QuantizeWeights
from compress.training.stage import Train

if TYPE_CHECKING:
    from compress.pipelines.config.pipeline import PipelineConfig
    from compress.pipelines.planning.plan import Plan, PlannedStage
    from compress.pipelines.runner.run_state import RunState
    from compress.pruning.latency.widths import ServedLatency

    AnyStage = Stage[Any, Any]


def source_key_parts(state: RunState) -> dict[str, Any]:
    """Return everything that decides the imported model."""
    return {**state.imported_model_parts, **_environment_parts(state, uses_data=False)}


def stage_key_parts(state: RunState, planned: PlannedStage) -> dict[str, Any]:
    """Return everything that decides a stage's artifact; its inputs must be there."""
    stage = planned.stage
    parts: dict[str, Any] = {
        "stage": stage.stage,
        "settings": stage.own_settings(),
        # By digest and not by name: the same weights under another name give the same artifact.
        "input": state.artifacts[planned.input].digest,
        "others": {name: state.artifacts[name].digest for name in stage.extra_inputs},
        # Of a stage that another package adds; ours are among the versions below.
        "library": version_of(type(stage).__module__),
        **stage.machine_parts,
        **latency_parts(planned, state),
        **history_parts(planned, state),
        **_environment_parts(state, stage.uses_data),
    }
    if stage.uses_data and stage.drawn_samples and state.data is not None:
        # Of long splits the data's own digest covers a sample; this one, all that is drawn.
        digest = state.data.calibration_digest(stage.drawn_samples, state.pipeline.seed)
        if digest:
            parts["calibration"] = digest
    if {kind.kind for kind in members_of(stage.writes())} != {"eager"}:
        # Manifests of files and graphs hold how they compare with their source.
        parts |= state.judging_part
    if stage.uses_loss:
        parts["loss"] = state.plan.loss.identity()
    return parts


def _environment_parts(state: RunState, uses_data: bool) -> dict[str, Any]:
    return {
        "data": state.contents.parts if uses_data and state.contents else None,
        # Training keeps the best epoch by the metric, so that decides the result as data does.
        "metric": state.plan.metric.identity() if uses_data else None,
        "seed": state.pipeline.seed,
        "versions": versions(),
        **state.declared_parts,
    }


def history_before(planned: PlannedStage, state: RunState) -> History:
    """Describe the stages between the imported model and a stage's input."""
    stages = []
    for past in ancestors(planned, state.plan):
        report = state.reports[past.name]
        artifact, measured = report.artifact, report.measurements
        gates = (each for gate in past.stage.gates for each in gate.on_each())
        verdicts = zip(gates, report.verdicts, strict=True)
        stages.append(
            PastStage(
                name=report.name,
                stage=report.stage,
                input=report.input,
                settings=past.stage.own_settings(),
                kind=artifact.kind,
                digest=artifact.digest,
                bytes=artifact.bytes,
                parameters=measured.parameters,
                macs=measured.macs,
                metric=measured.metric and measured.metric.model_dump(mode="json"),
                certificate=str(artifact.facts.get(CERTIFICATE, "")),
                verdicts=tuple(gate.reproducible(verdict) for gate, verdict in verdicts),
            )
        )
    return History(
        pipeline=state.pipeline.name,
        seed=state.pipeline.seed,
        data=state.fingerprint,
        versions=versions(),
        source=_imported_files(state),
        source_digest=state.artifacts[SOURCE].digest,
        stages=tuple(stages),
    )


def history_parts(planned: PlannedStage, state: RunState) -> dict[str, Any]:
    """Return the part of a cache key that covers the recorded history; empty if none is recorded.

    The input's digest covers most of it. Names, earlier gates and the imported files are not in
    that digest, as other files may hold the same weights.
    """
    if not planned.stage.records_history:
        return {}
    past = ancestors(planned, state.plan)
    return {
        "history": {
            "pipeline": state.pipeline.name,
            "source": _imported_files(state),
            "names": [[p.name, p.input] for p in past],
            "gates": [[gate.model_dump(mode="json") for gate in p.stage.gates] for p in past],
        }
    }


def ancestors(planned: PlannedStage, plan: Plan) -> list[PlannedStage]:
    """Return the stages that led to a stage's input, in their order."""
    return [plan.stage(name) for name in plan.branch(planned.name) if name != SOURCE]


def _imported_files(state: RunState) -> dict[str, Any]:
    return {key: state.imported_model_parts.get(key) for key in ("checkpoint", "code", "library")}


def served_latency(planned: PlannedStage, state: RunState) -> ServedLatency | None:
    """Return how fast a result is in a later stage's runtime; None without a target or tables."""
    served = _served(planned, state.pipeline)
    if served is None:
        return None
    from compress.export.latency.kernels import TABLES
    from compress.export.latency.served_latency import OnnxLatency

    runtime, stages = served
    weights = [stage for stage in stages if isinstance(stage, QuantizeWeights)]
    return OnnxLatency(
        runtime,
        stages,
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
        stages = [{"stage": one.stage, **one.own_settings()} for one in served[1]]
        conditions["served"] = {"runtime": served[0], "stages": stages}
    return {"latency": conditions}


def _has_latency_target(stage: AnyStage) -> bool:
    target = stage.target if isinstance(stage, PruneChannels) else None
    return target is not None and target.latency is not None


def _served(
    planned: PlannedStage, pipeline: PipelineConfig
) -> tuple[str, tuple[AnyStage, ...]] | None:
    """Return the first later runtime of a result, and the stages that quantize it, made quick."""
    if not _has_latency_target(planned.stage) or pipeline.device != "cpu":
        return None
    # All of the pipeline's, also those that `--until` leaves out.
    stages = {stage.title: stage for stage in pipeline.stages}
    before = dict(zip(stages, [SOURCE, *stages], strict=False))
    inputs = {name: stage.input or before[name] for name, stage in stages.items()}
    for export in pipeline.stages:
        if any(need.missing() for need in export.all_requirements()):
            continue
        kinds: Any = [kind.kind for kind in members_of(export.writes())]
        if isinstance(export, ExportFastest):
            kinds = export.runtimes
        predicted = (k for k in kinds if k in EXPORTERS and EXPORTERS[k].runtime.from_onnx)
        runtime = next(predicted, None)
        between: list[AnyStage] = []
        name = inputs[export.title]
        while name not in (SOURCE, planned.name):
            between.insert(0, stages[name])
            name = inputs[name]
        quantizing = _quantizing(between)
        if runtime is not None and name == planned.name and quantizing is not None:
            return runtime, quantizing
    return None


def _quantizing(between: list[AnyStage]) -> tuple[AnyStage, ...] | None:
    """Return the stages that change kernels, made quick; None where one changes sizes too."""
    changing: list[AnyStage] = []
    for stage in between:
        if isinstance(stage, QuantizeStatic):
            changing.append(stage.calibrated_quickly(rounding="nearest", bias_correction=False))
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
