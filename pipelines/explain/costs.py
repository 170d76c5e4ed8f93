"""Explains refusals of speed, size, integer kernels and parity: which modules, for what cause."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from compress.common.atomic_files import temporary_folder
from compress.common.errors import ArtifactInvalid, CompressError, StageFailed
from compress.core.diagnosis.cause import (
    MACS_GATES,
    MEMORY_GATES,
    PARAMETER_GATES,
    PARITY_GATES,
    SPEED_GATES,
    RefusedStage,
)
from compress.core.gates.baselines import baseline_for, baseline_name, nearest_float_model
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
from compress.pipelines.explain.causes import (
    NO_CAUSE,
    cheapest_first,
    check_cause,
    check_causes,
    likelihood,
    log_causes,
)
from compress.pipelines.results.explanation import FLOAT_MACS, FoundCause, ModuleCost
from compress.pipelines.results.schema import FailureReport
from compress.profiling.benchmark import unmeasurable
from compress.training.config.training import Training

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import onnx_ir as ir

    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context
    from compress.core.diagnosis.cause import Cause
    from compress.export.diagnosis.costs import FileDiagnosis, Unit
    from compress.pipelines.explain.causes import Found
    from compress.pipelines.explain.finished_run import FinishedRun, JudgedStage
    from compress.profiling.benchmark import Comparison

MIB = 2**20
LONGER_SECONDS = 3.0
"""For which each model is measured where the first measurement does not tell."""


@dataclass
class RefusedBranch:
    """The stages that led to a refused one, and their artifacts."""

    run: FinishedRun
    judged: JudgedStage
    context: Context
    names: list[str]
    """Of the stages, the refused one last."""

    @classmethod
    def of_verdict(cls, run: FinishedRun, judged: JudgedStage) -> Self:
        """Return the branch of a verdict.

        Raises:
            ArtifactInvalid: the run's artifacts are not in the store any more.
        """
        names = [*judged.report.branch[1:], judged.report.name]
        root = temporary_folder() / "explain"
        contexts = [run.context(name, judged, root) for name in names]
        return cls(run, judged, contexts[-1], names)

    @property
    def after(self) -> Artifact:
        """What the refused stage made."""
        return self.run.state.artifacts[self.names[-1]]

    @property
    def gate(self) -> Any:
        """The gate's settings."""
        verdict, plan = self.judged.verdict, self.run.state.plan
        planned, kind = plan.stage(self.names[-1]), self.after.kind
        return next(
            gate
            for gate in planned.stage.gates
            if (gate.gate, gate.verdict(None).rule) == (verdict.gate, verdict.rule)
            and verdict.against
            == (baseline_name(gate, kind, planned.input, plan.baseline) if gate.compares else None)
        )

    @property
    def file(self) -> tuple[Artifact, Any, Any, Context]:
        """What a diagnosis takes apart, its float model, and what makes the file again."""
        source = nearest_float_model(self.before(self.names[-1]), self.context)
        return self.after, source, self.rerun, self.context

    def stage(self, name: str) -> Any:
        """Return a stage's settings."""
        return self.run.state.plan.stage(name).stage

    def before(self, name: str) -> Artifact:
        """Return what a stage reads."""
        return self.run.state.artifacts[self.run.state.plan.stage(name).input]

    def rerun(self, name: str, settings: Mapping[str, Any]) -> ir.Model | None:
        """Return the file that the branch would make with other settings of a stage.

        Fine-tuning is left out, as it changes no size; None where a stage trains or fails.
        """
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
        """Return a stage with what was measured, for the tests of causes."""
        before = self.before(name)
        after = self.run.state.artifacts.get(name, before)  # of an export that failed
        stage = self.stage(name)
        return RefusedStage(stage, before, after, self.context, tuple(layers), measured, 0.0)

    def check_causes(
        self, measured: Any, layers: Sequence[str], known: Mapping[str, Any] | None = None
    ) -> Found:
        """Test the causes of all stages; the one whose cause returns most is the culprit.

        What is `known` besides becomes part of the explanation.
        """
        found: list[tuple[RefusedStage[Any], Cause, FoundCause]] = []
        for name in self.names:
            refused = self.refused(name, measured, layers)
            checked = check_causes(refused, self.judged.verdict.gate)
            log_causes(checked, name)
            found += [(refused, *pair) for pair in checked]
        counted = {**(known or {}), "judgings": measured.measured}
        if not found:
            return {**counted, "notice": NO_CAUSE}, ()
        found.sort(key=lambda one: -likelihood(one[2]))
        culprit = found[0][0]
        own = [(c, [n for n in f.layers if n]) for refused, c, f in found if refused is culprit]
        repairs = tuple(cheapest_first(own, culprit).values())
        return {
            **counted,
            "culprit": culprit.stage.title,
            "causes": tuple(result for _, _, result in found),
            "repairs": tuple(dict(repair.settings) for repair in repairs),
        }, repairs


