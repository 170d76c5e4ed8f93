"""Recover a sliced module's outputs without training: refit and BatchNorm re-estimation.

Layers that lost inputs are refitted by closed-form least squares on activations, as He, Zhang and
Sun reconstruct layers in "Channel Pruning for Accelerating Very Deep Neural Networks" (2017): in
the order in which they run, each on the inputs that it gets in the smaller model, so that it also
compensates the errors of the layers before it. Both models run once: their passes wait at each
layer, and go on with its new weights (:class:`PausedForward`). Layers that have many positions a
sample are fitted on the first samples, whose passes alone have begun by then, and on positions
drawn at random.
"""

from __future__ import annotations

import tempfile
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate, chain
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from compress.common.forward import copy_module, flatten_outputs, plain_attention, run_in_eval
from compress.common.tensor_difference import measured
from compress.core.stage import DEFAULT_CALIBRATION_SAMPLES
from compress.graph.positive_definite import solve_positive_definite
from compress.pruning.importance.layer_calls import (
    LayerCall,
    LayerInput,
    channels_last,
    record_layer_calls,
    refused_samples,
)
from compress.pruning.importance.scores import (
    MAX_COLUMNS,
    Moments,
    ridge_factor,
    samples_needed,
    share_needed,
)
from compress.pruning.recovery.paused_forward import ActivationFiles, PausedForward, resident_budget
from compress.pruning.verification.masked_equivalence import sliced_copy

if TYPE_CHECKING:
    from pydantic import JsonValue

    from compress.artifacts.eager_model import EagerModel
    from compress.core.context import Context
    from compress.data.batch import Batch
    from compress.pruning.dependency.channel_groups import Kept, SlicePlan

Outputs: TypeAlias = tuple[torch.Tensor, ...]
Difference: TypeAlias = tuple[float, float]
"""Squared error of a batch's outputs, and the energy of those expected."""
MAX_ENTRIES = 2**24  # entries of the systems of equations that are solved together, 8 bytes each
RIDGE = 1e-4  # penalty on changes of the weights, relative to the mean square of a layer's inputs
TRIAL_SAMPLES = 128
"""Samples on which the error of the cut is measured, and on which new BatchNorm statistics must
reduce the error before all are used."""
MIN_KEPT_BYTES = 2**26  # outputs of the unpruned module that are kept, even if samples take less


@dataclass(frozen=True)
class RefitResult:
    """Squared error of a refitted layer's outputs, relative to their energy before slicing."""

    weight: str
    before: float
    after: float


@dataclass(frozen=True)
class RefittableLayer:
    """A layer that lost input channels and can be refitted."""

    weight: str
    bias: str | None
    """Its bias, if no other layer uses it."""
    mean: str | None
    """Running mean of the BatchNorm behind it, which takes what a bias would add."""
    read_axis: int
    calls: int
    """Calls in one forward pass."""
    samples: int
    """Samples that it is fitted on; the first of them, if there are more."""
    share: float
    """Share of their positions that are drawn at random."""


@torch.no_grad()
def refit_(
    module: nn.Module,
    reference: nn.Module,
    kept: Kept,
    batches: Sequence[Batch],
    device: str = "cpu",
    ridge: float = RIDGE,
    names: Mapping[str, str] | None = None,
    on_outputs: Callable[[Outputs, Outputs], None] | None = None,
    folder: Path | None = None,
) -> list[RefitResult]:
    """Refit, in place, the weights and biases of the layers that lost input channels.

    Linear layers and convolutions are refitted if nothing else uses their weight; other layers stay
    as they were sliced. ``kept`` gives the indices that are left of each tensor of ``reference``,
    the module before slicing; ``names`` gives other names that weights have there. ``on_outputs``
    gets what the reference and the refitted module return for each batch. Activations that do not
    fit into memory are kept in a temporary folder in ``folder``.
    """
    results = []
    for part in (module, reference):
        part.eval().to(device)
    layers = refittable_layers(module, kept, batches, device)
    with ExitStack() as stack:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        work = tempfile.TemporaryDirectory(prefix="activations-", dir=folder)
        files = ActivationFiles(stack.enter_context(work), resident_budget(device))
        # A batch's passes through both models begin at the first layer that is fitted on it: the
        # module's weights before are those that stay.
        moved = [batch.to(device) for batch in batches]
        passes = [
            (PausedForward(reference, batch, files), PausedForward(module, batch, files))
            for batch in moved
        ]
        for one in chain.from_iterable(passes):
            stack.callback(one.close)
        for layer in layers:
            there = (names or {}).get(layer.weight, layer.weight)
            results.append(_refit_layer_(layer, there, module, kept, passes, ridge))
        for both in passes:
            if on_outputs is not None:
                on_outputs(*(one.outputs() for one in both))
            for one in both:
                one.close()
    for part in (module, reference):
        part.cpu()
    return results


