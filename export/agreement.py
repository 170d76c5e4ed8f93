"""Whether an exported model answers like its source, whatever the size of each named axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compress.core.errors import StageFailed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from compress.core.artifact import Predictor
    from compress.core.signature import Signature

Outputs = tuple[torch.Tensor, ...]

BATCHES = (1, 3, 8)
SIZES = (8, 16, 4)
"""Sizes tried of named axes other than the batch; a model may refuse some."""
FLOAT_ERROR = 1e-3
"""Largest error, relative to the norm of the output, of a model that computes in floats."""
ROUNDED_ERROR = 0.1
"""The same with integer activations, where one unit in the last place of a float flips a rounding;
a gate states what accuracy is needed, this only tells a right graph from a wrong one."""


def check_agreement(
    expected: Predictor, got: Predictor, signature: Signature, *, rounded: bool = False
) -> None:
    """Compare two models at several sizes of every named axis.

    Args:
        expected: the source model.
        got: the exported one.
        signature: their interface.
        rounded: whether the models compute in integers.

    Raises:
        StageFailed: an axis is baked in, or the answers differ; the message names the axis.
    """
    limit = ROUNDED_ERROR if rounded else FLOAT_ERROR
    if not signature.dynamic_axes:
        inputs = signature.example()
        _compare(expected(*inputs), _answer(got, inputs, "the declared sizes"), "", limit)
    for axis in signature.dynamic_axes:
        for size, inputs, outputs in _variations(expected, signature, axis):
            place = f"axis {axis!r} at size {size}"
            _compare(outputs, _answer(got, inputs, place), place, limit)


def _variations(
    expected: Predictor, signature: Signature, axis: str
) -> Iterator[tuple[int, Outputs, Outputs]]:
    """Yield sizes of an axis with inputs of that size and the source model's outputs."""
    taken = 0
    refusal = ""
    for size in BATCHES if axis == signature.batch_axis else SIZES:
        inputs = signature.example(sizes={axis: size})
        try:
            outputs = expected(*inputs)
        except Exception as error:  # noqa: BLE001 - whatever the user's own code raises
            refusal = f"size {size}: {_first_line(error)}"
            continue
        taken += 1
        yield size, inputs, outputs
    if taken < 2:
        raise StageFailed(
            f"axis {axis!r} is declared dynamic and the source model takes one size only "
            f"({refusal}); declare a number instead of the name in model.inputs"
        )


def _answer(got: Predictor, inputs: Sequence[torch.Tensor], place: str) -> Outputs:
    try:
        return got(*inputs)
    except Exception as error:
        raise StageFailed(
            f"{place}: the exported model fails where the source answers, so the axis is baked in "
            f"({_first_line(error)}); compute it from the input's shape in the model's code"
        ) from error


def _compare(expected: Outputs, got: Outputs, place: str, limit: float) -> None:
    at = f"{place}: " if place else ""
    shapes, expected_shapes = ([tuple(t.shape) for t in ts] for ts in (got, expected))
    if shapes != expected_shapes:
        raise StageFailed(
            f"{at}the exported model returns shapes {shapes} and the source {expected_shapes}, so "
            "the axis is baked in; compute it from the input's shape in the model's code"
        )
    for a, b in zip(expected, got, strict=True):
        norm = torch.linalg.vector_norm(a.double())
        error = torch.linalg.vector_norm(b.double() - a.double()) / norm.clamp_min(1e-9)
        if not error <= limit:  # also true of NaN
            raise StageFailed(
                f"{at}the exported model's answers differ from the source's by {error:.2g} of "
                f"their norm, expected at most {limit:g}"
            )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
