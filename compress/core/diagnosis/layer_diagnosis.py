"""What a diagnosis measures: the layers that lose accuracy, and a stage that is run once more."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from compress.common.errors import CompressError, StageFailed
from compress.common.forward import Predictor, accept_any_batch, torch_predictor
from compress.common.lazy_modules import torch
from compress.core.metrics import evaluate
from compress.core.val_halves import HalfOfVal, halves_of_val
from compress.data.batch import Batch

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context
    from compress.core.stage import Stage

ENTRY_POINT_GROUP = "compress.diagnoses"
"""Where packages announce the :class:`LayerDiagnosis` of a kind of stage, under the stage's key."""
WHY = "compress explain"
# On 1024 samples an accuracy of 90 % is known to ±1.9 points (95 %); half of that takes 4096.
MAX_SAMPLES = 1024  # samples that models are evaluated on
LEAST_SAMPLES = 64  # also where there is no time for them: fewer show no layer
TIMED_SAMPLES = 8  # that tell how long one takes
USUAL_EVALUATIONS = 16  # of a search; most find the layers in half of what `max_evaluations` allows
LEAST_RECOVERED = 0.5  # share of the loss that the set must return
SLACK = 0.05  # share of the loss within which two sets return the same
RANGE_SAMPLES = 512  # samples of which ranges are measured, at most
# Half as wide again, or shifted by half a standard deviation; bytes beside fractions are 255 times.
UNLIKE = 1.5  # samples are unlike each other where :func:`unlikeness` is above


def max_evaluations(layers: int) -> int:
    """Return how many models may be evaluated for one loss."""
    # One bisection takes log2, and the search has two (the prefix, and the layers to leave out)
    # and the layers alone; docs/explain.md promises this bound.
    return int(3 * math.log2(max(layers, 2))) + 10