def refittable_layers(
    module: nn.Module, kept: Kept, batches: Sequence[Batch], device: str
) -> list[RefittableLayer]:
    """Return the layers to refit, in the order in which they run."""
    size, available = len(batches[0]), sum(map(len, batches))
    calls: dict[str, list[LayerCall]] = {}
    in_order, observed = record_layer_calls(module, batches[0], device)
    for call in in_order:
        calls.setdefault(call.weight, []).append(call)
    owners = Counter(bias for own in calls.values() for bias in {call.bias for call in own})
    layers = []
    for weight, own in calls.items():
        last = own[-1]
        is_sliced = last.read_axis in kept.get(weight, {})
        alike = len({(call.read_axis, call.bias) for call in own}) == 1
        if (
            is_sliced
            and alike
            and weight not in observed.used_elsewhere | observed.not_fitted
            and last.columns <= MAX_COLUMNS
        ):
            bias = (
                last.bias
                if owners[last.bias] == 1 and last.bias not in observed.used_elsewhere
                else None
            )
            samples = samples_needed(last, size, len(own))
            share = share_needed(last, len(own) * last.positions * min(samples, available) / size)
            # A BatchNorm's channels are on axis 1; those of a product of sequences are on axis 2.
            takes_mean = len(own) == 1 and last.bias is None and last.channel_axis == 1
            mean = observed.means.get(weight) if takes_mean else None
            one = RefittableLayer(weight, bias, mean, last.read_axis, len(own), samples, share)
            layers.append(one)
    return layers


def _add_products_(
    moments: Moments,
    outputs: list[torch.Tensor],
    inputs: list[LayerInput],
    outputs_left: torch.Tensor | None,
    share: float,
    generator: torch.Generator,
) -> float:
    """Add a layer's outputs in the reference by its inputs in the module; return their energy.

    The lists are emptied, as a pass that pauses frees or stores what nothing else holds.
    """
    energy = 0.0
    for expected, call in zip(outputs, inputs, strict=True):
        if outputs_left is not None:
            expected = expected.index_select(call.channel_axis, outputs_left)
        answers = [expected]
        if call.added is not None:  # behind the channels' axis there are those of the positions
            added = call.added.reshape(call.added.shape + (1,) * len(call.kernel))
            answers.append(added.expand_as(expected))
        for columns, targets, *rest in call.parts(*answers, share=share, generator=generator):
            moments.add_(columns, targets - rest[0] if rest else targets)
            energy += float(targets.square().sum())
    outputs.clear()
    inputs.clear()
    return energy


