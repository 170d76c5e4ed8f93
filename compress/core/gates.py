"""Gates: what must be true of a stage's result. A gate that cannot be measured fails."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union, get_args

from pydantic import Field, TypeAdapter
from pydantic_core import core_schema

from compress.common.config import Fraction, Positive
from compress.common.errors import StageFailed, Unavailable
from compress.common.requirements import load_entry_point
from compress.core.gates.call_cost import (
    MaxFirstToken,
    MaxLatency,
    MaxMemory,
    MinSpeedup,
    MinTokensPerSecond,
)
from compress.core.gates.gate import Gate, describe_value
from compress.core.gates.kernels import MinDelegated, MinIntegerMacs
from compress.core.gates.next_tokens import MaxDivergence, MinEqualTokens
from compress.core.gates.other_runtime import RunsIn
from compress.core.gates.outputs import paired_outputs
from compress.core.metrics import FALLING, FRACTIONS, IN_POINTS
from compress.core.metrics.labels import labelled_outputs, predicted_decisions
from compress.core.objectives.task import NO_METRIC

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, JsonValue

    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context
    from compress.core.objectives.task import Task
    from compress.core.verdict import Uncertainty, Verdict

ENTRY_POINT_GROUP = "compress.gates"
"""Where installed packages announce gates of their own."""
LARGEST_RATIO = 5
"""Of sizes: who writes 25 means 25 %, not that the result may become 25 times as large."""
NO_ELEMENTS = "the outputs have no elements, so that there is nothing to compare"
FEWEST_POINTS, MOST_POINTS = 0.01, 50
"""Of an accuracy: who writes 0.005 means half a point, and nobody means more than half of it."""


class Parity(Gate):
    """No output differs by more than `atol` in any element, on `val` (or seeded inputs)."""

    gate: Literal["parity"] = "parity"
    atol: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Largest absolute difference allowed."""

    limit_field: ClassVar[str] = "atol"
    rule_template: ClassVar[str] = "max |difference| <= {atol:g}"
    report_template: ClassVar[str] = "outputs differ by at most {limit:g}"
    reads_all_outputs: ClassVar[bool] = True
    judges_quality: ClassVar[bool] = True
    depends_on_batch: ClassVar[bool] = True

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the largest absolute difference."""
        from compress.common.tensor_difference import largest, largest_difference, measured

        differences, elements, finite = [], 0, 0
        for expected, got in paired_outputs(before, after, context):
            for a, b in zip(expected, got, strict=True):
                if a.shape != b.shape:
                    raise StageFailed(f"outputs have shapes {tuple(a.shape)} and {tuple(b.shape)}")
                elements += a.numel()
                finite += int(a.isfinite().sum())
                differences.append(largest_difference(*measured(a, b)))
        if not finite:
            nothing = "all outputs of the model compared with are infinite or NaN"
            raise StageFailed(nothing if elements else NO_ELEMENTS)
        worst = largest(differences)
        if not math.isfinite(worst):
            raise StageFailed("an output is NaN or infinite in one of the models alone")
        return worst


class _OutputsGate(Gate):
    """A gate on a number of each output, of which the worst decides."""

    judges_quality: ClassVar[bool] = True
    depends_on_batch: ClassVar[bool] = True
    higher_passes: ClassVar[bool] = True

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the worst output's number."""
        return self.measure_by_output(before, after, context)[0]

    def measurement_key(self) -> dict[str, JsonValue]:
        """Return what changes the value, apart from values of the first output alone."""
        return {**super().measurement_key(), "outputs": "each"}


def _worst(
    found: Mapping[int, float], before: Artifact, count: int
) -> tuple[float, dict[str, float]]:
    """Return the least number, and those of a model's `count` outputs by name if it has several."""
    if any(map(math.isnan, found.values())):
        return math.nan, {}
    value = min(found.values())
    if count == 1:
        return value, {}
    names = [output.name for output in before.signature.outputs]
    return value, {names[i]: number for i, number in found.items()}