@dataclass
class GuiltSearch:
    """A search among ranked layers, which are put back; what returns counts.

    The smallest prefix of a ranking is bisected, and reduced after Zeller and Hildebrandt,
    "Simplifying and Isolating Failure-Inducing Input" (2002): a layer stays in the set only if the
    set without it recovers less.
    """

    ranking: Sequence[str]
    """All layers, the likeliest first."""
    drop: Callable[[frozenset[str]], float]
    """Measures the points lost with some layers in float."""
    wanted: float = 0.0
    """Share of the loss that must return so that the gate passes."""
    least_points: float = math.inf
    """Points that are enough for a layer to cost alone."""
    deadline: float = math.inf
    """On the clock of :func:`time.monotonic`; after it the set is not reduced further."""
    tried: dict[tuple[str, ...], float] = field(default_factory=dict)
    """Layers that were put back to float → the share of the loss that returned."""
    _drops: dict[frozenset[str], float] = field(default_factory=dict)

    @property
    def evaluations(self) -> int:
        """How many models were evaluated."""
        return len(self._drops)

    @property
    def budget(self) -> int:
        """How many more may be evaluated."""
        if time.monotonic() > self.deadline:
            return 0
        return max_evaluations(len(self.ranking)) - 8 - self.evaluations  # 8 are for the causes

    def points(self, layers: frozenset[str]) -> float:
        """Return the points lost with some layers in float, measured once."""
        if layers not in self._drops:
            self._drops[layers] = self.drop(layers)
        return self._drops[layers]

    @property
    def lost(self) -> float:
        """Points that rounding loses: those of all layers rounded, less those of none."""
        return self.points(frozenset()) - self.points(frozenset(self.ranking))

    def recovered_share(self, points: float) -> float:
        """Return the share of the loss that is mended where so many points are lost."""
        return share_of_loss(self.points(frozenset()), points, self.lost)

    def recovered(self, layers: Sequence[str]) -> float:
        """Return the share of the loss that returns with some layers in float."""
        known = frozenset(layers) in self._drops
        share = self.recovered_share(self.points(frozenset(layers)))
        if not known:
            self.tried[tuple(layers)] = share
        return share

    def alone(self, layer: str) -> float:
        """Return the share of the loss that a layer costs when all others are in float."""
        return 1 - self.recovered_share(self.points(frozenset(self.ranking) - {layer}))

    def known_alone(self) -> dict[str, float]:
        """Return what layers cost alone, of those that were evaluated so."""
        every = frozenset(self.ranking)
        return {layer: self.alone(layer) for layer in every if every - {layer} in self._drops}

    def smallest_prefix(self, most: int, wanted: float) -> int:
        """Bisect how many of the first layers return a share of the loss; 0 where none do."""
        if self.recovered(self.ranking[:most]) < wanted - SLACK:
            return 0
        # Longer prefixes mostly return more; what the one found has too much, guilty() leaves out.
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            enough = self.recovered(self.ranking[:middle]) >= wanted - SLACK
            low, high = (low, middle) if enough else (middle, high)
        return high

    def widest(self) -> tuple[str, ...]:
        """Return the first layers that return half of the loss, however many they are."""
        return tuple(self.ranking[: self.smallest_prefix(len(self.ranking), LEAST_RECOVERED)])

    def guilty(self) -> tuple[str, ...]:
        """Return the smallest set that was found, worst first; empty where the loss is spread."""
        # A loss to which more than a quarter of the layers contribute is spread over the model.
        most = math.ceil(len(self.ranking) / 4) or 1
        all_of_these = self.recovered(self.ranking[:most])
        if all_of_these < LEAST_RECOVERED:
            return ()
        wanted = max(LEAST_RECOVERED, min(all_of_these, self.wanted or all_of_these))
        found = list(self.ranking[: self.smallest_prefix(most, wanted)])
        # Leave out halves, quarters, … and single layers without which as much returns.
        size = len(found) // 2
        while size >= 1 and len(found) > 1:
            start = len(found) - size
            # Each layer that is left needs one evaluation alone, hence `len(found)` in reserve.
            while start >= 0 and self.budget > len(found):
                fewer = found[:start] + found[start + size :]
                if fewer and self.recovered(fewer) >= wanted - SLACK:
                    found = fewer
                start -= size
            size //= 2
        # Not by what returns with one layer in float: beside another one that spoils all answers,
        # that is nothing. A tenth of the loss, or what the gate allows, is enough for a layer.
        costs = {layer: self.alone(layer) for layer in found if self.budget > 0}
        least = min(0.1, self.least_points / self.lost)
        kept = [layer for layer in found if costs.get(layer, 1.0) >= least]
        # Layers whose errors only add up each cost little alone; together they are the cause.
        if kept and len(kept) < len(found) and self.recovered(kept) < wanted - SLACK:
            kept = found
        return tuple(sorted(kept or found, key=lambda layer: -costs.get(layer, 0.0)))


def share_of_loss(total: float, points: float, lost: float) -> float:
    """Return the share of the points lost that is gone where of `total` so many points are left."""
    # A model without a finite metric has lost infinitely many, of which no share can be computed.
    if not (math.isfinite(points) and math.isfinite(lost)):
        return 1.0 if math.isfinite(points) else 0.0
    return (total - points) / lost


