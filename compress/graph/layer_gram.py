"""How a layer's weights make up for the errors of others, by its inputs: for SparseGPT and GPTQ."""

from __future__ import annotations

from collections.abc import Callable

import torch

LAZY_INPUTS = 128  # the batch size of the authors of both papers below
DAMPING = 0.01  # added to the Hessian's diagonal, as a share of its mean; as in both papers below


def inverse_hessian_factor(moment_II: torch.Tensor) -> torch.Tensor:
    """Return the upper Cholesky factor of the damped Hessian's inverse, from XᵀX of the inputs.

    Its rows say how the weights after one compensate for that one's error: in SparseGPT (Frantar
    and Alistarh, 2023) and in GPTQ (Frantar et al., 2023). XᵀX is a sum or mean; leading axes are
    a batch.
    """
    hessian_II = moment_II.clone()
    del moment_II  # for 11,008 inputs each of these takes a GB
    diagonal_I = hessian_II.diagonal(dim1=-2, dim2=-1)
    dead_I = diagonal_I == 0  # always 0: independent of all other inputs
    diagonal_I.add_(DAMPING * diagonal_I.mean(-1, keepdim=True)).masked_fill_(dead_I, 1)
    factor_II: torch.Tensor = torch.linalg.cholesky(hessian_II)
    del hessian_II
    inverse_II = torch.cholesky_inverse(factor_II)
    del factor_II
    upper_II: torch.Tensor = torch.linalg.cholesky(inverse_II, upper=True)
    return upper_II


def compensate(
    weight_OI: torch.Tensor,
    inverse_II: torch.Tensor,
    change: Callable[[int, torch.Tensor], torch.Tensor],
    at_once: int = LAZY_INPUTS,
) -> None:
    """Change input after input; those that follow make up for each one's error, in place.

    `inverse_II` is :func:`inverse_hessian_factor` of the inputs in this order; `change` is given an
    input's place and its weights, and returns them rounded, or zero. The inputs behind `at_once` of
    them make up for the errors of all of these at once: the papers' "lazy batch updates". Leading
    axes of both tensors are a batch.
    """
    inputs = weight_OI.shape[-1]
    for begin in range(0, inputs, at_once):
        end = min(begin + at_once, inputs)
        error_OL = torch.empty_like(weight_OI[..., begin:end])
        for step in range(begin, end):
            off_O = weight_OI[..., step] - change(step, weight_OI[..., step])
            error_O = off_O / inverse_II[..., step, step, None]
            next_1L = inverse_II[..., step, None, step + 1 : end]
            weight_OI[..., step + 1 : end] -= error_O[..., None] * next_1L
            error_OL[..., step - begin] = error_O
        weight_OI[..., end:] -= error_OL @ inverse_II[..., begin:end, end:]