class LabelAgreement(_OutputsGate):
    """The largest score of an output is the same one for at least this share of samples.

    Of a model with one score, or of several labels each: whether a score is above 0. The task says
    on which axis the classes are; for tokens every position counts. Of several outputs those of
    floats are read that have as many labels as the first, and the worst decides.
    """

    gate: Literal["label_agreement"] = "label_agreement"
    minimum: Fraction = 1.0
    """Fraction of samples with equal labels; 1.0 means every one."""

    limit_field: ClassVar[str] = "minimum"
    rule_template: ClassVar[str] = "equal labels >= {minimum:g}"
    report_template: ClassVar[str] = "at least {percent:g} % of the labels are equal"

    def measure_by_output(
        self, before: Artifact, after: Artifact, context: Context
    ) -> tuple[float, dict[str, float]]:
        """Return the fraction of equal labels, of the worst output and of each."""
        equal, total, count = Counter[int](), Counter[int](), 0
        for expected, got in paired_outputs(before, after, context):
            count = len(expected)
            for i in labelled_outputs(expected, context.task):
                labels, others = (predicted_decisions(x[i], context.task) for x in (expected, got))
                if labels.shape != others.shape:
                    shapes = f"{tuple(labels.shape)} and {tuple(others.shape)}"
                    raise StageFailed(f"labels of output {i} have shapes {shapes}")
                equal[i] += int((labels == others).sum())
                total[i] += labels.numel()
        if not total[0]:
            raise StageFailed("the outputs have no samples, so that there are no labels to compare")
        return _worst({i: equal[i] / n for i, n in total.items() if n}, before, count)

    def unsuitable_task(self, task: Task) -> str:
        """Return why a model for the task has no labels to compare."""
        if task.has_labels:
            return ""
        return (
            f"compares labels, and a model for {task.name} gives {task.answer}; use parity or "
            f"{task.gates[0]['gate']}"
        )


class MinCosine(_OutputsGate):
    """Each output of every sample points in the same direction, by the cosine.

    Of several outputs those of more than one number, floats, are read, and the worst decides.
    """

    gate: Literal["min_cosine"] = "min_cosine"
    minimum: Annotated[float, Field(ge=-1, le=1)]
    """Least cosine between the vectors of a sample; 1 means the same direction."""

    limit_field: ClassVar[str] = "minimum"
    rule_template: ClassVar[str] = "cosine of outputs >= {minimum:g}"

    def measure_by_output(
        self, before: Artifact, after: Artifact, context: Context
    ) -> tuple[float, dict[str, float]]:
        """Return the least cosine of all samples of `val`, of the worst output and of each."""
        import torch
        from torch.nn.functional import cosine_similarity

        cosines, count = defaultdict[int, list[torch.Tensor]](list), 0
        for expected, got in paired_outputs(before, after, context):
            count = len(expected)
            floats = [i for i, x in enumerate(expected) if x.is_floating_point()]
            vectors = [i for i in floats if expected[i].numel() > expected[i].shape[:1].numel()]
            for i in vectors or [0]:
                a, b = expected[i].double(), got[i].double()
                if a.shape != b.shape:
                    raise StageFailed(f"outputs have shapes {tuple(a.shape)} and {tuple(b.shape)}")
                if a.numel():
                    a, b = a.flatten(1), b.flatten(1)
                    # Nothing turns a vector of zeros that is equal; its cosine would be 0.
                    cosines[i].append(cosine_similarity(a, b).masked_fill((a == b).all(1), 1.0))
        if not cosines:
            raise StageFailed(NO_ELEMENTS)
        least = {i: float(torch.cat(found).min()) for i, found in cosines.items()}
        return _worst(least, before, count)


class _MetricGate(Gate):
    """A gate on the pipeline's metric."""

    needs_data: ClassVar[bool] = True
    judges_quality: ClassVar[bool] = True
    depends_on_batch: ClassVar[bool] = True

    def uncertainty(
        self, before: Artifact, after: Artifact, context: Context
    ) -> Uncertainty | None:
        """Return the interval of the drop, in points, from the scores that were measured."""
        return context.drop_uncertainty(before, after)

    def measurement_key(self) -> dict[str, JsonValue]:
        """Return what changes the value, apart from values of versions without such intervals."""
        return {**super().measurement_key(), "measured": "by part"}

    def unsuitable_metric(self, metric: str) -> str:
        """Return that there is no metric."""
        return "the pipeline has no metric; add `metric:`" if metric == NO_METRIC else ""


