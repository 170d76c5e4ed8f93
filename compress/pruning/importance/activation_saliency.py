"""Score channels by their effect on the layers that read them, on calibration samples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import ceil, prod
from typing import TYPE_CHECKING, Any

import torch

from compress.pruning.importance.layer_calls import LayerCall, observe_layer_calls

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from compress.data.batch import Batch
    from compress.pruning.dependency.channel_groups import AxisGraph, ChannelGroup


# GPTQ and SparseGPT damp by 1e-2, in float32; in float64 less is enough.
RIDGE = 1e-4
"""Added to the diagonal of second moments, relative to their mean, so that they are invertible."""
ROUNDS = 128
"""Rounds in which all channels of a group are ranked; of wider groups several in each round."""


MAX_COLUMNS = 12288
"""Columns of the widest layer whose Gram matrix is computed: it takes 1.2 GB in float64."""


POSITIONS_PER_COLUMN = 64
"""Positions after which further ones hardly change a layer's Gram matrix, for each of its columns.
"""
MIN_SAMPLES = 128
"""Samples that are read in any case: the positions of one image are much alike."""
GRAM_BLOCK = 128
"""Columns whose products with all later columns are computed at once: the Gram matrix is symmetric,
and half of it takes half of the time (measured: 512 columns at once take a tenth longer)."""


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
    _upper_gii: Any = None
    """Gram matrix of which only blocks on and above the diagonal are up to date."""

    @property
    def gram_gii(self) -> torch.Tensor:
        """Gram matrix of the columns."""
        gram_gii: torch.Tensor = self._upper_gii
        for start in range(0, gram_gii.shape[1], GRAM_BLOCK):
            rows, later = slice(start, start + GRAM_BLOCK), slice(start + GRAM_BLOCK, None)
            gram_gii[:, later, rows] = gram_gii[:, rows, later].mT
        return gram_gii

    def add_(self, columns_gpi: torch.Tensor, answers_gpo: torch.Tensor | None = None) -> None:
        """Add matrices of positions by columns and of positions by answers, in place."""
        groups, positions, width = columns_gpi.shape
        self.positions += positions
        # Not sum(1, dtype=torch.float64), which takes half as long as the Gram matrix.
        self.columns_gi = self.columns_gi + columns_gpi.sum(1).double()
        if self._upper_gii is None:
            self._upper_gii = self.columns_gi.new_zeros(groups, width, width)
        for start in range(0, width, GRAM_BLOCK):
            rows_gip = columns_gpi[:, :, start : start + GRAM_BLOCK].mT
            block_gii = self._upper_gii[:, start : start + GRAM_BLOCK, start:]
            block_gii += rows_gip @ columns_gpi[:, :, start:]
        if answers_gpo is None:
            return
        self.answers_go = self.answers_go + answers_gpo.sum(1).double()
        self.cross_gio = self.cross_gio + (columns_gpi.mT @ answers_gpo).double()
        self.energy += float(answers_gpo.square().sum())


def samples_needed(call: LayerCall, samples: int, calls: int = 1) -> int:
    """Return how many samples a layer's Gram matrix needs, from one of its calls on some samples.

    The first layers of a convolutional network have thousands of positions a sample.
    """
    positions = calls * call.output.numel() / call.output.shape[call.channel_axis] / samples
    return max(MIN_SAMPLES, ceil(POSITIONS_PER_COLUMN * call.columns / max(positions, 1e-9)))


@dataclass(frozen=True)
class Consumer:
    """A layer that reads a group's channels, as matrices."""

    weight_gio: torch.Tensor
    gram_gii: torch.Tensor
    """Gram matrix of its inputs."""
    entries_ce: torch.Tensor
    """Columns of each channel, `(channels, columns per channel)`."""


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
    the remaining weights are updated to compensate. The rise is relative to the energy of each
    consumer's output.
    """
    states = [_PrunedConsumer.from_consumer(consumer) for consumer in consumers]
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


@dataclass
class _PrunedConsumer:
    """A consumer's compensated weights while channels are removed one after the other.

    Columns of removed channels stay, unread, until they are half of all: to copy the matrices
    takes longer than to compute with them.
    """

    weight_gio: torch.Tensor
    inverse_gii: torch.Tensor
    entries_ce: torch.Tensor
    energy: float
    """Sum of the squares of its unpruned output."""
    kept_i: torch.Tensor
    """Whether each column's channel is there."""

    @classmethod
    def from_consumer(cls, consumer: Consumer) -> _PrunedConsumer:
        gram_gii, weight_gio = consumer.gram_gii, consumer.weight_gio
        # 1e-30: the inputs may all be zero.
        damping = RIDGE * gram_gii.diagonal(dim1=1, dim2=2).mean().clamp_min(1e-30)
        damped_gii = gram_gii.clone()
        damped_gii.diagonal(dim1=1, dim2=2).add_(damping)
        factor_gii, failed_g = torch.linalg.cholesky_ex(damped_gii)
        # `inv` takes twice as long, and passes on what is not finite.
        inverse_gii = (
            torch.linalg.inv(damped_gii) if failed_g.any() else torch.cholesky_inverse(factor_gii)
        )
        energy = float((weight_gio * (gram_gii @ weight_gio)).sum())
        kept_i = torch.ones(gram_gii.shape[1], dtype=torch.bool)
        return cls(weight_gio.clone(), inverse_gii, consumer.entries_ce, max(energy, 1e-30), kept_i)

    def rises(self, channels: torch.Tensor) -> torch.Tensor:
        """Return the relative rise of the squared error when each channel is removed alone."""
        rows_ce = self.entries_ce[channels]
        block_gcee = self.inverse_gii[:, rows_ce[:, :, None], rows_ce[:, None, :]]
        weight_gceo = self.weight_gio[:, rows_ce]
        # In systems of one unknown torch's threads wait for each other more than they compute.
        is_one = rows_ce.shape[1] == 1
        solved_gceo = (
            weight_gceo / block_gcee if is_one else torch.linalg.solve(block_gcee, weight_gceo)
        )
        rise_gc = (weight_gceo * solved_gceo).sum((2, 3))
        rises: torch.Tensor = rise_gc.sum(0) / self.energy
        return rises

    def remove_(self, channels: torch.Tensor) -> None:
        """Remove channels and compensate them by the other weights, in place."""
        rows_e = self.entries_ce[channels].flatten()
        block_gee = self.inverse_gii[:, rows_e[:, None], rows_e]
        across_gei = self.inverse_gii[:, rows_e]
        solved_gei = torch.linalg.solve(block_gee, across_gei)
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


