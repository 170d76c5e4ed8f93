"""The loss that a pipeline's models are trained with, and the metric that judges them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from compress.core.errors import CompressError, PipelineInvalid
from compress.core.metrics import OF_TARGETS, usual_metric
from compress.core.targets import fitted, form_of, sampled_targets
from pipelines.needs import check_loss, check_metric

if TYPE_CHECKING:
    import torch

    from compress.core.artifact import Artifact
    from compress.core.data import Splits
    from compress.core.stage import Context
    from pipelines.pipeline import Pipeline
    from pipelines.plan import Plan

SAMPLES = 32
"""Samples of `train` that the model answers, to see whether its outputs and the targets fit."""


def settled(plan: Plan, pipeline: Pipeline, data: Splits | None) -> tuple[Plan, Pipeline]:
    """Return plan and pipeline with the loss and the metric that the data's targets ask for.

    Raises:
        PipelineInvalid: a gate does not suit that metric.
    """
    if not (_uses_loss(plan) or plan.metric.name in OF_TARGETS):
        return plan, pipeline
    loss = plan.loss.settled(data)
    metric = usual_metric(loss) if pipeline.metric is None else replace(plan.metric, loss=loss)
    for stage in plan.stages:
        check_metric(pipeline, stage, metric.name)
    return replace(plan, loss=loss, metric=metric), pipeline.with_metric(metric.name)


def fitting_loss(plan: Plan, pipeline: Pipeline, source: Artifact, context: Context) -> str:
    """Return the loss that outputs and targets ask for, in words; empty where the file names it.

    Args:
        plan: the plan, settled on the data.
        pipeline: the pipeline.
        source: the model as it comes in, which answers a few samples.
        context: the data and the device.

    Raises:
        PipelineInvalid: outputs and targets do not fit the loss, or settings of a training do not.
    """
    data = context.data
    if data is None or not _uses_loss(plan):
        return ""
    name = next((n for n in ("train", "val") if n in data.datasets), next(iter(data.datasets)))
    count = min(SAMPLES, len(data.stored(name)))  # type: ignore[arg-type]  # Splits admits sized datasets only
    batch = next(data.read(name, range(count), count))
    if batch.target is None:
        return ""
    with context.opened(source) as predict:
        outputs = predict(*batch.inputs)[0].cpu()
    key = "loss" if pipeline.loss else "data"
    try:
        found = plan.loss.name_for(outputs, batch.target)
        plan.loss.summed(outputs, batch.target)
        if not plan.loss.is_own:
            _refuse_others(found, outputs, batch.target, sampled_targets(data))
        key = "metric"
        if plan.metric.is_mean and plan.metric.name != "fidelity":
            plan.metric.summed(outputs, batch.target)
    except CompressError as error:
        raise PipelineInvalid(f"{pipeline.place(key)}: {error}") from error
    check_loss(pipeline, plan.stages, replace(plan.loss, name=found))
    if pipeline.loss:
        return ""
    forms = f"targets are {form_of(batch.target)} and outputs {form_of(outputs)}"
    return f"loss: {found}, as {forms}; metric: {plan.metric.name}"


def _refuse_others(
    name: str, outputs: torch.Tensor, targets: torch.Tensor, more: torch.Tensor | None
) -> None:
    """Refuse targets that only samples beyond the first have, such as a label out of range."""
    if more is not None and more.shape[1:] == targets.shape[1:]:
        fitted(name, outputs[:1].expand(len(more), *outputs.shape[1:]), more)


def _uses_loss(plan: Plan) -> bool:
    return any(planned.stage.uses_loss for planned in plan.stages)
