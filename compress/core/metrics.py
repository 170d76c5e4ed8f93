"""Metrics by name: one number for a model on a split, and whether higher is better."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path  # noqa: TC003 - a dataclass field
from typing import TYPE_CHECKING, Any

from compress.common.errors import PipelineInvalid, StageFailed, Unavailable
from compress.core.loss import INFERRED_LOSS, Loss
from compress.core.task_targets import (
    are_class_labels,
    describe_tensor,
    match_to_loss,
    same_shape,
    target_kind,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch
    from pydantic import JsonValue

    from compress.common.forward import Predictor
    from compress.core.progress import Progress
    from compress.data.batch import Batch
    from compress.data.splits import Splits

REGRESSION_METRICS = ("mse", "mae", "r2")
"""Built-in metrics of models that predict numbers."""
BUILT_IN = ("accuracy", "loss", "fidelity", *REGRESSION_METRICS)
TARGET_METRICS = ("accuracy", "loss")
"""Built-in metrics whose computation depends on the kind of the targets."""
FRACTIONS = ("accuracy", "fidelity")
"""Built-in metrics that are shares of all samples, from 0 to 1."""
FALLING = ("loss", "mse", "mae")
"""Built-in metrics that are lower when better."""


@dataclass(frozen=True)
class Metric:
    """A metric by name, resolved where it is needed.

    ``accuracy`` is the fraction of right labels, ``loss`` the mean of the task's loss, ``fidelity``
    the fraction of labels equal to the reference model's. For numbers there are ``mse``, ``mae``
    and ``r2``, the coefficient of determination. ``torchmetrics.classification.BinaryF1Score`` and
    the like, and ``module:callable`` (outputs, targets → float), are imported by their name.
    """

    name: str = "accuracy"
    arguments: tuple[tuple[str, Any], ...] = ()
    """Keyword arguments of a torchmetrics class or of the callable."""
    direction: bool | None = None
    """Whether higher is better, where the metric's class does not declare it."""
    folder: Path | None = None
    """Folder with the module of ``module:callable``."""
    loss: Loss = INFERRED_LOSS
    """The task's loss; a :class:`~compress.core.context.Context` sets its own."""

    @property
    def higher_is_better(self) -> bool:
        """Whether larger is better; raises PipelineInvalid where nobody declares it."""
        direction = self.direction
        if self.name in BUILT_IN:
            direction = self.name not in FALLING
        elif direction is None and self.is_torchmetric:
            direction = self.torchmetric().higher_is_better
        if direction is None:
            raise PipelineInvalid(
                f"metric {self.name!r} does not tell its direction; write "
                f"metric: {{name: {self.name!r}, higher_is_better: true}} (or false)"
            )
        return bool(direction)

    @property
    def is_mean(self) -> bool:
        """Whether the metric is a mean over samples, so that sums over parts of a split add up."""
        return self.name in BUILT_IN and self.name != "r2"

    @property
    def is_torchmetric(self) -> bool:
        """Whether a class of torchmetrics computes the metric."""
        return self.name.startswith("torchmetrics.")

    def identity(self) -> list[JsonValue]:
        """Return the metric's part of a cache key, with a hash of the user's own code."""
        code = ""
        if ":" in self.name:
            from compress.common.factories import local_sources, sources_digest

            code = sources_digest(local_sources(self.name, self.folder))
        loss = self.loss.identity() if self.name in TARGET_METRICS else None
        return [self.name, dict(self.arguments), self.direction, code, loss]

    def with_inferred_loss(self, data: Splits | None) -> Metric:
        """Return the same metric with its loss inferred from the data's targets, if it uses one."""
        if self.name not in TARGET_METRICS:
            return self
        return replace(self, loss=self.loss.infer_targets(data))

    def drop_points(self, before: float, after: float) -> float:
        """Return how much worse ``after`` is, in hundredths of the metric; negative if better."""
        return 100 * (before - after if self.higher_is_better else after - before)

    def score(self, outputs: torch.Tensor, targets: torch.Tensor) -> float:
        """Compute the metric from the model's first output on a whole split, and the targets.

        Raises:
            StageFailed: the outputs are NaN or infinite (except -inf, a masked class), or of
                another shape than the metric needs.
        """
        import torch

        summed = self.sum_and_count(outputs, targets)
        if summed is not None:
            return summed[0] / summed[1] if summed[1] else math.nan
        if self.name == "r2":
            return _r2(outputs, targets)
        if self.is_torchmetric:
            metric = self.torchmetric()
            metric.update(outputs, targets)
            return float(metric.compute())
        from compress.common.factories import resolve

        function: Callable[..., Any] = resolve(self.name, self.folder)
        with torch.inference_mode():
            return float(function(outputs, targets, **dict(self.arguments)))

    def sum_and_count(
        self, outputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[float, float] | None:
        """Return a mean as sum and count, None for other metrics; raises as :meth:`score`."""
        if problem := _not_finite(outputs):
            raise StageFailed(f"metric {self.name}: {problem}")
        if self.name == "fidelity":
            return _count_equal(self.name, predicted_decisions(outputs), targets)
        if self.name == "accuracy":
            return _count_correct(outputs, targets, self.loss)
        if self.name == "loss":
            return self.loss.sum_and_count(outputs, targets)
        if self.name in ("mse", "mae"):
            return Loss("mse" if self.name == "mse" else "l1").sum_and_count(outputs, targets)
        return None

    def check(self) -> None:
        """Raise PipelineInvalid or Unavailable if the metric cannot be used, without evaluating."""
        if self.name in BUILT_IN:
            if self.arguments or self.direction is not None:
                raise PipelineInvalid(f"metric {self.name!r} takes no settings")
            return
        if ":" in self.name:
            from compress.common.factories import resolve

            resolve(self.name, self.folder)
        elif not self.is_torchmetric:
            raise PipelineInvalid(
                f"metric {self.name!r} is unknown; expected {', '.join(BUILT_IN)}, "
                "torchmetrics.… or module:callable"
            )
        _ = self.higher_is_better

    def torchmetric(self) -> Any:
        """Make the object of torchmetrics that computes the metric."""
        try:
            import torchmetrics
        except ImportError:
            raise Unavailable(
                f"metric {self.name!r} needs torchmetrics: pip install -e '.[metrics]'"
            ) from None
        metric_class: Any = torchmetrics
        for part in self.name.split(".")[1:]:
            metric_class = getattr(metric_class, part, None)
        if not isinstance(metric_class, type):
            raise PipelineInvalid(f"metric {self.name!r}: torchmetrics has no such class")
        try:
            # In distributed training rank 0 evaluates alone and must not wait for the other ranks.
            return metric_class(**dict(self.arguments), sync_on_compute=False)
        except Exception as error:
            raise PipelineInvalid(
                f"metric {self.name!r} with arguments {dict(self.arguments)}: {error}"
            ) from error


def default_metric(loss: Loss) -> Metric:
    """Return the metric of a pipeline that names none: accuracy, or for regression the loss."""
    return Metric("loss" if loss.is_regression else "accuracy", loss=loss)


def predicted_labels(outputs: torch.Tensor) -> torch.Tensor:
    """Return each sample's class of the largest output; raise StageFailed if none is defined."""
    if outputs.dim() < 2 or outputs.shape[1] < 2:
        raise StageFailed(
            f"outputs of shape {tuple(outputs.shape)} hold no classes to choose from; labels need "
            "at least two outputs a sample"
        )
    if problem := _not_finite(outputs):
        raise StageFailed(problem)
    return outputs.argmax(1)


def predicted_decisions(outputs: torch.Tensor) -> torch.Tensor:
    """Return each sample's predicted class, or for one output whether it is above 0."""
    if outputs.dim() > 1 and outputs.shape[1] > 1:
        return predicted_labels(outputs)
    if not bool(outputs.isfinite().all()):
        raise StageFailed("the model's outputs are not all finite")
    return outputs > 0


def _count_correct(outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> tuple[float, int]:
    """Return how many predictions are correct, of classes or of binary logits, and of how many."""
    from compress.data.batch import IGNORED_LABEL

    kind = loss.targets or target_kind(targets)
    if kind == "numbers":
        raise StageFailed(
            "metric accuracy needs labels, and targets are numbers, "
            f"{describe_tensor(targets)}; use metric: loss, {', '.join(REGRESSION_METRICS)}"
        )
    if kind == "probabilities" and targets.shape == outputs.shape:
        return _count_equal("accuracy", predicted_labels(outputs), targets.argmax(1))
    if not are_class_labels(outputs, targets) and same_shape(outputs, targets):
        # Each output may be the logit of a binary target: 0, 1, soft, or ignored.
        known = (targets == 0) | (targets == 1) | (targets == IGNORED_LABEL)
        may_be_binary = targets.is_floating_point() or bool(known.all())
        if may_be_binary and loss.name_for(outputs, targets) == "binary_cross_entropy":
            outputs, targets = match_to_loss("binary_cross_entropy", outputs, targets)
            return _count_equal("accuracy", outputs > 0, targets > 0.5)
    return _count_equal("accuracy", predicted_labels(outputs), targets)


def _not_finite(outputs: torch.Tensor) -> str:
    """Return why no metric can be computed from outputs; empty where one can."""
    # A class whose score is -inf is masked: the largest output and the softmax are defined, as long
    # as another class is left.
    is_finite = outputs.isfinite()
    if bool(is_finite.all()):
        return ""
    if bool(outputs.isnan().any()):
        return "the model's outputs are not all finite: some are NaN"
    if bool(outputs.isposinf().any()) or outputs.dim() < 2 or outputs.shape[1] < 2:
        return "the model's outputs are not all finite: some are infinite"
    if not bool(is_finite.any(1).all()):
        return "all classes of a sample are masked (-inf), so that it has no label"
    return ""


def _count_equal(name: str, labels: torch.Tensor, targets: torch.Tensor) -> tuple[float, int]:
    """Return how many labels equal their targets, and how many targets are not ignored."""
    from compress.data.batch import IGNORED_LABEL

    if labels.shape != targets.shape:
        raise StageFailed(
            f"metric {name}: labels have shape {tuple(labels.shape)} and targets "
            f"{tuple(targets.shape)}"
        )
    return float((labels == targets).sum()), int((targets != IGNORED_LABEL).sum())


def _r2(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Return R², one minus the residuals' share of the targets' variance, averaged over outputs."""
    outputs, targets = (
        x.double().reshape(len(x), -1) for x in match_to_loss("mse", outputs, targets)
    )
    residual = (outputs - targets).square().sum(0)
    total = (targets - targets.mean(0)).square().sum(0)
    if not bool((total > 0).all()):
        raise StageFailed("metric r2: the targets of an output are all equal; use mse or mae")
    return float((1 - residual / total).mean())


def predict_split(
    predict: Predictor,
    splits: Splits,
    split: str,
    progress: Progress | None = None,
    batch_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the first output for every sample of a split, and the targets if there are any."""

    def batches_with_progress() -> Iterator[Batch]:
        done, total = 0, len(splits.split(split))  # type: ignore[arg-type]
        for batch in splits.batches(split, batch_size):
            yield batch
            done += len(batch)
            if progress is not None:
                progress(f"evaluate on {split}", done, total)

    return predict_batches(predict, batches_with_progress())


def predict_batches(
    predict: Predictor, batches: Iterable[Batch]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the first output for every sample, and the targets if there are any."""
    import torch

    outputs, targets = [], []
    for batch in batches:
        outputs.append(predict(*batch.inputs)[0].cpu())
        targets.append(batch.target)
    labelled = [t for t in targets if t is not None]
    return torch.cat(outputs), torch.cat(labelled) if labelled else None


def evaluate(
    predict: Predictor,
    splits: Splits,
    split: str,
    metric: Metric,
    reference: Predictor | None = None,
    progress: Progress | None = None,
    batch_size: int | None = None,
) -> float:
    """Compute a model's metric on a split, or raise StageFailed; `reference` is for `fidelity`."""
    outputs, targets = predict_split(predict, splits, split, progress, batch_size)
    if metric.name == "fidelity":
        if reference is None:
            raise StageFailed("metric fidelity needs a reference model")
        targets = predicted_decisions(predict_split(reference, splits, split, None, batch_size)[0])
    if targets is None:
        raise StageFailed(f"metric {metric.name} needs targets and split {split!r} has none")
    value = metric.score(outputs, targets)
    if not math.isfinite(value):
        raise StageFailed(f"metric {metric.name} on {split!r} is {value}")
    return value