def consumers(
    module: nn.Module,
    groups: Sequence[ChannelGroup],
    graph: AxisGraph,
    batches: Sequence[Batch],
    device: str = "cpu",
) -> list[list[Consumer]]:
    """Return, for each group, the linear layers and convolutions that read its channels."""
    slots = {slot for group in groups for slot in group.consumed_slots}
    calls: dict[str, LayerCall] = {}
    moments: dict[str, Moments] = {}
    module.to(device)

    def add_to_moments(call: LayerCall, size: int, samples_before: int) -> None:
        is_read = (call.weight, call.read_axis) in slots and call.columns <= MAX_COLUMNS
        if is_read and samples_before < samples_needed(call, size):
            calls[call.weight] = call.without_values()
            own = moments.setdefault(call.weight, Moments())
            for columns, _ in call.parts():
                own.add_(columns)

    samples = 0
    for batch in batches:
        add = partial(add_to_moments, size=len(batch), samples_before=samples)
        observe_layer_calls(module, [batch], add, device)
        samples += len(batch)
    module.cpu()  # where it is sliced and verified
    weights = dict(module.named_parameters())
    return [
        [
            _consumer(group, graph, weights[name], calls[name], moments[name])
            for name, axis in group.consumed_slots
            if name in calls and calls[name].read_axis == axis
        ]
        for group in groups
    ]


def _consumer(
    group: ChannelGroup, graph: AxisGraph, weight: torch.Tensor, call: LayerCall, moments: Moments
) -> Consumer:
    weight = weight.detach().double().cpu()
    if call.read_axis == 0:
        weight_gio = weight[None]
    else:
        weight_gio = weight.reshape(call.groups, -1, call.columns).mT
    classes = graph.classes[call.weight, call.read_axis]
    # A channel of a convolution's input takes as many columns as its window has positions.
    classes = classes.repeat_interleave(prod(call.kernel))
    own = [(classes == channel).nonzero().flatten() for channel in group.channels]
    return Consumer(weight_gio, moments.gram_gii.cpu(), torch.stack(own))
