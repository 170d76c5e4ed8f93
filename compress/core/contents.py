"""What a dataset holds, for a fingerprint of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from compress.core.batch import adapt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.utils.data import Dataset

SAMPLED_FOR_FINGERPRINT = 2048
"""Samples hashed at most of a dataset that does not hold its tensors in memory."""


def held_tensors(dataset: Dataset[Any]) -> Sequence[torch.Tensor] | None:
    """Return the tensors that a dataset holds in memory, if it does."""
    held = getattr(dataset, "tensors", None)
    if isinstance(held, tuple | list) and all(isinstance(t, torch.Tensor) for t in held):
        return held
    return None


def tensors_of(dataset: Dataset[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors of a dataset, or of evenly spaced samples of it."""
    held = held_tensors(dataset)
    if held is not None:
        yield from held
        return
    count = len(dataset)  # type: ignore[arg-type]
    for index in range(0, count, -(-count // SAMPLED_FOR_FINGERPRINT)):
        inputs, target = adapt(dataset[index])
        yield from inputs
        if target is not None:
            yield target


def update(digest: Any, tensor: torch.Tensor) -> None:
    """Take a tensor into a hash."""
    digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
