"""Integers written into a module, like its number of heads, that must change with a cut."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from compress.pruning.families import AxisGraph, Family

MOST_COMBINED = 5
"""Attributes tried in every combination; of more, only all together."""


def attribute_changes(
    module: nn.Module, family: Family, graph: AxisGraph, removed: Sequence[int]
) -> Iterator[dict[str, int]]:
    """Yield sets of changes that may go with a cut, the empty one first; a proof has to choose.

    An attribute is a candidate when its module, or one inside it, makes the family's channels and
    its value is a size that the cut changes: a number of channels or heads, or an axis's length.

    Args:
        module: the module before the cut.
        family: the channels.
        graph: says how many entries of each axis the channels take.
        removed: the channels that go.
    """
    yield {}
    candidates = list(_candidates(module, family, _new_sizes(family, graph, removed)).items())
    fewest = 1 if len(candidates) <= MOST_COMBINED else len(candidates)
    for count in range(len(candidates), fewest - 1, -1):
        yield from map(dict, combinations(candidates, count))


def _new_sizes(family: Family, graph: AxisGraph, removed: Sequence[int]) -> dict[int, int]:
    """Return old size → new size: of the family, of axes, and of axes counted in whole blocks."""
    block = min(graph.entries(slot, removed[0]) for slot in family.slots)
    sizes = {len(family.channels): len(family.channels) - len(removed)}
    for slot in family.slots:
        before = len(graph.classes[slot])
        after = before - graph.entries(slot, *removed)
        sizes.setdefault(before, after)
        # A group of heads that share keys takes several blocks of a head's width.
        sizes.setdefault(before // block, after // block)
    return sizes


def _candidates(module: nn.Module, family: Family, new_sizes: dict[int, int]) -> dict[str, int]:
    modules = dict(module.named_modules())
    owners = (name for made_by in family.producers for name in (made_by, _parent(made_by)))
    return {
        f"{name}.{attribute}".lstrip("."): new_sizes[value]
        for name in dict.fromkeys(owners)
        # torch's own layers are mended by the surgery, which knows what their attributes mean.
        if not type(modules[name]).__module__.startswith("torch.nn.")
        for attribute, value in vars(modules[name]).items()
        if type(value) is int and value in new_sizes
    }


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
