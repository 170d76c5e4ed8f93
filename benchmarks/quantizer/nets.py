"""A network that is quantized, and digits that are hard to read."""

import sys
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "digits"))

from data import digits
from models import resnet20

__all__ = ["easy", "hard", "narrow", "resnet20"]
COPIES = 4
"""How often each image is in `train`, harder in its own way each time."""
NOISE, LEAST_CONTRAST, MOST_CONTRAST = 0.2, 0.4, 1.2


def narrow() -> torch.nn.Module:
    """Return a ResNet-20 of 4, 8 and 16 channels, to which few bits matter."""
    return resnet20(width=4)


def easy(seed: int = 0) -> dict[str, TensorDataset]:
    """Return scikit-learn's digits."""
    return digits(seed)


def hard(seed: int = 0) -> dict[str, TensorDataset]:
    """Return the digits shifted, with noise, and each at a contrast of its own."""
    splits = {}
    for i, (name, split) in enumerate(digits(seed).items()):
        copies = COPIES if name == "train" else 1
        images, labels = (part.repeat(copies, *[1] * (part.dim() - 1)) for part in split.tensors)
        splits[name] = TensorDataset(_harder(images, seed + i), labels)
    return splits


def _harder(x: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    moves = torch.randint(-1, 2, (len(x), 2), generator=generator).tolist()
    moved = torch.stack([image.roll(move, (1, 2)) for image, move in zip(x, moves, strict=True)])
    spread = MOST_CONTRAST - LEAST_CONTRAST
    contrast = LEAST_CONTRAST + spread * torch.rand(len(x), 1, 1, 1, generator=generator)
    return moved * contrast + NOISE * torch.randn(x.shape, generator=generator)
