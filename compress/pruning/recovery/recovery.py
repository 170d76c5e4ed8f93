"""Recover a sliced module's outputs without training: refit and BatchNorm re-estimation."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compress.common.forward import copy_module, flatten_outputs, plain_attention
from compress.common.tensor_difference import measured
from compress.core.stage import DEFAULT_CALIBRATION_SAMPLES
from compress.pruning.importance.layer_calls import record_layer_calls, samples_refused
from compress.pruning.recovery.least_squares import Outputs, refit_

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from pydantic import JsonValue

    from compress.core.context import Context
    from compress.data.batch import Batch
    from compress.pruning.dependency.channel_groups import Kept

TRIAL_SAMPLES = 128
"""Samples on which new BatchNorm statistics must reduce the error before all are used."""
MIN_KEPT_BYTES = 2**26
"""Outputs of the unpruned module that are kept, even if samples take less."""


# Fused attention answers otherwise at masked places, and the passes of a refit do not take it.
@plain_attention()
def recover_(
    module: nn.Module,
    reference: nn.Module,
    kept: Kept,
    batches: Sequence[Batch],
    device: str = "cpu",
    *,
    refit: bool = True,
    names: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> dict[str, JsonValue]:
    """Refit layers and re-estimate BatchNorm statistics, in place; return the errors as facts.

    After a refit, new statistics are only taken if they reduce the output error. ``kept`` gives the
    indices that are left of each tensor of ``reference``, the module before slicing; ``names``
    gives other names that weights have there. Activations that do not fit into memory are kept in a
    temporary folder in ``folder``.
    """
    expected = ReferenceOutputs(reference, batches, device)
    errors: dict[str, float] = {}
    layers: dict[str, JsonValue] = {}
    refitted: list[OutputDifference] = []
    if refit:
        sliced = copy_module(module)

        def compare(targets: Outputs, outputs: Outputs) -> None:
            # The passes of the refit end with what both modules return.
            expected.add(targets)
            refitted.append(OutputDifference.between(targets, outputs))

        results = refit_(
            module,
            reference,
            kept,
            batches,
            device,
            names=names,
            on_outputs=compare,
            folder=folder,
        )
        for one in results:
            layers[one.weight] = [_rounded(one.before), _rounded(one.after)]
        errors = {"cut": expected.error(sliced), "refit": relative_error(refitted)}
        del sliced
    else:
        errors = {"cut": expected.error(module)}
    if batch_norms(module):
        before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        # Whether new statistics help after a refit is tried on a part of the samples first.
        enough = bisect_left([*accumulate(map(len, batches))], TRIAL_SAMPLES) + 1
        for count in (enough, len(batches)) if refit and enough < len(batches) else (len(batches),):
            reestimate_batch_norms_(module, batches[:count], device)
            error = expected.error(module, count)
            if refit and not error < relative_error(refitted[:count]):
                module.load_state_dict(before, strict=False)
                break
        else:
            errors["batch_norm"] = error
    samples = sum(map(len, batches))
    return {
        "samples": samples,
        "output_error": {name: _rounded(error) for name, error in errors.items()},
        "layers": layers,
    }


@dataclass
class OutputDifference:
    """Squared error of a batch's outputs, and the energy of those expected."""

    error: float = 0.0
    energy: float = 0.0

    @classmethod
    def between(cls, targets: Outputs, outputs: Outputs) -> OutputDifference:
        """Compare what a reference and a module return, without equal infinities, as of masks."""
        own = cls()
        for output, target in zip(outputs, targets, strict=True):
            target_part, output_part = measured(target, output)
            own.error += float((output_part - target_part).square().sum())
            own.energy += float(target_part.square().sum())
        return own


def relative_error(batches: Sequence[OutputDifference]) -> float:
    """Return the squared error of some batches, relative to their energy."""
    return sum(one.error for one in batches) / max(sum(one.energy for one in batches), 1e-30)


class ReferenceOutputs:
    """What a module returns for each batch, computed once where it takes little memory."""

    def __init__(self, reference: nn.Module, batches: Iterable[Batch], device: str = "cpu") -> None:
        """Run nothing yet; modules are compared on the device."""
        self._reference, self._batches, self._device = reference, list(batches), device
        self._known: list[Outputs] = []
        # As much as the samples themselves, which are in memory too; classes of tokens take little.
        self._room = max(
            MIN_KEPT_BYTES, sum(x.nbytes for batch in self._batches for x in batch.inputs)
        )

    def add(self, outputs: Outputs) -> None:
        """Keep the outputs for the next batch, if those of all before it were kept."""
        self._room -= sum(x.nbytes for x in outputs)
        if self._room >= 0:
            self._known.append(outputs)

    @torch.no_grad()
    def error(self, module: nn.Module, count: int | None = None) -> float:
        """Return the squared error of a module's outputs, relative to their energy.

        With ``count``, on so many of the batches.
        """
        for part in (module, self._reference):
            part.eval().to(self._device)
        differences = []
        for number, batch in enumerate(self._batches[:count]):
            moved = batch.to(self._device)
            if number < len(self._known):
                targets = self._known[number]
            else:
                targets = _run(self._reference, moved)
                if number == len(self._known):
                    self.add(targets)
            differences.append(OutputDifference.between(targets, _run(module, moved)))
        for part in (module, self._reference):
            part.cpu()
        return relative_error(differences)


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


def _run(module: nn.Module, batch: Batch) -> Outputs:
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
    folder: Path | None = None,
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
    return recover_(module, reference, kept, batches, device, names=names, folder=folder)


def name_before(name: str, kept_blocks: Mapping[str, Sequence[int]]) -> str:
    """Return the name that a parameter had before blocks were removed from containers."""
    for container in sorted(kept_blocks, key=len):  # outer ones first, which inner names begin with
        prefix = f"{container}." if container else ""
        index, dot, rest = name.removeprefix(prefix).partition(".")
        if name.startswith(prefix) and index.isdigit():
            name = f"{prefix}{kept_blocks[container][int(index)]}{dot}{rest}"
    return name