def _refit_layer_(
    layer: RefittableLayer,
    name: str,
    module: nn.Module,
    kept: Kept,
    passes: Sequence[tuple[PausedForward, PausedForward]],
    ridge: float,
) -> RefitResult:
    """Change a layer's weight and bias so that its squared error is minimal, in place."""
    moments, energy, samples = Moments(), 0.0, 0
    weight, generator = module.get_parameter(layer.weight), torch.Generator().manual_seed(0)
    left = kept[layer.weight].get(1 - layer.read_axis)
    outputs_left = None if left is None else torch.tensor(left, device=weight.device)
    for both in passes:
        if samples >= layer.samples:
            break
        before, after = both
        samples += after.samples
        if before.has_passed(name) or after.has_passed(layer.weight):
            for one in both:
                one.close()
        outputs = before.outputs_of(name, layer.calls)
        inputs = after.inputs_of(layer.weight, layer.calls)
        energy += _add_products_(moments, outputs, inputs, outputs_left, layer.share, generator)
        for one in both:
            if layer.calls > 1:  # its first calls had the weights before
                one.close()
            one.pause()
    if not moments.positions:  # as of an expert that no sample is sent to
        return RefitResult(layer.weight, 0.0, 0.0)
    groups, columns, channels = moments.cross_gio.shape
    rows = weight.movedim(layer.read_axis, -1)
    matrix_gio = rows.reshape(groups, channels, columns).mT
    # Errors are fitted instead of outputs, so that the ridge penalizes changes of weights.
    moments.subtract_(matrix_gio.double())
    zeros_gio = matrix_gio == 0  # an earlier stage pruned them
    intercept = layer.bias is not None or layer.mean is not None
    ridge *= ridge_factor(columns, moments.positions)
    change_gio, shift_go, remaining = least_squares(
        moments, ridge, intercept=intercept, fixed_gio=zeros_gio
    )
    rows.add_(change_gio.mT.reshape(rows.shape).to(weight))
    if layer.bias is not None:
        bias = module.get_parameter(layer.bias)
        bias.add_(shift_go.flatten().to(bias))
    elif layer.mean is not None:
        mean = module.get_buffer(layer.mean)
        mean.sub_(shift_go.flatten().to(mean))
    energy = max(energy, 1e-30)
    return RefitResult(layer.weight, moments.energy / energy, remaining / energy)


