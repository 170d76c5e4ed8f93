"""Causes of a metric that a distillation does not reach: its teacher, and the weights of its loss.

Thresholds were set on half of the injected faults of `benchmarks/explain.py`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from compress.common.errors import CompressError, StageFailed
from compress.common.forward import flatten_outputs
from compress.core.diagnosis.cause import Cause, Repair
from compress.core.diagnosis.layer_diagnosis import WHY
from compress.distillation.stage import Distill
from compress.distillation.teacher import OnnxFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from compress.core.diagnosis.cause import RefusedStage
    from compress.core.diagnosis.rerun import RerunStage

    Refused = RefusedStage[Any]

FROM_LABELS = {"soft_weight": 0.01, "hard_weight": 1.0}
"""Settings of a distillation that learns from labels alone, or nearly so."""
GRADIENT_SAMPLES = 64


class DistillationCause(Cause[Any]):
    """A cause in what a student learns from."""

    stages = ("distill",)

    def measure(self, refused: Refused, layer: str) -> float | None:
        """Return the value for the stage as a whole."""
        stage, rerun = refused.stage, refused.rerun
        if layer or rerun is None or not isinstance(stage, Distill):
            return None
        return self.measure_stage(stage, rerun)

    def measure_stage(self, stage: Distill, rerun: RerunStage) -> float | None:
        """Return the value; None where the test does not apply."""
        raise NotImplementedError

    def changes(self, stage: Distill, rerun: RerunStage) -> Iterator[dict[str, Any]]:
        """Yield settings that take the cause away, the likeliest first."""
        raise NotImplementedError

    def returned(self, refused: Refused, layers: Sequence[str]) -> float | None:
        """Return the share that returns with the likeliest change, where there is time for it."""
        stage, rerun = refused.stage, refused.rerun
        if rerun is None or not isinstance(stage, Distill):
            return None
        settings = next(self.changes(stage, rerun), None)
        return None if settings is None else rerun.returned(settings)

    def repairs(self, refused: Refused, layers: Sequence[str]) -> tuple[Repair, ...]:
        """Return the changes; all of them train."""
        stage, rerun = refused.stage, refused.rerun
        if rerun is None or not isinstance(stage, Distill):
            return ()
        return tuple(Repair(settings, 4) for settings in self.changes(stage, rerun))


class TeacherWorse(DistillationCause):
    """The teacher itself misses what the gate asks of the student."""

    limit = 1.0
    text = (
        "the teacher is worse than what is asked of the student (by {value:.3g} points; "
        "limit {limit:g})"
    )

    def measure_stage(self, stage: Distill, rerun: RerunStage) -> float | None:
        """Return the points by which the teacher misses what the gate asks for."""
        score = teacher_score(stage, rerun)
        if score is None:
            return None
        return rerun.context.metric.drop_points(rerun.score, score) + rerun.missing

    def changes(self, stage: Distill, rerun: RerunStage) -> Iterator[dict[str, Any]]:
        """Yield better teachers of the pipeline, then labels in the place of the teacher."""
        metric, found = rerun.context.metric, []
        for name, artifact in rerun.context.artifacts.items():
            if name == stage.teacher:
                continue
            try:
                missing = metric.drop_points(rerun.score, rerun.context.score(artifact))
            except CompressError:
                continue
            if missing + rerun.missing <= self.limit:
                found.append((missing, name))
        for _, name in sorted(found):
            yield {"teacher": name}
        if not stage.losses:
            yield dict(FROM_LABELS)


class LossWeights(DistillationCause):
    """The terms' weights or the temperature make steps far longer or shorter than labels do."""

    limit = 10.0
    text = (
        "weights of the loss (its gradient is {value:.3g} times as long, or as short, as that of "
        "the labels; limit {limit:g})"
    )

    def measure_stage(self, stage: Distill, rerun: RerunStage) -> float | None:
        """Return the ratio of the gradients on some samples of `train`, before the training."""
        try:
            ratio = gradient_ratio(stage, rerun)
        except CompressError:
            return None
        return max(ratio, 1 / ratio) if ratio > 0 else math.inf

    def changes(self, stage: Distill, rerun: RerunStage) -> Iterator[dict[str, Any]]:
        """Yield the default weights and temperature."""
        if not stage.losses:
            yield {"soft_weight": None, "hard_weight": None, "temperature": None}


def teacher_score(stage: Distill, rerun: RerunStage) -> float | None:
    """Return the teacher's metric on `val`; None of an ONNX file, or where it has none."""
    with rerun.context.in_temporary_folder() as context:
        try:
            teacher = stage.teacher_model(rerun.before, context)  # type: ignore[arg-type]
            return None if isinstance(teacher, OnnxFile) else context.score(teacher)
        except CompressError:
            return None


def gradient_ratio(stage: Distill, rerun: RerunStage) -> float:
    """Return how long the gradient of the loss is over that of the labels' mean loss.

    Both of the student as it begins, on some samples of `train`.

    Raises:
        CompressError: there are no labels, or the loss reads features.
    """
    with rerun.context.in_temporary_folder() as context:
        student, objective, _ = stage.student_and_objective(rerun.before, context)  # type: ignore[arg-type]
        if objective.teacher_modules:
            raise StageFailed("the loss compares features, which the module does not return here")
        data = context.need_data(WHY)
        batch = next(data.batches("train", GRADIENT_SAMPLES, GRADIENT_SAMPLES))
        norms = []
        for loss in (objective.prepare("cpu"), objective.targets.prepare("cpu")):
            module = student.load().eval()
            with torch.enable_grad():
                value = loss(flatten_outputs(module(*batch.inputs)), batch)
                torch.autograd.backward(value)
            gradients = [p.grad.flatten() for p in module.parameters() if p.grad is not None]
            norms.append(float(torch.cat(gradients).norm()) if gradients else 0.0)
    return norms[0] / norms[1] if norms[1] > 0 else math.inf


DISTILLATION_CAUSES: tuple[type[DistillationCause], ...] = (TeacherWorse, LossWeights)
"""Where two of them explain as much, the one that stands first is named first."""
