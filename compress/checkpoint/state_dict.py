"""State dicts whose tensors may still be on disk, and loading them into a module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from compress.common.errors import ArtifactInvalid, first_few

if TYPE_CHECKING:
    import torch

COMPLEX = "complex numbers for the real"
MISSING_BUFFERS, UNEXPECTED = "missing buffers", "unexpected"
BYTES_AT_ONCE = 16 * 2**20
"""Bytes read from disk before they are copied into the module; a larger tensor is read alone."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor on disk: its shape and dtype, and functions that read it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    read_headers: Callable[[], object] = int
    """Reads what describes it where it is stored, but not its bytes."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


Weights: TypeAlias = "Mapping[str, torch.Tensor | StoredTensor]"


def load_state_(module: torch.nn.Module, state: Weights, source: str) -> None:
    """Copy a state dict into a module, in place, or raise ArtifactInvalid naming what differs.

    A name may be missing if the module ties it to a name that is present, and names may differ
    where the module's own loading makes up for it, such as BatchNorm's for older checkpoints.
    """
    own = module.state_dict(keep_vars=True)
    built_by = inspect.getmodule(type(module))
    place = f"{getattr(built_by, '__name__', '')}.{type(module).__name__}"
    if refused := describe_misfit(source, place, own, state):
        parts = (own, state)
        sizes = [sum(prod(x.shape) * x.dtype.itemsize for x in part.values()) for part in parts]
        is_larger = sizes[1] > 2 * sizes[0] + BYTES_AT_ONCE
        if is_larger or COMPLEX in refused:
            raise ArtifactInvalid(refused)
        try:
            weights = {name: in_memory(tensor) for name, tensor in state.items()}
            left = module.load_state_dict(weights, strict=False)
        except Exception as error:  # a module's own loading may raise any
            raise ArtifactInvalid(refused) from error
        loaded = {storage_key(own[name]) for name in own if name not in left.missing_keys}
        missing = {storage_key(own[name]) for name in left.missing_keys if name in own}
        if left.unexpected_keys or missing - loaded:
            raise ArtifactInvalid(refused)
        return
    # Stored tensors are read a few at a time, so that the weights are never in memory twice.
    names: list[str] = []
    pending_bytes = 0
    for name, tensor in state.items():
        stored_bytes = tensor.nbytes if isinstance(tensor, StoredTensor) else 0
        if names and pending_bytes + stored_bytes > BYTES_AT_ONCE:
            _copy_(module, state, names)
            names, pending_bytes = [], 0
        names.append(name)
        pending_bytes += stored_bytes
    _copy_(module, state, names)


def _copy_(module: torch.nn.Module, state: Weights, names: list[str]) -> None:
    module.load_state_dict({name: in_memory(state[name]) for name in names}, strict=False)


def mismatches(own: Mapping[str, torch.Tensor], state: Weights) -> list[str]:
    """Describe how weights differ from a module's state dict; empty where they fit."""
    shared = [k for k in own if k in state]
    tied = {storage_key(own[k]) for k in shared}
    missing = [k for k in own if k not in state and storage_key(own[k]) not in tied]
    unexpected = [k for k in state if k not in own]
    shapes = [
        f"{k}: {tuple(state[k].shape)} instead of {tuple(own[k].shape)}"
        for k in shared
        if tuple(state[k].shape) != tuple(own[k].shape)
    ]
    # Copying would leave out the imaginary parts.
    complex_ = [k for k in shared if state[k].dtype.is_complex and not own[k].dtype.is_complex]
    buffers = [k for k in missing if type(own[k]).__name__ != "Parameter"]
    found = {
        MISSING_BUFFERS: buffers,
        "missing": [k for k in missing if k not in buffers],
        UNEXPECTED: unexpected,
        "shape of": shapes,
        COMPLEX: complex_,
    }
    return [f"{label} {first_few(names)}" for label, names in found.items() if names]


def describe_misfit(
    source: str, model: str, own: Mapping[str, torch.Tensor], state: Weights
) -> str:
    """Return the refusal of weights that differ from a model's; empty where they fit."""
    problems = mismatches(own, state)
    refused = f"{source} does not hold the weights of {model}: {'; '.join(problems)}"
    if any(not problem.startswith((MISSING_BUFFERS, UNEXPECTED)) for problem in problems):
        return refused
    # The constructor may compute a buffer, and have no use for what is left; nothing else can.
    way_out = "model.load_state_dict(…, strict=False), torch.save(model.state_dict(), …)"
    also = f"; where the model is right without them, save it as it loads: {way_out}"
    return refused + also if problems else ""


def storage_key(tensor: torch.Tensor | StoredTensor) -> tuple[object, ...]:
    """Return a key that is equal for two names of one (tied) tensor; empty tensors never are."""
    if isinstance(tensor, StoredTensor) or not tensor.numel() or not tensor.data_ptr():
        return (id(tensor),)
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def in_memory(tensor: torch.Tensor | StoredTensor) -> torch.Tensor:
    """Return the tensor, read from disk where it lies there."""
    return tensor.read() if isinstance(tensor, StoredTensor) else tensor


def as_dtype(
    tensor: torch.Tensor | StoredTensor, dtype: torch.dtype
) -> torch.Tensor | StoredTensor:
    """Return a tensor in another type, which it is converted to when it is read."""
    if tensor.dtype == dtype:
        return tensor
    return StoredTensor(tuple(tensor.shape), dtype, lambda: in_memory(tensor).to(dtype))


def zero_share(state: Weights) -> float:
    """Return the share of zeros among the entries of matrices and kernels."""
    zeros = entries = 0
    for tensor in state.values():
        if len(tensor.shape) > 1:
            zeros += int((in_memory(tensor) == 0).sum())
            entries += prod(tensor.shape)
    return zeros / max(1, entries)