class MaxDrop(_MetricGate):
    """The metric on `val` gets worse by at most `points` hundredths."""

    gate: Literal["max_drop"] = "max_drop"
    points: Annotated[float, Field(allow_inf_nan=False)]
    """Largest loss allowed, in hundredths of the metric (percentage points for accuracy)."""

    limit_field: ClassVar[str] = "points"
    rule_template: ClassVar[str] = "drop <= {points:g} hundredths of the metric"

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the loss in points, negative when the result is better."""
        # Rounded: 0.98 - 0.97 must not exceed one point by a float's last bit.
        return round(context.metric.drop_points(context.score(before), context.score(after)), 9)

    def unsuitable_metric(self, metric: str) -> str:
        """Return why so many points of an accuracy cannot be meant, or there is no metric."""
        problem = unlikely_points(self.points) if metric in FRACTIONS else ""
        return f"points: {problem}" if problem else super().unsuitable_metric(metric)

    @classmethod
    def rule_in_words(cls, verdict: Verdict, metric: str) -> str:
        """Return the rule: in points where 1 is best, and else in the metric's own unit."""
        if metric not in IN_POINTS:
            change = "rises" if metric in FALLING else "gets worse"
            return f"{metric} {change} by at most {verdict.limit / 100:g}"
        points = "point" if verdict.limit == 1 else "points"
        return f"loses at most {verdict.limit:g} {points} of {metric}"

    @classmethod
    def value_in_words(cls, verdict: Verdict, metric: str) -> str:
        """Return the value in the unit of the rule, or why there is none."""
        in_points = metric in IN_POINTS
        return describe_value(verdict, " points" if in_points else "", 1 if in_points else 0.01)


class MaxRelativeDrop(_MetricGate):
    """The metric on `val` gets worse by at most `percent` of its value before."""

    gate: Literal["max_relative_drop"] = "max_relative_drop"
    percent: Annotated[float, Field(allow_inf_nan=False)]
    """Largest loss allowed, in percent of the metric before: 2 lets a perplexity of 20 become 20.4,
    and an accuracy of 0.90 become 0.882."""

    limit_field: ClassVar[str] = "percent"
    rule_template: ClassVar[str] = "drop <= {percent:g} % of the metric"
    report_template: ClassVar[str] = "{metric} gets worse by at most {limit:g} %"

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the loss in percent, negative when the result is better."""
        score = context.score(before)
        if score == 0:
            raise StageFailed(f"{context.metric.name} was 0 before, which has no percentage")
        return round(context.metric.drop_points(score, context.score(after)) / abs(score), 9)

    def uncertainty(
        self, before: Artifact, after: Artifact, context: Context
    ) -> Uncertainty | None:
        """Return the interval of the loss in percent, taking the metric before as given."""
        return context.drop_uncertainty(before, after).scaled(1 / abs(context.score(before)))


class MinMetric(_MetricGate):
    """The metric on `val` reaches a value."""

    gate: Literal["min_metric"] = "min_metric"
    at: Annotated[float, Field(allow_inf_nan=False)]
    """The value to reach, in the metric's own unit (0.975 for an accuracy of 97.5 %)."""

    limit_field: ClassVar[str] = "at"
    rule_template: ClassVar[str] = "metric >= {at:g}"
    report_template: ClassVar[str] = "{metric} >= {limit:g}"
    higher_passes: ClassVar[bool] = True
    compares: ClassVar[bool] = False

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the metric on `val`."""
        if not context.metric.higher_is_better:
            raise StageFailed(f"metric {context.metric.name} falls with quality; use max_drop")
        return context.score(after)

    def uncertainty(
        self, before: Artifact, after: Artifact, context: Context
    ) -> Uncertainty | None:
        """Return the interval of the metric."""
        return context.score_by_sample(after).uncertainty()

    def unsuitable_metric(self, metric: str) -> str:
        """Return why the metric, or a limit in its unit, cannot be meant."""
        if metric in FALLING:
            return f"metric {metric} falls with quality; use max_drop"
        if metric in FRACTIONS and self.at > 1:
            return (
                f"at: found {self.at:g}, and {metric} is a fraction of 1; "
                f"for {self.at:g} % write {self.at / 100:g}"
            )
        return super().unsuitable_metric(metric)


class _RatioGate(Gate):
    """A gate on how much of something is left."""

    limit_field: ClassVar[str] = "ratio"

    def unsuitable_artifact(self, written: type[Artifact]) -> str:
        """Return why so large a ratio cannot be meant."""
        if self.limit < LARGEST_RATIO:
            return ""
        return (
            f"ratio: {self.limit:g} would let it become {self.limit:g} times as large; "
            f"for {self.limit:g} % write {self.limit / 100:g}"
        )


class MaxSize(_RatioGate):
    """The deployed file is at most this fraction of the size compared with."""

    gate: Literal["max_size"] = "max_size"
    ratio: Positive
    """Largest ratio of the deployed file's bytes to those of the artifact compared with."""

    rule_template: ClassVar[str] = "size ratio <= {ratio:.4g}"
    report_template: ClassVar[str] = "the file has at most {percent:.4g} % of the bytes"

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the ratio of bytes."""
        return after.payload_bytes / before.payload_bytes


class MaxFileSize(Gate):
    """The deployed file has at most so many mebibytes."""

    gate: Literal["max_file_size"] = "max_file_size"
    mebibytes: Positive
    """Largest size of the deployed file, in mebibytes (1,048,576 bytes)."""

    limit_field: ClassVar[str] = "mebibytes"
    rule_template: ClassVar[str] = "size <= {mebibytes:g} MiB"
    report_template: ClassVar[str] = "the file has at most {limit:g} MiB"
    compares: ClassVar[bool] = False

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the mebibytes of the deployed file."""
        return after.payload_bytes / 2**20


