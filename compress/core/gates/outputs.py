"""Gates on how near a result's outputs are to those of the model compared with."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from compress.common.config import Fraction
from compress.common.errors import StageFailed
from compress.core.gates.gate import Gate
from compress.core.metrics.labels import labelled_outputs, predicted_decisions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch
    from pydantic import JsonValue

    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context
    from compress.core.objectives.task import Task

NO_ELEMENTS = "the outputs have no elements, so that there is nothing to compare"


def paired_outputs(
    before: Artifact, after: Artifact, context: Context
) -> Iterator[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]]:
    """Yield both models' outputs for the same batches, on the CPU; there are as many of both."""
    with context.predictor(before) as expected, context.predictor(after) as got:
        batch_size = context.judged_batch_size(before, after)
        for inputs in context.comparison_inputs(before.signature, batch_size):
            one, other = (tuple(x.cpu() for x in run(*inputs)) for run in (expected, got))
            if len(one) != len(other):
                raise StageFailed(f"{len(one)} outputs against {len(other)}")
            yield one, other


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
