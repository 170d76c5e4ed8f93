"""Metrics: one number for a model on a split, what a run has to know of it, and its evaluation."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from compress.common.errors import PipelineInvalid, StageFailed, first_line
from compress.common.forward import Predictor, first_output, output_argument
from compress.common.lazy_modules import np, torch
from compress.common.requirements import announced, announcing_package
from compress.core.metrics.score import Score, jackknifed, pseudo_values
from compress.core.objectives.loss import INFERRED_LOSS, Loss
from compress.core.objectives.task import LabelOutOfRange, has_target, user_errors
from compress.core.progress import Progress, silent
from compress.data.targets import concatenate, interleave, select

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pydantic import JsonValue

    from compress.common.forward import Outputs, Tensors
    from compress.common.signature import Signature
    from compress.data.batch import Batch
    from compress.data.splits import Splits
    from compress.data.targets import Targets

JACKKNIFE_GROUPS = 20
"""Of metrics that are computed anew without each group: more cost time, and would narrow intervals
by 6 % at most (Student's t of 19 degrees of freedom)."""
GROUPS = 200
"""Groups of a split at most, of other metrics: their variance is then known to some 5 %."""


@cache
def _announced() -> dict[str, type[Metric]]:
    return announced("compress.metrics", "metric")


def metric_class(name: str) -> type[Metric]:
    """Return the class of a metric's name; :class:`UnknownMetric` where no package has it."""
    return _announcement(name)[1]


def _announcement(name: str) -> tuple[str, type[Metric]]:
    """Return name and class of the entry point that a metric's name is for."""
    # One after the other: `torchmetrics.…` and `module:callable` are forms, and no fixed names.
    for entry, kind in _announced().items():
        if re.search(kind.pattern, name) if kind.pattern else name == entry:
            return entry, kind
    return "", UnknownMetric


@dataclass(frozen=True)
class Metric:
    """A metric by name, resolved where it is needed: ``Metric("f1")`` is one of that name's class.

    A subclass is an entry point of ``compress.metrics``. The user's own get several outputs of a
    model as a mapping by name, and one as a tensor; others get the first.
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

    pattern: ClassVar[str] = ""
    """What is found in names of the class, where it has more than that of its entry point."""
    form: ClassVar[str] = ""
    """How these look, for messages."""
    higher: ClassVar[bool | None] = True
    """Whether larger is better; None where the pipeline or the user's class says it."""
    is_fraction: ClassVar[bool] = False
    """Whether it lies between 0 and 1."""
    in_points: ClassVar[bool] = False
    """Whether its hundredths are called points; 1 is best."""
    is_exponential: ClassVar[bool] = False
    """Whether it is the exponential of the mean over samples."""
    is_measured: ClassVar[bool] = True
    """Whether there is a metric: tasks without targets have none by default."""
    labels: ClassVar[Literal["class", "any"] | None] = None
    """What answers it compares: classes that exclude each other, those and several labels for each
    sample, or None where it takes others too."""
    of_numbers: ClassVar[bool] = False
    """Whether the model predicts numbers; its name then tells the task."""
    reads_loss: ClassVar[bool] = False
    """Whether it depends on the loss, or the kind of targets that this was inferred from."""
    needs_reference: ClassVar[bool] = False
    """Whether it compares with another model's answers instead of targets."""
    takes_all_outputs: ClassVar[bool] = False
    """Whether it reads all outputs of a model, and not the first alone."""
    needs_output_names: ClassVar[bool] = False
    """Whether outputs must bear certain names, which no drafted pipeline can know."""
    adds_states: ClassVar[bool] = False
    """Whether it may be a function of sums over samples that are no mean: see `pseudo_values`."""

    def __new__(cls, name: str = "accuracy", *_: Any, **__: Any) -> Self:
        """Create an object of the class that the name is for, as ``pathlib.Path`` does."""
        return super().__new__(metric_class(name) if cls is Metric else cls)  # type: ignore[return-value]

    @property
    def higher_is_better(self) -> bool:
        """Whether larger is better; raises PipelineInvalid where nobody declares it."""
        direction = self.direction if self.higher is None else self.higher
        if direction is None:
            direction = self.declared_direction()
        if direction is None:
            raise PipelineInvalid(
                f"metric {self.name!r} does not tell its direction; write "
                f"metric: {{name: {self.name!r}, higher_is_better: true}} (or false)"
            )
        return bool(direction)

    def declared_direction(self) -> bool | None:
        """Return whether larger is better by what the name imports; None where unknown."""
        return None

    @property
    def reads_all_outputs(self) -> bool:
        """Whether the metric reads all outputs of a model, and not the first alone."""
        return self.takes_all_outputs

    def passes_over(self, batch: Batch) -> bool:
        """Whether no sample of a batch has the target that the metric needs."""
        return batch.target is None and self.is_measured and not self.needs_reference

    def identity(self) -> list[JsonValue]:
        """Return the metric's part of a cache key, with a hash of the user's own code."""
        loss: JsonValue = self.loss.task.name if self.loss.task else None
        if self.reads_loss:
            loss = self.loss.identity()
        return [self.name, dict(self.arguments), self.direction, self.code(), loss]

    def code(self) -> str:
        """Return what identifies code outside of this toolkit: a package, or the user's own."""
        # Not by its own name: a class with a pattern has more than that of its entry point.
        return announcing_package("compress.metrics", _announcement(self.name)[0])

    def with_inferred_loss(self, data: Splits | None) -> Self:
        """Return the same metric with its loss inferred from the data's targets, if it uses one."""
        return replace(self, loss=self.loss.infer_targets(data)) if self.reads_loss else self

    def for_model(self, signature: Signature) -> Self:
        """Return the same metric with the names of a model's outputs."""
        loss = self.loss.for_model(signature)
        return replace(self, loss=loss, outputs=loss.outputs)

    def outputs_read(
        self, outputs: Sequence[torch.Tensor], samples: slice = slice(None)
    ) -> Outputs:
        """Return what the metric reads of a model's outputs for some samples, in main memory."""
        if self.reads_all_outputs or self.needs_reference:
            return [x[samples].cpu() for x in outputs]
        return outputs[0][samples].cpu()

    def drop_points(self, before: float, after: float) -> float:
        """Return how much worse ``after`` is, in hundredths of the metric; negative if better."""
        return 100 * (before - after if self.higher_is_better else after - before)

    def targets_of(self, batch: Batch, split: str, reference: Predictor | None = None) -> Targets:
        """Return what a batch's outputs are compared with, or raise StageFailed without it.

        `reference` is the model that `fidelity` compares with.
        """
        if batch.target is None:
            raise StageFailed(
                f"metric {self.name} needs targets and samples of split {split!r} have none"
            )
        return batch.target

    def parts(self, inputs: Tensors, targets: Targets) -> Iterator[tuple[Tensors, Targets]]:
        """Yield what a model is called with for a batch, and its targets: the batch, or windows."""
        yield inputs, targets

    def require_finite(self, value: float, split: str) -> float:
        """Return a value of the metric; raise StageFailed if it is NaN or infinite."""
        if not math.isfinite(value):
            raise StageFailed(f"metric {self.name} on {split!r} is {value}")
        return value

    def score(self, outputs: Outputs, targets: Targets) -> float:
        """Compute the metric of one batch; raises as :meth:`MetricMeter.update`."""
        meter = self.meter()
        meter.update(outputs, targets)
        return meter.compute()

    def meter(self) -> MetricMeter:
        """Return an object that computes the metric batch by batch."""
        return MetricMeter(self)

    def sums_and_counts(self, outputs: Outputs, targets: Targets) -> torch.Tensor:
        """Return a mean over samples, or over the labels in them, as sums and counts by sample.

        `(2, samples)`, of the user's own loss `(2, 1)`. Metrics with their own meter need none.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Raise PipelineInvalid or Unavailable if the metric cannot be used, without evaluating."""
        task = self.loss.task
        if (
            task is not None
            and self.labels is not None
            and not (task.has_labels if self.labels == "any" else task.labels == self.labels)
        ):
            raise PipelineInvalid(
                f"metric {self.name!r} is for class labels, and a model for {task.name} gives "
                f"{task.answer}; use metric: {task.metric}"
            )
        self.check_settings()

    def check_settings(self) -> None:
        """Raise PipelineInvalid for settings that the metric does not take: by default any."""
        if self.arguments or self.direction is not None:
            raise PipelineInvalid(f"metric {self.name!r} takes no settings")


class UnknownMetric(Metric):
    """A name that no installed package announces."""

    higher = None

    def check_settings(self) -> None:
        """Raise PipelineInvalid."""
        known = [kind.form or name for name, kind in _announced().items()]
        raise PipelineInvalid(
            f"metric {self.name!r} is unknown; expected {', '.join(known[:-1])} or {known[-1]}"
        )


METRIC_ADVICE = (
    "name one with `metric:`, such as `fidelity`, the share of labels equal to the uncompressed "
    "model's, which needs no targets; outputs that are no scores of classes need data with targets "
    "and a metric such as `r2`, `mae` or `mse`"
)


class NoMetric(Metric):
    """Nothing is measured: tasks whose targets no metric is known for."""

    is_measured = False

    def targets_of(self, batch: Batch, split: str, reference: Predictor | None = None) -> Targets:
        """Raise StageFailed."""
        raise StageFailed(f"the pipeline has no metric; {METRIC_ADVICE}")


def not_finite(outputs: torch.Tensor) -> str:
    """Return why no metric can be computed from outputs; empty where one can."""
    # A class whose score is -inf is masked: softmax is defined as long as another class is left.
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


class MetricMeter:
    """Computes a metric batch by batch: by default a mean, from sums and counts in float64."""

    keeps_outputs: ClassVar[bool] = False
    """Whether all outputs are kept, so that none may be left out where processes share them."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.sums: torch.Tensor | None = None  # sum and count, or what a subclass adds up
        self.groups: dict[int, torch.Tensor] = {}
        """Sums of each group of samples, of metrics that are functions of these."""

    def update(
        self, outputs: Outputs, targets: Targets, group: int | None = None
    ) -> torch.Tensor | None:
        """Add a batch, which may be empty: the outputs that the metric reads, and targets.

        `group` is the number of the group of samples that it belongs to, if its sums are wanted.
        Returned is what :meth:`Metric.sums_and_counts` does; None for metrics that are no means.

        Raises:
            StageFailed: the outputs are NaN or infinite (except -inf, a masked class), or of
                another shape than the metric needs.
        """
        first, task = first_output(outputs), self.metric.loss.task
        if not len(first):
            return None
        if problem := not_finite(first if task is None else task.classes_first(first)):
            raise StageFailed(f"metric {self.metric.name}: {problem}")
        return self._add(outputs, targets, group)

    def _add(self, outputs: Outputs, targets: Targets, group: int | None) -> torch.Tensor | None:
        by_sample = self.metric.sums_and_counts(outputs, targets)
        # In float64: a count beyond 2**24 is no longer exact in float32.
        self.sums = self._added(self.sums, by_sample.sum(1))
        return by_sample

    def _add_group(self, group: int | None, sums: torch.Tensor) -> None:
        if group is not None:
            self.groups[group] = self._added(self.groups.get(group), sums)

    @staticmethod
    def _added(one: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
        """Return the sums of the samples of both."""
        return other if one is None else one + other

    def pseudo_values(self) -> NDArray[np.float64] | None:
        """Return what each group adds to the metric; None where no sums of groups give it."""
        if not self.groups:
            return None
        groups = [self.groups[number] for number in sorted(self.groups)]
        return pseudo_values(self.compute(), groups, self._added, self._copied()._compute_of)

    def _copied(self) -> Self:
        """Return a meter whose sums can be replaced while this one keeps its own."""
        return copy.copy(self)

    def _compute_of(self, sums: torch.Tensor) -> float:
        """Return the metric of other sums, which replace the meter's own."""
        self.sums = sums
        return self.compute()

    def state(self) -> Any:
        """Return all that was added, to be sent to another process; None where that is nothing."""
        return self.sums

    def add_shares_(self, states: Sequence[Any]) -> None:
        """Add the others' states to share 0's; share `i` of `n` has the samples i, i + n and on."""
        known = [state for state in states if state is not None]
        self.sums = reduce(self._added, known) if known else None

    def compute(self) -> float:
        """Return the metric of all that was added, which may be NaN or infinite."""
        added = self.state()
        if added is None:
            raise StageFailed(
                f"metric {self.metric.name} needs targets and no sample has one; add them, or "
                "choose `metric: none`, and gates that compare outputs"
            )
        return self._value(added)

    def _value(self, added: Any) -> float:
        """Return the metric of what :meth:`state` returned."""
        mean = added[0] / added[1]
        return float(mean.exp() if self.metric.is_exponential else mean)

    def _call(self, function: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        """Call a part of the user's metric; StageFailed where that raises."""
        # In the mode of the outputs, or torchmetrics' state could not change in place.
        with user_errors(f"metric {self.metric.name!r}", *arguments), torch.inference_mode():
            return function(*arguments, **settings)


class FunctionMeter(MetricMeter):
    """Keeps all outputs and targets for a function of all of them at once."""

    keeps_outputs = True

    def __init__(
        self,
        metric: Metric,
        function: Callable[..., Any],
        settings: dict[str, Any] | None = None,
        jackknife_groups: int = 0,
    ) -> None:
        super().__init__(metric)
        self.function, self.settings = function, settings or {}
        # Of samples, which give an interval. None for users' own, which may not be smooth: a
        # maximum without some samples tells nothing of how sure it is.
        self.jackknife_groups = jackknife_groups
        self.batches: list[tuple[Any, Targets]] = []

    def _add(self, outputs: Outputs, targets: Targets, group: int | None) -> None:
        self.batches.append((output_argument(outputs, self.metric.outputs), targets))

    def add_shares_(self, states: Sequence[tuple[Any, Targets] | None]) -> None:
        """Put the samples of all processes into their order."""
        known = [state for state in states if state is not None]
        if len(known) > 1:
            outputs, targets = zip(*known, strict=True)
            self.batches = [(interleave(outputs, len(states)), interleave(targets, len(states)))]

    def _value(self, added: Any) -> float:
        return one_number(self.metric.name, self._call(self.function, *added, **self.settings))

    def pseudo_values(self) -> NDArray[np.float64] | None:
        """Return what each group adds to the metric; None for functions without groups."""
        added, groups = self.state(), self.jackknife_groups
        samples = 0 if added is None else len(has_target(added[1]))
        if not groups or samples < 2 * groups:
            return None
        group_of = torch.arange(samples) * groups // samples
        value = self._value(added)
        with suppress(StageFailed):  # not defined without one group
            without = self._values_of(added, [group_of != group for group in range(groups)])
            return jackknifed(value, without)
        return None

    def _values_of(self, added: Any, parts: Sequence[torch.Tensor]) -> list[float]:
        """Return the function of each part of the samples, by a mask of these."""
        return [self._value([select(each, part) for each in added]) for part in parts]

    def state(self) -> tuple[Any, Targets] | None:
        """Return all outputs and targets."""
        if not self.batches:
            return None
        try:
            outputs, targets = zip(*self.batches, strict=True)
            return concatenate(outputs), concatenate(targets)
        except RuntimeError as error:  # batches were padded to other lengths
            raise StageFailed(
                f"metric {self.metric.name!r} is a function of all outputs at once, and batches "
                f"differ in shape ({first_line(error)}); a subclass of torchmetrics.Metric takes "
                "batches"
            ) from error


def one_number(name: str, value: Any) -> float:
    """Return a metric's value as a number; raise StageFailed where it is not one."""
    is_tensor = isinstance(value, torch.Tensor)
    try:
        if not is_tensor or value.numel() == 1:
            return float(value)
    except (TypeError, ValueError):
        pass
    found = f"a tensor of shape {list(value.shape)}" if is_tensor else f"a {type(value).__name__}"
    raise StageFailed(f"metric {name!r} returned {found}, expected one number")


def default_metric(loss: Loss) -> Metric:
    """Return the metric of a pipeline that names none: that of the task, else accuracy.

    For numbers it is the loss, if one is named or nobody names a task, and for nested targets too.
    """
    if loss.is_regression and (loss.task is None or loss.name is not None):
        return Metric("loss", loss=loss)
    if loss.task is not None:
        return Metric(loss.task.metric, loss=loss)
    return Metric("loss" if loss.targets == "nested" else "accuracy", loss=loss)


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
    # Once: of a few targets, as of a batch, the kind may be another.
    metric = metric.with_inferred_loss(splits)
    meter = metric.meter()
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
    kinds = {"is_exponential": metric.is_exponential, "is_fraction": metric.is_fraction}
    return Score.from_sums(value, labelled, **kinds)


def _by_group(
    metric: Metric, outputs: Outputs, targets: Targets, first: int, samples: int
) -> Iterator[tuple[int | None, int, Outputs, Targets]]:
    # Parts of one group of samples each: the group, its first row, and the rows. The batch begins
    # with sample `first` of a split's `samples`. It stays whole, without a group, if the metric
    # needs no groups, or its outputs have other rows than the targets.
    rows = len(first_output(outputs)) if metric.adds_states else 0
    if not (rows and rows == len(has_target(targets))):
        yield None, 0, outputs, targets
        return
    for group, own in groups_of_batch(first, rows, samples):
        yield group, own.start, first_output(outputs)[own], select(targets, own)


def groups_of_batch(first: int, rows: int, samples: int) -> Iterator[tuple[int, slice]]:
    """Yield the groups that a batch of some rows has, and which of its rows.

    `first` is the number of its first sample in the split of so many samples.
    """
    count, start = min(GROUPS, samples), 0
    while start < rows:
        group = (first + start) * count // samples
        end = min(rows, -(-(group + 1) * samples // count) - first)
        yield group, slice(start, end)
        start = end
