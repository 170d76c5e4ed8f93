"""Names of the criteria by which channels are ranked, and what each of them needs."""

from __future__ import annotations

from typing import Literal, TypeAlias

Criterion: TypeAlias = Literal[
    "l1", "l2", "taylor", "hessian", "fpgm", "lamp", "bn_scale", "wanda", "obs", "random"
]

FROM_DATA: tuple[Criterion, ...] = ("taylor", "hessian", "wanda", "obs")
"""Criteria that need samples: they use activations or gradients."""

OF_GRADIENTS: tuple[Criterion, ...] = ("taylor", "hessian")
"""Criteria that use derivatives of the loss."""

COMPARABLE: tuple[Criterion, ...] = ("taylor", "hessian", "lamp", "obs")
"""Criteria whose scores of different groups can be compared; others are divided by their mean."""
