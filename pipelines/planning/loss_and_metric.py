"""Infers the training loss and the metric from the targets, and checks both on a few samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from compress.common.errors import PipelineInvalid, located, raised_as
from compress.common.forward import Predictor, image_advice, output_argument
from compress.core.context import QUICK_SAMPLES, Context
from compress.core.gates import LabelAgreement
from compress.core.metrics import Metric, default_metric
from compress.core.metrics.builtin import are_shares
from compress.core.objectives import task
from compress.core.objectives.loss import Loss, loss_kind
from compress.pipelines.config.pipeline import MetricSpec, PipelineConfig
from compress.pipelines.planning import planner

if TYPE_CHECKING:
    import torch

    from compress.artifacts.artifact import Artifact
    from compress.data.batch import Batch
    from compress.data.fingerprint import Contents, SplitFacts
    from compress.data.splits import Splits
    from compress.data.targets import Targets
    from compress.pipelines.planning.plan import Plan

TARGET_WORDS = {"binary": "0 and 1", "probabilities": "probabilities of classes"}
"""Kind of targets → in words, where its name is none."""
SAME_LOSS_RTOL = 1e-3
"""Relative difference within which the loss of a batch is the mean of those of its halves."""
TRIED_SAMPLES = 32
FIRST_SAMPLES = 2  # a metric may take one alone for something else
"""Samples of a split that the model runs on, to check its outputs against the targets."""
MAX_SAMPLES = 512  # samples that a metric is tried with that fails on fewer
MEASURED_SPLITS = ("val", "test")  # splits that the metric is computed on


def infer_loss_and_metric(
    plan: Plan, pipeline: PipelineConfig, data: Splits | None
) -> tuple[Plan, PipelineConfig]:
    """Return plan and pipeline with loss, metric and task that follow from the data's targets."""
    planner.check_conditions(pipeline, plan.stages, data)
    compares_labels = any(
        isinstance(gate, LabelAgreement) for p in plan.stages for gate in p.stage.gates
    )
    by_targets = plan.metric.reads_loss or plan.metric.needs_reference
    if not (_uses_loss(plan) or by_targets or compares_labels):
        return plan, pipeline
    with _located_errors(pipeline, "data"):
        loss = plan.loss.infer_targets(data)
    metric = default_metric(loss) if pipeline.metric is None else replace(plan.metric, loss=loss)
    plan = replace(plan, loss=loss, metric=metric)
    if loss.task is not None and not (plan.task_reason or pipeline.task):
        kind = loss.targets or ""
        plan = replace(plan, task_reason=f"as targets are {TARGET_WORDS.get(kind, kind)}")
    with _located_errors(pipeline, "metric"), planner.explained_task(loss.task, plan.task_reason):
        metric.check()
    for stage in plan.stages:
        planner.check_metric(pipeline, stage, metric.name)
    with planner.explained_task(loss.task, plan.task_reason):
        plan = replace(plan, stages=planner.fit_to_task(pipeline, plan.stages, loss.task))
    if pipeline.metric is None:
        pipeline = pipeline.model_copy(update={"metric": MetricSpec(name=metric.name)})
    return plan, pipeline


def fitting_loss(
    plan: Plan,
    pipeline: PipelineConfig,
    source: Artifact,
    context: Context,
    contents: Contents | None,
) -> str:
    """Run model, loss and metric on a few samples of each split, and describe what was inferred.

    The loss is computed on `train`, the metric on the splits that it is measured on. Labels and NaN
    are looked for in all samples of the `contents`, which were hashed.
    """
    data = context.data
    if data is None or contents is None:
        return ""
    lines: list[str] = []
    metric = plan.metric.for_model(source.signature)
    with context.predictor(source) as predict:
        with _located_errors(pipeline, "data"):
            _refuse_nan(predict, data, contents.facts)
            _check_labels(plan, predict, data, contents.facts)
        if _uses_loss(plan):
            lines = _fitting_loss(plan, pipeline, source, predict, data)
        for split in data.datasets:
            if split in MEASURED_SPLITS and metric.is_measured:
                tried = QUICK_SAMPLES if context.is_quick else TRIED_SAMPLES
                _check_metric(metric, pipeline, predict, data, split, tried)
            else:
                for batch in _samples(pipeline, data, split, 1):
                    _outputs_for(pipeline, predict, batch.inputs, split)
        if metric.needs_reference and metric.labels and "val" in data.datasets:
            read = [*_samples(pipeline, data, "val", TRIED_SAMPLES)]
            answers = [_outputs_for(pipeline, predict, batch.inputs, "val")[0] for batch in read]
            # Of fewer samples all outputs may lie between 0 and 1 by chance.
            is_sure = sum(map(len, answers)) >= TRIED_SAMPLES
            if is_sure and all(are_shares(x, metric.loss.task) for x in answers):
                lines.append(
                    f"warning: metric {metric.name} reads a yes from each positive output, and the "
                    "model's are all from 0 to 1, as after a sigmoid; leave the sigmoid out, or "
                    "let label_agreement or max_disagreement judge, to which one half is the limit"
                )
    return "\n".join(lines)


