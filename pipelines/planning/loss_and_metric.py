"""The loss that a pipeline's models are trained with, and the metric that judges them."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from compress.common.errors import CompressError, PipelineInvalid, first_line
from compress.core.metrics import OF_TARGETS, usual_metric
from compress.core.targets import (
    are_probabilities,
    fitted,
    form_of,
    sampled_targets,
    split_of_targets,
    with_target,
)
from pipelines.planning.requirement_checks import check_loss, check_metric

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from compress.artifacts.artifact import Artifact
    from compress.core.stage import Context
    from compress.data.batch import Batch
    from compress.data.splits import Splits
    from pipelines.config.pipeline import PipelineConfig
    from pipelines.planning.plan import Plan

SAMPLES = 32
"""Samples of `train` that the model answers, to see whether its outputs and the targets fit."""


def settled(
    plan: Plan, pipeline: PipelineConfig, data: Splits | None
) -> tuple[Plan, PipelineConfig]:
    """Return plan and pipeline with the loss and the metric that the data's targets ask for.

    Raises:
        PipelineInvalid: a sample cannot be read, or a gate does not suit that metric.
    """
    if not (_uses_loss(plan) or plan.metric.name in OF_TARGETS):
        return plan, pipeline
    with _placed(pipeline, "data"):
        loss = plan.loss.settled(data)
    metric = usual_metric(loss) if pipeline.metric is None else replace(plan.metric, loss=loss)
    for stage in plan.stages:
        check_metric(pipeline, stage, metric.name)
    return replace(plan, loss=loss, metric=metric), pipeline.with_metric(metric.name)


def fitting_loss(plan: Plan, pipeline: PipelineConfig, source: Artifact, context: Context) -> str:
    """Return the loss that outputs and targets ask for, in words; empty where the file names it.

    Args:
        plan: the plan, settled on the data.
        pipeline: the pipeline.
        source: the model as it comes in, which answers a few samples.
        context: the data and the device.

    Raises:
        PipelineInvalid: outputs and targets do not fit the loss, or settings of a training do not.
    """
    data, loss, metric = context.data, plan.loss, plan.metric
    if data is None or not _uses_loss(plan):
        return ""
    with _placed(pipeline, "data"):
        name = split_of_targets(data)
        count = min(SAMPLES, len(data.stored(name)))  # type: ignore[arg-type]  # Splits admits sized datasets only
        batch, targets = next(data.read(name, range(count), count)), sampled_targets(data)
    if batch.target is None or targets is None:
        return ""
    known = with_target(batch.target)
    outputs, first = _answers(pipeline, source, context, batch, name)[known], batch.target[known]
    if not len(first):
        return ""
    with _placed(pipeline, "loss" if pipeline.loss else "data"):
        found = loss.name_for(outputs, first)
        loss.summed(outputs, first)
        if not loss.is_own and targets.shape[1:] == first.shape[1:]:
            # What only samples beyond the first have, such as a label out of range.
            fitted(found, outputs[:1].expand(len(targets), *outputs.shape[1:]), targets)
    with _placed(pipeline, "metric"):
        if metric.is_mean and metric.name != "fidelity":
            metric.summed(outputs, first)
    check_loss(pipeline, plan.stages, replace(loss, name=found))
    forms = f"targets are {form_of(first)} and outputs {form_of(outputs)}"
    line = "" if pipeline.loss else f"loss: {found}, as {forms}; metric: {metric.name}"
    return "\n".join(filter(None, [line, _twice_normalized(found, outputs)]))


def _answers(
    pipeline: PipelineConfig, source: Artifact, context: Context, batch: Batch, split: str
) -> torch.Tensor:
    """Return the model's first output for a batch.

    Raises:
        PipelineInvalid: it does not take the samples.
    """
    try:
        with context.predictor(source) as predict:
            return predict(*batch.inputs)[0].cpu()
    except CompressError:
        raise
    except Exception as error:
        shapes = ", ".join(form_of(x) for x in batch.inputs)
        raise PipelineInvalid(
            f"{pipeline.place('data')}: the model does not take the samples of split {split!r}, "
            f"{shapes}: {type(error).__name__}: {first_line(error)}"
        ) from error


def _twice_normalized(loss: str, outputs: torch.Tensor) -> str:
    """Return a warning where outputs are probabilities and the loss makes some of them again."""
    if loss == "cross_entropy" and are_probabilities(outputs):
        mend = "leave out the softmax, or use log_softmax and loss: nll"
    elif loss == "binary_cross_entropy" and len(outputs) == SAMPLES and _are_shares(outputs):
        mend = "leave out the sigmoid"
    else:
        return ""
    return f"warning: {loss} takes logits, and the model's outputs look like probabilities; {mend}"


def _are_shares(outputs: torch.Tensor) -> bool:
    return bool(((outputs >= 0) & (outputs <= 1)).all())


@contextmanager
def _placed(pipeline: PipelineConfig, key: str) -> Iterator[None]:
    """Let errors name a setting's place in the file."""
    try:
        yield
    except CompressError as error:
        raise PipelineInvalid(f"{pipeline.place(key)}: {error}") from error


def _uses_loss(plan: Plan) -> bool:
    return any(planned.stage.uses_loss for planned in plan.stages)
