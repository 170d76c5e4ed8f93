"""How good a model is: one number on a split, and in which direction it is better."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path  # noqa: TC003 - a dataclass field
from typing import TYPE_CHECKING, Any

from compress.common.errors import PipelineInvalid, StageFailed, Unavailable
from compress.core.loss import INFERRED, Loss
from compress.core.targets import are_classes, fitted, form_of, kind_of, same_elements

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch
    from pydantic import JsonValue

    from compress.common.forward import Predictor
    from compress.core.stage import Progress
    from compress.data.splits import Batch, Splits

OF_NUMBERS = ("mse", "mae", "r2")
"""Metrics of models that predict numbers."""
BUILT_IN = ("accuracy", "loss", "fidelity", *OF_NUMBERS)
OF_TARGETS = ("accuracy", "loss")
"""Metrics that look at the kind of the targets."""
FALLING = ("loss", "mse", "mae")
"""Built-in metrics that are lower when better."""


@dataclass(frozen=True)
class Metric:
    """A metric by name, resolved where it is needed.

    ``accuracy`` is the fraction of right labels, ``loss`` the mean of the task's loss, ``fidelity``
    the fraction of labels equal to the reference model's. For numbers there are ``mse``, ``mae``
    and ``r2``, the coefficient of determination. ``torchmetrics.classification.BinaryF1Score`` and
    the like, and ``module:callable`` (outputs, targets → float) are taken as named.
    """

    name: str = "accuracy"
    arguments: tuple[tuple[str, Any], ...] = ()
    """Keyword arguments of a torchmetrics class or of the callable."""
    direction: bool | None = None
    """Whether higher is better, where the metric itself does not tell."""
    folder: Path | None = None
    """Where the module of ``module:callable`` lies."""
    loss: Loss = INFERRED
    """The task's loss; a :class:`~compress.core.stage.Context` gives its own."""

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger value is the better one.

        Raises:
            PipelineInvalid: neither the metric nor the user tells.
        """
        known = self.direction
        if self.name in BUILT_IN:
            known = self.name not in FALLING
        elif known is None and self.name.startswith("torchmetrics."):
            known = self._torchmetric().higher_is_better
        if known is None:
            raise PipelineInvalid(
                f"metric {self.name!r} does not tell its direction; write "
                f"metric: {{name: {self.name!r}, higher_is_better: true}} (or false)"
            )
        return bool(known)

    @property
    def is_mean(self) -> bool:
        """Whether the metric is a mean over samples, so that parts of a split add up."""
        return self.name in BUILT_IN and self.name != "r2"

    def identity(self) -> list[JsonValue]:
        """Return what decides a measured value, the user's own code included."""
        code = ""
        if ":" in self.name:
            from compress.common.factories import local_sources, sources_digest

            code = sources_digest(local_sources(self.name, self.folder))
        loss = self.loss.identity() if self.name in OF_TARGETS else None
        return [self.name, dict(self.arguments), self.direction, code, loss]

    def settled(self, data: Splits | None) -> Metric:
        """Return the same metric, its loss settled on the targets of the data where it matters."""
        if self.name not in OF_TARGETS:
            return self
        return replace(self, loss=self.loss.settled(data))

    def drop_points(self, before: float, after: float) -> float:
        """Return how much worse ``after`` is, in hundredths; negative when it is better."""
        return 100 * (before - after if self.higher_is_better else after - before)

    def score(self, outputs: torch.Tensor, targets: torch.Tensor) -> float:
        """Return the value for a whole split's first outputs and its targets.

        Raises:
            StageFailed: the outputs are NaN or infinite, masked classes (-inf) left out, or of
                another shape than the metric needs.
        """
        import torch

        summed = self.summed(outputs, targets)
        if summed is not None:
            return summed[0] / summed[1] if summed[1] else math.nan
        if self.name == "r2":
            return _determination(outputs, targets)
        if self.name.startswith("torchmetrics."):
            metric = self._torchmetric()
            metric.update(outputs, targets)
            return float(metric.compute())
        from compress.common.factories import resolve

        function: Callable[..., Any] = resolve(self.name, self.folder)
        with torch.inference_mode():
            return float(function(outputs, targets, **dict(self.arguments)))

    def summed(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, int] | None:
        """Return a metric that is a mean as sum and count; None for any other.

        Raises:
            StageFailed: the outputs are not finite, or do not fit the metric.
        """
        problem = _not_measurable(outputs)
        if problem:
            raise StageFailed(f"metric {self.name}: {problem}")
        if self.name == "fidelity":
            return _share_of_right_labels(self.name, decisions_of(outputs), targets)
        if self.name == "accuracy":
            return _right_labels(outputs, targets, self.loss)
        if self.name == "loss":
            return self.loss.summed(outputs, targets)
        if self.name in ("mse", "mae"):
            return Loss("mse" if self.name == "mse" else "l1").summed(outputs, targets)
        return None

    def check(self) -> None:
        """Refuse a name, arguments or a direction that mean nothing, without evaluating.

        Raises:
            PipelineInvalid: the metric cannot be used as it is written.
            Unavailable: torchmetrics is not installed.
        """
        if self.name in BUILT_IN:
            if self.arguments or self.direction is not None:
                raise PipelineInvalid(f"metric {self.name!r} takes no settings")
            return
        if ":" in self.name:
            from compress.common.factories import resolve

            resolve(self.name, self.folder)
        elif not self.name.startswith("torchmetrics."):
            raise PipelineInvalid(
                f"metric {self.name!r} is unknown; expected {', '.join(BUILT_IN)}, "
                "torchmetrics.… or module:callable"
            )
        _ = self.higher_is_better

    def _torchmetric(self) -> Any:
        made = _torchmetrics_class(self.name)
        try:
            # In a training of several processes rank 0 evaluates alone and must not wait.
            return made(**dict(self.arguments), sync_on_compute=False)
        except Exception as error:
            raise PipelineInvalid(
                f"metric {self.name!r} with arguments {dict(self.arguments)}: {error}"
            ) from error


