"""What decides an artifact: the parts that its key in the store is the hash of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipelines.runner.run_history import history_parts
from pipelines.system.machine_info import version_of, versions

if TYPE_CHECKING:
    from pipelines.planning.plan import PlannedStage
    from pipelines.runner.run_state import RunState


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
        "library": version_of(type(stage).__module__),
        **stage.machine_parts,
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
