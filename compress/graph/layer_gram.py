"""The inverse Hessian of a layer's output error, from its inputs: for SparseGPT and GPTQ."""

from __future__ import annotations

import torch

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