def metric_takes_first(plan: Plan, source: Artifact, context: Context) -> bool:
    """Whether the metric takes a model's answers to the first samples of `val`.

    For the price of two calls it says whether :func:`fitting_loss`, which names what is wrong,
    should come before anything else is done with a large model.
    """
    data, metric = context.need_data("val"), plan.metric.for_model(source.signature)
    try:
        meter = metric.with_inferred_loss(data).meter()
        with context.predictor(source) as predict:
            for batch in data.batches("val", limit=FIRST_SAMPLES):
                if not metric.passes_over(batch):
                    targets = metric.targets_of(batch, "val", predict)
                    for inputs, known in metric.parts(batch.inputs, targets):
                        meter.update(metric.outputs_read(predict(*inputs)), known)
    except Exception:  # noqa: BLE001 - a model and a metric of the user's may raise any
        return False
    return True


def _refuse_nan(predict: Predictor, data: Splits, facts: Mapping[str, SplitFacts]) -> None:
    """Raise PipelineInvalid for a sample with NaN that makes the model's answer NaN."""
    for split, known in facts.items():
        index, spreads = known.first(known.rows["nan"]), False
        if index is not None:
            (batch,) = data.read(split, [index], 1)
            with suppress(Exception):  # a model that does not take the samples is refused below
                spreads = any(bool(x.isnan().any()) for x in predict(*batch.inputs))
            if spreads:
                raise PipelineInvalid(
                    f"split {split!r}, sample {index}: an input holds NaN, and so does the model's "
                    "answer; leave the sample out, or fill in a number"
                )


def _check_labels(
    plan: Plan, predict: Predictor, data: Splits, facts: Mapping[str, SplitFacts]
) -> None:
    """Raise PipelineInvalid for a label that is read and that the model has no class for."""
    from compress.data.splits import UNLABELLED

    split = task.targets_split(data)
    uses_labels = plan.metric.labels is not None and not plan.metric.needs_reference
    uses_labels |= _uses_loss(plan) and not plan.loss.is_custom
    if split not in facts or not uses_labels or plan.loss.is_regression:
        return
    index = facts[split].first(facts[split].rows["low"] <= facts[split].rows["high"])
    classes = None if index is None else _classes(plan, predict, next(data.read(split, [index], 1)))
    unread = {UNLABELLED}
    if not any(planned.stage.uses_calibration_labels for planned in plan.stages):
        unread.add("calibration")
    for split, known in facts.items():
        if classes is not None and split not in unread:
            known.check_labels(split, classes)


def _classes(plan: Plan, predict: Predictor, batch: Batch) -> int | None:
    """Return how many classes the model's outputs have: one of yes or no, None of no labels."""
    try:
        known = task.need_tensor("the data", batch.target)  # type: ignore[arg-type]
        outputs, targets = plan.loss.align(predict(*batch.inputs)[0].cpu(), known)
    except Exception:  # noqa: BLE001 - outputs that do not fit are refused by loss and metric
        return None
    if task.are_class_labels(outputs, targets):
        return outputs.shape[1]
    return 1 if task.same_shape(outputs, targets) else None


