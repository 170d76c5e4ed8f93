"""Infers the training loss and the metric from the targets, and checks both on a few samples."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from compress.common.errors import CompressError, PipelineInvalid, first_line
from compress.core.metrics import TARGET_METRICS, default_metric
from compress.core.task_targets import (
    are_probabilities,
    describe_tensor,
    has_target,
    match_to_loss,
    sampled_targets,
    targets_split,
)
from pipelines.planning.requirement_checks import check_loss, check_metric

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context
    from compress.data.splits import Splits
    from pipelines.config.pipeline import PipelineConfig
    from pipelines.planning.plan import Plan

SAMPLES = 32
"""Samples of `train` that the model runs on, to check its outputs against the targets."""


def infer_loss_and_metric(
    plan: Plan, pipeline: PipelineConfig, data: Splits | None
) -> tuple[Plan, PipelineConfig]:
    """Return plan and pipeline with the loss and the metric that follow from the data's targets."""
    if not (_uses_loss(plan) or plan.metric.name in TARGET_METRICS):
        return plan, pipeline
    with _located_errors(pipeline, "data"):
        loss = plan.loss.infer_targets(data)
    metric = default_metric(loss) if pipeline.metric is None else replace(plan.metric, loss=loss)
    for stage in plan.stages:
        check_metric(pipeline, stage, metric.name)
    return replace(plan, loss=loss, metric=metric), pipeline.with_metric(metric.name)


def fitting_loss(plan: Plan, pipeline: PipelineConfig, source: Artifact, context: Context) -> str:
    """Check the loss and the metric on a few samples, and describe what was inferred, in lines.

    Raises:
        PipelineInvalid: outputs and targets do not fit the loss, or settings of a training do not.
    """
    data, loss, metric = context.data, plan.loss, plan.metric
    if data is None or not _uses_loss(plan):
        return ""
    with _located_errors(pipeline, "data"):
        name = targets_split(data)
        count = min(SAMPLES, len(data.stored(name)))  # type: ignore[arg-type]  # Splits admits sized datasets only
        batch, targets = next(data.read(name, range(count), count)), sampled_targets(data)
    if batch.target is None or targets is None:
        return ""
    known = has_target(batch.target)
    try:
        with context.predictor(source) as predict:
            outputs = predict(*batch.inputs)[0].cpu()[known]
    except CompressError:
        raise
    except Exception as error:
        shapes = ", ".join(describe_tensor(x) for x in batch.inputs)
        raise PipelineInvalid(
            f"{pipeline.place('data')}: the model does not take the samples of split {name!r}, "
            f"{shapes}: {type(error).__name__}: {first_line(error)}"
        ) from error
    batch_targets = batch.target[known]
    if not len(batch_targets):
        return ""
    with _located_errors(pipeline, "loss" if pipeline.loss else "data"):
        loss_name = loss.name_for(outputs, batch_targets)
        loss.sum_and_count(outputs, batch_targets)
        if not loss.is_custom and targets.shape[1:] == batch_targets.shape[1:]:
            # Faults of samples beyond this batch, such as a label out of range.
            match_to_loss(loss_name, outputs[:1].expand(len(targets), *outputs.shape[1:]), targets)
    with _located_errors(pipeline, "metric"):
        if metric.is_mean and metric.name != "fidelity":
            metric.sum_and_count(outputs, batch_targets)
    check_loss(pipeline, plan.stages, replace(loss, name=loss_name))
    forms = f"targets are {describe_tensor(batch_targets)} and outputs {describe_tensor(outputs)}"
    line = "" if pipeline.loss else f"loss: {loss_name}, as {forms}; metric: {metric.name}"
    return "\n".join(filter(None, [line, _softmax_warning(loss_name, outputs)]))


def _softmax_warning(loss: str, outputs: torch.Tensor) -> str:
    """Warn of outputs that are probabilities already, where the loss applies softmax or sigmoid."""
    if loss == "cross_entropy" and are_probabilities(outputs):
        mend = "leave out the softmax, or use log_softmax and loss: nll"
    elif (
        loss == "binary_cross_entropy"
        # Of fewer samples all outputs may lie between 0 and 1 by chance.
        and len(outputs) == SAMPLES
        and bool(((outputs >= 0) & (outputs <= 1)).all())
    ):
        mend = "leave out the sigmoid"
    else:
        return ""
    return f"warning: {loss} takes logits, and the model's outputs look like probabilities; {mend}"


@contextmanager
def _located_errors(pipeline: PipelineConfig, key: str) -> Iterator[None]:
    """Prefix errors with the place of a setting in the file."""
    try:
        yield
    except CompressError as error:
        raise PipelineInvalid(f"{pipeline.place(key)}: {error}") from error


def _uses_loss(plan: Plan) -> bool:
    return any(planned.stage.uses_loss for planned in plan.stages)
