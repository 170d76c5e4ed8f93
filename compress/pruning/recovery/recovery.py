"""Recover a sliced module's outputs without training: refit and BatchNorm re-estimation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compress.common.forward import flatten_outputs
from compress.common.tensor_difference import measured
from compress.core.stage import DEFAULT_CALIBRATION_SAMPLES
from compress.pruning.importance.layer_calls import record_layer_calls, samples_refused
from compress.pruning.recovery.least_squares import refit_

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pydantic import JsonValue

    from compress.core.context import Context
    from compress.data.batch import Batch
    from compress.pruning.dependency.channel_groups import Kept


def recover_(
    module: nn.Module,
    reference: nn.Module,
    kept: Kept,
    batches: Sequence[Batch],
    device: str = "cpu",
    *,
    refit: bool = True,
    names: Mapping[str, str] | None = None,
) -> dict[str, JsonValue]:
    """Refit layers and re-estimate BatchNorm statistics, in place; return the errors as facts.

    After a refit, new statistics are only taken if they reduce the output error. ``kept`` gives the
    indices that are left of each tensor of ``reference``, the module before slicing; ``names``
    gives other names that weights have there.
    """
    errors = {"cut": output_error(module, reference, batches, device)}
    layers: dict[str, JsonValue] = {}
    if refit:
        for one in refit_(module, reference, kept, batches, device, names=names):
            layers[one.weight] = [_rounded(one.before), _rounded(one.after)]
        errors["refit"] = output_error(module, reference, batches, device)
    if batch_norms(module):
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        reestimate_batch_norms_(module, batches, device)
        error = output_error(module, reference, batches, device)
        if refit and not error < errors["refit"]:
            module.load_state_dict(before)
        else:
            errors["batch_norm"] = error
    samples = sum(map(len, batches))
    return {
        "samples": samples,
        "output_error": {name: _rounded(error) for name, error in errors.items()},
        "layers": layers,
    }


@torch.no_grad()
def output_error(
    module: nn.Module, reference: nn.Module, batches: Iterable[Batch], device: str = "cpu"
) -> float:
    """Return the squared error of the outputs, relative to the energy of the reference's.

    Equal infinities, as of masked scores, are left out.
    """
    module.eval().to(device)
    reference.eval().to(device)
    error, energy = 0.0, 0.0
    for batch in batches:
        moved = batch.to(device)
        outputs, targets = (_run(part, moved) for part in (module, reference))
        for output, target in zip(outputs, targets, strict=True):
            target_part, output_part = measured(target, output)
            error += float((output_part - target_part).square().sum())
            energy += float(target_part.square().sum())
    module.cpu()
    reference.cpu()
    return error / max(energy, 1e-30)


def batch_norms(module: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """Return the BatchNorm layers with running statistics."""
    return [
        layer
        for layer in module.modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.track_running_stats
    ]


@torch.no_grad()
def reestimate_batch_norms_(
    module: nn.Module, batches: Iterable[Batch], device: str = "cpu"
) -> None:
    """Re-estimate BatchNorm statistics over batches, in place; the module is left in eval mode.

    Removed channels shift the statistics of all later layers (Li et al., "EagleEye", 2020).
    """
    norms = batch_norms(module)
    # One sample has no variance if the batch is the only axis that BatchNorm reduces.
    usable = [batch for batch in batches if len(batch) > 1]
    if not norms or not usable:
        return
    momenta = [norm.momentum for norm in norms]
    module.eval().to(device)
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # cumulative average over all batches
        norm.train()
    for batch in usable:
        _run(module, batch.to(device))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()
    module.cpu()


def reestimate_on_calibration_(module: nn.Module, context: Context) -> None:
    """Re-estimate BatchNorm statistics over calibration samples, in place."""
    reestimate_batch_norms_(module, usual_calibration(context), context.device)


def usual_calibration(
    context: Context,
    why: str = "batch_norm: reestimate",
    most: int = DEFAULT_CALIBRATION_SAMPLES,
) -> list[Batch]:
    """Return calibration samples, as many as stages draw by default; StageFailed without data."""
    data: Any = context.need_data(why)
    available = len(data.split(data.calibration_split))
    return list(data.calibration(min(most, available), context.seed))


def _run(module: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
    try:
        return flatten_outputs(module(*batch.inputs))
    except Exception as error:
        raise samples_refused(batch, error) from error


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def recover_without_blocks_(
    module: nn.Module,
    reference: nn.Module,
    kept_blocks: Mapping[str, Sequence[int]],
    batches: Sequence[Batch],
    device: str = "cpu",
) -> dict[str, JsonValue]:
    """Refit the layers that run after a removed block, in place; return the errors as facts.

    ``kept_blocks`` gives, for each container that lost entries, the indices of those that stay.
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
