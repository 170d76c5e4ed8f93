"""Explains refusals of speed, size, integer kernels and parity: which modules, for what cause."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from compress.common.errors import CompressError, StageFailed
from compress.core.diagnosis.cause import (
    MACS_GATES,
    MEMORY_GATES,
    PARAMETER_GATES,
    PARITY_GATES,
    SPEED_GATES,
    Repair,
)
from compress.core.gates.baselines import baseline_for
from compress.export.diagnosis.causes import Noise
from compress.export.diagnosis.costs import (
    MacsDiagnosis,
    SizeDiagnosis,
    SpeedDiagnosis,
    SpeedGate,
    sizes_by_module,
)
from compress.export.diagnosis.parity import ParityDiagnosis
from compress.export.onnx.stage import ExportOnnx
from compress.pipelines.explain.causes import Explained, check_cause
from compress.pipelines.explain.costs import RefusedBranch
from compress.pipelines.results.explanation import FLOAT_MACS, Explanation, ModuleCost
from compress.profiling.benchmark import unmeasurable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from compress.export.diagnosis.costs import Unit
    from compress.pipelines.explain.finished_run import FinishedRun, JudgedStage
    from compress.profiling.benchmark import Comparison

    Found = tuple[dict[str, Any], tuple[Repair, ...]]
    """What an explanation has besides the verdict, and the repairs."""

MIB = 2**20
LONGER_SECONDS = 3.0
"""For which each model is measured where the first measurement does not tell."""


def explain_cost(run: FinishedRun, judged: JudgedStage) -> Explained:
    """Explain a verdict on what a file costs, or on its outputs.

    Raises:
        ArtifactInvalid: the run's artifacts are not in the store any more.
    """
    began = time.monotonic()
    branch = RefusedBranch.of_verdict(run, judged)
    explanation = Explanation(
        stage=judged.report.name,
        verdict=judged.verdict,
        artifact=judged.digest,
        metric=run.state.plan.metric.name,
        split=(),
        culprit=None,
    )
    repairs: tuple[Repair, ...] = ()
    try:
        if judged.verdict.gate in SPEED_GATES:
            changes, repairs = _explain_speed(branch)
        elif judged.verdict.gate in PARITY_GATES:
            changes, repairs = _explain_parity(branch)
        elif judged.verdict.gate in MACS_GATES:
            changes, repairs = _explain_macs(branch)
        else:
            changes, repairs = _explain_size(branch)
    except CompressError as error:
        changes = {"notice": str(error)}
    changes["seconds"] = round(time.monotonic() - began, 2)
    return Explained(judged, explanation.model_copy(update=changes), repairs)


def _explain_speed(branch: RefusedBranch) -> Found:
    """Return what an explanation has of a file that is too slow, and its repairs."""
    gate, before, after = branch.gate, branch.before(branch.names[-1]), branch.after
    if gate.compares:
        before = baseline_for(gate, before, after, branch.context)
    compared = branch.context.compare_latency(before, after, gate.batch)
    earlier = branch.judged.verdict.value
    found = _speed_gate(gate, compared, earlier)
    if found.spread_in_margin > Noise.limit:
        # It may be told in more time than a run takes.
        compared = branch.context.compare_latency(before, after, gate.batch, LONGER_SECONDS)
        found = _speed_gate(gate, compared, earlier)
    if compared.after.disturbed:
        raise StageFailed(unmeasurable("the speed", compared.after.disturbed))
    measured = SpeedDiagnosis.create(
        after, branch.float_model, found, compared.after.p50, branch.rerun, branch.context
    )
    before_ms, now = measured.float_profile.by_module, measured.profile.by_module
    changes: dict[str, Any] = {
        "unit": "ms",
        "costs": _module_costs(before_ms, now),
        "layers": len(measured.names),
    }
    if not branch.judged.verdict.passed:
        noise = check_cause(Noise(), branch.refused(branch.names[-1], measured, ()))
        if noise is not None:
            return {**changes, "causes": (noise,), "culprit": branch.names[-1]}, ()
    tested, repairs = branch.check_causes(measured, [*now])
    return {**changes, **tested, "judgings": measured.measured}, repairs


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
    measured = SizeDiagnosis.create(
        after,
        branch.float_model,
        missing,
        branch.rerun,
        branch.context,
        unit,
        gate.batch if verdict.gate in MEMORY_GATES else None,
    )
    sizes_before, now = (sizes_by_module(t, unit) for t in (measured.before, measured.tensors))
    changes = {
        "unit": unit,
        "costs": _module_costs(sizes_before, now),
        "layers": len(measured.names),
    }
    tested, repairs = branch.check_causes(measured, [*{**now, **measured.activations}])
    return {**changes, **tested, "judgings": measured.measured}, repairs


def _explain_macs(branch: RefusedBranch) -> Found:
    """Return what an explanation has of a file too little of which is integer, and its repairs."""
    verdict = branch.judged.verdict
    if verdict.value is None:
        return {"notice": verdict.reason}, ()
    missing = verdict.limit - verdict.value
    measured = MacsDiagnosis.create(
        branch.after, branch.float_model, missing, branch.rerun, branch.context
    )
    before, now = measured.float_profile.float_macs, measured.profile.float_macs
    changes = {
        "unit": FLOAT_MACS,
        "costs": _module_costs(before, now),
        "layers": len(measured.names),
    }
    tested, repairs = branch.check_causes(measured, [*now])
    return {**changes, **tested, "judgings": measured.measured}, repairs


def _explain_parity(branch: RefusedBranch) -> Found:
    """Return what an explanation has of a file whose outputs are wrong, and its repairs."""
    name, verdict = branch.names[-1], branch.judged.verdict
    stage: Any = branch.stage(name)
    if not isinstance(stage, ExportOnnx):
        return {"notice": f"parity of {stage.stage} is not explained; expected export_onnx"}, ()
    source: Any = branch.before(name)
    model = stage.translated(source)[0]
    limit = verdict.limit if branch.judged.has_artifact else 0.0
    measured = ParityDiagnosis(stage, source, model, branch.context, limit, branch.rerun)
    layers = [*measured.axis_errors]
    if any(map(math.isfinite, measured.errors.values())) and measured.wrong_layer is not None:
        layers.append(str(measured.wrong_layer))
    tested, repairs = branch.check_causes(measured, layers)
    return {**tested, "judgings": measured.measured}, repairs


def _module_costs(before: Mapping[str, float], now: Mapping[str, float]) -> tuple[ModuleCost, ...]:
    """Return what modules cost, the dearest first."""
    return tuple(
        ModuleCost(
            module=name,
            before=round(before[name], 6) if name in before else None,
            now=round(now.get(name, 0.0), 6),
        )
        for name in sorted({**before, **now}, key=lambda name: -now.get(name, 0.0))
    )
