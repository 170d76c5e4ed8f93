"""Depth pruning: finds the repeated blocks of a model, and removes some of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

COUNTS = re.compile(
    r"^(num|n|total)?_?(hidden|encoder|decoder|text|vision)?_?(layers?|blocks?|depth)$"
)
"""Attributes that hold the number of blocks: ``num_hidden_layers``, ``depth`` …"""

PER_BLOCK = re.compile(r"layer|block")
"""Part of the name of a list with one entry per block: ``layer_types`` …"""

BLOCK_INDEX = ("layer_idx", "layer_id", "layer_index", "layer_number", "block_idx", "block_index")
"""Attributes that hold a block's index; attention finds its key-value cache by it."""


def blocks_of(module: nn.Module) -> dict[str, int]:
    """Return the name of each container of repeated blocks, outer ones first → its length.

    A container is a ModuleList or Sequential in which a class with submodules occurs more than
    once: the layers of a transformer, a stage of a ResNet. Entries of other classes count too.
    """
    return {name: len(m._modules) for name, m in module.named_modules() if alike_entries(m)}


def alike_entries(container: nn.Module) -> dict[int, nn.Module]:
    """Return the repeated blocks of a ModuleList or Sequential by index; {} for other modules."""
    if not isinstance(container, nn.ModuleList | nn.Sequential):
        return {}
    # children() yields a module once, even if the container holds it twice with shared weights.
    classes = Counter(type(child) for child in container.children() if any(child.children()))
    blocks = enumerate(container._modules.values())
    return {i: block for i, block in blocks if block is not None and classes[type(block)] > 1}


def keep_blocks_(module: nn.Module, kept: Mapping[str, Sequence[int]]) -> None:
    """Remove all but the entries with the given ascending indices from containers, in place.

    Attributes that count the entries are updated: ``depth`` and the like of the module around the
    container, ``num_hidden_layers`` and lists such as ``layer_types`` of the nearest configuration,
    and ``layer_idx`` and the like in the blocks that stay. Entries with names keep their names.
    Raises KeyError, IndexError: a name is no ModuleList or Sequential, or indices do not fit it.
    """
    for name, indices in kept.items():
        _check(module, name, indices)
    # All are looked up before any is changed: containers may lie in each other.
    containers = {name: module.get_submodule(name) for name in kept}
    owners = {name: list(_count_owners(module, name)) for name in kept}
    for name, indices in kept.items():
        entries = list(containers[name]._modules.items())
        is_numbered = [key for key, _ in entries] == [str(i) for i in range(len(entries))]
        containers[name]._modules.clear()
        for place, index in enumerate(indices):
            key, block = entries[index]
            containers[name]._modules[str(place) if is_numbered else key] = block
            parts = () if block is None else block.modules()
            for part in parts:
                for attribute in BLOCK_INDEX:
                    value: Any = vars(part).get(attribute)
                    if isinstance(value, int) and value == index:
                        setattr(part, attribute, place)
        count = len(entries)
        for owner in owners[name]:
            for attribute, old in list(vars(owner).items()):
                if type(old) is int and old == count and COUNTS.match(attribute):
                    setattr(owner, attribute, len(indices))
                elif isinstance(old, list) and len(old) == count and PER_BLOCK.search(attribute):
                    setattr(owner, attribute, [old[i] for i in indices])


def _check(module: nn.Module, name: str, indices: Sequence[int]) -> None:
    container = dict(module.named_modules()).get(name)
    if not isinstance(container, nn.ModuleList | nn.Sequential):
        known = ", ".join(map(repr, blocks_of(module))) or "none"
        raise KeyError(f"{name!r} is not a list of blocks; those there are: {known}")
    count = len(container)
    ascending = all(a < b for a, b in pairwise(indices))
    if not indices or not ascending or indices[0] < 0 or indices[-1] >= count:
        raise IndexError(
            f"{name!r} has {count} blocks, found the indices {list(indices)}; "
            f"expected some of 0 to {count - 1}, ascending"
        )


def _count_owners(module: nn.Module, container: str) -> Iterator[Any]:
    """Yield what may hold a container's length: the module around it, the nearest config."""
    path = container.split(".") if container else []
    around = [module.get_submodule(".".join(path[:depth])) for depth in reversed(range(len(path)))]
    yield from around[:1]
    configurations = (getattr(part, "config", None) for part in around)
    yield from [c for c in configurations if hasattr(c, "__dict__")][:1]
