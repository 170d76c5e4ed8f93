"""Products of a layer's inputs, and how its weights make up for others' errors by these."""

from __future__ import annotations

from collections.abc import Callable

import torch

LAZY_INPUTS = 128  # the batch size of the authors of both papers below
DAMPING = 0.01  # added to the Hessian's diagonal, as a share of its mean; as in both papers below
GRAM_BLOCK = 128
"""Columns whose products with all later columns are computed at once: the Gram matrix is symmetric,
and half of it takes half of the time (measured: 512 columns at once take a tenth longer)."""


def add_products_(upper_gii: torch.Tensor, columns_gpi: torch.Tensor) -> None:
    """Add the products of all columns to a Gram matrix's blocks on and above the diagonal."""
    for start in range(0, columns_gpi.shape[2], GRAM_BLOCK):
        rows_gip = columns_gpi[:, :, start : start + GRAM_BLOCK].mT
        block_gii = upper_gii[:, start : start + GRAM_BLOCK, start:]
        block_gii += rows_gip @ columns_gpi[:, :, start:]


def mirror_(upper_gii: torch.Tensor) -> torch.Tensor:
    """Fill in the rest of a Gram matrix from its blocks on and above the diagonal; return it."""
    for start in range(0, upper_gii.shape[1], GRAM_BLOCK):
        rows, later = slice(start, start + GRAM_BLOCK), slice(start + GRAM_BLOCK, None)
        upper_gii[:, later, rows] = upper_gii[:, rows, later].mT
    return upper_gii


def hessian_factor(moment_II: torch.Tensor) -> torch.Tensor:
    """Return the upper triangular R with RRᵀ = H, the damped Hessian XᵀX of a layer's inputs.

    R is the inverse of the upper Cholesky factor of H⁻¹ in SparseGPT (Frantar and Alistarh, 2023)
    and in GPTQ (Frantar et al., 2023), without an inverse: a quarter of the work. XᵀX is a sum or
    mean; leading axes are a batch.
    """
    # Its lower Cholesky factor, of the inputs in the opposite order, is R in that order.
    hessian_II = moment_II.flip(-2, -1)
    del moment_II  # for 11,008 inputs each of these takes a GB
    diagonal_I = hessian_II.diagonal(dim1=-2, dim2=-1)
    dead_I = diagonal_I == 0  # always 0: independent of all other inputs
    diagonal_I.add_(DAMPING * diagonal_I.mean(-1, keepdim=True)).masked_fill_(dead_I, 1)
    lower_II: torch.Tensor = torch.linalg.cholesky(hessian_II)
    return lower_II.flip(-2, -1)


def compensate(
    weight_OI: torch.Tensor,
    factor_II: torch.Tensor,
    change: Callable[[int, torch.Tensor], torch.Tensor],
    at_once: int = LAZY_INPUTS,
) -> None:
    """Change input after input; those that follow make up for each one's error, in place.

    `factor_II` is :func:`hessian_factor` of the inputs in this order. `change` is given an input's
    place, and its weights with those of inputs behind it, which lack what they change for one
    another; it returns its weights rounded, or zero. The inputs behind `at_once` of them make up
    for the errors of all of these at once: the papers' "lazy batch updates". Leading axes of both
    tensors are a batch.
    """
    # In the papers errors e = (w' - q) / U_jj, of the weights w' changed so far, are taken times U,
    # the inverse of R. For all inputs together that is e U = w - q, with the weights w as they
    # came; so w'_j = w_j + the sum over all i < j of (w_i - q_i) R_ij / R_jj.
    given_OI = weight_OI.clone()
    inputs = weight_OI.shape[-1]
    for begin in range(0, inputs, at_once):
        end = min(begin + at_once, inputs)
        diagonal_I = factor_II.diagonal(dim1=-2, dim2=-1)[..., None, begin:]
        shares_LI = factor_II[..., begin:end, begin:] / diagonal_I
        # Copied, and inputs first: each step reads one's weights, and changes those that follow.
        given_LO, part_LO = (x[..., begin:end].mT.contiguous() for x in (given_OI, weight_OI))
        for step in range(end - begin):
            rest_LO = part_LO[..., step:, :]
            error_O = given_LO[..., step, :]
            error_O -= change(begin + step, rest_LO.mT)
            next_L1 = shares_LI[..., step, step + 1 : end - begin, None]
            rest_LO[..., 1:, :] += next_L1 * error_O[..., None, :]
        weight_OI[..., begin:end] = part_LO.mT
        weight_OI[..., end:] += given_LO.mT @ shares_LI[..., end - begin :]