@dataclass(eq=False)
class LayerDiagnosis(ABC):
    """What a stage has made, of which parts can be put back, and the search for the guilty ones."""

    parts: ClassVar[str] = "layers"
    """What can be put back, for messages."""
    put_back: ClassVar[str] = "in float"
    """How these parts are once they are put back, for messages."""

    stage: Any
    model: Any
    """The model that the stage has read."""
    after: Artifact
    """What it made."""
    context: Context
    allowed: float
    """Points that the refused gate allows."""
    deadline: float = field(default=math.inf, init=False)
    """On the clock of :func:`time.monotonic`; the halves are so small that it may be kept."""
    evaluations: int = field(default=0, init=False)
    """How many models were evaluated on half of `val`."""
    spread: bool = field(default=False, init=False)
    """Whether no quarter of the parts returns half of the loss."""

    @abstractmethod
    def ranked_parts(self) -> Sequence[str]:
        """Return what can be put back, the likeliest cause of the loss first."""

    @abstractmethod
    def drop_on(self, half: HalfOfVal, layers: Collection[str]) -> float:
        """Return the points lost on some samples with some layers put back."""

    @cached_property
    def halves(self) -> tuple[HalfOfVal, HalfOfVal]:
        """The halves of `val` that decide, and that confirm, with the float model's metric."""
        metric = self.context.metric.for_model(self.model.signature)
        metric = metric.with_inferred_loss(self.context.data)
        return halves_of_val(self.model, self.context, WHY, metric, self._samples_in_time())

    def _samples_in_time(self) -> int:
        """Return how many samples a half may have, where the search takes half of the time."""
        if math.isinf(self.deadline):
            return MAX_SAMPLES
        batch = next(self.context.need_data(WHY).batches("val", TIMED_SAMPLES, TIMED_SAMPLES))
        with self.after.open(self.context.device, self.context.threads) as opened:
            predict = accept_any_batch(opened, self.after.signature)
            predict(*batch.inputs)  # the first call takes longer
            began = time.monotonic()
            predict(*batch.inputs)
        seconds = (time.monotonic() - began) / len(batch) * USUAL_EVALUATIONS
        samples = int((self.deadline - time.monotonic()) / 2 / max(seconds, 1e-9))
        return min(max(samples, LEAST_SAMPLES), MAX_SAMPLES)

    @cached_property
    def search(self) -> GuiltSearch:
        """The search among the ranked parts."""
        decided_on = self.halves[0]
        search = GuiltSearch(self.ranked_parts(), lambda layers: self.drop_on(decided_on, layers))
        search.wanted = search.recovered_share(self.allowed) if search.lost > 0 else 0.0
        search.least_points = max(self.allowed, self.resolution)
        search.deadline = self.deadline
        return search

    @property
    def notice(self) -> str:
        """What the figures leave out, for messages."""
        return ""

    @property
    def resolution(self) -> float:
        """Points that two samples are worth, of a fraction of them: less may be chance."""
        return 2 * self.halves[0].points_of_sample

    def confirm(self, layers: Collection[str]) -> float:
        """Return the share of the loss that layers return on the half that did not decide."""
        total, left, none = (
            self.drop_on(self.halves[1], some) for some in ((), layers, self.search.ranking)
        )
        if total <= none:
            return 0.0
        return share_of_loss(total, left, total - none)

    def recovered_share(self, points: float) -> float:
        """Return the share of the loss that is mended where so many points are lost."""
        return self.search.recovered_share(points)

    def own_sqnr_db(self, layer: str) -> float | None:
        """Return the signal to quantization noise ratio of a rounded layer; None of others."""
        return None

    def evaluate(self, half: HalfOfVal, predict: Predictor) -> float:
        """Return the points that a predictor loses on some samples."""
        self.evaluations += 1
        return half.drop_points(accept_any_batch(predict, self.model.signature))

    def evaluate_module(self, half: HalfOfVal, module: torch.nn.Module) -> float:
        """Return the points that a module loses on some samples."""
        device = self.context.device
        with torch_predictor(module.to(device), device, self.context.threads) as predict:
            return self.evaluate(half, predict)


@dataclass(frozen=True)
class InputRange:
    """Mean and standard deviation of one input over a sample."""

    mean: float
    deviation: float


def input_ranges(batches: Iterable[Batch]) -> list[InputRange | None]:
    """Return the range of each input over some batches; None for inputs that are no floats."""
    sums: dict[int, torch.Tensor] = {}
    count = 0
    for batch in batches:
        count = max(count, len(batch.inputs))
        for i, values in enumerate(batch.inputs):
            if values.is_floating_point() and values.numel():
                own = values.double()
                part = torch.stack((torch.tensor(own.numel()), own.sum(), own.square().sum()))
                sums[i] = sums.get(i, torch.zeros(3, dtype=torch.float64)) + part
    found: list[InputRange | None] = [None] * count
    for i, of_input in sums.items():
        number, total, squares = of_input.tolist()
        mean = total / number
        # Rounding may leave a constant input a variance below 0.
        found[i] = InputRange(mean, max(squares / number - mean**2, 0.0) ** 0.5)
    return found


def unlikeness(sample: Sequence[InputRange | None], val: Sequence[InputRange | None]) -> float:
    """Return by how many times the input that differs most is wider, narrower or shifted.

    1 is alike; a shift by one standard deviation of `val` counts as 2.
    """
    found = 1.0
    for own, other in zip(sample, val, strict=False):
        if own is None or other is None or other.deviation <= 0:
            continue
        ratio = own.deviation / other.deviation
        wider = max(ratio, 1 / ratio) if ratio > 0 else float("inf")
        shift = 1 + abs(own.mean - other.mean) / other.deviation
        found = max(found, wider, shift)
    return found