def least_squares(
    moments: Moments, ridge: float, *, intercept: bool, fixed_gio: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Solve for the matrices and shifts that map columns to answers with the least squared error.

    Returns this error, too. ``ridge`` penalizes the matrices, relative to the columns' mean square.
    Without ``intercept`` there are no shifts. Entries that ``fixed_gio`` marks are zero.
    """
    # In place, as a matrix of 4,600 columns takes 170 MB.
    normal_gii, cross_gio = moments.gram_gii.clone(), moments.cross_gio
    diagonal_gi = normal_gii.diagonal(dim1=1, dim2=2)
    # 1e-30: the inputs may all be zero.
    damping = (ridge * diagonal_gi.mean()).clamp_min(1e-30)
    if intercept:
        mean_gi = moments.columns_gi / moments.positions
        normal_gii.baddbmm_(mean_gi[:, :, None], moments.columns_gi[:, None], alpha=-1)
        cross_gio = cross_gio - mean_gi[:, :, None] * moments.answers_go[:, None]
    diagonal_gi.add_(damping)
    if fixed_gio is None:
        fixed_gio = torch.zeros_like(cross_gio, dtype=torch.bool)
    is_own_go = fixed_gio.any(1)  # outputs that have equations of their own, without fixed entries
    all_own = bool(is_own_go.all())
    matrix_gio = (
        torch.zeros_like(cross_gio) if all_own else solve_positive_definite(normal_gii, cross_gio)
    )
    at_once = max(1, MAX_ENTRIES // normal_gii.shape[1] ** 2)
    for group, normal_ii in enumerate(normal_gii):
        own = is_own_go[group].nonzero()[:, 0].tolist()
        for part in range(0, len(own), at_once):
            outputs = own[part : part + at_once]
            free_oi = ~fixed_gio[group][:, outputs].mT
            normal_oii = torch.where(free_oi[:, :, None] & free_oi[:, None], normal_ii, 0)
            normal_oii.diagonal(dim1=1, dim2=2).masked_fill_(~free_oi, 1)
            answers_oi = torch.where(free_oi, cross_gio[group][:, outputs].mT, 0)
            matrix_gio[group][:, outputs] = solve_positive_definite(
                normal_oii, answers_oi[..., None]
            )[..., 0].mT
    # By the normal equations, which hold wherever the matrix is not zero.
    gained = (matrix_gio * (cross_gio + damping * matrix_gio)).sum()
    if not intercept:
        remaining = moments.energy - float(gained)
        return matrix_gio, torch.zeros_like(moments.answers_go), max(0.0, remaining)
    gained += moments.answers_go.square().sum() / moments.positions
    shift_go = moments.answers_go - (moments.columns_gi[:, None] @ matrix_gio)[:, 0]
    return matrix_gio, shift_go / moments.positions, max(0.0, moments.energy - float(gained))


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
    with channels_last([reference, module], batches[0], device):
        expected = ReferenceOutputs(reference, batches, device)
        enough = bisect_left([*accumulate(map(len, batches))], TRIAL_SAMPLES) + 1
        layers: dict[str, JsonValue] = {}
        refitted: list[Difference] = []
        if refit:
            sliced = copy_module(module)

            def compare(targets: Outputs, outputs: Outputs) -> None:
                # The passes of the refit end with what both modules return.
                expected.add(targets)
                refitted.append(_difference(targets, outputs))

            options: Any = {"names": names, "on_outputs": compare, "folder": folder}
            for one in refit_(module, reference, kept, batches, device, **options):
                layers[one.weight] = [rounded(one.before), rounded(one.after)]
            errors = {"cut": expected.error(sliced, enough), "refit": relative_error(refitted)}
            del sliced
        else:
            errors = {"cut": expected.error(module)}
        if batch_norms(module):
            before = {name: buffer.clone() for name, buffer in module.named_buffers()}
            # Whether new statistics help after a refit is tried on a part of the samples first.
            is_tried = refit and enough < len(batches)
            for count in (enough, len(batches)) if is_tried else (len(batches),):
                reestimate_batch_norms_(module, batches[:count], device)
                error = expected.error(module, count, refitted[:count])
                if refit and not error < relative_error(refitted[:count]):
                    module.load_state_dict(before, strict=False)
                    break
            else:
                errors["batch_norm"] = error
    return {
        "samples": sum(map(len, batches)),
        "output_error": {name: rounded(error) for name, error in errors.items()},
        "layers": layers,
    }


def recovered_slice(
    module: nn.Module, plan: SlicePlan, batches: Sequence[Batch], device: str, *, refit: bool
) -> nn.Module:
    """Copy a module without the channels of a plan, and recover it if there are batches."""
    # A slice shares the tensors that it leaves whole, and a refit changes them in place.
    sliced = copy_module(sliced_copy(module, plan))
    if batches:
        recover_(sliced, copy_module(module), plan.kept, batches, device, refit=refit)
    return sliced


def _difference(targets: Outputs, outputs: Outputs) -> Difference:
    """Compare what a reference and a module return, without equal infinities, as of masks."""
    error = energy = 0.0
    for output, target in zip(outputs, targets, strict=True):
        target_part, output_part = measured(target, output)
        error += float((output_part - target_part).square().sum())
        energy += float(target_part.square().sum())
    return error, energy


def relative_error(batches: Sequence[Difference]) -> float:
    """Return the squared error of some batches, relative to their energy."""
    return sum(error for error, _ in batches) / max(sum(energy for _, energy in batches), 1e-30)


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
    def error(
        self, module: nn.Module, count: int | None = None, others: Sequence[Difference] = ()
    ) -> float:
        """Return the squared error of a module's outputs, relative to their energy.

        With ``count``, on so many of the batches. ``others`` are another module's differences on
        the same ones: once this module's squared error reaches theirs, no more batches are run.
        """
        most = sum(error for error, _ in others) if others else inf
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
            differences.append(_difference(targets, _run(module, moved)))
            if sum(error for error, _ in differences) >= most:
                break
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


def usual_calibration(
    context: Context, why: str = "batch_norm: reestimate", most: int = DEFAULT_CALIBRATION_SAMPLES
) -> list[Batch]:
    """Return calibration samples, as many as stages draw by default; StageFailed without data."""
    data: Any = context.need_data(why)
    available = len(data.split(data.calibration_split))
    return list(data.calibration(min(most, available), context.seed))


def calibration_batches(
    stage: Any, model: EagerModel, module: nn.Module, context: Context
) -> list[Batch]:
    """Return a stage's samples in batches of the data, or of the one size that the model takes."""
    data: Any = context.need_data(stage.title)
    size, samples = model.signature.smallest_batch, stage.available_samples(data)
    batches = list(data.calibration(samples, context.seed))
    if model.signature.batch_axis is None:
        # The declared size may be that of exports alone, and larger batches have better statistics.
        try:
            run_in_eval(module, batches[0].inputs)
        except Exception:  # noqa: BLE001 - the model's own; what it still raises names the samples
            whole = max(size, samples - samples % size)
            return list(data.replaced(batch_size=size).calibration(whole, context.seed))
    return batches


def _run(module: nn.Module, batch: Batch) -> Outputs:
    with refused_samples(batch):
        return flatten_outputs(module(*batch.inputs))


def rounded(value: float) -> float:
    """Return a value with four digits, for facts."""
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
