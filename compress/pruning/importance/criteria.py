"""Names of the criteria by which channels are ranked, and what each of them looks at."""

from __future__ import annotations

from typing import Literal, TypeAlias

Criterion: TypeAlias = Literal[
    "l1", "l2", "taylor", "hessian", "fpgm", "lamp", "bn_scale", "wanda", "obs", "random"
]

FROM_DATA: tuple[Criterion, ...] = ("taylor", "hessian", "wanda", "obs")
"""Those that look at activations or gradients."""

OF_GRADIENTS: tuple[Criterion, ...] = ("taylor", "hessian")
"""Those that look at derivatives of the loss."""

COMPARABLE: tuple[Criterion, ...] = ("taylor", "hessian", "lamp", "obs")
"""Those whose scores mean the same in every family; others are compared relative to their mean."""
