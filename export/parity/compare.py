"""Whether an exported model answers like its source, whatever the size of each named axis."""

from __future__ import annotations

import logging
import math
import re
from typing import TYPE_CHECKING, Any

import torch

from compress.artifacts.graph_model import GraphModel
from compress.common.errors import StageFailed
from compress.common.forward import accept_any_batch
from compress.common.tensor_difference import relative_error
from export.parity import sample_parity
from export.parity.adversarial_inputs import adversarial_inputs, check_on_hostile
from export.parity.float64_reference import Float64Reference
from export.parity.sample_parity import ELSEWHERE, NOTHING_FINITE, check_on_samples, val_inputs

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence

    from compress.artifacts.artifact import Artifact
    from compress.common.forward import Predictor
    from compress.common.signature import Signature
    from compress.core.context import Context

    Limits = Mapping[str, int]

logger = logging.getLogger(__name__)

Outputs = tuple[torch.Tensor, ...]

BATCHES = (1, 3, 8)
SIZES = (8, 16, 4, 7)
"""Sizes tried of named axes other than the batch, an odd one too; a model may refuse some."""
LARGEST = 1024
"""The largest size of an axis that is bounded is tried too, up to here: answers take memory."""
FLOAT_ERROR = 1e-3
"""Largest error, relative to the norm of the output, of a model that computes in floats."""
ROUNDED_ERROR = 0.1
"""The same with integer activations, where one unit in the last place of a float flips a rounding;
a gate states what accuracy is needed, this only tells a right graph from a wrong one."""
ASSERTED = re.compile(
    r"Runtime assertion failed for expression|Expected .+ to be True but received"
)
"""What a graph of torch.export says, or AOTInductor's code, of sizes that were ruled out."""
RULED_OUT = (
    ": the model's code, or torch's own, goes another way where this holds than where it does not; "
    "torch.export followed one way, and refuses the other sizes (it takes it that none within the "
    "model is 1); bound the axis with model.axes, or use export_onnx or export_torchscript"
)
BAKED_IN = (
    ", and is right at the sizes it was made with, so the axis is baked in; compute it from the "
    "input's shape in the model's code"
)


class Disagreement(StageFailed):
    """Two models answer otherwise to an input that is known."""

    def __init__(self, message: str, kind: str = "", inputs: Outputs = ()) -> None:
        # Made of the message alone too, as errors are when a stage's name is put before them.
        super().__init__(message)
        self.kind = kind
        """What sort of input it is."""
        self.inputs = inputs


def prove_equal(
    source: Artifact,
    got: Predictor,
    context: Context,
    limits: Limits | None = None,
    operators: Container[str] = (),
) -> None:
    """Compare an exported model with its source: at several sizes, on `val`, on hostile inputs.

    Args:
        source: what was exported.
        got: the exported model.
        context: with the data and threads of this run.
        limits: the largest size of each named axis that has one.
        operators: those that the exported model has, by their names.

    Raises:
        StageFailed: they answer otherwise; the message says where.
    """
    with source.open(threads=context.threads) as expected:
        compare(source, expected, got, list(val_inputs(context)), limits, operators)


def compare(
    source: Artifact,
    expected: Predictor,
    got: Predictor,
    seen: Sequence[Outputs],
    limits: Limits | None = None,
    operators: Container[str] = (),
) -> None:
    """Compare two models: at several sizes, on real inputs, on hostile ones.

    Args:
        source: what was exported.
        expected: its answers.
        got: the exported model.
        seen: batches of real inputs.
        limits: the largest size of each named axis that has one.
        operators: those that the exported model has, by their names.

    Raises:
        StageFailed: they answer otherwise; the message says where.
    """
    signature, rounded = source.signature, isinstance(source, GraphModel)
    _refuse_outside(signature, seen)
    truth = Float64Reference(source, expected)
    check_agreement(expected, got, signature, rounded=rounded, truth=truth, limits=limits)
    found = check_on_samples(
        accept_any_batch(expected, signature),
        accept_any_batch(got, signature),
        seen,
        rounded=rounded,
    )
    limit = sample_parity.ROUNDED_ERROR if rounded else FLOAT_ERROR
    kinds = adversarial_inputs(signature, seen, operators)
    hostile = check_on_hostile(expected, got, signature, kinds, limit, truth)
    if hostile:
        kind, inputs, error = hostile
        raise Disagreement(
            f"on hostile inputs ({kind}) the exported model's answers differ from the source's by "
            f"{error:.2g} of their norm, expected at most {limit:g}",
            kind,
            inputs,
        )
    if found.samples:
        logger.info(
            "on %d samples of `val` answers differ by %.2g of their spread, %d labels clearly",
            *(found.samples, found.relative_error, found.changed),
        )


def _refuse_outside(signature: Signature, seen: Sequence[Outputs]) -> None:
    """Refuse real inputs of a size that was declared not to come."""
    for inputs in seen:
        for spec, x in zip(signature.inputs, inputs, strict=True):
            for axis, size in zip(spec.shape, x.shape, strict=True):
                if isinstance(axis, str) and size not in signature.bounds(axis):
                    raise StageFailed(
                        f"axis {axis!r} has size {size} in a sample of `val`, and model.axes "
                        f"allows {signature.bounds(axis)}"
                    )


