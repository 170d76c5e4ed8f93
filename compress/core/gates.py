"""Gates: what must be true of a stage's result. A gate that cannot be measured fails.

A gate's value is measured once per pair of artifacts; its limit is applied afterwards, so that
tightening a limit judges again without computing anything.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from compress.common.config import Count, Fraction, Positive
from compress.common.errors import StageFailed
from compress.core.gate import Gate
from compress.profiling.benchmark import unmeasurable

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from pydantic import JsonValue

    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context


class Parity(Gate):
    """Outputs differ by at most `atol` in any element, on `val` (seeded inputs without data)."""

    gate: Literal["parity"] = "parity"
    atol: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Largest absolute difference allowed."""

    limit_field: ClassVar[str] = "atol"
    rule_template: ClassVar[str] = "max |difference| <= {atol:g}"
    asks_rows: ClassVar[bool] = True

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the largest absolute difference."""
        from compress.common.tensor_difference import largest, largest_difference

        differences, elements = [], 0
        for expected, got in _paired_outputs(before, after, context):
            if len(expected) != len(got):
                raise StageFailed(f"{len(expected)} outputs against {len(got)}")
            for a, b in zip(expected, got, strict=True):
                if a.shape != b.shape:
                    raise StageFailed(f"outputs have shapes {tuple(a.shape)} and {tuple(b.shape)}")
                elements += a.numel()
                differences.append(largest_difference(a, b))
        if not elements:
            raise StageFailed("the outputs have no elements, so that there is nothing to compare")
        worst = largest(differences)
        if math.isnan(worst):
            raise StageFailed("an output is NaN")
        return worst


class LabelAgreement(Gate):
    """The largest output is the same one for at least this fraction of samples.

    Of a model with one output: whether that is above 0.
    """

    gate: Literal["label_agreement"] = "label_agreement"
    minimum: Fraction = 1.0
    """Fraction of samples with equal labels; 1.0 means every one."""

    limit_field: ClassVar[str] = "minimum"
    rule_template: ClassVar[str] = "equal labels >= {minimum:g}"
    asks_rows: ClassVar[bool] = True
    higher_passes: ClassVar[bool] = True

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the fraction of equal labels."""
        from compress.core.metrics import decisions_of

        equal = total = 0
        for expected, got in _paired_outputs(before, after, context):
            labels = decisions_of(expected[0])
            equal += int((labels == decisions_of(got[0])).sum())
            total += labels.numel()
        if not total:
            raise StageFailed("the outputs have no samples, so that there are no labels to compare")
        return equal / total


class MaxDrop(Gate):
    """The metric on `val` gets worse by at most `points` hundredths."""

    gate: Literal["max_drop"] = "max_drop"
    points: Annotated[float, Field(allow_inf_nan=False)]
    """Largest loss allowed, in hundredths of the metric (percentage points for accuracy)."""

    limit_field: ClassVar[str] = "points"
    rule_template: ClassVar[str] = "drop <= {points:g} points"
    asks_rows: ClassVar[bool] = True

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the loss in points, negative when the result is better."""
        # Rounded: 0.98 - 0.97 must not exceed one point by a float's last bit.
        return round(context.metric.drop_points(context.score(before), context.score(after)), 9)


class MinMetric(Gate):
    """The metric on `val` reaches a value."""

    gate: Literal["min_metric"] = "min_metric"
    at: Annotated[float, Field(allow_inf_nan=False)]
    """The value to reach, in the metric's own unit (0.975 for an accuracy of 97.5 %)."""

    limit_field: ClassVar[str] = "at"
    rule_template: ClassVar[str] = "metric >= {at:g}"
    asks_rows: ClassVar[bool] = True
    higher_passes: ClassVar[bool] = True
    compares: ClassVar[bool] = False

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the metric on `val`."""
        if not context.metric.higher_is_better:
            raise StageFailed(f"metric {context.metric.name} falls with quality; use max_drop")
        return context.score(after)


class MaxSize(Gate):
    """The deployed file is at most this fraction of the size compared with."""

    gate: Literal["max_size"] = "max_size"
    ratio: Positive
    """Largest ratio of the deployed file's bytes to those of the artifact compared with."""

    limit_field: ClassVar[str] = "ratio"
    rule_template: ClassVar[str] = "size ratio <= {ratio:.4g}"

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the ratio of bytes."""
        return after.payload_bytes / before.payload_bytes


class MaxParameters(Gate):
    """At most this fraction of the weights is left."""

    gate: Literal["max_parameters"] = "max_parameters"
    ratio: Positive
    """Largest ratio of weights left."""

    limit_field: ClassVar[str] = "ratio"
    rule_template: ClassVar[str] = "parameter ratio <= {ratio:g}"

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the ratio of weights."""
        mine, theirs = after.parameters(), before.parameters()
        if mine is None or not theirs:
            raise StageFailed(f"parameters of {after.kind} or {before.kind} cannot be counted")
        return mine / theirs


