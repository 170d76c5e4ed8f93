"""A small text classifier whose rarer tokens have embeddings that are far larger than others."""

from typing import Any

import torch
from torch import nn

TOKENS, RARE, LENGTH = 100, 90, 12


class Classifier(nn.Module):
    """Mean of what each token says, over those that the mask lets through."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(TOKENS, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 4)
        with torch.no_grad():
            self.embedding.weight[RARE:] *= 50

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        kept = mask.unsqueeze(-1).float()
        words = torch.nn.functional.gelu(self.up(self.embedding(ids)))
        return self.down((words * kept).sum(1) / kept.sum(1).clamp(min=1))


def texts(count: int, first: int, last: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return samples of tokens within a range, of several lengths."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(count):
        ids = torch.randint(first, last, (LENGTH,), generator=generator)
        length = int(torch.randint(3, LENGTH + 1, (1,), generator=generator))
        samples.append({"ids": ids, "mask": (torch.arange(LENGTH) < length).long()})
    return samples


def data() -> dict[str, Any]:
    """Return `val`, of which some rows hold rare tokens as real texts do."""
    return {"val": texts(60, 0, RARE, 1) + texts(20, 0, TOKENS, 2)}
