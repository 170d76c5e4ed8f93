"""Optimization profiles: smallest, usual and largest size of each named axis of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from compress.common.errors import StageFailed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from compress.common.signature import Signature, TensorSpec

BATCH = (1, 8, 32)
"""Sizes of the batch where the stage has none."""
LENGTH = 128
"""The usual size of another axis of which only the bounds are known, or the nearest allowed."""


class Shapes(NamedTuple):
    """The shapes of one input, as an optimization profile takes them."""

    smallest: tuple[int, ...]
    usual: tuple[int, ...]
    largest: tuple[int, ...]


def sizes_of(
    signature: Signature, given: Mapping[str, Sequence[int]]
) -> dict[str, tuple[int, int, int]]:
    """Return the sizes of every named axis.

    Raises:
        StageFailed: an axis other than the batch has none, or there is no such axis.
    """
    axes = signature.dynamic_axes
    for name in given:
        if name not in axes:
            raise StageFailed(
                f"sizes: {name!r} is not a named axis of the model's inputs; they have "
                f"{', '.join(axes) or 'none'}"
            )
    all_sizes = {}
    for name in axes:
        bounds = signature.bounds(name)
        usual = BATCH if name == signature.batch_axis else None
        if usual is None and bounds.max is not None:
            usual = (bounds.min, bounds.nearest(LENGTH), bounds.max)
        sizes = given.get(name, usual)
        if sizes is None:
            raise StageFailed(
                f"axis {name!r} has no sizes to build the engine for; add them, for example "
                f"sizes: {{{name}: [1, 128, 512]}}, or declare its bounds in model.axes"
            )
        if not all(size in bounds for size in sizes):
            raise StageFailed(
                f"sizes: {{{name}: {[*sizes]}}} leaves what model.axes allows, {bounds}"
            )
        all_sizes[name] = (sizes[0], sizes[1], sizes[2])
    return all_sizes


def shapes_of(spec: TensorSpec, sizes: Mapping[str, Sequence[int]]) -> Shapes:
    """Return the shapes of an input at the three sizes."""
    return Shapes(*(spec.sized({name: s[i] for name, s in sizes.items()}) for i in range(3)))


def with_fixed_sizes(signature: Signature, sizes: Mapping[str, int]) -> Signature:
    """Return a signature whose named axes are replaced by numbers."""
    inputs = tuple(
        spec.model_copy(update={"shape": spec.sized(dict(sizes))}) for spec in signature.inputs
    )
    return signature.model_copy(update={"inputs": inputs})
