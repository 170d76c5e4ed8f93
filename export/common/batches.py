"""What compiled code takes at once: checks of its inputs, and batches in parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from compress.common.signature import Signature

    Tensors = tuple[torch.Tensor, ...]


def refuse_misfit(
    signature: Signature, inputs: Sequence[torch.Tensor], *, bounded: bool = False
) -> None:
    """Raise ValueError for inputs of other types or shapes than a signature's.

    Compiled code reads memory by the sizes that it was made for, whatever it is given. With
    `bounded`, named axes are also held to the signature's bounds.
    """
    sizes: dict[str, int] = {}
    for spec, tensor in zip(signature.inputs, inputs, strict=True):
        fits = tensor.dim() == len(spec.shape) and str(tensor.dtype) == f"torch.{spec.dtype}"
        for axis, size in zip(spec.shape, tensor.shape, strict=False):
            if isinstance(axis, int):
                fits &= size == axis
            else:  # a named axis has the same size in all inputs
                fits &= size == sizes.setdefault(axis, size)
                fits &= not bounded or size in signature.bounds(axis)
        if not fits:
            expected = ", ".join(
                f"{axis} of {signature.bounds(axis)}"
                if bounded and isinstance(axis, str)
                else str(axis)
                for axis in spec.shape
            )
            raise ValueError(
                f"input {spec.name} is {tensor.dtype} {list(tensor.shape)}, expected "
                f"{spec.dtype} [{expected}]"
            )


def in_parts(
    run: Callable[..., Tensors], signature: Signature, largest: int
) -> Callable[..., Tensors]:
    """Return a function that runs at most `largest` samples at once, on the first axis."""
    batched = [spec.shape[:1] == (signature.batch_axis,) for spec in signature.inputs]

    def run_in_parts(*inputs: torch.Tensor) -> Tensors:
        rows, outputs = len(inputs[0]), []
        for start in range(0, max(rows, 1), largest):
            part = slice(start, start + largest)
            outputs.append(
                run(*(x[part] if b else x for x, b in zip(inputs, batched, strict=True)))
            )
        return tuple(torch.cat(column) for column in zip(*outputs, strict=True))

    return run_in_parts
