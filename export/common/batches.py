"""Answer batches that are larger than what an exported model takes at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from compress.common.signature import Signature

    Tensors = tuple[torch.Tensor, ...]


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
