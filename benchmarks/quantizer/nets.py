"""Networks that are quantized, and digits that are hard to read."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "digits"))

from data import digits
from models import resnet20

__all__ = ["easy", "hard", "mobilenet", "resnet18", "resnet20", "resnet50"]


class Inverted(nn.Module):
    """Widen, filter each channel, narrow (Sandler et al., "MobileNetV2", 2018)."""

    def __init__(self, inputs: int, outputs: int, stride: int, widening: int = 6) -> None:
        super().__init__()
        inner = inputs * widening
        self.narrow = nn.Sequential(
            *_filtered(inputs, inner, 1, 1, 1),
            *_filtered(inner, inner, 3, stride, inner),
            nn.Conv2d(inner, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(x) if self.shortcut else self.narrow(x)


def _filtered(inputs: int, outputs: int, kernel: int, stride: int, groups: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, 1, groups, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU6()]


def mobilenet() -> nn.Module:
    """Return a small MobileNetV2 for 8×8 grey images."""
    return nn.Sequential(
        *_filtered(1, 16, 3, 1, 1),
        Inverted(16, 24, 1),
        Inverted(24, 32, 2),
        Inverted(32, 32, 1),
        Inverted(32, 64, 2),
        Inverted(64, 64, 1),
        *_filtered(64, 256, 1, 1, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


class Residual(nn.Module):
    """Two 3×3 convolutions, or a bottleneck of three, around a shortcut (He et al., 2015)."""

    def __init__(self, inputs: int, outputs: int, stride: int, inner: int | None) -> None:
        super().__init__()
        shapes = [(inputs, outputs, 3, stride), (outputs, outputs, 3, 1)]
        if inner:
            shapes = [(inputs, inner, 1, 1), (inner, inner, 3, stride), (inner, outputs, 1, 1)]
        layers: list[nn.Module] = []
        for i, o, kernel, step in shapes:
            layers += [nn.Conv2d(i, o, kernel, step, kernel // 2, bias=False), nn.BatchNorm2d(o)]
            layers.append(nn.ReLU())
        self.body = nn.Sequential(*layers[:-1])
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet18() -> nn.Module:
    """Return a network of ResNet-18's shape, with random weights."""
    return _resnet((2, 2, 2, 2), 1)


def resnet50() -> nn.Module:
    """Return a network of ResNet-50's shape, with random weights."""
    return _resnet((3, 4, 6, 3), 4)


def _resnet(blocks: tuple[int, ...], widening: int) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = 64
    for stage, count in enumerate(blocks):
        width = 64 * 2**stage
        for place in range(count):
            inner = width if widening > 1 else None
            stride = 2 if stage and not place else 1
            layers.append(Residual(inputs, width * widening, stride, inner))
            inputs = width * widening
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


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
