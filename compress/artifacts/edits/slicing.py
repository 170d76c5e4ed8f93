"""Channel pruning: selects entries of a module's parameters and buffers along their axes."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

Indices = Mapping[str, Mapping[int, Sequence[int]]]


@torch.no_grad()
def keep_indices_(module: nn.Module, kept: Indices, attributes: Mapping[str, Any]) -> None:
    """Keep only the given entries of parameters and buffers, in place; tied ones stay tied.

    ``kept`` is tensor name → axis → ascending indices, ``attributes`` dotted attribute → value.
    Sizes of torch's own layers are updated. Raises KeyError for a name that is not in the module.
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
