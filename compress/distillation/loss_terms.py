"""All terms that a distillation loss can be a sum of."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from compress.distillation.feature_losses import (
    Attention,
    Contrastive,
    Hint,
    Relational,
    Similarity,
)
from compress.distillation.output_losses import Cosine, Dist, Dkd, Kl, Labels, Mse

AnyTerm = Annotated[
    Labels
    | Kl
    | Dkd
    | Dist
    | Mse
    | Cosine
    | Relational
    | Hint
    | Attention
    | Similarity
    | Contrastive,
    Field(discriminator="loss"),
]
"""A term of the loss; the key ``loss`` selects its class."""
