"""Score the channels of groups by any criterion: by weights, derivatives or consuming layers.

Every score covers a channel's entries in all tensors of its group, not only one filter (Fang et
al., "DepGraph", 2023). Buffers do not count.

Derivatives are those of the task's loss on calibration samples with targets, and of the change of
the outputs on those without. A channel's gate is where the next layers read it: the derivative with
respect to these weights, times the weights, is the derivative with respect to a factor on the
channel itself (Molchanov et al., 2019, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import ceil, prod
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from compress.common.errors import CompressError
from compress.common.forward import copy_module, flatten_outputs
from compress.core.objectives.loss import INFERRED_LOSS, refuse_without_curvature
from compress.core.objectives.task import has_target
from compress.core.progress import Progress, silent
from compress.data.batch import Batch
from compress.data.targets import select
from compress.graph.layer_gram import add_products_, mirror_
from compress.graph.positive_definite import solve_positive_definite
from compress.pruning.channel_settings import FROM_DATA, OF_GRADIENTS, Criterion
from compress.pruning.importance.layer_calls import (
    LayerCall,
    LayerCallMode,
    channels_last,
    observe_layer_calls,
    refused_samples,
)

if TYPE_CHECKING:
    from compress.common.signature import Signature
    from compress.core.context import Context
    from compress.core.objectives.loss import Loss, LossFunction
    from compress.pruning.dependency.channel_groups import AxisGraph, ChannelGroup
    from compress.pruning.dependency.rules.channel_labels import Slot

SLOPE_SAMPLES = 32
"""Samples on which derivatives of the outputs are averaged, over a layer's positions, too."""
# At a minimum of the loss, the gradients of many samples together cancel.
SAMPLES_PER_GRADIENT = 16
# GPTQ and SparseGPT damp by 1e-2, in float32; in float64 less is enough.
RIDGE = 1e-4
"""Added to the diagonal of second moments, relative to their mean, so that they are invertible."""
ROUNDS = 128
"""Rounds in which all channels of a group are ranked; of wider groups several in each round."""
MAX_COLUMNS = 12288
"""Columns of the widest layer whose Gram matrix is computed: it takes 1.2 GB in float64."""

POSITIONS_PER_COLUMN = 64
"""Positions after which further samples hardly change a layer's Gram matrix, per column."""
USED_PER_COLUMN = 32
"""Positions of these samples that are used for each column, drawn at random, as neighbours are much
alike: on 128 other images a ResNet-18 refitted on 128 has an error of 0.279, and by all positions
0.276."""
POSITIONS_PER_SAMPLE = 6
"""Positions of a sample that count as independent: by the errors of an EfficientNet-Lite0's last
seven layers on photographs of `val`, and on the 256 crops that they were fitted to, 5.4 to 6.8."""
MOST_FITTED = 0.75  # largest share of columns to independent positions that is reckoned with
MIN_POSITIONS = 2**15  # positions that are used in any case, as they cost little
MIN_SAMPLES = 128  # samples that are read in any case: the positions of one image are much alike
Scores = list[torch.Tensor | str]
"""For each group the score of each channel, `(channels,)`, or why there is none."""


@dataclass(frozen=True)
class ScoringSamples:
    """The samples on which channels are scored, and how."""

    batches: Sequence[Batch] = ()
    device: str = "cpu"
    """Where samples are run."""
    seed: int = 0
    """Of random scores and probes."""
    loss: Loss = INFERRED_LOSS
    """What derivatives are taken of, where samples have targets."""

    @classmethod
    def from_context(cls, context: Context, signature: Signature, batches: Sequence[Batch]) -> Self:
        """Score on a run's device, by its loss."""
        loss = context.loss.for_model(signature).infer_targets(context.data)
        return cls(batches, context.device, context.seed, loss)


