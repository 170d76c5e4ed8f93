"""Explains refusals of speed, size and memory: which modules cost most, and for what cause."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.common.atomic_files import temporary_folder
from compress.common.errors import CompressError
from compress.core.diagnosis.cause import (
    MEMORY_GATES,
    SPEED_GATES,
    RefusedStage,
    Repair,
)
from compress.core.gate_kinds.baselines import baseline_for, nearest_float_model
from compress.training.config.training import Training
from export.diagnosis.layer_names import as_onnx
from export.diagnosis.sizes import SizeDiagnosis, bytes_by_module
from export.diagnosis.speed import SpeedDiagnosis, SpeedGate
from export.diagnosis.speed_causes import Noise
from export.onnx.stage import ExportOnnx
from pipelines.explain.registry import causes_of
from pipelines.explain.tested_causes import Explained, check_cause
from pipelines.results.explanation import Explanation, ModuleCost
from pipelines.system.jsonl_log import log_event

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import onnx

    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context
    from compress.core.diagnosis.cause import Cause
    from pipelines.explain.finished_run import FinishedRun, JudgedStage
    from pipelines.results.explanation import FoundCause

MIB = 2**20


def explain_cost(run: FinishedRun, judged: JudgedStage) -> Explained:
    """Explain a verdict on speed, size or memory.

    Raises:
        ArtifactInvalid: the run's artifacts are not in the store any more.
    """
    began = time.monotonic()
    branch = _Branch.of_verdict(run, judged)
    explanation = Explanation(
        stage=judged.report.name,
        verdict=judged.verdict,
        artifact=judged.report.artifact.digest,
        metric=run.state.plan.metric.name,
        split=(),
        culprit=None,
    )
    repairs: tuple[Repair, ...] = ()
    try:
        if judged.verdict.gate in SPEED_GATES:
            changes, repairs = branch.explain_speed()
        else:
            changes, repairs = branch.explain_size()
    except CompressError as error:
        changes = {"notice": str(error)}
    changes["seconds"] = round(time.monotonic() - began, 2)
    return Explained(judged, explanation.model_copy(update=changes), repairs)


@dataclass
class _Branch:
    """The stages that led to a refused one, and their artifacts."""

    run: FinishedRun
    judged: JudgedStage
    context: Context
    names: list[str]
    """Of the stages, the refused one last."""

    @classmethod
    def of_verdict(cls, run: FinishedRun, judged: JudgedStage) -> _Branch:
        names = [*judged.report.branch[1:], judged.report.name]
        root = temporary_folder() / "explain"
        context = [run.context(name, judged, root) for name in names][-1]
        return cls(run, judged, context, names)

    @property
    def after(self) -> Artifact:
        return self.run.state.artifacts[self.names[-1]]

    @property
    def gate(self) -> Any:
        """The gate's settings."""
        stage, verdict = self._stage(self.names[-1]), self.judged.verdict
        return next(
            gate
            for gate in stage.gates
            if (gate.gate, gate.verdict(None).rule) == (verdict.gate, verdict.rule)
            and gate.verdict(None).against == verdict.against
        )

    def _stage(self, name: str) -> Any:
        return self.run.state.plan.stage(name).stage

    @property
    def _float_model(self) -> Any:
        return nearest_float_model(self._before(self.names[-1]), self.context)

    def _before(self, name: str) -> Artifact:
        return self.run.state.artifacts[self.run.state.plan.stage(name).input]

    def explain_speed(self) -> tuple[dict[str, Any], tuple[Repair, ...]]:
        """Return what an explanation has of a file that is too slow, and its repairs."""
        gate, before, after = self.gate, self._before(self.names[-1]), self.after
        if gate.compares:
            before = baseline_for(gate, before, self.context)
        compared = self.context.compare_latency(before, after, gate.batch)
        latency = compared.after
        limits = {"limit": gate.limit, "batch": gate.batch, "higher_passes": gate.higher_passes}
        if gate.higher_passes:
            found = SpeedGate(compared.interval, compared.speedup, **limits)
        else:
            found = SpeedGate(latency.p95_interval, latency.p95, **limits)
        measured = SpeedDiagnosis.create(
            after, self._float_model, found, latency.p50, self.rerun, self.context
        )
        before_ms, now = measured.float_profile.by_module, measured.profile.by_module
        changes: dict[str, Any] = {
            "unit": "ms",
            "costs": _module_costs(before_ms, now),
            "layers": len(measured.names),
        }
        if not self.judged.verdict.passed:
            noise = check_cause(Noise(), self._refused(self.names[-1], measured, ()))
            if noise is not None:
                return {**changes, "causes": (noise,), "culprit": self.names[-1]}, ()
        tested, repairs = self._test(measured, [*now])
        return {**changes, **tested, "judgings": measured.measured}, repairs

    def explain_size(self) -> tuple[dict[str, Any], tuple[Repair, ...]]:
        """Return what an explanation has of a file that is too large, and its repairs."""
        gate, after, verdict = self.gate, self.after, self.judged.verdict
        is_memory = verdict.gate in MEMORY_GATES
        if is_memory:
            missing = MIB * (float(verdict.value or verdict.limit) - verdict.limit)
        elif gate.compares:
            before = baseline_for(gate, self._before(self.names[-1]), self.context)
            missing = after.payload_bytes - verdict.limit * before.payload_bytes
        else:
            missing = after.payload_bytes - MIB * verdict.limit
        measured = SizeDiagnosis.create(
            after,
            self._float_model,
            missing,
            gate.batch if is_memory else after.signature.smallest_batch,
            self.rerun,
            self.context,
        )
        before_bytes, now = bytes_by_module(measured.before), bytes_by_module(measured.tensors)
        changes = {
            "unit": "bytes",
            "costs": _module_costs(before_bytes, now),
            "layers": len(measured.names),
        }
        tested, repairs = self._test(measured, [*{**now, **measured.activations}])
        return {**changes, **tested, "judgings": measured.measured}, repairs

    def rerun(self, name: str, settings: Mapping[str, Any]) -> onnx.ModelProto | None:
        """Return the file that the branch would make with other settings of a stage.

        Fine-tuning is left out, as it changes no size; None where a stage trains or fails.
        """
        artifact: Any = self._before(name)
        with tempfile.TemporaryDirectory(prefix="compress-rerun-") as folder:
            for place, later in enumerate(self.names[self.names.index(name) :]):
                stage = self._stage(later)
                if isinstance(stage, Training):
                    return None
                content = stage.model_dump(exclude={"gates"}, exclude_unset=True)
                content |= {"stage": stage.stage, **({} if place else settings)}
                if content.get("finetune"):
                    content["finetune"] = None
                changed = type(stage).model_validate(content)
                try:
                    if isinstance(changed, ExportOnnx):
                        return changed.translated(artifact)[0]
                    root = Path(folder) / later
                    artifact = changed.run(artifact, self.context.with_root(root))
                except CompressError:
                    return None
            return as_onnx(artifact)

    def _refused(self, name: str, measured: Any, layers: Sequence[str]) -> RefusedStage[Any]:
        before, after = self._before(name), self.run.state.artifacts[name]
        stage = self._stage(name)
        return RefusedStage(stage, before, after, self.context, tuple(layers), measured, 0.0)

    def _test(
        self, measured: Any, layers: Sequence[str]
    ) -> tuple[dict[str, Any], tuple[Repair, ...]]:
        """Test the causes of all stages; the one whose cause returns most is the culprit."""
        found: list[tuple[str, Cause[Any], FoundCause, tuple[Repair, ...]]] = []
        for name in self.names:
            refused = self._refused(name, measured, layers)
            for cause in causes_of(refused.stage.stage, self.judged.verdict.gate):
                result = check_cause(cause, refused)
                if result is not None:
                    guilty = [layer for layer in result.layers if layer]
                    found.append((name, cause, result, cause.repairs(refused, guilty)))
                    text = f"{name}: {result.text}"
                    log_event("cause_found", text, stage=name, cause=cause.key)
        if not found:
            return {"notice": "no test of a cause is above its threshold"}, ()
        found.sort(key=lambda one: -round(20 * (one[2].returned or 0.0)))
        culprit = found[0][0]
        own = [one for one in found if one[0] == culprit]
        repairs = {str(sorted(r.settings.items())): r for one in own for r in one[3]}
        ordered = tuple(sorted(repairs.values(), key=lambda repair: repair.cost))
        return {
            "culprit": culprit,
            "causes": tuple(result for _, _, result, _ in found),
            "repairs": tuple(dict(repair.settings) for repair in ordered),
        }, ordered


def _module_costs(
    before: Mapping[str, float], now: Mapping[str, float]
) -> tuple[ModuleCost, ...]:
    """Return what modules cost, the dearest first."""
    return tuple(
        ModuleCost(
            module=name,
            before=float(f"{before[name]:.4g}") if name in before else None,
            now=float(f"{now.get(name, 0.0):.4g}"),
        )
        for name in sorted({**before, **now}, key=lambda name: -now.get(name, 0.0))
    )