class _MeasuredOnVal(Gate):
    """A gate on latency or memory: measured on samples of `val`, or seeded inputs without data."""

    def measurement_key(self) -> dict[str, JsonValue]:
        """Return what changes the value; what was measured on seeded inputs is not taken for it."""
        return {**super().measurement_key(), "measured on": "val"}


class MinSpeedup(_MeasuredOnVal):
    """Faster than the artifact compared with, both measured in turn with equal threads on `val`."""

    gate: Literal["min_speedup"] = "min_speedup"
    ratio: Positive
    """How many times faster at least, by the lower end of the speedup's 95 % interval."""
    batch: Count = 1
    """Samples per call."""
    against: str | None = None
    """Earlier stage compared with, `source`, or what runs the float model that the input was made
    of: `eager` (PyTorch), `compiled` (torch.compile), `onnxruntime` (its plain export)."""

    limit_field: ClassVar[str] = "ratio"
    rule_template: ClassVar[str] = "speedup at batch {batch} >= {ratio:g} with 95 % confidence"
    higher_passes: ClassVar[bool] = True

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the lower end of the interval in which the ratio of median latencies lies.

        Raises:
            StageFailed: the machine is too busy to measure it.
        """
        interval = context.compare_latency(before, after, self.batch).interval
        if interval.doubt:
            raise StageFailed(unmeasurable("the speedup", interval.doubt))
        return interval.low


class MaxLatency(_MeasuredOnVal):
    """The 95th percentile of the latency on `val` stays under a bound, on this machine."""

    gate: Literal["max_latency"] = "max_latency"
    p95_ms: Positive
    """Largest 95th percentile, in milliseconds."""
    batch: Count = 1
    """Samples per call."""

    limit_field: ClassVar[str] = "p95_ms"
    rule_template: ClassVar[str] = "p95 at batch {batch} <= {p95_ms:g} ms"
    compares: ClassVar[bool] = False

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the p95 latency in milliseconds.

        Raises:
            StageFailed: the machine is too busy to measure it.
        """
        found = context.compare_latency(before, after, self.batch).after
        if found.p95_interval.doubt:
            raise StageFailed(unmeasurable("p95 in ms", found.p95_interval.doubt))
        return found.p95


class MaxMemory(_MeasuredOnVal):
    """Opening the file and answering calls take at most so much memory, on this machine.

    Counted in a process of its own, beyond what the libraries take there.
    """

    gate: Literal["max_memory"] = "max_memory"
    mebibytes: Positive
    """Most memory that may be taken at the same time, in MiB."""
    batch: Count = 1
    """Samples per call."""

    limit_field: ClassVar[str] = "mebibytes"
    rule_template: ClassVar[str] = "peak memory at batch {batch} <= {mebibytes:g} MiB"
    compares: ClassVar[bool] = False

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the peak memory in mebibytes."""
        return context.peak_memory(after, self.batch)


AnyGate = Annotated[
    Parity
    | LabelAgreement
    | MaxDrop
    | MinMetric
    | MaxSize
    | MaxParameters
    | MinSpeedup
    | MaxLatency
    | MaxMemory,
    Field(discriminator="gate"),
]
"""Every gate, by its `gate` key."""


def _paired_outputs(
    before: Artifact, after: Artifact, context: Context
) -> Iterator[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]]:
    """Yield both models' outputs for the same batches, on the CPU."""
    with (
        context.predictor(before) as expected,
        context.predictor(after) as got,
    ):
        batch_size = context.judged_batch_size(before, after)
        for inputs in context.comparison_inputs(before.signature, batch_size):
            yield (
                tuple(t.cpu() for t in expected(*inputs)),
                tuple(t.cpu() for t in got(*inputs)),
            )
