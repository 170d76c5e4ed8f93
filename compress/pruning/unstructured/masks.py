"""Masks of the weights that become zero: by magnitude, at random, or by calibration data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch.nn.utils.prune import L1Unstructured, RandomUnstructured

from compress.graph.layer_gram import inverse_hessian_factor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from compress.pruning.unstructured.weight_layout import WeightLayout

Method: TypeAlias = Literal["l1", "random", "wanda", "sparsegpt"]
NofM: TypeAlias = "tuple[int, int]"
"""n and m: of m neighbouring inputs n stay nonzero."""

# As in the paper: within a block, each column is compensated at once; later blocks once per block.
BLOCK = 128
"""Columns that SparseGPT prunes at a time."""


def unstructured_masks(
    weights: Mapping[str, torch.Tensor], amount: float, method: Method, is_global: bool
) -> dict[str, torch.Tensor]:
    """Return for each weight where it becomes zero: its smallest entries (`l1`), or random ones.

    ``amount`` is the share of zeros, in each weight or of all ranked together (``is_global``).
    """
    choose = (L1Unstructured if method == "l1" else RandomUnstructured)(amount)
    if not is_global:
        return {name: _chosen(choose, weight) for name, weight in weights.items()}
    together = torch.cat([weight.flatten() for weight in weights.values()])
    sizes = [weight.numel() for weight in weights.values()]
    parts = torch.split(_chosen(choose, together), sizes)
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
    groups = score.reshape(-1, m)
    removed = groups.topk(m - n, largest=False).indices
    zeros = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, removed, True)
    return zeros.reshape(score.shape)


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
    removed = score.topk(round(amount * score.shape[-1]), largest=False).indices
    return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, removed, True)


def sparsegpt(
    weight_goi: torch.Tensor, gram_gii: torch.Tensor, amount: float, n_of_m: NofM | None
) -> torch.Tensor:
    """Return a float64 matrix with zeros whose other entries are changed to compensate them.

    Columns are pruned from left to right; the effect of zeros in one on the outputs is compensated,
    as far as possible, by all columns right of it (Frantar and Alistarh, "SparseGPT: Massive
    Language Models Can Be Accurately Pruned in One-Shot", 2023, algorithm 1). An ``amount`` of each
    block of columns becomes zero, or all but n of m neighbours.
    """
    weight_goi = weight_goi.clone()
    # Weights of inputs that are always zero have no effect, and nothing to be compensated by.
    always_zero_gi = gram_gii.diagonal(dim1=-2, dim2=-1) == 0
    weight_goi.masked_fill_(always_zero_gi.unsqueeze(-2), 0)
    inverse_gii = inverse_hessian_factor(gram_gii)
    width = weight_goi.shape[-1]
    block = BLOCK - BLOCK % n_of_m[1] if n_of_m and n_of_m[1] < BLOCK else BLOCK
    for start in range(0, width, block):
        own = slice(start, min(start + block, width))
        factor = inverse_gii[:, own, own]
        error = _treat_block_(weight_goi[..., own], factor, amount, n_of_m)
        weight_goi[..., own.stop :] -= error @ inverse_gii[:, own, own.stop :]
    return weight_goi


def _treat_block_(
    block_goi: torch.Tensor, factor_gii: torch.Tensor, amount: float, n_of_m: NofM | None
) -> torch.Tensor:
    """Prune a block and compensate within it, in place; return the errors for later blocks."""
    diagonal_gi = factor_gii.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
    if n_of_m:
        zeros = torch.zeros_like(block_goi, dtype=torch.bool)
    else:
        score = (block_goi / diagonal_gi).square().flatten(1)
        removed = score.topk(round(amount * score.shape[1]), largest=False).indices
        zeros = torch.zeros_like(score, dtype=torch.bool).scatter_(1, removed, True)
        zeros = zeros.view_as(block_goi)
    errors = torch.zeros_like(block_goi)
    for i in range(block_goi.shape[-1]):
        if n_of_m and i % n_of_m[1] == 0:
            near = slice(i, i + n_of_m[1])
            score = (block_goi[..., near] / diagonal_gi[..., near]).square()
            zeros[..., near] = smallest_of_neighbours(score, n_of_m)
        removed = block_goi[..., i].where(zeros[..., i], block_goi.new_zeros(()))
        errors[..., i] = removed / diagonal_gi[..., i]
        row_gi = factor_gii[:, i, i + 1 :].unsqueeze(-2)
        block_goi[..., i + 1 :] -= errors[..., i, None] * row_gi
        block_goi[..., i].masked_fill_(zeros[..., i], 0)
    return errors


def _chosen(choose: L1Unstructured | RandomUnstructured, weight: torch.Tensor) -> torch.Tensor:
    weight = weight.detach().contiguous()  # compute_mask views it as a vector
    kept: torch.Tensor = choose.compute_mask(weight, torch.ones_like(weight))  # type: ignore[no-untyped-call]
    return kept == 0
