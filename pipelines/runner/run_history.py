"""The history that an artifact may record: the stages that led from the imported model to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compress.core.run_history import History, PastStage
from pipelines.config.model_spec import SOURCE
from pipelines.system.machine_info import versions

if TYPE_CHECKING:
    from pipelines.planning.plan import Plan, PlannedStage
    from pipelines.runner.run_state import RunState


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