def usual_metric(loss: Loss) -> Metric:
    """Return the metric of a task that names none: accuracy, or the loss where it is of numbers."""
    return Metric("loss" if loss.is_of_numbers else "accuracy", loss=loss)


def labels_of(outputs: torch.Tensor) -> torch.Tensor:
    """Return the class with the largest output for each sample; -inf is a class that is masked.

    Raises:
        StageFailed: the outputs have no axis of at least two classes, or are NaN, +inf, or -inf for
            all classes of a sample.
    """
    if outputs.dim() < 2 or outputs.shape[1] < 2:
        raise StageFailed(
            f"outputs of shape {tuple(outputs.shape)} hold no classes to choose from; labels need "
            "at least two outputs a sample"
        )
    problem = _not_measurable(outputs)
    if problem:
        raise StageFailed(problem)
    return outputs.argmax(1)


def decisions_of(outputs: torch.Tensor) -> torch.Tensor:
    """Return what each sample is taken for: its class, or of one output whether it is above 0.

    Raises:
        StageFailed: the outputs are not finite.
    """
    if outputs.dim() > 1 and outputs.shape[1] > 1:
        return labels_of(outputs)
    if not bool(outputs.isfinite().all()):
        raise StageFailed("the model's outputs are not all finite")
    return outputs > 0


