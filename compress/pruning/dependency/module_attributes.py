"""Numbers stored in a module, like its number of heads, that must change when it is sliced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from functools import reduce
from itertools import chain, combinations
from typing import Any, TypeVar

import torch
from torch import nn

from compress.pruning.dependency.channel_groups import AxisGraph, Change, ChannelGroup, GroupSlice

T = TypeVar("T")

# Each combination costs a verification, that is several forward passes: 5 attributes have 31.
MOST_COMBINED = 5
"""Most attributes that are tried in every combination; more are only tried all together."""

NORMS = (nn.GroupNorm, nn.modules.instancenorm._InstanceNorm, nn.modules.batchnorm._BatchNorm)
"""torch's layers that store their number of channels even without weights."""


def certain_changes(module: nn.Module, group: ChannelGroup, graph: AxisGraph) -> tuple[Change, ...]:
    """Return the changes that a slice requires in named sizes and, beside weights, in norms."""
    modules = dict(module.named_modules())
    sizes = (size.change() for size in graph.sized)
    found = [change for change in sizes if change is not None and _meets(change.counted, group)]
    for name, classes in graph.counted.items():
        layer = modules.get(name)
        # torch's own norms get their sizes from their weight, when that is sliced.
        is_sized = isinstance(layer, (*NORMS, nn.LayerNorm, nn.RMSNorm))
        if not _meets(classes, group) or (is_sized and getattr(layer, "weight", None) is not None):
            continue
        if isinstance(layer, NORMS):
            count = "num_channels" if isinstance(layer, nn.GroupNorm) else "num_features"
            found.append(Change(f"{name}.{count}".lstrip("."), classes))
            if isinstance(layer, nn.GroupNorm) and layer.num_groups > 1:
                unit = layer.num_channels // layer.num_groups
                found.append(Change(f"{name}.num_groups".lstrip("."), classes, unit))
        # Not only torch's: layers that are written by hand have it under the same name.
        elif tuple(getattr(layer, "normalized_shape", ())) == (len(classes),):
            shape = f"{name}.normalized_shape".lstrip(".")
            found.append(Change(shape, classes, (len(classes),)))
    return tuple(found)


def possible_changes(
    module: nn.Module, one: GroupSlice, graph: AxisGraph, is_read: Callable[[str], bool]
) -> Iterator[tuple[Change, ...]]:
    """Yield sets of changes that a slice may require, the smallest first, for verification.

    An attribute is a candidate if the forward reads it (``is_read`` of its dotted name), its value
    is a size that the slice changes (a number of channels or heads, an axis's length, the sizes of
    an axis's parts) and it belongs to a module that outputs the group's channels or to one around.
    """
    # The smallest sets and the nearest modules first: numbers that happen to be equal, like a
    # number of positions, are not changed without need.
    yield ()
    sizes, group = _sizes(one, graph), one.group
    counted = (name for name, classes in graph.counted.items() if _meets(classes, group))
    modules = (*group.producer_modules, *counted)
    near = dict.fromkeys(name for module_name in modules for name in _ancestors(module_name)[:2])
    every = dict.fromkeys(name for module_name in modules for name in _ancestors(module_name))
    tried: list[dict[str, Change]] = []
    for owners, is_deep in ((near, False), (near, True), (every, True)):
        found = _candidates(module, owners, sizes, is_deep)
        candidates = {c.attribute: c for c in found if is_read(c.attribute)}
        if candidates and candidates not in tried:
            tried.append(candidates)
            yield from combined(list(candidates.values()))
            # A transformer's hidden width is counted in every block, under the same names.
            if graph.statistics and len(candidates) > MOST_COMBINED:
                by_name: dict[str, list[Change]] = {}
                for change in candidates.values():
                    by_name.setdefault(change.attribute.rpartition(".")[2], []).append(change)
                for some in combined(list(by_name.values())):
                    yield tuple(chain.from_iterable(some))


def all_changes(module: nn.Module, one: GroupSlice, graph: AxisGraph) -> tuple[Change, ...]:
    """Return every change that a slice may require, whether the forward reads it or not."""
    owners = one.group.producer_modules
    every = dict.fromkeys(name for owner in owners for name in _ancestors(owner))
    return tuple(_candidates(module, every, _sizes(one, graph), True))


