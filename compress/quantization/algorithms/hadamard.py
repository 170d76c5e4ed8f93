"""Random orthogonal matrices that spread outliers over all channels: randomized Hadamard matrices.

After Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs" (2024). Rows and
channels are N and I.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

AT_ONCE = 2**22
"""Numbers that are multiplied at a time, in float64: 32 MiB."""


@dataclass(frozen=True)
class Rotation:
    """The orthogonal matrix Q = D (F₁ ⊗ F₂ ⊗ …): signs and a Kronecker product."""

    diagonal: torch.Tensor
    """The diagonal of D: 1 and -1, float64, `(channels,)`."""
    factors: tuple[torch.Tensor, ...]
    """Orthogonal matrices, float64, whose sizes multiply to the number of channels."""

    def after_scaling(self, scale_I: torch.Tensor) -> Rotation:
        """Return what multiplies channels by a scale first, and is orthogonal no more."""
        return replace(self, diagonal=self.diagonal * scale_I)

    def apply(self, values: torch.Tensor, axis: int = -1) -> torch.Tensor:
        """Return x Q for each row x along an axis: computed in float64, in the values' dtype."""
        moved = values.movedim(axis, -1)
        rows_NI = moved.reshape(-1, moved.shape[-1])
        rotated_NI = torch.empty_like(rows_NI)
        count = max(1, AT_ONCE // rows_NI.shape[1])
        for rows, rotated in zip(rows_NI.split(count), rotated_NI.split(count), strict=True):
            parts = (rows.double() * self.diagonal).unflatten(-1, [*map(len, self.factors)])
            for place, factor in enumerate(self.factors, 1):
                parts = (parts.movedim(place, -1) @ factor).movedim(-1, place)
            rotated.copy_(parts.flatten(1))
        return rotated_NI.view(moved.shape).movedim(-1, axis).contiguous()


def randomized_hadamard(size: int, generator: torch.Generator) -> Rotation:
    """Draw a randomized Hadamard matrix.

    For a size of 2ᵏ·m with an odd m it is the Kronecker product of Sylvester's matrix of 2ᵏ and a
    random orthogonal matrix of m, whose entries differ in magnitude.
    """
    from scipy.linalg import hadamard

    signs_I = 1.0 - 2.0 * torch.randint(0, 2, (size,), generator=generator).double()
    exponent = (size & -size).bit_length() - 1
    # Sylvester's matrix is itself a product; two factors of about its root take the least time.
    powers = (2 ** (exponent // 2), 2 ** (exponent - exponent // 2))
    factors = [torch.tensor(hadamard(power)).double() / math.sqrt(power) for power in powers]
    odd = size >> exponent
    drawn = torch.randn(odd, odd, generator=generator, dtype=torch.float64)
    return Rotation(signs_I, (*factors, torch.linalg.qr(drawn).Q))
