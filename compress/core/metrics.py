"""Metrics by name: one number for a model on a split, and whether higher is better."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path  # noqa: TC003 - a dataclass field
from typing import TYPE_CHECKING, Any

from compress.common.errors import PipelineInvalid, StageFailed, Unavailable, first_line
from compress.core.loss import INFERRED_LOSS, Loss
from compress.core.progress import Progress, silent
from compress.core.task_targets import (
    are_class_labels,
    describe_tensor,
    match_to_loss,
    same_shape,
    target_kind,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from pydantic import JsonValue

    from compress.common.forward import Predictor
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
    the like are imported by their name, and so is ``module:callable``: a function of all outputs
    and targets that returns a float, or a subclass of ``torchmetrics.Metric``.
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
        elif direction is None:
            direction = getattr(self.implementation(), "higher_is_better", None)
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

    def targets_of(
        self, batch: Batch, split: str, reference: Predictor | None = None
    ) -> torch.Tensor:
        """Return what a batch's outputs are compared with; `reference` is for `fidelity`.

        Raises:
            StageFailed: the batch has no targets, or there is no reference model.
        """
        if self.name == "fidelity":
            if reference is None:
                raise StageFailed("metric fidelity needs a reference model")
            return predicted_decisions(reference(*batch.inputs)[0].cpu())
        if batch.target is None:
            raise StageFailed(f"metric {self.name} needs targets and split {split!r} has none")
        return batch.target

    def require_finite(self, value: float, split: str) -> float:
        """Return a value of the metric; raise StageFailed if it is NaN or infinite."""
        if not math.isfinite(value):
            raise StageFailed(f"metric {self.name} on {split!r} is {value}")
        return value

    def score(self, outputs: torch.Tensor, targets: torch.Tensor) -> float:
        """Compute the metric of one batch; raises as :meth:`MetricMeter.update`."""
        meter = MetricMeter(self)
        meter.update(outputs, targets)
        return meter.compute()

    def sum_and_count(
        self, outputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[float, float] | None:
        """Return a mean as sum and count, None for other metrics.

        Raises:
            StageFailed: the outputs are NaN or infinite (except -inf, a masked class), or of
                another shape than the metric needs.
        """
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
        if ":" not in self.name and not self.name.startswith("torchmetrics."):
            raise PipelineInvalid(
                f"metric {self.name!r} is unknown; expected {', '.join(BUILT_IN)}, "
                "torchmetrics.… or module:callable"
            )
        self.implementation()
        _ = self.higher_is_better

    def implementation(self) -> Any:
        """Make the object of torchmetrics, or import the user's function; None if built in."""
        if self.name in BUILT_IN:
            return None
        if ":" in self.name:
            from compress.common.factories import resolve

            target: Any = resolve(self.name, self.folder)
            if not isinstance(target, type):
                return target
        try:
            import torchmetrics
        except ImportError:
            raise Unavailable(
                f"metric {self.name!r} needs torchmetrics: pip install -e '.[metrics]'"
            ) from None
        if ":" not in self.name:
            target = torchmetrics
            for part in self.name.split(".")[1:]:
                target = getattr(target, part, None)
        if not isinstance(target, type) or not issubclass(target, torchmetrics.Metric):
            raise PipelineInvalid(
                f"metric {self.name!r}: no such class of torchmetrics; expected one, a subclass of "
                "torchmetrics.Metric, or a function of outputs and targets"
            )
        try:
            made = target(**dict(self.arguments))
        except Exception as error:
            raise PipelineInvalid(
                f"metric {self.name!r} with arguments {dict(self.arguments)}: {error}"
            ) from error
        for module in _torchmetrics_in(made):
            # Rank 0 may evaluate alone, and must not wait for other ranks in `compute`.
            module.distributed_available_fn = lambda: False
        return made


