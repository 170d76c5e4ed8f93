"""Which stage explains a loss, and how its layers, groups or blocks are put back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compress.core.diagnosis.rerun import RerunStage
from compress.pruning.diagnosis.blocks import RemovedBlocks
from compress.pruning.diagnosis.channels import CutChannels
from compress.pruning.diagnosis.weights import ZeroedWeights
from compress.pruning.prune_channels import PruneChannels
from compress.pruning.prune_layers import PruneLayers
from compress.pruning.prune_weights import PruneWeights
from compress.quantization.diagnosis.diagnosis import (
    QuantizationDiagnosis,
    RequantizationDiagnosis,
)
from compress.quantization.stages.dynamic import QuantizeDynamic
from compress.quantization.stages.static import QuantizeStatic
from compress.quantization.stages.weight_only import QuantizeWeights
from compress.training.diagnosis.history import recorded_losses

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context
    from compress.core.diagnosis.layer_diagnosis import LayerDiagnosis
    from compress.core.stage import Stage
    from pipelines.explain.finished_run import FinishedRun, JudgedStage
    from pipelines.results.explanation import StageShare


def diagnose(
    stage: Stage[Any, Any], before: Any, after: Artifact, context: Context, allowed: float
) -> LayerDiagnosis | None:
    """Make a stage's model again so that parts of it can be put back; None where none can.

    Args:
        stage: the stage with its settings.
        before: what it read.
        after: what it made.
        context: data, metric and seed of the run.
        allowed: points that the refused gate allows.
    """
    if isinstance(stage, QuantizeStatic):
        return QuantizationDiagnosis.create(stage, before, context, allowed)
    if isinstance(stage, QuantizeDynamic | QuantizeWeights):
        return RequantizationDiagnosis.create(stage, before, after, context, allowed)
    if isinstance(stage, PruneChannels):
        return CutChannels.create(stage, before, after, context, allowed)
    if isinstance(stage, PruneWeights):
        return ZeroedWeights.create(stage, before, after, context, allowed)
    if isinstance(stage, PruneLayers):
        return RemovedBlocks.create(stage, before, after, context, allowed)
    return None


def rerun_of(
    run: FinishedRun, name: str, context: Context, missing: float, deadline: float
) -> RerunStage:
    """Return a stage that can be run again, given the points that a gate lacks."""
    planned = run.state.plan.stage(name)
    seconds = next((s.seconds for s in run.report.stages if s.name == name), 0.0)
    before, after = run.state.artifacts[planned.input], run.state.artifacts[name]
    return RerunStage(planned.stage, before, after, context, missing, seconds, deadline)


def trained_stages(
    run: FinishedRun, judged: JudgedStage, split: tuple[StageShare, ...]
) -> list[str]:
    """Return the stages that should have brought more of the metric, the last one first.

    Those that train after the stage that loses most: they were to recover what it loses. Where no
    stage loses, a gate asks for more than training has brought.
    """
    worst = max(split, key=lambda share: share.points, default=None)
    names = [share.stage for share in split]
    if worst is not None and worst.points > 0:
        names = names[names.index(worst.stage) + 1 :]
    elif judged.verdict.gate != "min_metric":
        return []
    artifacts = run.state.artifacts
    return [n for n in reversed(names) if n in artifacts and recorded_losses(artifacts[n])]
