"""Explains a refusal: which stage loses or costs too much, which layers, and for what cause."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from compress.common.atomic_files import temporary_folder
from compress.common.errors import ArtifactInvalid, CompressError, StageFailed, Unavailable
from compress.common.requirements import announced_entries, is_foreign, load_entry_point
from compress.core.diagnosis import layer_diagnosis
from compress.core.diagnosis.cause import (
    ACCURACY_GATES,
    ENTRY_POINT_GROUP,
    MACS_GATES,
    MEMORY_GATES,
    PARAMETER_GATES,
    PARITY_GATES,
    SPEED_GATES,
    Cause,
    RefusedStage,
    Repair,
)
from compress.core.diagnosis.layer_diagnosis import LEAST_RECOVERED, LayerDiagnosis, RerunStage
from compress.core.gates.runtime import baseline_for, baseline_name, nearest_float_model
from compress.export.diagnosis.causes import NOISE, WRONG_OPERATOR
from compress.export.diagnosis.costs import (
    MacsDiagnosis,
    ParityDiagnosis,
    SizeDiagnosis,
    SpeedDiagnosis,
    SpeedGate,
    sizes_by_module,
)
from compress.export.diagnosis.profile import as_onnx
from compress.export.onnx.proto_io import read
from compress.export.onnx.stage import ExportOnnx
from compress.export.parity.report import RefusedFile, report_folder
from compress.pipelines.results.explanation import (
    FLOAT_MACS,
    Explanation,
    FoundCause,
    GuiltyLayer,
    LayerSet,
    ModuleCost,
)
from compress.pipelines.results.schema import FailureReport, StageReport
from compress.pipelines.system.jsonl_log import log_event
from compress.profiling.benchmark import NotMeasurable, unmeasurable
from compress.training.config.training import Training
from compress.training.diagnosis.causes import recorded_losses

if TYPE_CHECKING:
    import onnx_ir as ir

    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context
    from compress.core.stage import Stage
    from compress.export.diagnosis.costs import FileDiagnosis, Unit
    from compress.pipelines.explain.finished_run import FinishedRun, JudgedStage
    from compress.pipelines.results.explanation import StageShare

MIB = 2**20
LONGER_SECONDS = 3.0  # for which each model is measured where the first measurement does not tell
LEAST_RETURNED = 0.1
"""Share of the loss that must return without a cause; with less, the cause is not named."""
NO_CAUSE = "no test of a cause is above its threshold"
Checked = list[tuple[Cause, FoundCause]]
Found = tuple[dict[str, Any], Sequence[Repair]]
"""What an explanation has besides the verdict, and the repairs that its causes name."""


@dataclass(frozen=True)
class Explained:
    """A verdict with its explanation, and the repairs that its causes name, cheapest first."""

    judged: JudgedStage
    explanation: Explanation
    repairs: tuple[Repair, ...]


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
        explain = _explain_accuracy if judged.verdict.gate in ACCURACY_GATES else _explain_cost
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
        measured.deadline = deadline
        search, lost = measured.search, measured.search.lost
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
    before, after = run.state.artifacts[planned.input], run.state.artifacts[name]
    missing = points[name] - allowed
    seconds = next((s.seconds for s in run.report.stages if s.name == name), 0.0)
    rerun = RerunStage(planned.stage, before, after, context, missing, seconds, deadline)
    return RefusedStage(planned.stage, before, after, context, (), None, allowed, rerun)


def _explain_causes(refused: RefusedStage[Any], gate: str) -> Found:
    found = _check_causes(refused, gate)
    known = [pair for pair in found if pair[1].returned is not None]
    # What packages add is named in any case: they may not be able to compute what returns.
    added = [pair for pair in found if pair not in known and announced_causes()[pair[0].key][1]]
    named = [*known, *added] if known else found
    _log_causes(named, refused.stage.stage)
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
    repairs = _cheapest_first(named, refused)
    if refused.measured is not None:
        every = [(cause, layers) for cause in _causes_of(refused.stage.stage, gate)]
        for key, repair in _cheapest_first(every, refused).items():
            repairs.setdefault(key, repair)
    return [*repairs.values()]


@dataclass
class _RefusedBranch:
    """The stages that led to a refused one, and their artifacts."""

    run: FinishedRun
    judged: JudgedStage
    context: Context
    names: list[str]
    """Of the stages, the refused one last."""

    @property
    def after(self) -> Artifact:
        return self.run.state.artifacts[self.names[-1]]

    @property
    def gate(self) -> Any:
        verdict, plan = self.judged.verdict, self.run.state.plan
        planned, kind = plan.stage(self.names[-1]), self.after.kind
        return next(
            gate
            for gate in planned.stage.gates
            if (gate.gate, gate.verdict(None).rule) == (verdict.gate, verdict.rule)
            and not gate.on
            and verdict.against
            == (baseline_name(gate, kind, planned.input, plan.baseline) if gate.compares else None)
        )

    @property
    def file(self) -> tuple[Artifact, Any, Any, Context]:
        """What a diagnosis takes apart, its float model, and what makes the file again."""
        source = nearest_float_model(self.before(self.names[-1]), self.context)
        return self.after, source, self.rerun, self.context

    def stage(self, name: str) -> Any:
        return self.run.state.plan.stage(name).stage

    def before(self, name: str) -> Artifact:
        return self.run.state.artifacts[self.run.state.plan.stage(name).input]

    def rerun(self, name: str, settings: Mapping[str, Any]) -> ir.Model | None:
        """Return the file made with other settings; None where a stage trains or fails."""
        # Fine-tuning is left out, as it changes no size.
        artifact: Any = self.before(name)
        with self.context.in_temporary_folder() as context:
            for place, later in enumerate(self.names[self.names.index(name) :]):
                stage = self.stage(later)
                if isinstance(stage, Training):
                    return None
                changes = {} if place else dict(settings)
                if hasattr(stage, "finetune"):
                    changes["finetune"] = None
                changed = stage.with_settings(changes)
                try:
                    if isinstance(changed, ExportOnnx):
                        return changed.translated(artifact)[0]
                    artifact = changed.run(artifact, context.with_root(context.root / later))
                except CompressError:
                    return None
            return as_onnx(artifact)

    def refused(self, name: str, measured: Any, layers: Sequence[str]) -> RefusedStage[Any]:
        before = self.before(name)
        after = self.run.state.artifacts.get(name, before)  # of an export that failed
        stage = self.stage(name)
        return RefusedStage(stage, before, after, self.context, tuple(layers), measured, 0.0)

    def check_causes(
        self, measured: Any, layers: Sequence[str], known: Mapping[str, Any] | None = None
    ) -> Found:
        """Test the causes of all stages; the one whose cause returns most is the culprit."""
        found: list[tuple[RefusedStage[Any], Cause, FoundCause]] = []
        for name in self.names:
            refused = self.refused(name, measured, layers)
            checked = _check_causes(refused, self.judged.verdict.gate)
            _log_causes(checked, name)
            found += [(refused, *pair) for pair in checked]
        counted = {**(known or {}), "judgings": measured.measured}
        if not found:
            return {**counted, "notice": NO_CAUSE}, ()
        found.sort(key=lambda one: -_likelihood(one[2]))
        culprit = found[0][0]
        own = [(c, [n for n in f.layers if n]) for refused, c, f in found if refused is culprit]
        repairs = tuple(_cheapest_first(own, culprit).values())
        return {
            **counted,
            "culprit": culprit.stage.title,
            "causes": tuple(result for _, _, result in found),
            "repairs": tuple(dict(repair.settings) for repair in repairs),
        }, repairs


def _explain_cost(run: FinishedRun, judged: JudgedStage, deadline: float) -> Found:
    """Explain a verdict on costs or outputs; until the deadline a wrong layer is searched for."""
    names, root = [*judged.report.branch[1:], judged.report.name], temporary_folder() / "explain"
    contexts = [run.context(name, judged, root) for name in names]
    branch, gate = _RefusedBranch(run, judged, contexts[-1], names), judged.verdict.gate
    try:
        if gate in SPEED_GATES:
            return _explain_speed(branch)
        if gate in PARITY_GATES:
            return _explain_parity(branch, deadline)
        return _explain_macs(branch) if gate in MACS_GATES else _explain_size(branch)
    except CompressError as error:
        return {"notice": str(error)}, ()


def _explain_speed(branch: _RefusedBranch) -> Found:
    gate, after = branch.gate, branch.after
    # A latency, too, is measured beside what `against` names.
    before = baseline_for(gate, branch.before(branch.names[-1]), after, branch.context)
    for seconds in (None, LONGER_SECONDS):  # more time than a run takes may show it
        compared = branch.context.compare_latency(before, after, gate.batch, seconds)
        latency, is_ratio = compared.after, gate.higher_passes
        found = SpeedGate(
            interval=compared.interval if is_ratio else getattr(latency, f"{gate.figure}_interval"),
            middle=compared.speedup if is_ratio else getattr(latency, gate.figure),
            limit=gate.limit,
            higher_passes=is_ratio,
            batch=gate.batch,
            earlier=branch.judged.verdict.value,
        )
        if not found.spread_in_margin > NOISE.limit:
            break
    # A busy machine makes each file slow, and every cause of that would be a guess.
    if compared.after.disturbed:
        raise NotMeasurable(unmeasurable("the speed", compared.after.disturbed))
    ms = compared.after.p50
    measured = SpeedDiagnosis(*branch.file, found.missing(ms), found, ms)
    now = measured.profile.by_module
    changes = _costs(measured, "ms", measured.float_profile.by_module, now)
    if not branch.judged.verdict.passed:
        noise = _check_cause(NOISE, branch.refused(branch.names[-1], measured, ()))
        if noise is not None:
            return {**changes, "causes": (noise,), "culprit": branch.names[-1]}, ()
    return branch.check_causes(measured, [*now], changes)


def _explain_size(branch: _RefusedBranch) -> Found:
    gate, after, verdict = branch.gate, branch.after, branch.judged.verdict
    unit: Unit = "weights" if verdict.gate in PARAMETER_GATES else "bytes"
    if verdict.gate in MEMORY_GATES:
        missing = MIB * (float(verdict.value or verdict.limit) - verdict.limit)
    elif gate.compares:
        before = baseline_for(gate, branch.before(branch.names[-1]), after, branch.context)
        sizes = [a.parameters() if unit == "weights" else a.payload_bytes for a in (before, after)]
        missing = (sizes[1] or 0) - verdict.limit * (sizes[0] or 0)
    else:
        missing = after.payload_bytes - MIB * verdict.limit
    batch = gate.batch if verdict.gate in MEMORY_GATES else None
    measured = SizeDiagnosis(*branch.file, missing, unit, batch)
    sizes_before, now = (sizes_by_module(t, unit) for t in (measured.before, measured.tensors))
    changes = _costs(measured, unit, sizes_before, now)
    return branch.check_causes(measured, [*{**now, **measured.activations}], changes)


def _explain_macs(branch: _RefusedBranch) -> Found:
    verdict = branch.judged.verdict
    if verdict.value is None:
        return {"notice": verdict.reason}, ()
    measured = MacsDiagnosis(*branch.file, verdict.limit - verdict.value)
    now = measured.profile.float_macs
    changes = _costs(measured, FLOAT_MACS, measured.float_profile.float_macs, now)
    return branch.check_causes(measured, [*now], changes)


def _explain_parity(branch: _RefusedBranch, deadline: float) -> Found:
    name, run = branch.names[-1], branch.run
    stage, kept = branch.stage(name), None
    source: Any = branch.before(name)
    made: Any = run.state.artifacts.get(name)
    if made is None or isinstance(branch.judged.report, FailureReport):
        try:
            kept = RefusedFile.read(report_folder(branch.context, name), source)
        except (ArtifactInvalid, OSError, KeyError) as error:
            raise StageFailed(f"{error}; run the pipeline again") from error
    if not isinstance(stage, ExportOnnx):
        if kept is None:
            return {"notice": f"parity of {stage.stage} is not explained; expected export_onnx"}, ()
        layer = stage.search_refused(source, kept, branch.context, deadline)
        if layer is None:
            return {"notice": "no part of the graph that is exported alone differs"}, ()
        cause = _found_cause(WRONG_OPERATOR, {str(layer): layer.error}, None)
        return {"culprit": name, "causes": (cause,)}, ()
    model = read(kept.file if kept else made.payload_path, weights=True)
    measured = ParityDiagnosis(stage, source, model, branch.context, branch.rerun, kept, deadline)
    layers = [*measured.axis_errors]
    if any(map(math.isfinite, measured.errors.values())) and measured.wrong_layer is not None:
        layers.append(str(measured.wrong_layer))
    return branch.check_causes(measured, layers)


def _costs(
    measured: FileDiagnosis, unit: str, before: Mapping[str, float], now: Mapping[str, float]
) -> dict[str, Any]:
    costs = tuple(
        ModuleCost(
            module=name,
            before=round(before[name], 6) if name in before else None,
            now=round(now.get(name, 0.0), 6),
        )
        for name in sorted({**before, **now}, key=lambda name: -now.get(name, 0.0))
    )
    return {"unit": unit, "costs": costs, "layers": len(measured.layer_names)}


@cache
def announced_causes() -> dict[str, tuple[Cause, bool]]:
    """Return key → cause, and whether a foreign package adds it; Unavailable if two clash."""
    known: dict[str, tuple[Cause, bool]] = {}
    for entry in announced_entries(ENTRY_POINT_GROUP, "cause"):
        table = load_entry_point(entry, "cause")
        for cause in (table,) if isinstance(table, Cause) else table:
            if cause.key in known:
                raise Unavailable(f"cause {entry.name!r} of {entry.value}: the name is taken")
            known[cause.key] = cause, is_foreign(entry)
    return known


def _causes_of(stage: str, gate: str) -> list[Cause]:
    every = (cause for cause, _ in announced_causes().values())
    return [cause for cause in every if stage in cause.stages and gate in cause.gates]


def diagnose(
    stage: Stage[Any, Any], before: Any, after: Artifact, context: Context, allowed: float
) -> LayerDiagnosis | None:
    """Return the diagnosis of what a stage made; None where no part of it can be put back."""
    for entry in announced_entries(layer_diagnosis.ENTRY_POINT_GROUP, "diagnosis"):
        if entry.name == stage.stage:
            kind: type[LayerDiagnosis] = load_entry_point(entry, "diagnosis")
            return kind(stage, before, after, context, allowed)
    return None


def _check_cause(cause: Cause, refused: RefusedStage[Any]) -> FoundCause | None:
    """Test a cause on the guilty layers; None where no value is above the threshold."""
    measured = {layer: cause.measure(refused, layer) for layer in (*refused.layers, "")}
    above = {n: value for n, value in measured.items() if value is not None and value > cause.limit}
    if not above:
        return None
    share = cause.recovered_share(refused, [n for n in above if n] or refused.layers)
    if share is not None and share < LEAST_RETURNED:
        return None
    return _found_cause(cause, above, None if share is None else round(share, 4))


def _found_cause(cause: Cause, values: Mapping[str, float], returned: float | None) -> FoundCause:
    """Return a cause with the values of layers that are above its threshold, the worst first."""
    worst = dict(sorted(values.items(), key=lambda item: -item[1]))
    return FoundCause(
        cause=cause.key,
        layers={layer: float(f"{value:.4g}") for layer, value in worst.items()},
        limit=cause.limit,
        returned=returned,
        text=cause.in_words(next(iter(worst.values()))),
    )


def _check_causes(refused: RefusedStage[Any], gate: str) -> Checked:
    """Return the causes of a stage above their thresholds, the likeliest first."""
    tested = [(c, _check_cause(c, refused)) for c in _causes_of(refused.stage.stage, gate)]
    found = [(cause, result) for cause, result in tested if result is not None]
    # Equal ones in their own order: a twentieth of the loss is some samples.
    return sorted(found, key=lambda pair: -_likelihood(pair[1]))


def _likelihood(found: FoundCause) -> int:
    """Return the share that returns, in twentieths; less is chance."""
    return round(20 * (found.returned or 0.0))


def _log_causes(found: Checked, stage: str) -> None:
    for cause, result in found:
        log_event("cause_found", f"{stage}: {result.text}", stage=stage, cause=cause.key)


def _cheapest_first(
    found: Sequence[tuple[Cause, Sequence[str]]], refused: RefusedStage[Any]
) -> dict[str, Repair]:
    """Return what causes of some layers name, without doubles, the cheapest first."""
    repairs: dict[str, Repair] = {}
    for cause, layers in found:
        for repair in cause.repairs(refused, layers):
            repairs.setdefault(str(sorted(repair.settings.items())), repair)
    return dict(sorted(repairs.items(), key=lambda item: item[1].cost))
