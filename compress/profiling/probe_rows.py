"""Rows that a model is probed with: from `val`, seeded, or far from any real one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from compress.common.signature import EXAMPLE_LENGTH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from compress.common.signature import Signature, TensorSpec
    from compress.data.splits import Splits

    Array = NDArray[Any]

ROWS = 8
"""Rows of the batch that is probed; as many others serve as their neighbours."""
EXTREME = 1000.0
"""How many times larger than real values extreme ones are."""


def as_arrays(inputs: Sequence[Any]) -> list[Array]:
    """Convert tensors to arrays; bfloat16, which numpy lacks, becomes float32."""
    import torch

    return [(t.float() if t.dtype == torch.bfloat16 else t).cpu().numpy() for t in inputs]


def val_rows(data: Splits, signature: Signature) -> tuple[list[Array], list[list[Array]]]:
    """Read rows of ``val``, and the first of them unpadded; empty for a row that was not padded."""
    # Evenly spaced: the first samples of a split are often of one class, and neighbours of one
    # source.
    samples = len(data.split("val"))  # type: ignore[arg-type]
    leading = signature.inputs[0].shape[:1]
    wanted = 2 * leading[0] if leading and isinstance(leading[0], int) else 2 * ROWS
    count = min(wanted, samples)
    order = [i * samples // count for i in range(count)]
    # Every other row is probed, and those in between are its neighbours.
    order = order[::2] + order[1::2]
    (batch,) = data.read("val", order, count)
    rows = as_arrays(batch.inputs)
    shapes = [array.shape[1:] for array in rows]
    unpadded = []
    has_varying_axes = bool({*signature.dynamic_axes} - {signature.batch_axis})
    for i in order[:ROWS] if has_varying_axes else ():
        (single,) = data.read("val", [i], 1)
        inputs = as_arrays(single.inputs)
        was_padded = [array.shape[1:] for array in inputs] != shapes
        unpadded.append(inputs if was_padded else [])
    return rows, unpadded


def seeded_rows(
    signature: Signature, rows: int, seed: int = 0, length: int = EXAMPLE_LENGTH
) -> list[Array]:
    """Generate rows as :meth:`Signature.example` does, but without torch and of other numbers.

    Named axes but the batch have `length` elements, or the nearest number that is allowed.
    """
    generator = np.random.default_rng(seed)
    sizes = {axis: signature.bounds(axis).nearest(length) for axis in signature.dynamic_axes}
    sizes |= {signature.batch_axis or "": rows}
    signature.refuse_too_large(sizes)
    arrays: list[Array] = []
    for spec in signature.inputs:
        shape = spec.sized(sizes)
        dtype = np.dtype("float32" if spec.dtype == "bfloat16" else spec.dtype)
        if dtype.kind == "f":
            arrays.append(generator.standard_normal(shape).astype(dtype))
        elif spec.unmasked_value is not None and shape[-1]:
            lengths = generator.integers(1, max(shape[-1], 2), (*shape[:-1], 1))
            arrays.append(spec.as_mask(np.arange(shape[-1]) < lengths).astype(dtype))
        else:
            arrays.append(generator.integers(*spec.invented_integers, shape).astype(dtype))
    return arrays


def extreme_rows(
    inputs: Sequence[Array], specs: Sequence[TensorSpec], *, masks: bool = True
) -> list[Array]:
    """Generate neighbours unlike any real row, of the same shapes.

    Floats become a thousand times larger, constant or zero; integers others of the range seen. With
    ``masks``, masks let through everything, nothing (which some models refuse), or one element.
    """
    generator = np.random.default_rng(0)
    changed = []
    for array, spec in zip(inputs, specs, strict=True):
        rows = array.copy()
        for i, row in enumerate(array if array.ndim and array.size else ()):
            if spec.unmasked_value is not None:
                if masks:
                    # All elements, none, or the first.
                    count = (rows.shape[-1], 0, 1)[i // 2 % 3]
                    rows[i] = spec.as_mask(np.arange(rows.shape[-1]) < count)
            elif array.dtype.kind == "f":
                finite = np.where(np.isfinite(row), row, 0).astype(np.float64)
                largest = max(float(np.abs(finite).max()), 1.0) * EXTREME
                constant = np.full_like(finite, largest)
                floats = (finite * EXTREME, constant, -finite * EXTREME, finite * 0)
                bound = float(np.finfo(array.dtype).max) / 2
                rows[i] = np.clip(floats[i // 2 % len(floats)], -bound, bound)
            elif array.dtype.kind == "b":
                rows[i] = ~row
            else:
                # Within the range seen: others may lie outside an embedding table.
                low, high = int(array.min()), int(array.max())
                integers = (
                    np.full_like(row, high),
                    generator.integers(low, high, row.shape, dtype=array.dtype, endpoint=True),
                    np.full_like(row, low),
                    generator.permutation(row.ravel()).reshape(row.shape),
                )
                rows[i] = integers[i // 2 % len(integers)]
        changed.append(rows)
    return changed