def explain_cost(run: FinishedRun, judged: JudgedStage, deadline: float) -> Found:
    """Explain a verdict on what a file costs, or on its outputs.

    A wrong layer is searched for until the deadline, on the clock of :func:`time.monotonic`.

    Raises:
        ArtifactInvalid: the run's artifacts are not in the store any more.
    """
    branch, gate = RefusedBranch.of_verdict(run, judged), judged.verdict.gate
    explain = _explain_size
    if gate in SPEED_GATES:
        explain = _explain_speed
    elif gate in PARITY_GATES:
        explain = partial(_explain_parity, deadline=deadline)
    elif gate in MACS_GATES:
        explain = _explain_macs
    try:
        return explain(branch)
    except CompressError as error:
        return {"notice": str(error)}, ()


def _explain_speed(branch: RefusedBranch) -> Found:
    """Return what an explanation has of a file that is too slow, and its repairs."""
    gate, before, after = branch.gate, branch.before(branch.names[-1]), branch.after
    if gate.compares:
        before = baseline_for(gate, before, after, branch.context)
    compared = branch.context.compare_latency(before, after, gate.batch)
    earlier = branch.judged.verdict.value
    found = _speed_gate(gate, compared, earlier)
    if found.spread_in_margin > NOISE.limit:
        # More time than a run takes may show it.
        compared = branch.context.compare_latency(before, after, gate.batch, LONGER_SECONDS)
        found = _speed_gate(gate, compared, earlier)
    # A busy machine makes each file slow, and every cause of that would be a guess.
    if compared.after.disturbed:
        raise StageFailed(unmeasurable("the speed", compared.after.disturbed))
    ms = compared.after.p50
    measured = SpeedDiagnosis(*branch.file, found.missing(ms), found, ms)
    before_ms, now = measured.float_profile.by_module, measured.profile.by_module
    changes = _costs(measured, "ms", before_ms, now)
    if not branch.judged.verdict.passed:
        noise = check_cause(NOISE, branch.refused(branch.names[-1], measured, ()))
        if noise is not None:
            return {**changes, "causes": (noise,), "culprit": branch.names[-1]}, ()
    return branch.check_causes(measured, [*now], changes)


def _speed_gate(gate: Any, compared: Comparison, earlier: float | None) -> SpeedGate:
    latency, is_ratio = compared.after, gate.higher_passes
    return SpeedGate(
        interval=compared.interval if is_ratio else latency.p95_interval,
        middle=compared.speedup if is_ratio else latency.p95,
        limit=gate.limit,
        higher_passes=is_ratio,
        batch=gate.batch,
        earlier=earlier,
    )


def _explain_size(branch: RefusedBranch) -> Found:
    """Return what an explanation has of a file that is too large, and its repairs."""
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


def _explain_macs(branch: RefusedBranch) -> Found:
    """Return what an explanation has of a file too little of which is integer, and its repairs."""
    verdict = branch.judged.verdict
    if verdict.value is None:
        return {"notice": verdict.reason}, ()
    measured = MacsDiagnosis(*branch.file, verdict.limit - verdict.value)
    before, now = measured.float_profile.float_macs, measured.profile.float_macs
    changes = _costs(measured, FLOAT_MACS, before, now)
    return branch.check_causes(measured, [*now], changes)


def _explain_parity(branch: RefusedBranch, deadline: float) -> Found:
    """Return what an explanation has of a file whose outputs are wrong, and its repairs."""
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
        cause = FoundCause(
            cause=WRONG_OPERATOR.key,
            layers={str(layer): float(f"{layer.error:.4g}")},
            limit=WRONG_OPERATOR.limit,
            returned=None,
            text=WRONG_OPERATOR.in_words(layer.error),
        )
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
    """Return what an explanation has of what modules cost, the dearest first."""
    costs = tuple(
        ModuleCost(
            module=name,
            before=round(before[name], 6) if name in before else None,
            now=round(now.get(name, 0.0), 6),
        )
        for name in sorted({**before, **now}, key=lambda name: -now.get(name, 0.0))
    )
    return {"unit": unit, "costs": costs, "layers": len(measured.layer_names)}
