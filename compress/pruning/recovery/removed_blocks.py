"""Refit the layers behind removed blocks to the outputs that they had with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.pruning.importance.layer_calls import record_layer_calls
from compress.pruning.recovery.recovery import recover_

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pydantic import JsonValue
    from torch import nn

    from compress.data.batch import Batch


def recover_without_blocks_(
    module: nn.Module,
    reference: nn.Module,
    kept_blocks: Mapping[str, Sequence[int]],
    batches: Sequence[Batch],
    device: str = "cpu",
) -> dict[str, JsonValue]:
    """Refit the layers that run after a removed block, in place; return the errors as facts.

    Args:
        module: the model without the blocks.
        reference: the model with them.
        kept_blocks: container → indices of the entries that stay, of those that lost some.
        batches: samples on which layers are refitted, without labels.
        device: where both run.

    Raises:
        StageFailed: the modules do not take the batches.
    """
    reference.eval().to(device)
    calls, _ = record_layer_calls(reference, batches[0], device)
    names = {name: name_before(name, kept_blocks) for name, _ in module.named_parameters()}
    left = {*names.values()}
    first = next((i for i, call in enumerate(calls) if call.weight not in left), 0)
    behind = {call.weight for call in calls[first:]}
    # All inputs and outputs are left; a refit is of layers that are named here.
    kept = {
        name: {axis: tuple(range(parameter.shape[axis])) for axis in (0, 1)}
        for name, parameter in module.named_parameters()
        if parameter.dim() > 1 and names[name] in behind
    }
    return recover_(module, reference, kept, batches, device, names=names)


def name_before(name: str, kept_blocks: Mapping[str, Sequence[int]]) -> str:
    """Return the name that a parameter had before blocks were removed from containers."""
    for container in sorted(kept_blocks, key=len):  # outer ones first, which inner names begin with
        prefix = f"{container}." if container else ""
        index, dot, rest = name.removeprefix(prefix).partition(".")
        if name.startswith(prefix) and index.isdigit():
            name = f"{prefix}{kept_blocks[container][int(index)]}{dot}{rest}"
    return name