def _fitting_loss(
    plan: Plan, pipeline: PipelineConfig, source: Artifact, predict: Predictor, data: Splits
) -> list[str]:
    """Check the loss on a few samples, and describe in lines what was inferred."""
    import torch

    from compress.data.targets import select

    split = task.targets_split(data)
    with _located_errors(pipeline, "data"):
        batch = next(data.batches(split, TRIED_SAMPLES, TRIED_SAMPLES))
        targets = task.sampled_targets(data)
    outputs = _outputs_for(pipeline, predict, batch.inputs, split)
    if batch.target is None or targets is None:
        return []
    known = task.has_target(batch.target)
    if not bool(known.any()):
        return []
    loss = plan.loss.for_model(source.signature)
    outputs = [x[known] for x in (outputs if loss.is_custom else outputs[:1])]
    batch_targets, first = select(batch.target, known), outputs[0]
    with _located_errors(pipeline, "loss" if pipeline.loss else "data"):
        loss_name = loss.name_for(first, batch_targets)
        loss.sums_and_counts(outputs, batch_targets)
        if (
            not loss.is_custom
            and isinstance(targets, torch.Tensor)
            and isinstance(batch_targets, torch.Tensor)
            and targets.shape[1:] == batch_targets.shape[1:]
        ):
            # Faults of samples beyond this batch, such as a label out of range.
            repeated = first[:1].expand(len(targets), *first.shape[1:])
            loss_kind(loss_name).match(*loss.align(repeated, targets))
    planner.check_loss(pipeline, plan.stages, replace(loss, name=loss_name))
    forms = (
        f"targets are {task.describe_targets(batch_targets)} and outputs "
        f"{task.describe_outputs(output_argument(outputs, loss.outputs))}"
    )
    line = "" if pipeline.loss else f"loss: {loss_name}, as {forms}; metric: {plan.metric.name}"
    mend = warning = ""
    if loss_name == "cross_entropy" and task.are_probabilities(first):
        mend = "leave out the softmax, or use log_softmax and loss: nll"
    # Of fewer samples all outputs may lie between 0 and 1 by chance.
    elif loss_name == "binary_cross_entropy" and len(first) == TRIED_SAMPLES:
        mend = "leave out the sigmoid" if ((first >= 0) & (first <= 1)).all() else ""
    if mend:
        looks = "takes logits, and the model's outputs look like probabilities"
        warning = f"warning: {loss_name} {looks}; {mend}"
    return [*filter(None, [line, warning, _parts_warning(loss, outputs, batch_targets)])]


def _check_metric(
    metric: Metric,
    pipeline: PipelineConfig,
    predict: Predictor,
    data: Splits,
    split: str,
    tried: int,
) -> None:
    """Compute the metric on a few samples of a split; raise PipelineInvalid where that fails."""
    located = partial(_located_errors, pipeline, "metric", f"on split {split!r}: ")

    def compute(samples: int) -> None:
        meter = metric.meter()
        for batch in _samples(pipeline, data, split, samples):
            if metric.passes_over(batch):
                continue
            with located():
                parts = [*metric.parts(batch.inputs, metric.targets_of(batch, split, predict))]
            for inputs, targets in parts:
                outputs = _outputs_for(pipeline, predict, inputs, split)
                with located():
                    meter.update(metric.outputs_read(outputs), targets)
        with located():
            meter.compute()

    try:
        compute(tried)
    except PipelineInvalid:
        # A few samples may have too few classes for a metric, or targets that are all equal.
        compute(MAX_SAMPLES)


def _samples(pipeline: PipelineConfig, data: Splits, split: str, count: int) -> Iterator[Batch]:
    with _located_errors(pipeline, "data"):
        yield from data.batches(split, limit=count)


def _outputs_for(
    pipeline: PipelineConfig, predict: Predictor, inputs: Sequence[torch.Tensor], split: str
) -> list[torch.Tensor]:
    shapes = ", ".join(task.describe_tensor(x) for x in inputs)
    what = f"the model does not take the samples of split {split!r}, {shapes}"
    where = pipeline.place("data")
    with raised_as(PipelineInvalid, f"{where}: {what}", image_advice(inputs)):
        return [x.cpu() for x in predict(*inputs)]


def _parts_warning(loss: Loss, outputs: list[torch.Tensor], targets: Targets) -> str:
    """Warn of the user's own loss that is no mean over samples, and does not say over what."""
    import torch

    from compress.data.targets import select

    samples, function = len(outputs[0]), loss.function()
    if not loss.is_custom or samples < 2 or function.label_count(targets) is not None:
        return ""
    whole, mean = float(function(outputs, targets)), 0.0
    is_first = torch.arange(samples) < samples // 2
    if isinstance(targets, torch.Tensor):  # by size: padding and ignored labels come together
        places = targets.reshape(samples, -1).double().sum(1).argsort(stable=True).argsort()
        is_first = places < samples // 2
    for part in (is_first, ~is_first):
        share = float(part.double().mean())
        mean += share * float(function([x[part] for x in outputs], select(targets, part)))
    if math.isclose(whole, mean, rel_tol=SAME_LOSS_RTOL):
        return ""
    return (
        f"warning: {loss.name} is no mean over samples: {whole:.4g} for {samples}, and {mean:.4g} "
        "as the mean of two halves; with accumulate, and on several processes, training minimizes "
        "the mean of parts; return a mean, or say by an attribute count over what it is"
    )


def _located_errors(
    pipeline: PipelineConfig, key: str, where: str = ""
) -> AbstractContextManager[None]:
    """Prefix errors with the place of a setting in the file, and with their place in the data."""
    return located(f"{pipeline.place(key)}: {where}", PipelineInvalid)


def _uses_loss(plan: Plan) -> bool:
    return any(planned.stage.uses_loss for planned in plan.stages)