class MaxParameters(_RatioGate):
    """At most this fraction of the weights is left."""

    gate: Literal["max_parameters"] = "max_parameters"
    ratio: Positive
    """Largest ratio of weights left."""

    rule_template: ClassVar[str] = "parameter ratio <= {ratio:g}"
    report_template: ClassVar[str] = "at most {percent:g} % of the weights are left"

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the ratio of weights."""
        weights_left, weights_before = after.parameters(), before.parameters()
        if weights_left is None or not weights_before:
            raise StageFailed(f"parameters of {after.kind} or {before.kind} cannot be counted")
        return weights_left / weights_before


class AddedGates:
    """Annotates the union of built-in gates: those of installed packages are taken as well."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_wrap_validator_function(
            self._validate,
            handler(source),
            # By the gate's own class; the union's serializer knows the built-in ones only.
            serialization=core_schema.simple_ser_schema("any"),
        )

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        # Packages are looked for now, and not where the class of a stage is made: theirs may
        # import this module.
        return handler(_every_gate().core_schema if added_gates() else schema)

    @staticmethod
    def _validate(value: Any, built_in: core_schema.ValidatorFunctionWrapHandler) -> Any:
        if isinstance(value, Gate):
            return value
        return _every_gate().validate_python(value) if added_gates() else built_in(value)


AnyGate = Annotated[
    Parity
    | LabelAgreement
    | MinCosine
    | MaxDivergence
    | MinEqualTokens
    | MaxDrop
    | MaxRelativeDrop
    | MinMetric
    | MaxSize
    | MaxFileSize
    | MaxParameters
    | MinSpeedup
    | MaxLatency
    | MaxMemory
    | MinDelegated
    | MinIntegerMacs
    | MinTokensPerSecond
    | MaxFirstToken
    | RunsIn,
    Field(discriminator="gate"),
    AddedGates(),
]
"""Every gate, by its `gate` key."""

BUILT_IN: dict[str, type[Gate]] = {
    gate.model_fields["gate"].default: gate for gate in get_args(get_args(AnyGate)[0])
}
"""Gates of this package by their `gate` key."""


@cache
def added_gates() -> dict[str, type[Gate]]:
    """Return packages' gates by key; raise Unavailable if one is broken or its key is taken."""
    added: dict[str, type[Gate]] = {}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        gate = load_entry_point(entry, "gate")
        key = gate.model_fields["gate"].default
        if key in BUILT_IN or key in added:
            raise Unavailable(f"gate {entry.name!r} of {entry.value}: the name is taken")
        added[key] = gate
    return added


@cache
def _every_gate() -> TypeAdapter[Gate]:
    gates = (*BUILT_IN.values(), *added_gates().values())
    union: Any = Annotated[Union[gates], Field(discriminator="gate")]  # noqa: UP007
    return TypeAdapter(union)


def gate_class(key: str) -> type[Gate]:
    """Return a gate's class by its `gate` key; the base class where its package is not here."""
    return BUILT_IN.get(key) or added_gates().get(key, Gate)


def rule_in_words(verdict: Verdict, metric: str) -> str:
    """Return a verdict's rule for people, with the metric's name."""
    return gate_class(verdict.gate).rule_in_words(verdict, metric)


def value_in_words(verdict: Verdict, metric: str) -> str:
    """Return what a gate measured, in the unit of :func:`rule_in_words`, or why it could not."""
    return gate_class(verdict.gate).value_in_words(verdict, metric)


def unlikely_points(points: float) -> str:
    """Return why so many points of an accuracy cannot be meant, and what to write; or nothing."""
    if 0 < points < FEWEST_POINTS:
        return (
            f"{points:g} is less than a hundredth of a percentage point; points are "
            f"percentage points, so for {100 * points:g} % write {100 * points:g}"
        )
    if points > MOST_POINTS:
        return (
            f"{points:g} would let more than half of all answers become wrong; points "
            f"are percentage points, expected at most {MOST_POINTS:g}"
        )
    return ""