def prove_again(source: Artifact, artifact: Artifact, context: Context) -> None:
    """Compare an artifact from an earlier run with its source, on the data of this one.

    Raises:
        StageFailed: they answer otherwise.
    """
    with artifact.open(threads=context.threads) as got:
        limits: Any = artifact.manifest.facts.get("axis_limits")
        operators: Any = artifact.manifest.facts.get("operators", ())
        prove_equal(source, got, context, limits, operators)


def cases(
    signature: Signature, seen: Sequence[Outputs], limits: Limits | None = None
) -> Iterator[tuple[str, Outputs]]:
    """Yield every kind of input that two models are compared on, with its name.

    Args:
        signature: their interface.
        seen: batches of real inputs.
        limits: the largest size of each named axis that has one.
    """
    yield "seeded", signature.example()
    for axis in signature.dynamic_axes:
        for size in _sizes(signature, axis, limits):
            yield f"{axis} of {size}", signature.example(sizes={axis: size})
    rows = signature.inputs[0].shape[0] if signature.inputs[0].shape else None
    for i, inputs in enumerate(seen):
        fixed = tuple(x[:rows] for x in inputs) if isinstance(rows, int) else inputs
        if not isinstance(rows, int) or len(fixed[0]) == rows:
            yield f"val, batch {i}", fixed
    yield from adversarial_inputs(signature, seen)


def check_agreement(
    expected: Predictor,
    got: Predictor,
    signature: Signature,
    *,
    rounded: bool = False,
    truth: Float64Reference | None = None,
    limits: Limits | None = None,
) -> None:
    """Compare two models at several sizes of every named axis.

    Args:
        expected: the source model.
        got: the exported one.
        signature: their interface.
        rounded: whether the models compute in integers.
        truth: what excuses a difference.
        limits: the largest size of each named axis that has one.

    Raises:
        StageFailed: an axis is baked in, or the answers differ; the message names the axis.
    """
    limit = ROUNDED_ERROR if rounded else FLOAT_ERROR
    example = signature.example()
    if not signature.dynamic_axes:
        problem = _problem(got, example, expected(*example), limit)
        if problem and not _excused(truth, got, example, limit):
            raise Disagreement(problem, "seeded", example)
    for axis in signature.dynamic_axes:
        for size, inputs, outputs in _variations(expected, signature, axis, limits):
            problem = _problem(got, inputs, outputs, limit)
            if problem and not _excused(truth, got, inputs, limit):
                baked_in = _problem(got, example, expected(*example), limit) is None
                advice = BAKED_IN if baked_in else ""
                advice = RULED_OUT if ASSERTED.search(problem) else advice
                raise Disagreement(
                    f"axis {axis!r} at size {size}: {problem}{advice}", f"{axis} of {size}", inputs
                )


def _excused(truth: Float64Reference | None, got: Predictor, inputs: Outputs, limit: float) -> bool:
    """Whether float32 itself is as far off; False where the exported model fails."""
    if truth is None:
        return False
    try:
        return truth.explains(inputs, got(*inputs), limit)
    except Exception:  # noqa: BLE001 - each runtime raises its own, and the problem tells it
        return False


def _variations(
    expected: Predictor, signature: Signature, axis: str, limits: Limits | None
) -> Iterator[tuple[int, Outputs, Outputs]]:
    """Yield sizes of an axis with inputs of that size and the source model's outputs."""
    taken = 0
    refusal = ""
    for size in _sizes(signature, axis, limits):
        inputs = signature.example(sizes={axis: size})
        try:
            outputs = expected(*inputs)
        except Exception as error:  # noqa: BLE001 - whatever the user's own code raises
            refusal = f"size {size}: {_one_line(error)}"
            continue
        taken += 1
        yield size, inputs, outputs
    if taken < 2:
        raise StageFailed(
            f"axis {axis!r} is declared dynamic and the source model takes one size only "
            f"({refusal}); declare a number instead of the name in model.inputs"
        )


def _sizes(signature: Signature, axis: str, limits: Limits | None) -> tuple[int, ...]:
    """Return the sizes of an axis that are tried: usual ones, and the ends of what is allowed."""
    bounds, limit = signature.bounds(axis), (limits or {}).get(axis, 0)
    usual = [s for s in (BATCHES if axis == signature.batch_axis else SIZES) if s in bounds]
    largest = min(limit or math.inf, bounds.max or math.inf)
    if (not usual or usual[0] < largest) and largest <= LARGEST:
        usual.append(int(largest))
    if bounds.min > 1:
        usual += [bounds.min, bounds.nearest(2 * bounds.min)]
    return tuple(dict.fromkeys(usual))


def _problem(
    got: Predictor, inputs: Sequence[torch.Tensor], expected: Outputs, limit: float
) -> str | None:
    """Return how the exported model's answer to one input is wrong, or None."""
    try:
        answers = got(*inputs)
    except Exception as error:  # noqa: BLE001 - each runtime raises its own
        return f"the exported model fails where the source answers ({_one_line(error)})"
    shapes, expected_shapes = ([tuple(t.shape) for t in ts] for ts in (answers, expected))
    if shapes != expected_shapes:
        return f"the exported model returns shapes {shapes} and the source {expected_shapes}"
    if all(a.numel() and not a.isfinite().any() for a in expected):
        return NOTHING_FINITE
    for pair in zip(expected, answers, strict=True):
        relative = relative_error(*pair)
        if math.isinf(relative):
            return ELSEWHERE
        if not relative <= limit:
            return (
                f"the exported model's answers differ from the source's by {relative:.2g} of their "
                f"norm, expected at most {limit:g}"
            )
    return None


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1] if "TorchScript interpreter" in lines[0] else lines[0]
