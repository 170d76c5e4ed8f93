"""Masks of the weights that become zero: by magnitude, at random, or by calibration data."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import nn

from compress.common.forward import bytes_of
from compress.data.batch import Batch
from compress.graph.layer_gram import LAZY_INPUTS, compensate, hessian_factor
from compress.pruning.allocation.ranking import names_matching
from compress.pruning.depth.block_search import all_blocks
from compress.pruning.importance.layer_calls import observe_layer_calls, record_layer_calls
from compress.pruning.importance.scores import MAX_COLUMNS, Moments
from compress.training.objectives.objective import KeepZeros, set_zeros_, weights_of

if TYPE_CHECKING:
    from pydantic import JsonValue

    from compress.core.progress import Progress
    from compress.pruning.importance.layer_calls import LayerCall

UNOBSERVED = (nn.MultiheadAttention, nn.RNNBase, nn.modules.conv._ConvTransposeNd)
"""Layers of torch with matrices for weights whose calls :mod:`layer_calls` does not observe."""
Method: TypeAlias = Literal["l1", "random", "wanda", "sparsegpt"]
NofM: TypeAlias = "tuple[int, int]"
"""n and m: of m neighbouring inputs n stay nonzero."""

DENSE = (
    "Zeros alone make dense kernels no faster and the file no smaller: they are stored and "
    "multiplied like other numbers. They pay where the file is compressed."
)
SPARSE = (
    "Dense kernels are no faster with these zeros. Sparse kernels of CUDA devices take the pattern "
    "2:4 (torch.sparse.to_sparse_semi_structured)."
)


@dataclass(frozen=True)
class WeightLayout:
    """How a layer reads its weight as one matrix for each of its groups."""

    read_axis: int
    groups: int
    channels: int
    """Channels that each group reads."""
    kernel: int
    """Positions of a convolution's window; 1 for a linear layer."""

    def matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """Reshape a weight to `(groups, outputs, columns)`, in the order of a call's parts.

        Channels of one position are neighbours, as sparse kernels require.
        """
        rows = weight.movedim(self.read_axis, -1)
        return rows.reshape(self.groups, -1, self.channels * self.kernel)

    def weight(self, matrix_goi: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Undo ``matrix``: return a matrix in the shape of its weight."""
        axis = self.read_axis
        rows = matrix_goi.reshape(*shape[:axis], *shape[axis + 1 :], shape[axis])
        return rows.movedim(-1, axis).contiguous()


@dataclass(frozen=True)
class PrunableWeights:
    """The weights that can be set to zero, and why others cannot."""

    layouts: Mapping[str, WeightLayout | None]
    """Tensor in the order of its first use → its layout, or None if no call was observed."""
    left: Mapping[str, str]
    """Tensor that is not pruned → why."""

    def with_known_layout(self, n_of_m: tuple[int, int] | None = None) -> PrunableWeights:
        """Keep the weights with a layout, and with a multiple of ``m`` channels."""
        left = dict(self.left)
        for name, layout in self.layouts.items():
            if layout is None:
                left[name] = "what it is multiplied with cannot be seen; use method: l1 or random"
            elif n_of_m and layout.channels % n_of_m[1]:
                left[name] = f"it reads {layout.channels} channels, no multiple of {n_of_m[1]}"
        return self.without(left)

    def without(self, left: Mapping[str, str]) -> PrunableWeights:
        """Return the same without some weights → why these are not pruned."""
        layouts = {name: layout for name, layout in self.layouts.items() if name not in left}
        return PrunableWeights(layouts, {**self.left, **left})


def prunable_weights(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> PrunableWeights:
    """Find the matrices and kernels of a module in eval mode, without embeddings and vectors.

    ``include`` and ``exclude`` are patterns of tensors, or of modules around them.
    """
    calls, observed = record_layer_calls(module, Batch(tuple(inputs), None), str(inputs[0].device))
    layout_of: dict[str, WeightLayout] = {}
    for call in calls:
        kernel = prod(call.kernel)
        layout = WeightLayout(call.read_axis, call.groups, call.columns // kernel, kernel)
        layout_of.setdefault(call.weight, layout)
    unobserved = [
        f"{prefix}.{name}".lstrip(".")
        for prefix, part in module.named_modules()
        if isinstance(part, UNOBSERVED)
        for name, _ in part.named_parameters()
    ]
    shapes = {name: p.dim() for name, p in module.named_parameters() if p.is_floating_point()}
    matrices = [name for name in (*layout_of, *unobserved) if shapes.get(name, 0) > 1]
    chosen = _matching(list(shapes), include, "include") if include else set(matrices)
    chosen -= _matching(list(shapes), exclude, "exclude")
    layouts, left = {}, {}
    for name in dict.fromkeys((*matrices, *sorted(chosen))):
        if name not in chosen:
            left[name] = "excluded"
        elif shapes[name] < 2:
            left[name] = "it is a vector"
        elif name in observed.used_elsewhere and not include:
            left[name] = "it is used otherwise than by a layer, too"
        else:
            layouts[name] = layout_of.get(name)
    return PrunableWeights(layouts, left)


def group_by_block(module: nn.Module, names: Sequence[str]) -> list[list[str]]:
    """Group tensors of one repeated block; others stay alone. The order is kept."""
    blocks = [block.name for block in all_blocks(module)]
    groups: dict[str, list[str]] = {}
    for name in names:
        around = next((block for block in blocks if name.startswith(f"{block}.")), name)
        groups.setdefault(around, []).append(name)
    return list(groups.values())


def _matching(names: Sequence[str], patterns: Sequence[str], setting: str) -> set[str]:
    """Return the tensors whose names, or modules around them, patterns match."""
    parts_of = [name.split(".") for name in names]
    known = {".".join(parts[:end]) for parts in parts_of for end in range(1, len(parts) + 1)}
    setting = f"prune_weights.{setting}"
    return set(names) & set(names_matching(sorted(known), patterns, setting, "weight or module"))


def sparsity_facts(
    before: nn.Module, after: nn.Module, pruned: PrunableWeights, n_of_m: tuple[int, int] | None
) -> dict[str, JsonValue]:
    """Return the share of zeros by layer and in all, and the size of the compressed weights."""
    weights = dict(after.named_parameters())
    shares = {name: _share_of_zeros([weights[name]]) for name in pruned.layouts}
    return {
        "zeros": {
            "by_weight": {name: round(share, 6) for name, share in shares.items()},
            "pruned_weights": round(_share_of_zeros([weights[n] for n in shares]), 6),
            "all_weights": round(_share_of_zeros(list(weights.values())), 6),
        },
        "left": dict(pruned.left),
        "deflated_bytes": {"before": deflated_bytes(before), "after": deflated_bytes(after)},
        "speed": DENSE if n_of_m is None else SPARSE,
    }


def deflated_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's weights and buffers, compressed by zlib as in a zip file."""
    packer, size, seen = zlib.compressobj(), 0, set()
    for tensor in module.state_dict().values():
        if tensor.data_ptr() in seen and tensor.numel():
            continue  # tied weights are stored once
        seen.add(tensor.data_ptr())
        size += len(packer.compress(bytes_of(tensor)))
    return size + len(packer.flush())


def _share_of_zeros(weights: list[nn.Parameter]) -> float:
    zeros = sum(int((weight == 0).sum()) for weight in weights)
    return zeros / sum(weight.numel() for weight in weights)


def unstructured_masks(
    weights: Mapping[str, torch.Tensor], amount: float, method: Method, is_global: bool
) -> dict[str, torch.Tensor]:
    """Return for each weight where it becomes zero: its smallest entries (`l1`), or random ones.

    ``amount`` is the share of zeros, in each weight or of all ranked together (``is_global``).
    """

    def zeros_of(flat: torch.Tensor) -> torch.Tensor:
        score = flat.abs() if method == "l1" else -torch.rand_like(flat)
        return _smallest(score, round(amount * len(flat)))

    flat = [weight.detach().flatten() for weight in weights.values()]
    if is_global:
        parts = torch.split(zeros_of(torch.cat(flat)), [*map(len, flat)])
    else:
        parts = tuple(map(zeros_of, flat))
    return {
        name: part.view_as(weight)
        for (name, weight), part in zip(weights.items(), parts, strict=True)
    }


def n_of_m_masks(
    weights: Mapping[str, torch.Tensor],
    layouts: Mapping[str, WeightLayout | None],
    n_of_m: NofM,
    method: Method,
) -> dict[str, torch.Tensor]:
    """Return for each weight where it becomes zero, so that of m neighbouring inputs n stay.

    A weight without a layout gets no zeros. `l1` keeps the largest, `random` random ones.
    """
    zeros = {}
    for name, weight in weights.items():
        layout = layouts[name]
        if layout is not None:
            matrix = layout.matrix(weight.detach())
            score = matrix.abs() if method == "l1" else torch.rand_like(matrix)
            zeros[name] = layout.weight(smallest_of_neighbours(score, n_of_m), weight.shape)
    return zeros


def smallest_of_neighbours(score: torch.Tensor, n_of_m: NofM) -> torch.Tensor:
    """Mask the smallest scores along the last axis, so that of each m neighbours n stay."""
    n, m = n_of_m
    return _smallest(score.reshape(-1, m), m - n).reshape(score.shape)


def _smallest(score: torch.Tensor, count: int) -> torch.Tensor:
    """Mask so many of the smallest scores along the last axis."""
    removed = score.topk(count, largest=False).indices
    return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, removed, True)


