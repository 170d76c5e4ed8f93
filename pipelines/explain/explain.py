"""Explains a refusal: which stage loses the metric, which of its layers, and for what cause."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from compress.common.atomic_files import temporary_folder
from compress.core.diagnosis.cause import ACCURACY_GATES, RefusedStage, Repair
from compress.core.diagnosis.layer_diagnosis import LEAST_RECOVERED, LayerDiagnosis
from compress.core.diagnosis.rerun import RerunStage
from compress.pipelines.explain.causes import (
    NO_CAUSE,
    Explained,
    announced_causes,
    causes_of,
    cheapest_first,
    check_causes,
    diagnose,
    log_causes,
)
from compress.pipelines.explain.costs import explain_cost
from compress.pipelines.results.explanation import Explanation, GuiltyLayer, LayerSet
from compress.pipelines.results.schema import StageReport
from compress.pipelines.system.jsonl_log import log_event
from compress.training.diagnosis.causes import recorded_losses

if TYPE_CHECKING:
    from compress.pipelines.explain.causes import Found
    from compress.pipelines.explain.finished_run import FinishedRun, JudgedStage
    from compress.pipelines.results.explanation import FoundCause, StageShare


def explain_run(
    run: FinishedRun, stage: str | None, gate: str | None, deadline: float
) -> list[Explained]:
    """Explain the verdicts that are named, else all that refused; stop early at the deadline.

    Raises PipelineInvalid: there is no verdict to explain; ArtifactInvalid: the artifacts are not
    in the store any more; StageFailed: there is no data to judge by.
    """
    explained = []
    for judged in run.judged(stage, gate):
        began = time.monotonic()
        explain = _explain_accuracy if judged.verdict.gate in ACCURACY_GATES else explain_cost
        changes, repairs = explain(run, judged, deadline)
        report = judged.report
        explanation = Explanation(
            stage=report.name,
            verdict=judged.verdict,
            artifact=report.artifact.digest if isinstance(report, StageReport) else "",
            metric=run.state.plan.metric.name,
            split=(),
            culprit=None,
        )
        changes["seconds"] = round(time.monotonic() - began, 2)
        explanation = explanation.model_copy(update=changes)
        explained.append(Explained(judged, explanation, tuple(repairs)))
    return explained


def _explain_accuracy(run: FinishedRun, judged: JudgedStage, deadline: float) -> Found:
    split = run.split(judged)
    worst = max(split, key=lambda share: share.points, default=None)
    culprit = worst.stage if worst and worst.points > 0 else None
    known = {"split": split, "culprit": culprit}
    # What was to recover the loss comes before what has lost it, which was known to lose: the
    # stages that train after that. Where none loses, a gate asks for more than training brought.
    names = [share.stage for share in split]
    if culprit is not None:
        names = names[names.index(culprit) + 1 :]
    elif judged.verdict.gate != "min_metric":
        names = []
    artifacts = run.state.artifacts
    trained = [n for n in reversed(names) if n in artifacts and recorded_losses(artifacts[n])]
    for name in trained:
        refused = _refused(run, judged, split, name, deadline)
        found, repairs = _explain_causes(refused, judged.verdict.gate)
        causes: tuple[FoundCause, ...] = found["causes"]
        # Half of what is missing: training more mends a little of most losses.
        if causes and (culprit is None or (causes[0].returned or 0.0) >= LEAST_RECOVERED):
            return {**known, **found, "culprit": name}, repairs
    if culprit is not None:
        refused = _refused(run, judged, split, culprit, deadline)
        found, repairs = _explain_stage(refused, judged.verdict.gate, deadline)
        return {**known, **found}, repairs
    if trained:
        return {**known, "culprit": trained[0], "notice": NO_CAUSE}, ()
    return {**known, "notice": "nothing is lost between these stages"}, ()


def _explain_stage(refused: RefusedStage[Any], gate: str, deadline: float) -> Found:
    measured = diagnose(
        refused.stage, refused.before, refused.after, refused.context, refused.max_points
    )
    found: dict[str, Any] = {}
    if measured is not None:
        refused = replace(refused, measured=measured)
        search, lost = measured.search, measured.search.lost
        search.deadline = deadline
        found = {
            "parts": measured.parts,
            "put_back": measured.put_back,
            "points": round(lost, 6) if math.isfinite(lost) else None,
            "samples": measured.halves[0].samples,
            "layers": len(search.ranking),
        }
        if lost <= 0 or lost < measured.resolution:
            notice = "so little is lost on these samples that it may be chance"
            found |= {"judgings": measured.evaluations, "notice": notice}
            return found, _repairs(refused, gate, [])
        guilty, layers = _guilty_layers(measured)
        found |= guilty
        refused = replace(refused, layers=layers)
    explained, repairs = _explain_causes(refused, gate)
    found |= explained
    if measured is None:
        found["notice"] = found["notice"] or f"layers of {refused.stage.stage} cannot be put back"
    else:
        found["judgings"] = measured.evaluations
        found["notice"] = found["notice"] or measured.notice
    return found, repairs


def _refused(
    run: FinishedRun, judged: JudgedStage, split: Sequence[StageShare], name: str, deadline: float
) -> RefusedStage[Any]:
    """Return a stage with the points that it may lose where the others lose what they do."""
    points = {share.stage: share.points for share in split}
    allowed = run.max_points(judged) - sum(lost for stage, lost in points.items() if stage != name)
    planned = run.state.plan.stage(name)
    context = run.context(name, judged, temporary_folder() / "explain")
    stage = planned.stage, run.state.artifacts[planned.input], run.state.artifacts[name], context
    seconds = next((s.seconds for s in run.report.stages if s.name == name), 0.0)
    rerun = RerunStage(*stage, points[name] - allowed, seconds, deadline)
    return RefusedStage(*stage, (), None, allowed, rerun)


def _explain_causes(refused: RefusedStage[Any], gate: str) -> Found:
    found = check_causes(refused, gate)
    known = [pair for pair in found if pair[1].returned is not None]
    # What packages add is named in any case: they may not be able to compute what returns.
    added = [pair for pair in found if pair not in known and announced_causes()[pair[0].key][1]]
    named = [*known, *added] if known else found
    log_causes(named, refused.stage.stage)
    repairs = _repairs(refused, gate, [result for _, result in named])
    return {
        "causes": tuple(result for _, result in named),
        "repairs": tuple(dict(repair.settings) for repair in repairs),
        "notice": "" if named else NO_CAUSE,
    }, repairs


def _guilty_layers(measured: LayerDiagnosis) -> tuple[dict[str, Any], tuple[str, ...]]:
    search = measured.search
    layers = search.guilty()
    spread = measured.spread = not layers
    layers = layers or search.widest()
    known = search.known_alone()
    sets = []
    for names, share in search.tried.items():
        sets.append(LayerSet(layers=names, recovered=round(share, 4)))
        put_back = f"{len(names)} {measured.parts} {measured.put_back}"
        log_event("patched", f"{put_back} return {share:.0%}")
    return {
        "sets": tuple(sets),
        "guilty": tuple(
            GuiltyLayer(
                layer=name,
                alone=round(known[name], 4) if name in known else None,
                own_sqnr_db=measured.own_sqnr_db(name),
            )
            for name in layers
        ),
        "recovered": round(search.recovered(layers), 4),
        "confirmed": round(measured.confirm(layers), 4),
        "spread": spread,
    }, layers


def _repairs(refused: RefusedStage[Any], gate: str, found: Sequence[FoundCause]) -> list[Repair]:
    """Return what the causes name, cheapest first, and then what others do: a test may miss."""
    causes, layers = announced_causes(), refused.layers
    named = [(causes[f.cause][0], [n for n in f.layers if n] or layers) for f in found]
    repairs = cheapest_first(named, refused)
    if refused.measured is not None:
        every = [(cause, layers) for cause in causes_of(refused.stage.stage, gate)]
        for key, repair in cheapest_first(every, refused).items():
            repairs.setdefault(key, repair)
    return [*repairs.values()]
