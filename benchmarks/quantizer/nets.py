"""A network that is quantized, and digits that are hard to read."""

import sys
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "digits"))

from data import digits
from models import resnet20

__all__ = ["easy", "hard", "resnet20"]


def easy(seed: int = 0) -> dict[str, TensorDataset]:
    """Return scikit-learn's digits."""
    return digits(seed)


def hard(seed: int = 0) -> dict[str, TensorDataset]:
    """Return the digits shifted, with noise, and each at a contrast of its own."""
    return {
        name: TensorDataset(_harder(split.tensors[0], seed + i), split.tensors[1])
        for i, (name, split) in enumerate(digits(seed).items())
    }


def _harder(x: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    moves = torch.randint(-1, 2, (len(x), 2), generator=generator).tolist()
    moved = torch.stack([image.roll(move, (1, 2)) for image, move in zip(x, moves, strict=True)])
    contrast = 0.2 + torch.rand(len(x), 1, 1, 1, generator=generator)
    return moved * contrast + 0.35 * torch.randn(x.shape, generator=generator)