def score_groups(
    module: nn.Module,
    groups: Sequence[ChannelGroup],
    graph: AxisGraph,
    criterion: Criterion,
    samples: ScoringSamples | None = None,
    progress: Progress = silent,
) -> Scores:
    """Score the importance of each channel, or say why a criterion cannot; nothing is changed."""
    samples = samples or ScoringSamples()
    if criterion in FROM_DATA and not samples.batches:
        raise ValueError(f"importance {criterion!r} needs calibration samples")
    if criterion in OF_GRADIENTS:
        by_gradients = taylor if criterion == "taylor" else hessian
        return list(by_gradients(module, groups, graph, samples))
    if criterion in ("wanda", "obs"):
        by_consumers = wanda if criterion == "wanda" else optimal_brain_surgeon
        reason = f"no product or convolution reads its channels, so {criterion} cannot rank them"
        has_slopes = criterion == "obs"
        consumers_of = consumers(
            module, groups, graph, samples, has_slopes=has_slopes, progress=progress
        )
        scores: Scores = []
        for done, own in enumerate(consumers_of):
            progress("scores of channels", done, len(groups))
            scores.append(by_consumers(own) if own else reason)
        progress("scores of channels", len(groups), len(groups))
        return scores
    if criterion == "random":
        generator = torch.Generator().manual_seed(samples.seed)
        counts = [len(group.channels) for group in groups]
        return [torch.rand(n, generator=generator, dtype=torch.float64) for n in counts]
    if criterion == "bn_scale":
        reason = "no BatchNorm scales its channels, so bn_scale cannot rank them"
        scales = (batch_norm_scale(group, graph, module) for group in groups)
        return [reason if own is None else own for own in scales]
    by_weights: dict[str, Callable[..., torch.Tensor]] = {
        "l1": partial(norm, power=1),
        "l2": partial(norm, power=2),
        "lamp": lamp,
        "fpgm": geometric_median_distance,
    }
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return [by_weights[criterion](group, graph, parameters) for group in groups]


def taylor(
    module: nn.Module, groups: Sequence[ChannelGroup], graph: AxisGraph, samples: ScoringSamples
) -> list[torch.Tensor]:
    """Score each channel by the first-order change of the loss when it is zeroed.

    Molchanov et al., "Importance Estimation for Neural Network Pruning" (2019), of groups: the root
    mean square over parts of the samples. Without labels, the change is that of the outputs along
    random directions, whose mean square is that of the outputs' change itself.
    """
    twin, weights = _prepared(module, groups, samples.device)
    on_targets = samples.loss.function()
    generator = torch.Generator().manual_seed(samples.seed)
    totals = [torch.zeros(len(group.channels), dtype=torch.float64) for group in groups]
    count = 0
    for part in parts(samples.batches):
        value = _loss(twin, part.to(samples.device), on_targets, generator)
        # materialize_grads: gates on which the loss does not depend get zeros.
        gradients = torch.autograd.grad(value, list(weights.values()), materialize_grads=True)
        products = {n: g * w for (n, w), g in zip(weights.items(), gradients, strict=True)}
        for group, total in zip(groups, totals, strict=True):
            changes = sums_by_channel(group, graph, gates(group), products)
            total += len(part) * changes.square()
        count += len(part)
    return [(total / count).sqrt() for total in totals]


def hessian(
    module: nn.Module, groups: Sequence[ChannelGroup], graph: AxisGraph, samples: ScoringSamples
) -> list[torch.Tensor]:
    """Score each channel by the second-order change of the loss when it is zeroed at a minimum.

    LeCun, Denker and Solla, "Optimal Brain Damage" (1990), with a channel's whole block of the
    Hessian instead of the diagonal: half of w'Hw, estimated for all channels at once by random
    signs (Hutchinson, 1989). Without labels, the loss is half the squared change of the outputs.

    Raises:
        StageFailed: the loss has no second derivative.
    """
    refuse_without_curvature(samples.loss)
    twin, weights = _prepared(module, groups, samples.device)
    on_targets = samples.loss.function()
    generator = torch.Generator().manual_seed(samples.seed)
    totals = [torch.zeros(len(group.channels), dtype=torch.float64) for group in groups]
    count = 0
    for part in parts(samples.batches):
        signs = torch.randint(0, 2, (graph.class_count,), generator=generator) * 2.0 - 1
        # Each entry times its channel's sign: one product with the Hessian probes all channels.
        probe = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        for group in groups:
            members = torch.isin(torch.arange(len(signs)), torch.tensor(group.channels))
            for name, axis in gates(group):
                if name in weights:
                    weight = weights[name].detach()
                    own = (signs * members)[graph.classes[name, axis]].to(weight)
                    shape = [-1 if i == axis else 1 for i in range(weight.dim())]
                    probe[name] += weight * own.view(shape)
        # Fused attention has no second derivative.
        with sdpa_kernel(SDPBackend.MATH):
            value = _loss(twin, part.to(samples.device), on_targets, None)
            slopes = torch.autograd.grad(
                value, list(weights.values()), create_graph=True, materialize_grads=True
            )
        curved = torch.autograd.grad(
            slopes, list(weights.values()), list(probe.values()), materialize_grads=True
        )
        products = {n: c * w for (n, w), c in zip(weights.items(), curved, strict=True)}
        for group, total in zip(groups, totals, strict=True):
            forms = sums_by_channel(group, graph, gates(group), products)
            total += len(part) * forms * signs[list(group.channels)]
        count += len(part)
    return [(total / count).abs() / 2 for total in totals]