class MetricMeter:
    """Computes a metric batch by batch: by sums, or by ``update`` of torchmetrics.

    Only for a function of the user's, which takes all outputs at once, outputs are kept.
    """

    def __init__(self, metric: Metric) -> None:
        self.metric, self.custom = metric, metric.implementation()
        self.is_torchmetric = hasattr(self.custom, "metric_state")
        self.sums: torch.Tensor | None = None
        """Of built-in metrics, in float64: sum and count, or for r2 what `_r2_sums` returns."""
        self.batches: list[tuple[torch.Tensor, ...]] = []
        """Outputs and targets, for a function of the user's."""

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Add a batch, which may be empty: the model's first output, and targets.

        Raises:
            StageFailed: the outputs are NaN or infinite (except -inf, a masked class), or of
                another shape than the metric needs.
        """
        import torch

        if not len(targets):
            return
        summed = self.metric.sum_and_count(outputs, targets)
        if self.is_torchmetric:
            # In the mode of the outputs, or its state could not change in place.
            with torch.inference_mode():
                self.custom.update(outputs, targets)
        elif self.custom is not None:
            self.batches.append((outputs, targets))
        elif summed is None:
            self._add(_r2_sums(outputs, targets))
        else:
            self._add(torch.tensor(summed, dtype=torch.float64))

    def _add(self, sums: torch.Tensor) -> None:
        if self.sums is None:
            self.sums = sums
        else:
            self.sums = _add_r2(self.sums, sums) if self.metric.name == "r2" else self.sums + sums

    def state(self) -> Any:
        """Return all that was added, to be sent to another process; None where that is nothing."""
        if self.is_torchmetric and self.custom.update_called:
            return [module.metric_state for module in _torchmetrics_in(self.custom)]
        return self._all_outputs() if self.batches else self.sums

    def add_shares_(self, states: Sequence[Any]) -> None:
        """Add the others' states to share 0's; share `i` of `n` has the samples i, i + n and on."""
        first, *others = [state for state in states if state is not None]
        if not others:
            return
        if self.is_torchmetric:
            _merge_states_(self.custom, [first, *others])
        elif self.custom is None:
            for sums in others:
                self._add(sums)
        else:
            pairs = zip(first, *others, strict=True)
            self.batches = [tuple(_interleaved(shares, len(states)) for shares in pairs)]

    def compute(self) -> float:
        """Return the metric of all that was added, which may be NaN or infinite."""
        import torch

        if self.custom is not None:
            with torch.inference_mode():
                if self.is_torchmetric:
                    return float(self.custom.compute())
                return float(self.custom(*self._all_outputs(), **dict(self.metric.arguments)))
        if self.sums is None:
            return math.nan
        return _r2(self.sums) if self.metric.name == "r2" else float(self.sums[0] / self.sums[1])

    def _all_outputs(self) -> tuple[torch.Tensor, ...]:
        import torch

        try:
            return tuple(torch.cat(column) for column in zip(*self.batches, strict=True))
        except RuntimeError as error:  # batches were padded to other lengths
            raise StageFailed(
                f"metric {self.metric.name!r} is a function of all outputs at once, and batches "
                f"differ in shape ({first_line(error)}); a subclass of torchmetrics.Metric takes "
                "batches"
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


def _r2_sums(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return samples, mean and spread of the targets, and squared error: `(4, outputs)`, float64.

    The spread is the sum of squared distances to the mean.
    """
    import torch

    outputs, targets = (
        x.double().reshape(len(x), -1) for x in match_to_loss("mse", outputs, targets)
    )
    mean = targets.mean(0)
    spread, error = (targets - mean).square().sum(0), (outputs - targets).square().sum(0)
    return torch.stack([torch.full_like(mean, len(targets)), mean, spread, error])


def _add_r2(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the sums over the samples of both; raise StageFailed where samples differ in size."""
    import torch

    if a.shape != b.shape:
        raise StageFailed(
            f"metric r2: samples of a batch have {a.shape[1]} outputs and of another {b.shape[1]}; "
            "pad all samples to one length, or use mse or mae"
        )
    # Chan, Golub and LeVeque (1979): sums of squares alone lose digits where the mean is large.
    (samples_a, mean_a, *sums_a), (samples_b, mean_b, *sums_b) = a, b
    samples, apart = samples_a + samples_b, mean_b - mean_a
    spread, error = (x + y for x, y in zip(sums_a, sums_b, strict=True))
    spread += apart.square() * samples_a * samples_b / samples
    return torch.stack([samples, mean_a + apart * samples_b / samples, spread, error])


def _r2(sums: torch.Tensor) -> float:
    """Return R², one minus the residuals' share of the targets' variance, averaged over outputs."""
    _, _, spread, error = sums
    if not bool((spread > 0).all()):
        raise StageFailed("metric r2: the targets of an output are all equal; use mse or mae")
    return float((1 - error / spread).mean())


def _torchmetrics_in(metric: Any) -> list[Any]:
    """Return an object of torchmetrics and those that it is computed from."""
    return [module for module in metric.modules() if hasattr(module, "metric_state")]


def _merge_states_(metric: Any, shares: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Overwrite the state of an object of torchmetrics by that of several shares of the samples."""
    import torch

    # As `Metric.sync` does. But that exchanges tensor by tensor, so that processes with lists of
    # different lengths wait for ever, and counts the initial state of one without samples; and
    # `Metric.merge_state` refuses some metrics.
    for module, *states in zip(_torchmetrics_in(metric), *shares, strict=True):
        for name, reduce in module._reductions.items():
            values = [state[name] for state in states]
            if isinstance(values[0], list):
                setattr(module, name, [tensor for value in values for tensor in value])
            else:
                stacked = torch.stack(values)
                setattr(module, name, stacked if reduce is None else reduce(stacked))


def _interleaved(shares: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """Merge the first of ``count`` shares in the order of the samples; the others are empty."""
    merged = shares[0].new_empty((sum(map(len, shares)), *shares[0].shape[1:]))
    for i, share in enumerate(shares):
        merged[i::count] = share
    return merged


def evaluate(
    predict: Predictor,
    splits: Splits,
    split: str,
    metric: Metric,
    reference: Predictor | None = None,
    progress: Progress = silent,
    batch_size: int | None = None,
) -> float:
    """Compute a model's metric on a split, or raise StageFailed; `reference` is for `fidelity`."""
    # Once: of a few targets, as of a batch, the kind may be another.
    metric = metric.with_inferred_loss(splits)
    meter = MetricMeter(metric)
    done, total = 0, len(splits.split(split))  # type: ignore[arg-type]  # Splits admits sized datasets only
    for batch in splits.batches(split, batch_size):
        targets = metric.targets_of(batch, split, reference)
        meter.update(predict(*batch.inputs)[0].cpu(), targets)
        done += len(batch)
        progress(f"evaluate on {split}", done, total)
    return metric.require_finite(meter.compute(), split)
