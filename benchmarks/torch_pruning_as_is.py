"""What Torch-Pruning makes of a model without annotations, and whether the result is right.

It is judged by its masked twin: the original with zeros wherever the pruned model has nothing left.
Which entries are left is read from the weights: all of them are made different before, so that each
is known by its value. A normalisation over channels that became narrower normalises the same
channels in the twin, so that only what is inconsistent counts as wrong.
"""

import copy
import math

import torch
from torch import nn

from compress.common.forward import run_in_eval
from compress.common.tensor_difference import largest, largest_difference, largest_finite
from compress.graph.flops import count_macs

RIGHT = 1e-6
"""Largest difference from the masked twin, relative to its largest output, in double precision."""

Inputs = tuple[torch.Tensor, ...]
Kept = dict[str, list[torch.Tensor]]


def verdict(module: nn.Module, inputs: Inputs, ignored: list[str]) -> str:
    """Return what became of a model, in a few words.

    Args:
        module: the model; it is not changed.
        inputs: its inputs.
        ignored: names of the layers that make its outputs.
    """
    module = copy.deepcopy(module).double().eval()
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    make_all_different_(module)
    expected, macs = run_in_eval(module, inputs), count_macs(module, inputs)
    pruned = copy.deepcopy(module)
    try:
        prune_(pruned, inputs, ignored)
    except Exception as error:  # noqa: BLE001 - whatever goes wrong there
        return f"raises {type(error).__name__}"
    try:
        found = run_in_eval(pruned, inputs)
    except Exception:  # noqa: BLE001 - whatever the pruned model does
        return "forward broke"
    if [x.shape for x in found] != [x.shape for x in expected]:
        return "output shape changed"
    less = 1 - count_macs(pruned, inputs) / macs
    if less <= 0:
        return "nothing pruned"
    difference = difference_from_twin(module, pruned, inputs, found)
    if difference is None:
        return f"runs, unjudged (MACs -{less:.0%})"
    if difference > RIGHT:
        return f"**wrong output** (by {difference:.1g}; MACs -{less:.0%})"
    return f"right (MACs -{less:.0%})"


def prune_(module: nn.Module, inputs: Inputs, ignored: list[str]) -> None:
    """Prune as the first example in Torch-Pruning's own documents does."""
    import torch_pruning as tp

    pruner = tp.pruner.MagnitudePruner(
        module,
        inputs,
        importance=tp.importance.GroupMagnitudeImportance(),
        pruning_ratio=0.5,
        ignored_layers=[module.get_submodule(name) for name in ignored],
    )
    pruner.step()


@torch.no_grad()
def make_all_different_(module: nn.Module) -> None:
    """Move every weight a little, so that it is known by its value."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            tensor.add_(torch.rand_like(tensor), alpha=1e-3)


def difference_from_twin(
    module: nn.Module, pruned: nn.Module, inputs: Inputs, found: Inputs
) -> float | None:
    """Return how far a pruned model is from its masked twin, or None where that is not known."""
    kept = entries_kept(module, pruned)
    if kept is None:
        return None
    twin = copy.deepcopy(module)
    silence_(twin, kept)
    narrow_norms_(twin, pruned, kept)
    expected = run_in_eval(twin, inputs)
    pairs = zip(found, expected, strict=True)
    return largest(largest_difference(b, a) / max(largest_finite(b), 1e-12) for a, b in pairs)


def entries_kept(module: nn.Module, pruned: nn.Module) -> Kept | None:
    """Return which indices are left along each axis of each tensor, or None if nobody can tell."""
    before, after = tensors(module), tensors(pruned)
    if before.keys() != after.keys():
        return None
    kept: Kept = {}
    for name, old in before.items():
        new = after[name]
        if old.shape == new.shape or not old.is_floating_point():
            continue
        axes = matched(old, new)
        if axes is None:
            return None
        kept[name] = axes
    return kept


def matched(old: torch.Tensor, new: torch.Tensor) -> list[torch.Tensor] | None:
    """Return the indices along each axis that make one tensor of another."""
    if old.dim() != new.dim() or not new.numel():
        return None
    values, order = old.flatten().sort()
    place = torch.searchsorted(values, new.flatten().contiguous()).clamp_max(values.numel() - 1)
    coordinates = torch.unravel_index(order[place], old.shape)
    axes = [axis.unique() for axis in coordinates]
    if math.prod(len(axis) for axis in axes) != new.numel():
        return None
    same = old[torch.meshgrid(*axes, indexing="ij")]
    return axes if torch.equal(same, new) else None


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers by name."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


@torch.no_grad()
def silence_(twin: nn.Module, kept: Kept) -> None:
    """Write zeros wherever nothing is left."""
    named = tensors(twin)
    for name, axes in kept.items():
        for axis, indices in enumerate(axes):
            silent = torch.ones(named[name].shape[axis], dtype=torch.bool)
            silent[indices] = False
            named[name].movedim(axis, 0)[silent] = 0


def narrow_norms_(twin: nn.Module, pruned: nn.Module, kept: Kept) -> None:
    """Let normalisations over the last axis see those channels alone that are left."""
    for name, norm in twin.named_modules():
        weight = f"{name}.weight"
        is_norm = type(norm).__name__.endswith("Norm") and not hasattr(norm, "running_mean")
        if is_norm and len(kept.get(weight, [])) == 1:
            smaller, (indices,) = pruned.get_submodule(name), kept[weight]

            def normalised(
                x: torch.Tensor, smaller=smaller, indices=indices, width=norm.weight.shape[0]
            ) -> torch.Tensor:
                is_last = x.shape[-1] == width and not isinstance(smaller, nn.GroupNorm)
                axis = -1 if is_last else 1
                found = smaller(x.index_select(axis, indices))
                return torch.zeros_like(x).index_copy(axis, indices, found)

            norm.forward = normalised
