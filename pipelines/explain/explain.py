"""Explains a refusal: which stage loses the metric, which of its layers, and for what cause."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from compress.common.atomic_files import temporary_folder
from compress.core.diagnosis.cause import ACCURACY_GATES, RefusedStage, Repair
from compress.quantization.diagnosis.diagnosis import (
    ExcludedLayers,
    LayerDiagnosis,
    QuantizationDiagnosis,
)
from compress.quantization.stages.dynamic import QuantizeDynamic
from compress.quantization.stages.static import QuantizeStatic
from compress.quantization.stages.weight_only import QuantizeWeights
from pipelines.explain.costs import explain_cost
from pipelines.explain.registry import causes_of
from pipelines.explain.tested_causes import Explained, check_cause
from pipelines.results.explanation import Explanation, GuiltyLayer, LayerSet
from pipelines.system.jsonl_log import log_event

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compress.core.diagnosis.cause import Cause
    from pipelines.explain.finished_run import FinishedRun, JudgedStage
    from pipelines.results.explanation import FoundCause


def explain_run(
    run: FinishedRun, stage: str | None, gate: str | None, deadline: float
) -> list[Explained]:
    """Explain the verdicts that are named, else all that refused; stop early at the deadline.

    Raises:
        PipelineInvalid: there is no verdict to explain.
        ArtifactInvalid: the run's artifacts are not in the store any more.
        StageFailed: there is no data to judge by.
    """
    return [explain_verdict(run, judged, deadline) for judged in run.judged(stage, gate)]


def explain_verdict(run: FinishedRun, judged: JudgedStage, deadline: float) -> Explained:
    """Explain one verdict of a run; see :func:`explain_run`."""
    if judged.verdict.gate not in ACCURACY_GATES:
        return explain_cost(run, judged)
    began = time.monotonic()
    split = run.split(judged)
    worst = max(split, key=lambda share: share.points, default=None)
    explanation = Explanation(
        stage=judged.report.name,
        verdict=judged.verdict,
        artifact=judged.digest,
        metric=run.state.plan.metric.name,
        split=split,
        culprit=worst.stage if worst and worst.points > 0 else None,
    )
    repairs: list[Repair] = []
    changes: dict[str, Any] = {"notice": "nothing is lost between these stages"}
    if worst is not None and explanation.culprit is not None:
        others = sum(share.points for share in split) - worst.points
        allowed = run.max_points(judged) - others
        changes, repairs = _explain_stage(run, judged, worst.stage, allowed, deadline)
    changes["seconds"] = round(time.monotonic() - began, 2)
    return Explained(judged, explanation.model_copy(update=changes), tuple(repairs))


def _explain_stage(
    run: FinishedRun, judged: JudgedStage, name: str, allowed: float, deadline: float
) -> tuple[dict[str, Any], list[Repair]]:
    """Return what an explanation has of the stage that loses most, and its repairs."""
    stage: Any = run.state.plan.stage(name).stage
    context = run.context(name, judged, temporary_folder() / "explain")
    before = run.state.artifacts[run.state.plan.stage(name).input]
    after = run.state.artifacts[name]
    found: dict[str, Any] = {}
    layers: tuple[str, ...] = ()
    measured: LayerDiagnosis | None = None
    refused: RefusedStage[Any]
    if isinstance(stage, QuantizeStatic):
        measured = QuantizationDiagnosis.create(stage, before, context, allowed)  # type: ignore[arg-type]
    elif isinstance(stage, QuantizeDynamic | QuantizeWeights):
        measured = ExcludedLayers.create(stage, before, after, context, allowed)  # type: ignore[arg-type]
    if measured is not None:
        measured.search.deadline = deadline
        lost = measured.search.lost
        if lost <= 0 or lost < measured.resolution:
            found = {
                "points": round(lost, 6),
                "samples": measured.samples,
                "layers": len(measured.search.ranking),
                "judgings": measured.judgings,
                "notice": "so little is lost on these samples that it may be chance",
            }
            refused = RefusedStage(stage, before, after, context, (), measured, allowed)
            return found, _repairs(refused, ())
        found, layers = _guilty_layers(measured)
    refused = RefusedStage(stage, before, after, context, layers, measured, allowed)
    tested = [(cause, check_cause(cause, refused)) for cause in causes_of(stage.stage)]
    causes = [(cause, result) for cause, result in tested if result is not None]
    # Equal ones in their own order: a twentieth of the loss is some samples.
    causes.sort(key=lambda pair: -round(20 * (pair[1].returned or 0.0)))
    known = [pair for pair in causes if pair[1].returned is not None]
    causes = known or causes
    for cause, result in causes:
        log_event("cause_found", f"{name}: {result.text}", stage=name, cause=cause.key)
    repairs = _repairs(refused, causes)
    found["causes"] = tuple(result for _, result in causes)
    found["repairs"] = tuple(dict(repair.settings) for repair in repairs)
    if measured is None:
        found["notice"] = f"layers of {stage.stage} cannot be put back one by one"
    else:
        found["judgings"] = measured.judgings
    if not causes and not found.get("notice"):
        found["notice"] = "no test of a cause is above its threshold"
    return found, repairs


def _guilty_layers(measured: LayerDiagnosis) -> tuple[dict[str, Any], tuple[str, ...]]:
    search = measured.search
    layers = search.guilty()
    spread = not layers
    layers = layers or search.widest()
    known = search.known_alone()
    for judged in search.judged:
        log_event("patched", f"{len(judged.layers)} layers in float return {judged.recovered:.0%}")
    return {
        "points": round(search.lost, 6) if math.isfinite(search.lost) else None,
        "samples": measured.samples,
        "layers": len(search.ranking),
        "sets": tuple(
            LayerSet(layers=j.layers, recovered=round(j.recovered, 4)) for j in search.judged
        ),
        "guilty": tuple(
            GuiltyLayer(
                layer=name,
                alone=round(known[name], 4) if name in known else None,
                own_sqnr_db=round(measured.own_sqnr_db(name), 1),
            )
            for name in layers
        ),
        "recovered": round(search.recovered(layers), 4),
        "confirmed": round(measured.confirm(layers), 4),
        "spread": spread,
    }, layers


def _repairs(
    refused: RefusedStage[Any], causes: Sequence[tuple[Cause[Any], FoundCause]]
) -> list[Repair]:
    """Return what the causes name, cheapest first, and of equal cost by the likeliest cause.

    What the other causes of the stage name follows: a test may miss, and each repair is judged.
    """
    likely: dict[str, Repair] = {}
    for cause, result in causes:
        layers = [layer for layer in result.layers if layer] or refused.layers
        for repair in cause.repairs(refused, layers):
            likely.setdefault(str(sorted(repair.settings.items())), repair)
    others: dict[str, Repair] = {}
    for cause in causes_of(refused.stage.stage) if refused.measured is not None else ():
        for repair in cause.repairs(refused, refused.layers):
            others.setdefault(str(sorted(repair.settings.items())), repair)
    rest = [repair for key, repair in others.items() if key not in likely]
    return [
        *sorted(likely.values(), key=lambda repair: repair.cost),
        *sorted(rest, key=lambda repair: repair.cost),
    ]
