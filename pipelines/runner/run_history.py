"""What is told to a stage that records the road to its input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compress.core.run_history import History, PastStage
from pipelines.planning.plan import SOURCE, Plan, PlannedStage
from pipelines.system.machine_info import versions

if TYPE_CHECKING:
    from compress.core.stage import Stage
    from pipelines.results.schema import StageReport
    from pipelines.runner.executor import PipelineExecutor


def history_before(planned: PlannedStage, walk: PipelineExecutor) -> History:
    """Return the road from the model as it came in to a stage's input."""
    rows = {row.name: row for row in walk.rows}
    road = road_before(planned, walk.plan)
    return History(
        pipeline=walk.pipeline.name,
        seed=walk.pipeline.seed,
        data=walk.fingerprint,
        versions=versions(),
        source=_source(walk),
        source_digest=walk.artifacts[SOURCE].digest,
        stages=tuple(_past_stage(rows[p.name], p.stage) for p in road),
    )


def history_parts(planned: PlannedStage, walk: PipelineExecutor) -> dict[str, Any]:
    """Return what decides a history, besides what decides the input.

    Names, earlier gates, and the files that came in: others may hold the same weights.
    """
    if not planned.stage.records_history:
        return {}
    road = road_before(planned, walk.plan)
    gates = [[gate.model_dump(mode="json") for gate in p.stage.gates] for p in road]
    names = [[p.name, p.input] for p in road]
    told = {"pipeline": walk.pipeline.name, "source": _source(walk), "names": names, "gates": gates}
    return {"history": told}


def road_before(planned: PlannedStage, plan: Plan) -> list[PlannedStage]:
    """Return the stages that led to a stage's input, in their order."""
    by_name = {p.name: p for p in plan.stages}
    road: list[PlannedStage] = []
    while planned.input != SOURCE:
        planned = by_name[planned.input]
        road.insert(0, planned)
    return road


def _source(walk: PipelineExecutor) -> dict[str, Any]:
    return {key: walk.imported_model_parts.get(key) for key in ("checkpoint", "code", "library")}


def _past_stage(row: StageReport, stage: Stage[Any, Any]) -> PastStage:
    metric = row.measurements.metric
    return PastStage(
        name=row.name,
        stage=row.stage,
        input=row.input,
        settings=stage.own_settings(),
        kind=row.artifact.kind,
        digest=row.artifact.digest,
        bytes=row.artifact.bytes,
        parameters=row.measurements.parameters,
        macs=row.measurements.macs,
        metric=None if metric is None else metric.model_dump(mode="json"),
        verdicts=tuple(
            gate.reproducible(verdict)
            for gate, verdict in zip(stage.gates, row.verdicts, strict=True)
        ),
    )
