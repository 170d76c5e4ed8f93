"""What decides an artifact: the parts that its key in the store hashes, and its history."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compress.core.verdict import History, PastStage
from compress.pipelines.config.model_spec import SOURCE
from compress.pipelines.runner.cache_keys import latency_parts
from compress.pipelines.system.machine_info import version_of, versions

if TYPE_CHECKING:
    from compress.pipelines.planning.plan import Plan, PlannedStage
    from compress.pipelines.runner.run_state import RunState


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
        metric = report.measurements.metric
        stages.append(
            PastStage(
                name=report.name,
                stage=report.stage,
                input=report.input,
                settings=past.stage.own_settings(),
                kind=report.artifact.kind,
                digest=report.artifact.digest,
                bytes=report.artifact.bytes,
                parameters=report.measurements.parameters,
                macs=report.measurements.macs,
                metric=None if metric is None else metric.model_dump(mode="json"),
                verdicts=tuple(
                    gate.reproducible(verdict)
                    for gate, verdict in zip(past.stage.gates, report.verdicts, strict=True)
                ),
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
