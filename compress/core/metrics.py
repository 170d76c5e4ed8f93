"""Metrics by name: one number for a model on a split, and whether higher is better."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path  # noqa: TC003 - a dataclass field
from typing import TYPE_CHECKING, Any

from compress.common.errors import (
    CompressError,
    PipelineInvalid,
    StageFailed,
    first_line,
)
from compress.common.forward import first_output, output_argument
from compress.core.metric_kinds.jackknife import groups_of_batch, pseudo_values
from compress.core.metrics.labels import (
    count_equal,
    joint_decisions,
    labelled_outputs,
    not_finite,
    one_number,
    predicted_labels,
)
from compress.core.metrics.numbers import add_r2, r2, r2_sums
from compress.core.metrics.perplexity import SlidingWindow
from compress.core.metrics.score import Score
from compress.core.objectives.loss import INFERRED_LOSS, Loss
from compress.core.objectives.targets import (
    LabelOutOfRange,
    are_class_labels,
    describe_outputs,
    describe_targets,
    describe_tensor,
    has_target,
    match_to_loss,
    need_tensor,
    refuse_wrong_labels,
    same_shape,
    target_kind,
)
from compress.core.objectives.task import NO_METRIC
from compress.core.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy as np
    import torch
    from numpy.typing import NDArray
    from pydantic import JsonValue

    from compress.common.forward import Outputs, Predictor
    from compress.common.signature import Signature
    from compress.data.batch import Batch
    from compress.data.splits import Splits
    from compress.data.targets import Targets

REGRESSION_METRICS = ("mse", "mae", "r2")
"""Built-in metrics of models that predict numbers."""
BUILT_IN = ("accuracy", "loss", "fidelity", "perplexity", *REGRESSION_METRICS)
TORCHMETRICS = {"f1": "F1Score", "miou": "JaccardIndex", "spearman": "SpearmanCorrCoef"}
"""Names of classes of torchmetrics whose arguments follow from outputs and targets."""
DETECTION = "map"
"""Metric of detectors."""
TARGET_METRICS = ("accuracy", "loss", "f1", "miou")
"""Metrics whose computation depends on the kind of the targets."""
FRACTIONS = ("accuracy", "fidelity", "f1", "miou", DETECTION)
"""Metrics from 0 to 1."""
LABEL_METRICS = ("accuracy", "fidelity", "f1", "miou", "perplexity")
"""Metrics of class labels, and all but perplexity also of several labels for each sample."""
FALLING = ("loss", "perplexity", "mse", "mae")
"""Built-in metrics that are lower when better."""
IN_POINTS = (*FRACTIONS, "r2")
"""Built-in metrics whose hundredths are called points; 1 is best."""


@dataclass(frozen=True)
class Metric:
    """A metric by name, resolved where it is needed.

    ``accuracy`` is the fraction of right labels, ``loss`` the mean of the task's loss, ``fidelity``
    the fraction of labels equal to the reference model's, in every output that has as many as the
    first, ``perplexity`` the exponential of the mean cross-entropy, with arguments ``context`` and
    ``stride`` over windows. For numbers there are ``mse``, ``mae``, ``r2``, the coefficient of
    determination, and ``spearman``, the correlation of ranks; ``f1`` and ``miou`` are means over
    the classes, and ``map`` is that of COCO for boxes. Classes such as
    ``torchmetrics.classification.BinaryF1Score`` are imported by their name, and so is
    ``module:callable``: a function of all outputs and targets that returns a float, or a subclass
    of ``torchmetrics.Metric``. The user's own get several outputs of a model as a mapping by name,
    and one as a tensor; others get the first.
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
    outputs: tuple[str, ...] = ()
    """Names of the model's outputs, for ``module:callable``; see :meth:`for_model`."""

    @property
    def higher_is_better(self) -> bool:
        """Whether larger is better; raises PipelineInvalid where nobody declares it."""
        direction = self.direction
        if self.name in (*BUILT_IN, NO_METRIC):
            direction = self.name not in FALLING
        elif self.name in (*TORCHMETRICS, DETECTION):
            direction = True
        elif direction is None:
            direction = getattr(self.implementation(), "higher_is_better", None)
        if direction is None:
            raise PipelineInvalid(
                f"metric {self.name!r} does not tell its direction; write "
                f"metric: {{name: {self.name!r}, higher_is_better: true}} (or false)"
            )
        return bool(direction)

    @property
    def is_measured(self) -> bool:
        """Whether there is a metric: tasks without targets have none by default."""
        return self.name != NO_METRIC

    def passes_over(self, batch: Batch) -> bool:
        """Whether no sample of a batch has the target that the metric needs."""
        return batch.target is None and self.is_measured and self.name != "fidelity"

    @property
    def reads_all_outputs(self) -> bool:
        """Whether the metric reads all outputs of a model, and not the first alone."""
        is_custom_loss = self.name == "loss" and self.loss.is_custom
        return ":" in self.name or self.name == DETECTION or is_custom_loss

    @property
    def adds_states(self) -> bool:
        """Whether it may be a function of sums over samples that are no mean: see `jackknife`.

        The user's own is not taken for one, as its updates may depend on how samples are divided.
        """
        name = self.name
        return name in ("r2", *TORCHMETRICS) or name.startswith("torchmetrics.")

    def identity(self) -> list[JsonValue]:
        """Return the metric's part of a cache key, with a hash of the user's own code."""
        code = ""
        if ":" in self.name:
            from compress.common.factories import local_sources, sources_digest

            code = sources_digest(local_sources(self.name, self.folder))
        loss: JsonValue = self.loss.task.name if self.loss.task else None
        if self.name in TARGET_METRICS:
            loss = self.loss.identity()
        return [self.name, dict(self.arguments), self.direction, code, loss]

    def with_inferred_loss(self, data: Splits | None) -> Metric:
        """Return the same metric with its loss inferred from the data's targets, if it uses one."""
        if self.name not in TARGET_METRICS:
            return self
        return replace(self, loss=self.loss.infer_targets(data))

    def for_model(self, signature: Signature) -> Metric:
        """Return the same metric with the names of a model's outputs."""
        loss = self.loss.for_model(signature)
        return replace(self, loss=loss, outputs=loss.outputs)

    def outputs_read(
        self, outputs: Sequence[torch.Tensor], samples: slice = slice(None)
    ) -> Outputs:
        """Return what the metric reads of a model's outputs for some samples, in main memory."""
        if self.reads_all_outputs or self.name == "fidelity":
            return [x[samples].cpu() for x in outputs]
        return outputs[0][samples].cpu()

    def drop_points(self, before: float, after: float) -> float:
        """Return how much worse ``after`` is, in hundredths of the metric; negative if better."""
        return 100 * (before - after if self.higher_is_better else after - before)

    def targets_of(self, batch: Batch, split: str, reference: Predictor | None = None) -> Targets:
        """Return what a batch's outputs are compared with; `reference` is for `fidelity`.

        Raises:
            StageFailed: the batch has no targets, or there is no reference model, or no metric.
        """
        if not self.is_measured:
            raise StageFailed("the pipeline has no metric; name one with `metric:`")
        if self.name == "fidelity":
            if reference is None:
                raise StageFailed("metric fidelity needs a reference model")
            return joint_decisions([x.cpu() for x in reference(*batch.inputs)], self.loss.task)
        if batch.target is None:
            raise StageFailed(
                f"metric {self.name} needs targets and samples of split {split!r} have none"
            )
        return batch.target

    @property
    def window(self) -> SlidingWindow | None:
        """Windows that perplexity is measured in; None where samples are read as they are."""
        if self.name != "perplexity" or not self.arguments:
            return None
        return SlidingWindow.from_arguments(dict(self.arguments))

    def parts(
        self, inputs: tuple[torch.Tensor, ...], targets: Targets
    ) -> Iterator[tuple[tuple[torch.Tensor, ...], Targets]]:
        """Yield what a model is called with for a batch, and its targets: the batch, or windows."""
        if self.window is None:
            yield inputs, targets
        else:
            yield from self.window.of(inputs, need_tensor("metric perplexity", targets))

    def require_finite(self, value: float, split: str) -> float:
        """Return a value of the metric; raise StageFailed if it is NaN or infinite."""
        if not math.isfinite(value):
            raise StageFailed(f"metric {self.name} on {split!r} is {value}")
        return value

    def score(self, outputs: Outputs, targets: Targets) -> float:
        """Compute the metric of one batch; raises as :meth:`MetricMeter.update`."""
        meter = MetricMeter(self)
        meter.update(outputs, targets)
        return meter.compute()

    def sums_and_counts(self, outputs: Outputs, targets: Targets) -> torch.Tensor | None:
        """Return a mean as sums and counts by sample, `(2, samples)`; None for other metrics.

        Of the user's own loss these are sums over all samples, `(2, 1)`.

        Raises:
            StageFailed: the outputs are NaN or infinite (except -inf, a masked class), or of
                another shape than the metric needs.
        """
        import torch

        first, task = first_output(outputs), self.loss.task
        if problem := not_finite(first if task is None else task.classes_first(first)):
            raise StageFailed(f"metric {self.name}: {problem}")
        if self.name == "loss":
            return self.loss.sums_and_counts(outputs, targets)
        if self.name not in BUILT_IN:
            return None
        targets = need_tensor(f"metric {self.name}", targets)
        if self.name == "fidelity":
            several = [first] if isinstance(outputs, torch.Tensor) else outputs
            decisions = joint_decisions(several, task)
            if len(labelled_outputs(several, task)) > 1 and decisions.shape == targets.shape:
                decisions = (decisions == targets).all(-1)  # of every output
                targets = torch.ones_like(decisions)
            return count_equal(self.name, decisions, targets)
        if self.name == "perplexity":
            name = "nll" if self.loss.name == "nll" else "cross_entropy"
            return replace(self.loss, name=name).sums_and_counts(first, targets)
        if self.name == "accuracy":
            first, targets = self.loss.align(first, targets)
            return count_equal(self.name, *_decisions(self.name, first, targets, self.loss))
        if self.name in ("mse", "mae"):
            return Loss("mse" if self.name == "mse" else "l1").sums_and_counts(first, targets)
        return None

    def torchmetrics_inputs(
        self, outputs: torch.Tensor, targets: Targets
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Return what a class in :data:`TORCHMETRICS` compares, and arguments that fit it."""
        from compress.core.metrics.torchmetrics import labelled_inputs, ranked_inputs

        targets = need_tensor(f"metric {self.name}", targets)
        if self.name == "spearman":
            return ranked_inputs(outputs, targets)
        outputs, targets = self.loss.align(outputs, targets)
        return labelled_inputs(outputs, _decisions(self.name, outputs, targets, self.loss))

    def check(self) -> None:
        """Raise PipelineInvalid or Unavailable if the metric cannot be used, without evaluating."""
        task = self.loss.task
        if task is not None and self.name in LABEL_METRICS:
            exclusive = task.labels == "class"
            if not (exclusive if self.name == "perplexity" else task.has_labels):
                raise PipelineInvalid(
                    f"metric {self.name!r} is for class labels, and a model for {task.name} gives "
                    f"{task.answer}; use metric: {task.metric}"
                )
        if self.name in (*BUILT_IN, NO_METRIC):
            if (self.window is None and self.arguments) or self.direction is not None:
                raise PipelineInvalid(f"metric {self.name!r} takes no settings")
            return
        if self.name in TORCHMETRICS:
            from compress.core.metrics.torchmetrics import import_torchmetrics

            import_torchmetrics(self.name)
            return
        if (
            ":" not in self.name
            and not self.name.startswith("torchmetrics.")
            and self.name != DETECTION
        ):
            raise PipelineInvalid(
                f"metric {self.name!r} is unknown; expected "
                f"{', '.join((*BUILT_IN, *TORCHMETRICS, DETECTION))}, torchmetrics.… or "
                "module:callable"
            )
        self.implementation()
        _ = self.higher_is_better

    def implementation(self, inferred: Mapping[str, Any] | None = None) -> Any:
        """Make the object of torchmetrics, or import the user's function; None if built in.

        Args:
            inferred: arguments of a class in :data:`TORCHMETRICS`; without them it is not made.
        """
        from compress.core.metrics.torchmetrics import class_at, create

        is_inferred = self.name in TORCHMETRICS and inferred is None
        if self.name in (*BUILT_IN, NO_METRIC) or is_inferred:
            return None
        if self.name == DETECTION:
            from compress.core.metrics.mean_average_precision import MeanAveragePrecision

            try:
                return MeanAveragePrecision(**dict(self.arguments))
            except TypeError as error:
                raise PipelineInvalid(f"metric 'map': {first_line(error)}") from error
        if ":" in self.name:
            from compress.common.factories import resolve

            target: Any = resolve(self.name, self.folder)
            if not isinstance(target, type):
                return target
        else:
            path = TORCHMETRICS.get(self.name, self.name.partition(".")[2])
            target = class_at(self.name, path)
        return create(self.name, target, {**(inferred or {}), **dict(self.arguments)})


class MetricMeter:
    """Computes a metric batch by batch; only a function of all outputs at once keeps these."""

    def __init__(self, metric: Metric) -> None:
        self.metric, self.custom = metric, metric.implementation()
        self.sums: torch.Tensor | None = None
        """Of built-in metrics, in float64: sum and count, or for r2 what `r2_sums` returns."""
        self.groups: dict[int, torch.Tensor] = {}
        """Sums of each group of samples, of metrics that are functions of these."""
        self.batches: list[tuple[Any, Targets]] = []
        """Outputs and targets, for a function of the user's."""
        self.inferred: Mapping[str, Any] | None = None
        """Arguments of a class in :data:`TORCHMETRICS`, known from the first batch with targets."""

    def update(
        self, outputs: Outputs, targets: Targets, group: int | None = None
    ) -> torch.Tensor | None:
        """Add a batch, which may be empty: the model's first output, and targets.

        `group` is the number of the group of samples that it belongs to, if its sums are wanted.

        Returns:
            What :meth:`Metric.sums_and_counts` does.

        Raises:
            StageFailed: the outputs are NaN or infinite (except -inf, a masked class), or of
                another shape than the metric needs.
        """
        import torch

        if not len(first_output(outputs)):
            return None
        metric, first = self.metric, first_output(outputs)
        state: torch.Tensor | None = None
        sums = metric.sums_and_counts(outputs, targets)
        read = output_argument(outputs, metric.outputs) if metric.reads_all_outputs else first
        if metric.name in TORCHMETRICS:
            read, targets, self.inferred = metric.torchmetrics_inputs(first, targets)
            self.custom = self.custom or metric.implementation(self.inferred)
        if self.is_torchmetric:
            from compress.core.metrics.torchmetrics import summed_state

            before = None if group is None else summed_state(self.custom)
            # In the mode of the outputs, or its state could not change in place.
            with torch.inference_mode():
                self._call(self.custom.update, read, targets)
            if before is not None and (now := summed_state(self.custom)) is not None:
                state = now - before
        elif self.custom is not None:
            self.batches.append((read, targets))
        elif sums is None:
            state = r2_sums(first, need_tensor("metric r2", targets))
            self.sums = self._sum(self.sums, state)
        else:
            self.sums = self._sum(self.sums, sums.sum(1))
        if group is not None and state is not None:
            self.groups[group] = self._sum(self.groups.get(group), state)
        return sums

    @property
    def is_torchmetric(self) -> bool:
        """Whether the metric is computed by an object of torchmetrics."""
        return hasattr(self.custom, "metric_state")

    def _call(self, function: Any, *arguments: Any, **settings: Any) -> Any:
        """Call a part of the user's metric; StageFailed where that raises."""
        try:
            return function(*arguments, **settings)
        except CompressError:
            raise
        except Exception as error:
            forms = ""
            if arguments:
                outputs, targets = arguments
                forms = f" for outputs {describe_outputs(outputs)} and targets "
                forms += describe_targets(targets)
            raise StageFailed(
                f"metric {self.metric.name!r} fails{forms}: {type(error).__name__}: "
                f"{first_line(error)}"
            ) from error

    def _sum(self, one: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
        """Return the sums of the samples of both."""
        if one is None:
            return other
        return add_r2(one, other) if self.metric.name == "r2" else one + other

    def pseudo_values(self) -> NDArray[np.float64] | None:
        """Return what each group adds to the metric; None where no sums of groups give it."""
        from compress.core.metrics.torchmetrics import set_summed_state_

        if not self.groups:
            return None
        rest = copy.copy(self)
        rest.custom = copy.deepcopy(self.custom)

        def compute(sums: torch.Tensor) -> float:
            rest.sums = sums
            if rest.custom is not None:
                set_summed_state_(rest.custom, sums)
            return rest.compute()

        groups = [self.groups[number] for number in sorted(self.groups)]
        return pseudo_values(self.compute(), groups, self._sum, compute)

    def state(self) -> Any:
        """Return all that was added, to be sent to another process; None where that is nothing."""
        if self.is_torchmetric and self.custom.update_called:
            from compress.core.metrics.torchmetrics import metrics_in

            return self.inferred, [module.metric_state for module in metrics_in(self.custom)]
        return self._all_outputs() if self.batches else self.sums

    def add_shares_(self, states: Sequence[Any]) -> None:
        """Add the others' states to share 0's; share `i` of `n` has the samples i, i + n and on."""
        known = [state for state in states if state is not None]
        if self.is_torchmetric or self.metric.name in TORCHMETRICS:
            from compress.core.metrics.torchmetrics import merge_states_

            if known:
                self.custom = self.custom or self.metric.implementation(known[0][0])
                merge_states_(self.custom, [state for _, state in known])
        elif self.custom is None:
            self.sums = reduce(self._sum, known) if known else None
        elif len(known) > 1:
            from compress.data.targets import interleave

            outputs, targets = zip(*known, strict=True)
            self.batches = [(interleave(outputs, len(states)), interleave(targets, len(states)))]

    def compute(self) -> float:
        """Return the metric of all that was added, which may be NaN or infinite."""
        import torch

        if not self.batches and self.sums is None and not getattr(self.custom, "update_called", 0):
            raise StageFailed(f"metric {self.metric.name} needs targets and no sample has one")
        if self.custom is not None:
            with torch.inference_mode():
                if self.is_torchmetric:
                    value = self._call(self.custom.compute)
                    # One number for each output of a model.
                    value = value.mean() if self.metric.name == "spearman" else value
                else:
                    settings = {} if self.metric.name == DETECTION else dict(self.metric.arguments)
                    value = self._call(self.custom, *self._all_outputs(), **settings)
            return one_number(self.metric.name, value)
        assert self.sums is not None
        if self.metric.name == "r2":
            return r2(self.sums)
        mean = self.sums[0] / self.sums[1]
        return float(mean.exp() if self.metric.name == "perplexity" else mean)

    def _all_outputs(self) -> tuple[Any, Targets]:
        from compress.data.targets import concatenate

        try:
            outputs, targets = zip(*self.batches, strict=True)
            return concatenate(outputs), concatenate(targets)
        except RuntimeError as error:  # batches were padded to other lengths
            raise StageFailed(
                f"metric {self.metric.name!r} is a function of all outputs at once, and batches "
                f"differ in shape ({first_line(error)}); a subclass of torchmetrics.Metric takes "
                "batches"
            ) from error


def default_metric(loss: Loss) -> Metric:
    """Return the metric of a pipeline that names none: that of the task, else accuracy.

    For numbers it is the loss, if one is named or nobody names a task, and for nested targets too.
    """
    if loss.is_regression and (loss.task is None or loss.name is not None):
        return Metric("loss", loss=loss)
    if loss.task is not None:
        return Metric(loss.task.metric, loss=loss)
    return Metric("loss" if loss.targets == "nested" else "accuracy", loss=loss)


def _decisions(
    name: str, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return predicted and true labels of classes, or booleans of binary logits."""
    from compress.data.batch import IGNORED_LABEL

    kind = loss.targets or target_kind(targets)
    if kind == "numbers":
        raise StageFailed(
            f"metric {name} needs labels, and targets are numbers, "
            f"{describe_tensor(targets)}; use metric: loss, {', '.join(REGRESSION_METRICS)}"
        )
    is_multilabel = loss.task is not None and loss.task.labels == "each output"
    if kind == "probabilities" and targets.shape == outputs.shape and not is_multilabel:
        return predicted_labels(outputs), targets.argmax(1)
    if not are_class_labels(outputs, targets) and same_shape(outputs, targets):
        # Each output may be the logit of a binary target: 0, 1, soft, or ignored.
        known = (targets == 0) | (targets == 1) | (targets == IGNORED_LABEL)
        may_be_binary = targets.is_floating_point() or bool(known.all())
        if may_be_binary and loss.name_for(outputs, targets) == "binary_cross_entropy":
            match_to_loss("binary_cross_entropy", outputs, targets)
            decisions = (targets > 0.5).where(targets != IGNORED_LABEL, IGNORED_LABEL)
            return outputs > 0, decisions.reshape(outputs.shape)
    labels = predicted_labels(outputs)
    if not targets.is_floating_point():
        refuse_wrong_labels(targets, outputs.shape[1])
    return labels, targets


def evaluate(
    predict: Predictor,
    splits: Splits,
    split: str,
    metric: Metric,
    reference: Predictor | None = None,
    progress: Progress = silent,
    batch_size: int | None = None,
) -> Score:
    """Compute a model's metric on a split, or raise StageFailed; `reference` is for `fidelity`."""
    import torch

    # Once: of a few targets, as of a batch, the kind may be another.
    metric = metric.with_inferred_loss(splits)
    meter = MetricMeter(metric)
    by_sample: list[torch.Tensor] | None = []
    done, known, total = 0, 0, len(splits.split(split))  # type: ignore[arg-type]  # Splits admits sized datasets only
    for batch in splits.batches(split, batch_size):
        done += len(batch)
        if metric.passes_over(batch):
            predict(*batch.inputs)  # of all rows the outputs are summarized
            progress(f"evaluate on {split}", done, total)
            continue
        targets = metric.targets_of(batch, split, reference)
        known += int(has_target(targets).sum())
        first = done - len(batch)
        sums: list[torch.Tensor | None] = []
        for inputs, known_targets in metric.parts(batch.inputs, targets):
            read = metric.outputs_read(predict(*inputs))
            for group, start, outputs, own in _by_group(metric, read, known_targets, first, total):
                try:
                    sums.append(meter.update(outputs, own, group))
                except LabelOutOfRange as error:
                    where = f"split {split!r}, sample {first + start + error.row}"
                    raise StageFailed(f"{where}: {error}") from error
        added = [x for x in sums if x is not None and x.shape[1] == len(batch)]
        if by_sample is not None and added and len(added) == len(sums):
            by_sample.append(torch.stack(added).sum(0))
        else:
            by_sample = None
        progress(f"evaluate on {split}", done, total)
    value = metric.require_finite(meter.compute(), split)
    if not by_sample:
        return Score(value, known, meter.pseudo_values())
    sums_2N = torch.cat(by_sample, 1)
    labelled = sums_2N[:, sums_2N[1] > 0].numpy()
    return Score.from_sums(value, labelled, is_exponential=metric.name == "perplexity")


def _by_group(
    metric: Metric, outputs: Outputs, targets: Targets, first: int, samples: int
) -> Iterator[tuple[int | None, int, Outputs, Targets]]:
    """Yield a batch in parts of one group of samples each: the group, its first row, and the rows.

    The batch begins with sample `first` of a split's `samples`. It stays whole, without a group, if
    the metric needs no groups, or its outputs have other rows than the targets.
    """
    from compress.data.targets import select

    rows = len(first_output(outputs)) if metric.adds_states else 0
    if not (rows and rows == len(has_target(targets))):
        yield None, 0, outputs, targets
        return
    for group, own in groups_of_batch(first, rows, samples):
        yield group, own.start, first_output(outputs)[own], select(targets, own)