def combined(candidates: Sequence[T]) -> Iterator[tuple[T, ...]]:
    """Yield all subsets of a few candidates, the smallest first; of many only all together."""
    fewest = 1 if len(candidates) <= MOST_COMBINED else len(candidates)
    for count in range(fewest, len(candidates) + 1):
        yield from combinations(candidates, count)


def _sizes(one: GroupSlice, graph: AxisGraph) -> dict[int, tuple[torch.Tensor, int]]:
    """Return each size that a slice changes → the classes counted, and how many count as one."""
    group = one.group
    block = min(int((graph.classes[slot] == one.removed[0]).sum()) for slot in group.slots)
    sizes = {len(group.channels): (torch.tensor(group.channels), 1)}
    for slot in group.slots:
        classes = graph.classes[slot]
        sizes.setdefault(len(classes), (classes, 1))
        # A group of heads that share keys takes several blocks of a head's width.
        sizes.setdefault(len(classes) // block, (classes, block))
    for classes in graph.counted.values():
        if _meets(classes, group):
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
        # keep_indices_ updates torch's own layers, whose attributes it knows.
        if type(modules[owner]).__module__.startswith("torch.nn."):
            continue
        attributes: dict[str, Any] = {}
        for name, value in vars(modules[owner]).items():
            # Named sizes are known to count these channels, or not to.
            if not name.startswith("_") and name not in getattr(modules[owner], "named_sizes", ()):
                attributes[name] = value
                if is_deep and is_configuration(value):
                    attributes |= {f"{name}.{inner}": own for inner, own in vars(value).items()}
        for name, value in attributes.items():
            dotted = f"{owner}.{name}".lstrip(".")
            # `type(…) is int`, because a bool is an int, too.
            if type(value) is int and value in sizes:
                yield Change(dotted, *sizes[value])
            elif (
                isinstance(value, tuple | list)
                and len(value) > 1
                and all(type(part) is int and part > 0 for part in value)
                and sum(value) in sizes
            ):
                yield Change(dotted, sizes[sum(value)][0], tuple(value))


def _meets(classes: torch.Tensor, group: ChannelGroup) -> bool:
    return bool(torch.isin(classes, torch.tensor(group.channels)).any())


def _ancestors(name: str) -> list[str]:
    """Return a module's name, then those of the modules around it; the outermost is empty."""
    parts = name.split(".") if name else []
    return [".".join(parts[:end]) for end in range(len(parts), -1, -1)]


class AttributeReads:
    """Records which attributes a forward pass reads of modules and of their configurations."""

    def __init__(self) -> None:
        self._read: set[tuple[int, str]] = set()
        self._recorded: dict[int, tuple[Any, type]] = {}

    def __contains__(self, key: tuple[int, str]) -> bool:
        """Whether an object's attribute was read, or may have been because recording failed."""
        return key in self._read or key[0] not in self._recorded

    @contextmanager
    def recording(self, module: nn.Module) -> Iterator[None]:
        """Record reads within the context: each object temporarily gets a recording subclass."""
        try:
            for part in list(module.modules()):
                for owner in (part, *filter(is_configuration, vars(part).values())):
                    self._record(owner)
            yield
        finally:
            for owner, original in self._recorded.values():
                object.__setattr__(owner, "__class__", original)

    def _record(self, owner: Any) -> None:
        original: Any = type(owner)
        read = self._read

        def look_up(self: Any, name: str) -> Any:
            read.add((id(self), name))
            return original.__getattribute__(self, name)

        if id(owner) not in self._recorded:
            with suppress(TypeError):  # the class is final, or its layout does not allow it
                # transformers looks up what a model can record by the name of its class.
                names = {key: getattr(original, key) for key in ("__module__", "__qualname__")}
                members = {**names, "__getattribute__": look_up}
                recording = type(original.__name__, (original,), members)
                # object's own: modules and frozen configurations have another.
                object.__setattr__(owner, "__class__", recording)
                self._recorded[id(owner)] = owner, original


def attribute_key(module: nn.Module, attribute: str) -> tuple[int, str]:
    """Resolve a dotted attribute to the id of the object that holds it and its last name."""
    *path, short = attribute.split(".")
    return id(reduce(getattr, path, module)), short


def is_configuration(value: object) -> bool:
    """Whether an object only holds attributes, like a model's configuration."""
    return (
        hasattr(value, "__dict__")
        and not callable(value)
        and not isinstance(value, nn.Module | torch.Tensor | Enum)
    )
