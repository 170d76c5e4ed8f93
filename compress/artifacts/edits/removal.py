"""Removes what pruning cut: channels of tensors, and repeated blocks, which are found here."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

Indices = Mapping[str, Mapping[int, Sequence[int]]]  # tensor → axis → ascending indices
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


@torch.no_grad()
def keep_indices_(module: nn.Module, kept: Indices, attributes: Mapping[str, Any]) -> None:
    """Keep only the given entries of parameters and buffers, in place; tied ones stay tied.

    ``attributes`` is dotted attribute → value; sizes of torch's own layers are updated. Raises
    KeyError for a name that is not in the module.
    """
    modules = dict(module.named_modules())
    cut: dict[int, nn.Parameter] = {}
    owners: list[nn.Module] = []
    for name, axes in kept.items():
        owner_name, _, short = name.rpartition(".")
        owner = modules[owner_name]
        owners.append(owner)
        if short in owner._parameters:
            old = owner._parameters[short]
            if old is None:
                raise KeyError(name)
            if id(old) not in cut:
                cut[id(old)] = nn.Parameter(_select(old, axes), requires_grad=old.requires_grad)
            owner._parameters[short] = cut[id(old)]
        else:
            buffer = owner._buffers[short]
            if buffer is None:
                raise KeyError(name)
            owner._buffers[short] = _select(buffer, axes)
    for owner in owners:
        _record_sizes_(owner)
    for dotted, value in attributes.items():
        # Of a module, or of an object in it such as a configuration. JSON has lists for tuples.
        *path, short = dotted.split(".")
        holder: Any = functools.reduce(getattr, path, module)
        is_tuple = isinstance(getattr(holder, short), tuple)
        setattr(holder, short, tuple(value) if is_tuple else value)


def _select(tensor: torch.Tensor, axes: Mapping[int, Sequence[int]]) -> torch.Tensor:
    result = tensor.detach()
    for axis, indices in axes.items():
        result = result.index_select(axis, torch.tensor(indices, device=tensor.device))
    return result.clone()


def _record_sizes_(layer: nn.Module) -> None:
    # Any: torch types every attribute of a module as "tensor or module".
    weight: Any = getattr(layer, "weight", None)
    if isinstance(layer, nn.modules.conv._ConvNd):
        # A transposed convolution's weight is [in, out / groups, …], any other's [out, in / groups,
        # …]. Where each input channel is a group of its own, pruning removes whole groups.
        if layer.transposed:
            if layer.groups == layer.in_channels:
                layer.groups = weight.shape[0]
            layer.in_channels, layer.out_channels = weight.shape[0], weight.shape[1] * layer.groups
            return
        if layer.groups > 1 and layer.groups == layer.in_channels:
            layer.groups = weight.shape[0] // (layer.out_channels // layer.in_channels)
        layer.out_channels, layer.in_channels = weight.shape[0], weight.shape[1] * layer.groups
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = weight.shape
    elif isinstance(layer, nn.Bilinear):
        layer.out_features, layer.in1_features, layer.in2_features = weight.shape
    elif isinstance(layer, nn.RNNCellBase):
        recurrent_weight: Any = layer.weight_hh
        layer.input_size, layer.hidden_size = layer.weight_ih.shape[1], recurrent_weight.shape[1]
    elif isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        layer.num_embeddings, layer.embedding_dim = weight.shape
    elif isinstance(layer, nn.modules.batchnorm._NormBase):
        per_channel: Any = weight if weight is not None else layer.running_mean
        layer.num_features = per_channel.shape[0]
    elif isinstance(layer, nn.LayerNorm | nn.RMSNorm) and weight is not None:
        layer.normalized_shape = tuple(weight.shape)
    elif isinstance(layer, nn.GroupNorm) and weight is not None:
        width = layer.num_channels // layer.num_groups
        layer.num_channels = weight.shape[0]
        layer.num_groups = max(1, layer.num_channels // width)  # channels per group stay
    elif isinstance(layer, nn.RNNBase):
        recurrent: Any = layer
        layer.input_size = recurrent.weight_ih_l0.shape[1]
        layer.hidden_size = recurrent.weight_hh_l0.shape[1]
        if layer.proj_size:
            layer.proj_size, layer.hidden_size = recurrent.weight_hr_l0.shape
        # torch's kernels read this list, which holds the old tensors.
        layer._flat_weights = [getattr(layer, name) for name in layer._flat_weights_names]
