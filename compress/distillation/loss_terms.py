"""All terms that a distillation loss can be a sum of."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from compress.distillation.terms import (
    Attention,
    Contrastive,
    Cosine,
    Dist,
    Dkd,
    Hint,
    Kl,
    Labels,
    Mse,
    Relational,
    Similarity,
)

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
