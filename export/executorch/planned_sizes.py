"""The sizes of named axes for which a program's memory is planned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.common.errors import StageFailed
from compress.common.signature import AxisBounds
from compress.graph.axis_bounds import axis_limits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.export import ExportedProgram

    from compress.common.signature import Signature


def planned_sizes(
    program: ExportedProgram, signature: Signature, largest_batch: int
) -> dict[str, list[int]]:
    """Return the smallest and largest size of each named axis.

    Raises:
        StageFailed: neither `model.axes` nor the model's code bounds an axis.
    """
    limits, sizes = axis_limits(program, signature), {}
    for name in signature.dynamic_axes:
        bounds = signature.bounds(name)
        known = [size for size in (bounds.max, limits.get(name)) if size is not None]
        if name == signature.batch_axis:
            known = [largest_batch]
        if not known:
            raise StageFailed(
                f"axis {name!r} has no largest size, for which ExecuTorch plans memory; declare "
                f"it, for example model.axes: {{{name}: {{max: 128}}}}"
            )
        sizes[name] = [bounds.min, min(known)]
    return sizes


def bounded_signature(signature: Signature, sizes: Mapping[str, Sequence[int]]) -> Signature:
    """Return a signature with bounds for every named axis; one that has a single size is fixed."""
    fixed = {name: least for name, (least, most) in sizes.items() if least == most}
    axes = {
        n: AxisBounds(min=least, max=most) for n, (least, most) in sizes.items() if n not in fixed
    }
    inputs = tuple(
        spec.model_copy(update={"shape": tuple(fixed.get(str(axis), axis) for axis in spec.shape)})
        for spec in signature.inputs
    )
    return signature.model_copy(update={"inputs": inputs, "axes": axes})
