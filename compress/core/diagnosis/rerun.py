"""A stage that is run again with other settings, and the ranges of what models read."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from compress.common.errors import CompressError, StageFailed
from compress.core.diagnosis.layer_diagnosis import MAX_SAMPLES, WHY
from compress.core.metrics import evaluate

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context
    from compress.core.stage import Stage
    from compress.data.batch import Batch

SAMPLES = 512
"""Samples of which ranges are measured, at most."""
# Half as wide again, or shifted by half a standard deviation; bytes beside fractions are 255 times.
UNLIKE = 1.5
"""Samples are unlike each other where :func:`unlikeness` is above."""


@dataclass(frozen=True)
class InputRange:
    """Mean and standard deviation of one input over a sample."""

    mean: float
    deviation: float


def input_ranges(batches: Iterable[Batch]) -> list[InputRange | None]:
    """Return the range of each input over some batches; None for inputs that are no floats."""
    import torch

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
        from compress.data.batch import Batch

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
        train, val = (input_ranges(data.batches(name, limit=SAMPLES)) for name in ("train", "val"))
        return train, val
