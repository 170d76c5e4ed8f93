"""Targets of a batch: one tensor, or lists and mappings of tensors, such as the boxes of images.

In a batch, a tensor has the samples on axis 0, a list has one entry for each sample (None: without
a target), and a mapping has one of both under each name. The entry of a sample is any nest of
mappings, lists and tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias, overload

from compress.common.errors import PipelineInvalid
from compress.common.lazy_modules import torch

Targets: TypeAlias = "torch.Tensor | list[Any] | dict[str, Any]"
"""The targets of a batch, or those of a sample."""


def as_target(value: Any, where: str = "a sample's target") -> Targets:
    """Return a sample's target as tensors, tuples as lists; raise PipelineInvalid if it cannot."""
    if isinstance(value, Mapping):
        return {str(name): as_target(x, f"{where}[{name!r}]") for name, x in value.items()}
    # Numbers and tensors without axes make one tensor; other parts may differ in length by sample.
    if isinstance(value, list | tuple) and any(
        isinstance(x, Mapping) or getattr(x, "ndim", 0) for x in value
    ):
        return [as_target(x, f"{where}[{i}]") for i, x in enumerate(value)]
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PipelineInvalid(
            f"{where} is {describe(value)}, expected a tensor, array or number, or a mapping, list "
            "or tuple of these"
        ) from error


def describe(value: Any) -> str:
    """Describe a value by its type, with the keys of a mapping."""
    if isinstance(value, Mapping):
        entries = ", ".join(repr(key) for key in value)
        return f"a {type(value).__name__} with the entries {entries or 'none'}"
    return "nothing (None)" if value is None else f"a {type(value).__name__}"


@overload
def map_leaves(targets: torch.Tensor, change: Callable[[Any], torch.Tensor]) -> torch.Tensor: ...
@overload
def map_leaves(targets: Any, change: Callable[[Any], Any]) -> Any: ...
def map_leaves(targets: Any, change: Callable[[Any], Any]) -> Any:
    """Return the same nest with each tensor changed."""
    if isinstance(targets, Mapping):
        return {name: map_leaves(entry, change) for name, entry in targets.items()}
    if isinstance(targets, list):
        return [map_leaves(entry, change) for entry in targets]
    return None if targets is None else change(targets)


def flatten(targets: Any) -> tuple[list[Any], Any]:
    """Return the tensors of a nest, and the nest with their numbers in place of them."""
    leaves: list[Any] = []

    def number(leaf: Any) -> int:
        leaves.append(leaf)
        return len(leaves) - 1

    structure = map_leaves(targets, number)
    return leaves, structure


def check_batch(targets: Targets, samples: int) -> str:
    """Return what is wrong with a batch's targets for a number of samples; empty if nothing is."""
    if isinstance(targets, Mapping):
        problems = ((name, check_batch(entry, samples)) for name, entry in targets.items())
        return next((f"entry {name!r}: {problem}" for name, problem in problems if problem), "")
    if isinstance(targets, list):
        return "" if len(targets) == samples else f"a list of {len(targets)}"
    if targets.dim() and len(targets) == samples:
        return ""
    return f"a tensor of shape {list(targets.shape)}"


@overload
def select(targets: torch.Tensor, samples: slice | torch.Tensor) -> torch.Tensor: ...
@overload
def select(targets: Targets, samples: slice | torch.Tensor) -> Targets: ...
def select(targets: Targets, samples: slice | torch.Tensor) -> Targets:
    """Return the targets of some samples of a batch, by a slice or a boolean mask."""
    if isinstance(targets, torch.Tensor):
        return targets[samples]
    if isinstance(targets, Mapping):
        return {name: select(entry, samples) for name, entry in targets.items()}
    if isinstance(samples, slice):
        return targets[samples]
    return [entry for entry, chosen in zip(targets, samples.tolist(), strict=True) if chosen]


def concatenate(batches: Sequence[Any]) -> Any:
    """Return the targets of several batches as those of one; raise RuntimeError if they differ."""
    kinds = {
        list if isinstance(y, list) else dict if isinstance(y, dict) else torch.Tensor
        for y in batches
    }
    if kinds == {torch.Tensor}:
        return torch.cat(list(batches))
    if kinds == {list}:
        return list(chain.from_iterable(batches))
    if kinds != {dict} or any(targets.keys() != batches[0].keys() for targets in batches):
        raise RuntimeError("targets of batches have other entries, or are of another kind")
    return {name: concatenate([targets[name] for targets in batches]) for name in batches[0]}


def interleave(shares: Sequence[Any], count: int) -> Any:
    """Merge the first of ``count`` shares in the order of the samples; the others are empty."""
    if isinstance(shares[0], dict):
        return {name: interleave([share[name] for share in shares], count) for name in shares[0]}
    length = sum(map(len, shares))
    merged: Any = [None] * length
    if isinstance(shares[0], torch.Tensor):
        merged = shares[0].new_empty((length, *shares[0].shape[1:]))
    for i, share in enumerate(shares):
        merged[i::count] = share
    return merged
