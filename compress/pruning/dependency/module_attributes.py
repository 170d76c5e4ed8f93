"""Numbers written into a module, like its number of heads, that must change with a cut."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from compress.pruning.dependency.attribute_reads import is_configuration
from compress.pruning.dependency.group_slices import Change

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from compress.pruning.dependency.channel_groups import AxisGraph, ChannelGroup

T = TypeVar("T")

MOST_COMBINED = 5
"""Attributes tried in every combination; of more, only all together."""

COUNTERS = (nn.GroupNorm, nn.modules.instancenorm._InstanceNorm, nn.modules.batchnorm._BatchNorm)
"""torch's layers that count their channels even when they have no weights."""


def certain_changes(
    module: nn.Module, family: ChannelGroup, graph: AxisGraph
) -> tuple[Change, ...]:
    """Return the changes that a cut makes to torch's own layers without weights."""
    modules = dict(module.named_modules())
    found = []
    for name, classes in graph.passed.items():
        layer = modules.get(name)
        if isinstance(layer, COUNTERS) and _meets(classes, family):
            count = "num_channels" if isinstance(layer, nn.GroupNorm) else "num_features"
            found.append(Change(f"{name}.{count}".lstrip("."), classes))
            if isinstance(layer, nn.GroupNorm):
                unit = layer.num_channels // layer.num_groups
                found.append(Change(f"{name}.num_groups".lstrip("."), classes, unit))
    return tuple(found)


def possible_changes(
    module: nn.Module,
    family: ChannelGroup,
    graph: AxisGraph,
    removed: Sequence[int],
    is_read: Callable[[str], bool],
) -> Iterator[tuple[Change, ...]]:
    """Yield sets of changes that may go with a cut, the smallest first; a proof has to choose.

    An attribute is a candidate when the forward reads it, its value is a size that the cut changes
    (a number of channels or heads, an axis's length, the sizes of an axis's parts) and it belongs
    to a module that makes the family's channels or to one around it; the nearest are tried first.
    The smallest set that is proven is right: of numbers that happen to be equal, like a number of
    positions, none is changed without need.

    Args:
        module: the module before the cut.
        family: the channels.
        graph: says how many entries of each axis the channels take.
        removed: the channels that go.
        is_read: whether the forward reads an attribute, given its dotted name.
    """
    yield ()
    sizes = _sizes(family, graph, removed)
    makers = (*family.producers, *(n for n, c in graph.passed.items() if _meets(c, family)))
    near = dict.fromkeys(name for made_by in makers for name in (made_by, _parent(made_by)))
    every = dict.fromkeys(name for made_by in makers for name in _around(made_by))
    tried: list[dict[str, Change]] = []
    for owners, is_deep in ((near, False), (near, True), (every, True)):
        every_one = _candidates(module, owners, sizes, is_deep)
        candidates = {c.attribute: c for c in every_one if is_read(c.attribute)}
        if candidates and candidates not in tried:
            tried.append(candidates)
            yield from combined(list(candidates.values()))


def all_changes(
    module: nn.Module, family: ChannelGroup, graph: AxisGraph, removed: Sequence[int]
) -> tuple[Change, ...]:
    """Return all candidates at once."""
    every = dict.fromkeys(name for made_by in family.producers for name in _around(made_by))
    return tuple(_candidates(module, every, _sizes(family, graph, removed), True))


def combined(candidates: Sequence[T]) -> Iterator[tuple[T, ...]]:
    """Yield all sets of a few candidates, the smallest first; of many only the whole."""
    fewest = 1 if len(candidates) <= MOST_COMBINED else len(candidates)
    for count in range(fewest, len(candidates) + 1):
        yield from combinations(candidates, count)


def _sizes(
    family: ChannelGroup, graph: AxisGraph, removed: Sequence[int]
) -> dict[int, tuple[torch.Tensor, int]]:
    """Return each size that a cut changes → the classes counted, and how many count as one."""
    block = min(graph.entries(slot, removed[0]) for slot in family.slots)
    sizes = {len(family.channels): (torch.tensor(family.channels), 1)}
    for slot in family.slots:
        classes = graph.classes[slot]
        sizes.setdefault(len(classes), (classes, 1))
        # A group of heads that share keys takes several blocks of a head's width.
        sizes.setdefault(len(classes) // block, (classes, block))
    for classes in graph.passed.values():
        if _meets(classes, family):
            unit = int((classes == classes[0]).sum())
            sizes.setdefault(len(classes), (classes, 1))
            sizes.setdefault(len(classes) // unit, (classes, unit))
    return sizes


def _candidates(
    module: nn.Module,
    owners: Iterable[str],
    sizes: Mapping[int, tuple[torch.Tensor, int]],
    is_deep: bool,
) -> Iterator[Change]:
    modules = dict(module.named_modules())
    for owner in owners:
        # torch's own layers are mended by the surgery, which knows what their attributes mean.
        if type(modules[owner]).__module__.startswith("torch.nn."):
            continue
        for name, value in _attributes(modules[owner], is_deep):
            dotted = f"{owner}.{name}".lstrip(".")
            if type(value) is int and value in sizes:
                yield Change(dotted, *sizes[value])
            elif _is_split(value) and sum(value) in sizes:
                yield Change(dotted, sizes[sum(value)][0], tuple(value))


def _attributes(module: nn.Module, is_deep: bool) -> Iterator[tuple[str, Any]]:
    """Yield a module's own attributes; of a configuration that it holds, too, if deep."""
    for name, value in vars(module).items():
        if name.startswith("_"):
            continue
        yield name, value
        if is_deep and is_configuration(value):
            yield from ((f"{name}.{inner}", found) for inner, found in vars(value).items())


def _is_split(value: object) -> bool:
    return (
        isinstance(value, tuple | list)
        and len(value) > 1
        and all(type(part) is int and part > 0 for part in value)
    )


def _meets(classes: torch.Tensor, family: ChannelGroup) -> bool:
    return bool(torch.isin(classes, torch.tensor(family.channels)).any())


def _around(name: str) -> Iterator[str]:
    while name:
        yield name
        name = _parent(name)
    yield name


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
