"""Causes of a metric that a distillation does not reach: its teacher, and the weights of its loss.

Thresholds were set on half of the injected faults of `benchmarks/explain.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from compress.common.errors import CompressError, StageFailed
from compress.common.forward import flatten_outputs
from compress.core.diagnosis.cause import Cause, RefusedStage, Repair
from compress.core.diagnosis.layer_diagnosis import WHY, RerunStage
from compress.distillation.teacher import OnnxFile

if TYPE_CHECKING:
    from compress.distillation.stage import Distill

    Refused = RefusedStage[Any]

GRADIENT_SAMPLES = 64
POINTS_OF_TEACHER = 1.0  # by which a teacher may miss what is asked of its student


def _cause(
    key: str,
    limit: float,
    text: str,
    of_stage: Callable[[Any, RerunStage], float | None],
    changes: Callable[[Any, RerunStage], Iterator[dict[str, Any]]],
) -> Cause:
    """Return a cause in what a student learns from, given the likeliest changes first."""

    def measure(refused: Refused, layer: str) -> float | None:
        rerun = refused.rerun
        return of_stage(refused.stage, rerun) if rerun and not layer else None

    def recovered_share(refused: Refused, layers: Sequence[str]) -> float | None:
        rerun = refused.rerun
        settings = next(changes(refused.stage, rerun), None) if rerun else None
        return rerun.recovered_share(settings) if rerun and settings is not None else None

    def repairs(refused: Refused, layers: Sequence[str]) -> tuple[Repair, ...]:
        found = changes(refused.stage, refused.rerun) if refused.rerun else ()
        return tuple(Repair(settings, 4) for settings in found)

    return Cause(key, ("distill",), limit, text, measure, recovered_share, repairs)


def _missed_by_teacher(stage: Distill, rerun: RerunStage) -> float | None:
    """Return the points by which the teacher misses what the gate asks for on `val`."""
    with rerun.context.in_temporary_folder() as context:
        try:
            teacher = stage.teacher_model(rerun.before, context)  # type: ignore[arg-type]
            if isinstance(teacher, OnnxFile):  # which has no metric here
                return None
            score = context.score(teacher)
        except CompressError:
            return None
    return rerun.context.metric.drop_points(rerun.score, score) + rerun.missing


def _better_teachers(stage: Distill, rerun: RerunStage) -> Iterator[dict[str, Any]]:
    """Yield better teachers of the pipeline, then labels in the place of the teacher."""
    metric, found = rerun.context.metric, []
    for name, artifact in rerun.context.artifacts.items():
        if name == stage.teacher:
            continue
        try:
            missing = metric.drop_points(rerun.score, rerun.context.score(artifact))
        except CompressError:
            continue
        if missing + rerun.missing <= POINTS_OF_TEACHER:
            found.append((missing, name))
    for _, name in sorted(found):
        yield {"teacher": name}
    if not stage.losses:  # from labels alone, or nearly so
        yield {"soft_weight": 0.01, "hard_weight": 1.0}


def _lengthened(stage: Distill, rerun: RerunStage) -> float | None:
    """Return the ratio of the gradients on some samples of `train`, before the training."""
    try:
        ratio = gradient_ratio(stage, rerun)
    except CompressError:
        return None
    return max(ratio, 1 / ratio) if ratio > 0 else math.inf


def _default_weights(stage: Distill, rerun: RerunStage) -> Iterator[dict[str, Any]]:
    if not stage.losses:
        yield {"soft_weight": None, "hard_weight": None, "temperature": None}


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


CAUSES = (
    # The teacher itself misses what the gate asks of the student.
    _cause(
        "teacher_worse",
        POINTS_OF_TEACHER,
        "the teacher is worse than what is asked of the student (by {value:.3g} points; "
        "limit {limit:g})",
        _missed_by_teacher,
        _better_teachers,
    ),
    # The terms' weights or the temperature make steps far longer or shorter than labels do.
    _cause(
        "loss_weights",
        10.0,
        "weights of the loss (its gradient is {value:.3g} times as long, or as short, as that of "
        "the labels; limit {limit:g})",
        _lengthened,
        _default_weights,
    ),
)
"""Where two of them explain as much, the one that stands first is named first."""