def with_ranges(
    batch: Batch, own: Sequence[InputRange | None], wanted: Sequence[InputRange | None]
) -> Batch:
    """Return a batch whose inputs are scaled and shifted from their own range to another one."""
    inputs = []
    for values, before, after in zip(batch.inputs, own, wanted, strict=True):
        if before is None or after is None or before.deviation <= 0:
            inputs.append(values)
            continue
        scaled = (values - before.mean) * (after.deviation / before.deviation) + after.mean
        inputs.append(scaled.to(values.dtype))
    return replace(batch, inputs=tuple(inputs))


@dataclass
class RerunStage:
    """A stage, and the points of the metric on `val` that it lacks for a gate."""

    stage: Stage[Any, Any]
    before: Artifact
    after: Artifact
    context: Context
    missing: float
    """Points that the gate lacks; none or less where it passed."""
    seconds: float
    """How long the stage ran."""
    deadline: float = math.inf
    """On the clock of :func:`time.monotonic`; the stage is not run again where it would pass."""
    known: dict[str, float | None] = field(default_factory=dict)
    """Other settings → the share that returned."""

    def recovered_share(self, settings: dict[str, Any], times: float = 1.0) -> float | None:
        """Return the share of the missing points that return with other settings.

        None where there is no time: the stage is expected to run `times` as long as it did.
        """
        key = str(sorted(settings.items()))
        if key not in self.known:
            left = self.deadline - time.monotonic()
            # The other half is for the repairs, each of which is a run of its own.
            if self.missing <= 0 or self.seconds * times > left / 2:
                return None
            with self.context.in_temporary_folder() as context:
                try:
                    made = self.stage.with_settings(settings).run(self.before, context)
                    self.known[key] = self.share_of(context.score(made))
                except CompressError:  # such as a loss that is not finite
                    self.known[key] = 0.0
        return self.known[key]

    def share_of(self, score: float) -> float:
        """Return the share of the missing points that a score of the metric returns."""
        gained = self.context.metric.drop_points(score, self.score)
        return max(0.0, min(1.0, gained / self.missing)) if self.missing > 0 else 0.0

    @cached_property
    def score(self) -> float:
        """The metric of what the stage made, on `val`."""
        return self.context.score(self.after)

    @cached_property
    def gap(self) -> float | None:
        """Points by which the metric is better on `train` than on `val`; None if unknown."""
        data = self.context.need_data(WHY)
        if "train" not in data.datasets or data.stream is not None:
            return None
        samples = len(data.split("train"))  # type: ignore[arg-type]  # Splits admits none without
        # Spread over it, as its first samples may be of one class.
        part, *_ = data.interleaved_parts("train", max(1, round(samples / MAX_SAMPLES)))
        metric = self.context.metric.for_model(self.after.signature)
        metric = metric.with_inferred_loss(self.context.data)
        try:
            with self.context.predictor(self.after) as predict:
                on_train = evaluate(predict, part, "train", metric).value
        except CompressError:  # such as a metric that needs a reference
            return None
        return self.context.metric.drop_points(on_train, self.score)

    @cached_property
    def train_unlikeness(self) -> float:
        """By how many times the range of `train` differs from that of `val`."""
        return unlikeness(*self._ranges)

    def share_in_range(self) -> float:
        """Return the share of the missing points that return on `val` in the range of `train`."""
        train, val = self._ranges
        data = self.context.need_data(WHY)
        metric = self.context.metric.for_model(self.after.signature)
        with self.context.predictor(self.after) as predict:

            def in_range(*inputs: torch.Tensor) -> Any:
                return predict(*with_ranges(Batch(inputs, None), val, train).inputs)

            try:
                return self.share_of(evaluate(in_range, data, "val", metric).value)
            except StageFailed:
                return 0.0

    @cached_property
    def _ranges(self) -> tuple[list[InputRange | None], list[InputRange | None]]:
        data = self.context.need_data(WHY)
        train, val = (
            input_ranges(data.batches(name, limit=RANGE_SAMPLES)) for name in ("train", "val")
        )
        return train, val