def wanda(
    weight_goi: torch.Tensor, gram_gii: torch.Tensor, amount: float, n_of_m: NofM | None
) -> torch.Tensor:
    """Mask the entries of a matrix that contribute least to each of its outputs.

    The score of an entry is its magnitude times the norm of its input; entries are compared within
    a row (Sun et al., "A Simple and Effective Pruning Approach for Large Language Models", 2023):
    an ``amount`` of each row is masked, or all but n of m neighbours.
    """
    norm_gi = gram_gii.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    score = weight_goi.abs() * norm_gi.unsqueeze(-2)
    if n_of_m:
        return smallest_of_neighbours(score, n_of_m)
    return _smallest(score, round(amount * score.shape[-1]))


def sparsegpt(
    weight_goi: torch.Tensor, gram_gii: torch.Tensor, amount: float, n_of_m: NofM | None
) -> torch.Tensor:
    """Return a float64 matrix with zeros whose other entries are changed to compensate them.

    Columns are pruned from left to right; the effect of zeros in one on the outputs is compensated,
    as far as possible, by all columns right of it (Frantar and Alistarh, "SparseGPT: Massive
    Language Models Can Be Accurately Pruned in One-Shot", 2023, algorithm 1). An ``amount`` of each
    block of columns becomes zero, or all but n of m neighbours.
    """
    # Weights of inputs that are always zero have no effect, and nothing to be compensated by.
    always_zero_gi = gram_gii.diagonal(dim1=-2, dim2=-1) == 0
    given_goi = weight_goi.masked_fill(always_zero_gi.unsqueeze(-2), 0)
    weight_goi = given_goi.clone()
    factor_gii = hessian_factor(gram_gii)
    diagonal_gi = factor_gii.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
    zeros_goi = torch.zeros_like(weight_goi, dtype=torch.bool)
    together = n_of_m[1] if n_of_m else LAZY_INPUTS  # columns whose zeros are chosen at once

    def prune_column(step: int, rest_gol: torch.Tensor) -> torch.Tensor:
        if step % together == 0:
            own = slice(step, step + together)
            given, diagonal = given_goi[..., own], diagonal_gi[..., own]
            # What these columns become if all of them stay.
            errors = (rest_gol[..., :together] - given) * diagonal
            triangle = factor_gii[..., own, own]
            change = torch.linalg.solve_triangular(triangle, errors, upper=True, left=False)
            score = ((given + change) * diagonal).square()
            if n_of_m:
                zeros_goi[..., own] = smallest_of_neighbours(score, n_of_m)
            else:
                zeros = _smallest(score.flatten(1), round(amount * score[0].numel()))
                zeros_goi[..., own] = zeros.view_as(score)
        return rest_gol[..., 0].masked_fill(zeros_goi[..., step], 0)

    compensate(weight_goi, factor_gii, prune_column, max(LAZY_INPUTS // together, 1) * together)
    return weight_goi.masked_fill_(zeros_goi, 0)


def set_uncalibrated_zeros_(
    module: nn.Module,
    layouts: Mapping[str, WeightLayout | None],
    *,
    method: Method,
    amount: float,
    n_of_m: NofM | None,
    is_global: bool,
    seed: int,
) -> None:
    """Set entries of weights to zero by their magnitude or at random, in place."""
    parameters = dict(module.named_parameters())
    weights = {name: parameters[name] for name in layouts}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if n_of_m:
            zeros = n_of_m_masks(weights, layouts, n_of_m, method)
        else:
            zeros = unstructured_masks(weights, amount, method, is_global)
    set_zeros_(weights, zeros)


@torch.no_grad()
def set_calibrated_zeros_(
    module: nn.Module,
    layouts: Mapping[str, WeightLayout],
    batches: Sequence[Batch],
    *,
    method: Method,
    amount: float,
    n_of_m: NofM | None,
    device: str,
    progress: Progress,
) -> dict[str, str]:
    """Set entries of weights to zero, in place; return the weights that were skipped → why.

    The module is in eval mode, and runs on the device. ``layouts`` are in the order of use.
    """
    module.to(device)
    weights, skipped = dict(module.named_parameters()), {}
    groups = group_by_block(module, list(layouts))
    # Blocks in order, so that each is calibrated on the outputs of the pruned ones before.
    for done, group in enumerate(groups, 1):
        moments = {name: Moments() for name in group}

        def add_to_moments(call: LayerCall, moments: dict[str, Moments] = moments) -> None:
            if call.weight in moments and call.columns <= MAX_COLUMNS:
                for (columns_gpi,) in call.parts():
                    moments[call.weight].add_(columns_gpi)

        observe_layer_calls(module, batches, add_to_moments, device)
        for name in group:
            if not moments[name].positions:
                skipped[name] = (
                    "it was not called on the calibration data, or reads more than "
                    f"{MAX_COLUMNS} numbers"
                )
                continue
            layout, gram = layouts[name], moments[name].gram_gii
            if not bool(gram.isfinite().all()):
                skipped[name] = "what it reads on the calibration data is not finite"
                continue
            matrix = layout.matrix(weights[name].detach().double())
            if method == "sparsegpt":
                matrix = sparsegpt(matrix, gram, amount, n_of_m)
            else:
                matrix = matrix.masked_fill(wanda(matrix, gram, amount, n_of_m), 0)
            weights[name].copy_(layout.weight(matrix, weights[name].shape))
        progress(method, done, len(groups))
    module.cpu()
    return skipped


# The repr of a constraint is part of the key by which an interrupted training is resumed: class and
# field names must stay.
@dataclass(frozen=True)
class AddZeros:
    """Adds zeros while weights are trained, the smallest weights first.

    Their share rises with the steps: evenly, or fast at first and slower later, as in Zhu and
    Gupta, "To prune, or not to prune" (2017), equation 1. Zeros stay zero.
    """

    tensors: tuple[str, ...]
    """Names of the weights."""
    amount: float
    """Final share of zeros."""
    whole: bool
    """Whether all weights are ranked together."""
    schedule: Literal["linear", "cubic"]
    until: float
    """Share of the steps after which no zeros are added."""
    updates: int
    """How often zeros are added, evenly spread."""

    @contextmanager
    def around(self, module: nn.Module, step: int, steps: int) -> Iterator[None]:
        """Context around the optimizer's step: restore zeros after it, and add some when due."""
        with KeepZeros(self.tensors).around(module, step, steps):
            yield
        before, after = self._done(step / steps), self._done((step + 1) / steps)
        if after > before:
            weights = weights_of(module, self.tensors)
            amount = self.amount_at(after)
            set_zeros_(weights, unstructured_masks(weights, amount, "l1", self.whole))

    def is_met(self, share: float) -> bool:
        """Whether all zeros have been set after a share of the steps."""
        return self._done(share) == self.updates

    def amount_at(self, done: int) -> float:
        """Return the share of zeros after a number of updates."""
        remaining = 1 - done / self.updates
        return self.amount * (1 - (remaining**3 if self.schedule == "cubic" else remaining))

    def _done(self, share: float) -> int:
        """Return how many updates are due within a share of the steps."""
        # 1e-9: rounding must not miss the last update, due at exactly `until` of the steps.
        return min(self.updates, int(share / self.until * self.updates + 1e-9))
