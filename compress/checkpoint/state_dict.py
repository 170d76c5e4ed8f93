"""Weights that may still lie on disk, and their way into a module."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from compress.common.errors import ArtifactInvalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    import torch

BYTES_AT_ONCE = 16 * 2**20
"""Bytes read from disk before they are copied into the module; a larger tensor goes alone."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor on disk."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


Weights: TypeAlias = "Mapping[str, torch.Tensor | StoredTensor]"


def load_state_(module: torch.nn.Module, state: Weights, source: str) -> None:
    """Copy a state dict into a module, in place, refusing any difference.

    Stored tensors are read a few at a time, so that the weights are never in memory twice. A name
    may be missing where the module ties it to one that is there.

    Raises:
        ArtifactInvalid: a tensor is missing, unexpected or of another shape; the message names it.
    """
    problems = differences(module.state_dict(), state)
    if problems:
        built_by = inspect.getmodule(type(module))
        place = f"{getattr(built_by, '__name__', '')}.{type(module).__name__}"
        raise ArtifactInvalid(
            f"{source} does not hold the weights of {place}: {'; '.join(problems)}"
        )
    for names in _few_at_a_time(state):
        module.load_state_dict({name: in_memory(state[name]) for name in names}, strict=False)


def differences(own: Mapping[str, torch.Tensor], state: Weights) -> list[str]:
    """Return in words what keeps weights from being those of a module with such a state dict."""
    tied = {place_of(own[k]) for k in own if k in state}
    missing = [k for k in own if k not in state and place_of(own[k]) not in tied]
    unexpected = [k for k in state if k not in own]
    shapes = [
        f"{k}: {tuple(state[k].shape)} instead of {tuple(own[k].shape)}"
        for k in own
        if k in state and tuple(state[k].shape) != tuple(own[k].shape)
    ]
    return [
        f"{label} {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
        for label, names in (("missing", missing), ("unexpected", unexpected), ("shape of", shapes))
        if names
    ]


def place_of(tensor: torch.Tensor | StoredTensor) -> tuple[object, ...]:
    """Return what is equal for two names of one tensor; empty tensors are all different."""
    if isinstance(tensor, StoredTensor) or not tensor.numel() or not tensor.data_ptr():
        return (id(tensor),)
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def _few_at_a_time(state: Weights) -> Iterator[list[str]]:
    names: list[str] = []
    gathered_bytes = 0
    for name, tensor in state.items():
        stored_bytes = tensor.nbytes if isinstance(tensor, StoredTensor) else 0
        if names and gathered_bytes + stored_bytes > BYTES_AT_ONCE:
            yield names
            names, gathered_bytes = [], 0
        names.append(name)
        gathered_bytes += stored_bytes
    yield names


def in_memory(tensor: torch.Tensor | StoredTensor) -> torch.Tensor:
    """Return the tensor, read from disk where it lies there."""
    return tensor.read() if isinstance(tensor, StoredTensor) else tensor


def refuse_elsewhere(index: Path, file: object) -> None:
    """Refuse a file that an index names and that does not lie beside it.

    Raises:
        ArtifactInvalid: it lies elsewhere.
    """
    if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\\" in file:
        raise ArtifactInvalid(f"checkpoint {index}: names {file!r}, expected a file beside it")
