"""Blocks: the alike parts that a model is a list of, and how some of them are taken out."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

COUNTS = re.compile(
    r"^(num|n|total)?_?(hidden|encoder|decoder|text|vision)?_?(layers?|blocks?|depth)$"
)
"""Names of attributes that say how many blocks there are: ``num_hidden_layers``, ``depth`` …"""

PER_BLOCK = re.compile(r"layer|block")
"""What the names of lists hold that have an entry for each block: ``layer_types`` …"""

PLACES = ("layer_idx", "layer_id", "layer_index", "layer_number", "block_idx", "block_index")
"""Attributes that say which of the blocks a part belongs to: attention keeps its cache by it."""


def blocks_of(module: nn.Module) -> dict[str, int]:
    """Return each container of alike blocks by name, outer ones first → how many entries it has.

    A container is a list or sequence in which a class with parts of its own occurs more than once:
    the layers of a transformer, a stage of a ResNet. Entries of other classes count too.
    """
    return {
        name: len(part._modules) for name, part in module.named_modules() if alike_entries(part)
    }


def alike_entries(container: nn.Module) -> dict[int, nn.Module]:
    """Return the entries of a list or sequence that are alike blocks, by index; of others none."""
    if not isinstance(container, nn.ModuleList | nn.Sequential):
        return {}
    # A module that is held twice is one block, which the same weights are used for again.
    classes = Counter(type(child) for child in container.children() if any(child.children()))
    return {
        index: child
        for index, child in enumerate(container._modules.values())
        if child is not None and classes[type(child)] > 1
    }


def keep_blocks_(module: nn.Module, kept: Mapping[str, Sequence[int]]) -> None:
    """Keep only the given entries of lists and sequences, in place, and number them anew.

    What counts the entries is mended with them: attributes like ``depth`` of the module around a
    list, ``num_hidden_layers`` and lists like ``layer_types`` of the configuration nearest to it,
    and in the blocks that stay ``layer_idx`` and its like. Entries with names of their own keep
    them.

    Args:
        module: the module to cut; the caller owns it.
        kept: container → ascending indices of the entries that stay; names and indices are those
            before the cut.

    Raises:
        KeyError: a name is not that of a list or sequence in the module.
        IndexError: indices are none, not ascending, or outside their list.
    """
    for name, indices in kept.items():
        _check(module, name, indices)
    containers = {name: module.get_submodule(name) for name in kept}
    counting = {name: list(_counting(module, name)) for name in kept}
    for name, indices in kept.items():
        _take_out_(containers[name], indices, counting[name])


def _check(module: nn.Module, name: str, indices: Sequence[int]) -> None:
    container = dict(module.named_modules()).get(name)
    if not isinstance(container, nn.ModuleList | nn.Sequential):
        known = ", ".join(map(repr, blocks_of(module))) or "none"
        raise KeyError(f"{name!r} is no list of blocks; those there are: {known}")
    count = len(container)
    ascending = all(a < b for a, b in pairwise(indices))
    if not indices or not ascending or indices[0] < 0 or indices[-1] >= count:
        raise IndexError(
            f"{name!r} has {count} blocks, found the indices {list(indices)}; "
            f"expected some of 0 to {count - 1}, ascending"
        )


def _take_out_(container: nn.Module, indices: Sequence[int], counting: Sequence[Any]) -> None:
    before = list(container._modules.items())
    numbered = [key for key, _ in before] == [str(i) for i in range(len(before))]
    container._modules.clear()
    for place, index in enumerate(indices):
        key, block = before[index]
        container._modules[str(place) if numbered else key] = block
        if block is not None:
            _renumber_(block, index, place)
    for holder in counting:
        _recount_(holder, len(before), indices)


def _renumber_(block: nn.Module, before: int, after: int) -> None:
    for part in block.modules():
        for name in PLACES:
            value: Any = vars(part).get(name)
            if isinstance(value, int) and value == before:
                setattr(part, name, after)


def _recount_(holder: Any, count: int, indices: Sequence[int]) -> None:
    for name, value in list(vars(holder).items()):
        if type(value) is int and value == count and COUNTS.match(name):
            setattr(holder, name, len(indices))
        elif isinstance(value, list) and len(value) == count and PER_BLOCK.search(name):
            setattr(holder, name, [value[i] for i in indices])


def _counting(module: nn.Module, container: str) -> Iterator[Any]:
    """Yield what may count a container's entries: the module around it, the next configuration."""
    path = container.split(".") if container else []
    around = [module.get_submodule(".".join(path[:depth])) for depth in reversed(range(len(path)))]
    yield from around[:1]
    configurations = (getattr(part, "config", None) for part in around)
    yield from [c for c in configurations if hasattr(c, "__dict__")][:1]