def _right_labels(outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> tuple[float, int]:
    """Return how many labels are right, and of how many.

    Of several classes the label is the largest output. Of one output for each target it is whether
    the output, a logit, is above 0.
    """
    kind = loss.targets or kind_of(targets)
    if kind == "numbers":
        raise StageFailed(
            f"metric accuracy needs labels, and targets are numbers, {form_of(targets)}; use "
            f"metric: loss, {', '.join(OF_NUMBERS)}"
        )
    if kind == "probabilities" and targets.shape == outputs.shape:
        return _share_of_right_labels("accuracy", labels_of(outputs), targets.argmax(1))
    if _are_yes_or_no(outputs, targets, loss):
        outputs, targets = fitted("binary_cross_entropy", outputs, targets)
        return _share_of_right_labels("accuracy", outputs > 0, targets > 0.5)
    return _share_of_right_labels("accuracy", labels_of(outputs), targets)


def _are_yes_or_no(outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> bool:
    """Whether each output is a logit of its own, and its target 0 or 1 or left out."""
    from compress.data.batch import IGNORED_LABEL

    if are_classes(outputs, targets) or not same_elements(outputs, targets):
        return False
    known = (targets == 0) | (targets == 1) | (targets == IGNORED_LABEL)
    is_soft = targets.is_floating_point()
    return bool(known.all() or is_soft) and (
        loss.name_for(outputs, targets) == "binary_cross_entropy"
    )


def _not_measurable(outputs: torch.Tensor) -> str:
    """Return why outputs cannot be measured, or nothing.

    A class whose score is -inf is masked: the largest output and the softmax are defined, as long
    as another class is left.
    """
    finite = outputs.isfinite()
    if bool(finite.all()):
        return ""
    if bool(outputs.isnan().any()):
        return "the model's outputs are not all finite: some are NaN"
    if bool(outputs.isposinf().any()) or outputs.dim() < 2 or outputs.shape[1] < 2:
        return "the model's outputs are not all finite: some are infinite"
    if not bool(finite.any(1).all()):
        return "all classes of a sample are masked (-inf), so that it has no label"
    return ""


def _share_of_right_labels(
    name: str, labels: torch.Tensor, targets: torch.Tensor
) -> tuple[float, int]:
    from compress.data.batch import IGNORED_LABEL

    if labels.shape != targets.shape:
        raise StageFailed(
            f"metric {name}: labels have shape {tuple(labels.shape)} and targets "
            f"{tuple(targets.shape)}"
        )
    return float((labels == targets).sum()), int((targets != IGNORED_LABEL).sum())


def _determination(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Return R², one minus the residuals' share of the targets' variance, averaged over outputs."""
    fitting = fitted("mse", outputs, targets)
    outputs, targets = (x.double().reshape(len(x), -1) for x in fitting)
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
    """Return the first output for every sample of a split, and the targets where there are any."""

    def counted_batches() -> Iterator[Batch]:
        done, total = 0, len(splits.split(split))  # type: ignore[arg-type]
        for batch in splits.batches(split, batch_size):
            yield batch
            done += len(batch)
            if progress is not None:
                progress(f"evaluate on {split}", done, total)

    return predict_batches(predict, counted_batches())


def predict_batches(
    predict: Predictor, batches: Iterable[Batch]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the first output for every sample, and the targets where there are any."""
    import torch

    outputs, targets = [], []
    for batch in batches:
        outputs.append(predict(*batch.inputs)[0].cpu())
        targets.append(batch.target)
    known = [t for t in targets if t is not None]
    return torch.cat(outputs), torch.cat(known) if known else None


def evaluate(
    predict: Predictor,
    splits: Splits,
    split: str,
    metric: Metric,
    reference: Predictor | None = None,
    progress: Progress | None = None,
    batch_size: int | None = None,
) -> float:
    """Return a predictor's metric on a split.

    Args:
        predict: the model.
        splits: the data.
        split: which split.
        metric: the metric.
        reference: for ``fidelity``, the model whose labels count as right.
        progress: where to say how far it is.
        batch_size: samples per call; the splits' own by default.

    Raises:
        StageFailed: the split has no targets, there is no reference, or the value is not finite.
    """
    outputs, targets = predict_split(predict, splits, split, progress, batch_size)
    if metric.name == "fidelity":
        if reference is None:
            raise StageFailed("metric fidelity needs a reference model")
        targets = decisions_of(predict_split(reference, splits, split, None, batch_size)[0])
    if targets is None:
        raise StageFailed(f"metric {metric.name} needs targets and split {split!r} has none")
    value = metric.score(outputs, targets)
    if not math.isfinite(value):
        raise StageFailed(f"metric {metric.name} on {split!r} is {value}")
    return value


def _torchmetrics_class(name: str) -> Any:
    try:
        import torchmetrics
    except ImportError:
        raise Unavailable(
            f"metric {name!r} needs torchmetrics: pip install 'compress-pipeline[metrics]'"
        ) from None
    target: Any = torchmetrics
    for part in name.split(".")[1:]:
        target = getattr(target, part, None)
    if not isinstance(target, type):
        raise PipelineInvalid(f"metric {name!r}: torchmetrics has no such class")
    return target