def gates(group: ChannelGroup) -> tuple[Slot, ...]:
    """Return the slots at which a group's channels are gated: where they are read, or all slots."""
    return group.consumed_slots or group.slots


def parts(batches: Sequence[Batch], size: int = SAMPLES_PER_GRADIENT) -> Iterator[Batch]:
    """Yield batches of at most a number of samples: of those that have a target, if any have."""
    labelled = []
    for batch in batches:
        if batch.target is not None:
            known = has_target(batch.target)
            if known.any():
                inputs = tuple(x[known] for x in batch.inputs)
                labelled.append(Batch(inputs, select(batch.target, known)))
    for batch in labelled or [Batch(batch.inputs, None) for batch in batches]:
        for i in range(0, len(batch), size):
            part = slice(i, i + size)
            target = None if batch.target is None else select(batch.target, part)
            yield Batch(tuple(x[part] for x in batch.inputs), target)


def _prepared(
    module: nn.Module, groups: Sequence[ChannelGroup], device: str
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Copy the module for differentiation, and return the weights that are gates."""
    twin = copy_module(module).eval().requires_grad_(False).to(device)
    named = dict(twin.named_parameters(remove_duplicate=False))
    names = dict.fromkeys(tensor for group in groups for tensor, _ in gates(group))
    weights = {name: named[name].requires_grad_() for name in names if name in named}
    return twin, weights


def _loss(
    module: nn.Module, batch: Batch, on_targets: LossFunction, generator: torch.Generator | None
) -> torch.Tensor:
    """Return the value to differentiate: the task's loss, or a function of the outputs' change."""
    with refused_samples(batch):
        # cuDNN differentiates recurrent layers in training mode only.
        with torch.backends.cudnn.flags(enabled=False):
            outputs = flatten_outputs(module(*batch.inputs))
        if batch.target is not None:
            return on_targets(outputs, batch.target, label_smoothing=0.0)
    floating = [x for x in outputs if x.is_floating_point()]
    if generator is None:
        return sum((x - x.detach()).square().sum() for x in floating) / (2 * len(batch))  # type: ignore[return-value]
    along = [torch.randn(x.shape, generator=generator).to(x) for x in floating]
    return sum((x * d).sum() for x, d in zip(floating, along, strict=True)) / len(batch)  # type: ignore[return-value]


def sums_by_channel(
    group: ChannelGroup, graph: AxisGraph, slots: Iterable[Slot], values: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Sum the values of each channel's entries along some slots, given a value for each entry.

    Tensors without values add nothing.
    """
    totals = torch.zeros(graph.class_count, dtype=torch.float64)
    for tensor, axis in slots:
        if tensor in values:
            value = values[tensor].detach().double().cpu().movedim(axis, 0)
            totals.scatter_add_(
                0,
                graph.classes[tensor, axis],
                value.flatten(1).sum(1) if value.dim() > 1 else value,
            )
    return totals[list(group.channels)]


def norm(
    group: ChannelGroup, graph: AxisGraph, parameters: Mapping[str, torch.Tensor], power: int
) -> torch.Tensor:
    """Compute the L1 or L2 norm of each channel's weights.

    Li et al., "Pruning Filters for Efficient ConvNets" (2017).
    """
    slots = [slot for slot in group.slots if slot[0] in parameters]
    powers = {name: parameters[name].detach().double().abs().pow(power) for name, _ in slots}
    return sums_by_channel(group, graph, slots, powers).pow(1 / power)


def lamp(
    group: ChannelGroup, graph: AxisGraph, parameters: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Divide each channel's squared norm by the sum of all that are not smaller, including itself.

    Lee et al., "Layer-adaptive Sparsity for the Magnitude-based Pruning" (2021), of groups: the
    order within a group is that of ``l2``; scores of different groups are comparable.
    """
    squares = norm(group, graph, parameters, 2).square()
    order = squares.argsort(stable=True)
    not_smaller = squares[order].flip(0).cumsum(0).flip(0)
    scores = torch.empty_like(squares)
    # `tiny`: all weights of a group may be zero.
    scores[order] = squares[order] / not_smaller.clamp_min(torch.finfo(squares.dtype).tiny)
    return scores


def geometric_median_distance(
    group: ChannelGroup, graph: AxisGraph, parameters: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Sum each channel's distances to all others of its group.

    He et al., "Filter Pruning via Geometric Median" (2019): a channel near the geometric median is
    redundant, as the others can represent it.
    """
    # Each channel's weights in a row; shorter rows are padded with zeros.
    columns = []
    for tensor, axis in group.slots:
        if tensor in parameters:
            rows = parameters[tensor].detach().double().cpu().movedim(axis, 0)
            rows = rows.reshape(len(rows), -1)
            classes = graph.classes[tensor, axis]
            own = [rows[classes == channel].flatten() for channel in group.channels]
            columns.append(nn.utils.rnn.pad_sequence(own, batch_first=True))
    vectors = torch.cat(columns, 1)
    # Distances by a matrix product lose digits where channels are nearly equal.
    return torch.cdist(vectors, vectors, compute_mode="donot_use_mm_for_euclid_dist").sum(1)


def batch_norm_scale(
    group: ChannelGroup, graph: AxisGraph, module: nn.Module
) -> torch.Tensor | None:
    """Sum the absolute BatchNorm scales of each channel, or return None if there are none.

    Liu et al., "Learning Efficient Convolutional Networks through Network Slimming" (2017).
    """
    scales = {
        f"{name}.weight": layer.weight.detach().abs()
        for name, layer in module.named_modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.weight is not None
    }
    slots = [slot for slot in group.slots if slot[0] in scales]
    return sums_by_channel(group, graph, slots, scales) if slots else None


@dataclass
class Moments:
    """Sums over positions, for each group: of columns, answers, and their products.

    Products are computed in the matrices' dtype and summed up in float64.

    g: groups, i: columns (a weight's entries for one output), o: answers (output channels).
    """

    # Any: numbers until the first matrices are added, then tensors.
    positions: int = 0
    columns_gi: Any = 0.0
    answers_go: Any = 0.0
    cross_gio: Any = 0.0
    energy: float = 0.0
    """Sum of squared answers."""
    samples: int = 0
    """Samples that the positions are of, if they were counted."""
    _upper_gii: Any = None
    """Gram matrix of which only blocks on and above the diagonal are up to date."""

    @property
    def gram_gii(self) -> torch.Tensor:
        """Gram matrix of the columns."""
        return mirror_(self._upper_gii)

    def add_(self, columns_gpi: torch.Tensor, answers_gpo: torch.Tensor | None = None) -> None:
        """Add matrices of positions by columns and of positions by answers, in place."""
        groups, positions, width = columns_gpi.shape
        self.positions += positions
        # Not sum(1, dtype=torch.float64), which takes half as long as the Gram matrix.
        self.columns_gi = self.columns_gi + columns_gpi.sum(1).double()
        if self._upper_gii is None:
            self._upper_gii = self.columns_gi.new_zeros(groups, width, width)
        add_products_(self._upper_gii, columns_gpi)
        if answers_gpo is None:
            return
        self.answers_go = self.answers_go + answers_gpo.sum(1).double()
        self.cross_gio = self.cross_gio + (columns_gpi.mT @ answers_gpo).double()
        self.energy += float(answers_gpo.square().sum())

    def subtract_(self, matrix_gio: torch.Tensor) -> None:
        """Subtract the product of the columns and a matrix from the answers, in place."""
        # The module itself need not be run for it, and these products are few.
        given_gio = self.gram_gii @ matrix_gio
        self.energy += float((matrix_gio * (given_gio - 2 * self.cross_gio)).sum())
        self.energy = max(0.0, self.energy)  # which rounding may miss
        self.cross_gio = self.cross_gio - given_gio
        self.answers_go = self.answers_go - (self.columns_gi[:, None] @ matrix_gio)[:, 0]


def samples_needed(call: LayerCall, samples: int, calls: int = 1) -> int:
    """Return how many samples a layer's Gram matrix needs, from one of its calls on some samples.

    The first layers of a convolutional network have thousands of positions a sample.
    """
    positions = calls * call.positions / samples
    return max(MIN_SAMPLES, ceil(POSITIONS_PER_COLUMN * call.columns / max(positions, 1e-9)))


def ridge_factor(columns: int, positions: int) -> float:
    """Return by how much a layer's ridge grows where it was seen at few positions for its columns.

    Its matrices fit what was seen otherwise, and nothing else, such as a classifier behind
    pooling, which is seen at one position a sample.
    """
    # An EfficientNet-Lite0 at 70 % of its multiply-accumulates, by 256 samples for 1280 columns of
    # its classifier, has 22 % of the labels of the whole one; with the square it had 12 %.
    return max(1.0, 4 * columns / max(positions, 1)) ** 3


def unseen_factor(columns: int, seen: Moments) -> float:
    """Estimate the error on other samples, relative to that on those a layer was fitted to.

    Generalized cross-validation (Golub, Heath and Wahba, 1979) of a fit by independent positions.
    """
    independent = min(seen.positions, POSITIONS_PER_SAMPLE * seen.samples)
    return (1 - min(MOST_FITTED, columns / max(independent, 1))) ** -2


def share_needed(call: LayerCall, positions: float) -> float:
    """Return which share of the positions of a layer's calls its Gram matrix needs."""
    return min(1.0, max(MIN_POSITIONS, USED_PER_COLUMN * call.columns) / max(positions, 1e-9))


@dataclass(frozen=True)
class Consumer:
    """A layer that reads a group's channels, as matrices."""

    weight_gio: torch.Tensor
    gram_gii: torch.Tensor
    """Gram matrix of its inputs."""
    entries_ce: torch.Tensor
    """Columns of each channel, `(channels, columns per channel)`."""
    ridge: float = 1.0
    """Factor on the ridge, above 1 where its inputs were seen at few positions."""
    slopes_go: torch.Tensor | None = None
    """By how much an error of each of its outputs changes the module's: mean square derivatives."""


def wanda(consumers: Sequence[Consumer]) -> torch.Tensor:
    """Score each channel by the norm that it adds to its consumers' outputs if uncorrelated.

    Sun et al., "A Simple and Effective Pruning Approach for Large Language Models" (2023): weight
    magnitude times activation norm, here of all weights that read a channel.
    """
    total = torch.zeros(len(consumers[0].entries_ce), dtype=torch.float64)
    for consumer in consumers:
        activation_gi = consumer.gram_gii.diagonal(dim1=1, dim2=2)
        contribution_gi = consumer.weight_gio.square().sum(2) * activation_gi
        total += contribution_gi.sum(0)[consumer.entries_ce].sum(1)
    return total.sqrt()


def optimal_brain_surgeon(consumers: Sequence[Consumer]) -> torch.Tensor:
    """Score each channel by the rise of its consumers' squared error when it is removed.

    Hassibi and Stork's "Optimal Brain Surgeon" (1993) of whole structures, as in Kurtic, Frantar
    and Alistarh, "ZipLM" (2023): channels are removed one after the other, the cheapest first, and
    the remaining weights are updated to compensate. Errors of a consumer count by what they change
    in the module's outputs; without derivatives, relative to the energy of its own output.
    """
    states = [_PrunedConsumer(consumer) for consumer in consumers]
    alive = torch.arange(len(consumers[0].entries_ce))
    scores = torch.zeros(len(alive), dtype=torch.float64)
    per_round = -(-len(alive) // ROUNDS)
    floor = 0.0
    while len(alive):
        rises = torch.stack([state.rises(alive) for state in states]).sum(0)
        order = rises.argsort(stable=True)[:per_round]
        removed = alive[order]
        # Scores follow the order of removal, though a rise may be smaller than one before.
        scores[removed] = rises[order].clamp_min(floor)
        floor = float(scores[removed].max())
        alive = alive[~torch.isin(alive, removed)]
        for state in states:
            state.remove_(removed)
    return scores


class _PrunedConsumer:
    """A consumer's compensated weights while channels are removed one after the other.

    Columns of removed channels stay, unread, until they are half of all: to copy the matrices
    takes longer than to compute with them.
    """

    def __init__(self, consumer: Consumer) -> None:
        gram_gii, weight_gio = consumer.gram_gii, consumer.weight_gio
        if consumer.slopes_go is None:
            energy = float((weight_gio * (gram_gii @ weight_gio)).sum())
            self.weight_gio = weight_gio / max(energy, 1e-30) ** 0.5
        else:
            self.weight_gio = weight_gio * consumer.slopes_go[:, None].sqrt()
        self.entries_ce = consumer.entries_ce
        # 1e-30: the inputs may all be zero.
        damping = consumer.ridge * RIDGE * gram_gii.diagonal(dim1=1, dim2=2).mean().clamp_min(1e-30)
        damped_gii = gram_gii.clone()
        damped_gii.diagonal(dim1=1, dim2=2).add_(damping)
        factor_gii, failed_g = torch.linalg.cholesky_ex(damped_gii)
        # `inv` takes twice as long, and passes on what is not finite.
        self.inverse_gii = (
            torch.stack([*map(torch.linalg.inv, damped_gii)])
            if failed_g.any()
            else torch.cholesky_inverse(factor_gii)
        )
        self.kept_i = torch.ones(gram_gii.shape[1], dtype=torch.bool)
        """Whether each column's channel is there."""

    def rises(self, channels: torch.Tensor) -> torch.Tensor:
        """Return the relative rise of the squared error when each channel is removed alone."""
        rows_ce = self.entries_ce[channels]
        block_gcee = self.inverse_gii[:, rows_ce[:, :, None], rows_ce[:, None, :]]
        weight_gceo = self.weight_gio[:, rows_ce]
        # In systems of one unknown torch's threads wait for each other more than they compute.
        is_one = rows_ce.shape[1] == 1
        solved_gceo = (
            weight_gceo / block_gcee if is_one else solve_positive_definite(block_gcee, weight_gceo)
        )
        rise_gc = (weight_gceo * solved_gceo).sum((2, 3))
        return rise_gc.sum(0)  # type: ignore[no-any-return]

    def remove_(self, channels: torch.Tensor) -> None:
        """Remove channels and compensate them by the other weights, in place."""
        rows_e = self.entries_ce[channels].flatten()
        block_gee = self.inverse_gii[:, rows_e[:, None], rows_e]
        across_gei = self.inverse_gii[:, rows_e]
        solved_gei = solve_positive_definite(block_gee, across_gei)
        self.weight_gio.baddbmm_(solved_gei.mT, self.weight_gio[:, rows_e], alpha=-1)
        self.inverse_gii.baddbmm_(across_gei.mT, solved_gei, alpha=-1)
        self.kept_i[rows_e] = False
        if 2 * self.kept_i.sum() <= len(self.kept_i):
            # Leave out the columns of removed channels.
            kept_i = self.kept_i
            self.weight_gio = self.weight_gio[:, kept_i]
            self.inverse_gii = self.inverse_gii[:, kept_i][:, :, kept_i]
            self.entries_ce = (kept_i.cumsum(0) - 1)[self.entries_ce]
            self.kept_i = kept_i[kept_i]


@torch.enable_grad()
def mean_square_slopes(
    module: nn.Module, layers: Collection[str], samples: ScoringSamples
) -> dict[str, torch.Tensor]:
    """Estimate the squared change of a module's outputs for each squared change of a layer's.

    Returns, for each layer's weight, the mean square derivative of the outputs with respect to each
    of its output channels, `(channels,)`; nothing where the outputs cannot be differentiated.
    """
    twin = copy_module(module).eval().requires_grad_(False)
    generator, on_targets = torch.Generator().manual_seed(samples.seed), samples.loss.function()
    slopes: dict[str, Any] = dict.fromkeys(layers, 0.0)
    for name in layers:
        twin.get_parameter(name).requires_grad_()
    calls: list[LayerCall] = []
    mode = LayerCallMode(twin, lambda call: calls.append(call) if call.weight in layers else None)
    unlabelled = parts([Batch(batch.inputs, None) for batch in samples.batches])
    for part in islice(unlabelled, SLOPE_SAMPLES // SAMPLES_PER_GRADIENT):
        calls.clear()
        try:
            with mode:
                value = _loss(twin, part.to(samples.device), on_targets, generator) * len(part)
            outputs = [call.output for call in calls]
            found = torch.autograd.grad(value, outputs, materialize_grads=True)
        # Without floating outputs, in the module's own `no_grad`, or written in place.
        except (RuntimeError, TypeError, CompressError):
            return {}
        for call, slope in zip(calls, found, strict=True):
            squares = slope.double().square().movedim(call.channel_axis, 0).flatten(1).sum(1)
            slopes[call.weight] = slopes[call.weight] + squares.cpu()
    return slopes


def consumers(
    module: nn.Module,
    groups: Sequence[ChannelGroup],
    graph: AxisGraph,
    samples: ScoringSamples,
    *,
    has_slopes: bool = False,
    progress: Progress = silent,
) -> list[list[Consumer]]:
    """Return, for each group, the linear layers and convolutions that read its channels."""
    batches, device = samples.batches, samples.device
    slots = {slot for group in groups for slot in group.consumed_slots}
    calls: dict[str, LayerCall] = {}
    moments: dict[str, Moments] = {}
    generator, available = torch.Generator().manual_seed(0), sum(map(len, batches))
    module.to(device)

    def add_to_moments(call: LayerCall, size: int, samples_before: int) -> None:
        is_read = (call.weight, call.read_axis) in slots and call.columns <= MAX_COLUMNS
        needed = samples_needed(call, size)
        if is_read and call.input.numel() and samples_before < needed:
            calls[call.weight] = call.without_values()
            own = moments.setdefault(call.weight, Moments())
            share = share_needed(call, call.positions * min(needed, available) / size)
            for (columns,) in call.parts(share=share, generator=generator):
                own.add_(columns)
            own.samples += size

    count = 0
    with channels_last([module], batches[0], device):
        for batch in batches:
            progress("inputs of layers", count, available)
            add = partial(add_to_moments, size=len(batch), samples_before=count)
            observe_layer_calls(module, [batch], add, device)
            count += len(batch)
        progress("inputs of layers", available, available)
        slopes = mean_square_slopes(module, calls, samples) if has_slopes else {}
    module.cpu()  # where it is sliced and verified
    weights = dict(module.named_parameters())
    found: list[list[Consumer]] = [[] for _ in groups]
    for group, own in zip(groups, found, strict=True):
        for name, axis in group.consumed_slots:
            if name not in calls or calls[name].read_axis != axis:
                continue
            weight, read = weights[name].detach().double().cpu(), calls[name]
            weight_gio = weight.movedim(axis, -1).reshape(read.groups, -1, read.columns).mT
            # A channel of a convolution's input takes as many columns as its window has positions.
            classes = graph.classes[name, axis].repeat(prod(read.kernel))
            entries = [(classes == channel).nonzero().flatten() for channel in group.channels]
            seen = moments[name]
            ridge = ridge_factor(read.columns, seen.positions)
            slopes_go = None
            if slopes:  # the errors of a sample at all positions add up
                unseen = unseen_factor(read.columns, seen) / seen.positions
                slopes_go = unseen * slopes[name].reshape(read.groups, -1)
            entries_ce = torch.stack(entries)
            own.append(Consumer(weight_gio, seen.gram_gii.cpu(), entries_ce, ridge, slopes_go))
    return found
