"""The stages that led to a refused one: run again with other settings, and tested for causes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from compress.common.atomic_files import temporary_folder
from compress.common.errors import CompressError
from compress.core.diagnosis.cause import RefusedStage, Repair
from compress.core.gates.baselines import baseline_name, nearest_float_model
from compress.export.diagnosis.profile import as_onnx
from compress.export.onnx.stage import ExportOnnx
from compress.pipelines.explain.causes import causes_of, check_cause
from compress.pipelines.system.jsonl_log import log_event
from compress.training.config.training import Training

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import onnx_ir as ir

    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context
    from compress.core.diagnosis.cause import Cause
    from compress.pipelines.explain.finished_run import FinishedRun, JudgedStage
    from compress.pipelines.results.explanation import FoundCause


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
    def float_model(self) -> Any:
        """The last model that PyTorch runs as its class."""
        return nearest_float_model(self.before(self.names[-1]), self.context)

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
        self, measured: Any, layers: Sequence[str]
    ) -> tuple[dict[str, Any], tuple[Repair, ...]]:
        """Test the causes of all stages; the one whose cause returns most is the culprit."""
        found: list[tuple[str, Cause[Any], FoundCause, tuple[Repair, ...]]] = []
        for name in self.names:
            refused = self.refused(name, measured, layers)
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
