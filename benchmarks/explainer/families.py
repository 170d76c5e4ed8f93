"""Six families of small networks on scikit-learn's digits, and samples that are unlike them."""

import sys
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "digits"))

from data import digits
from models import ResNet


def data(calibration: str = "") -> dict[str, TensorDataset]:
    """Return digits; the split `calibration` is too `dark`, or in `raw` pixels."""
    splits = digits()
    if calibration:
        x, y = splits["train"].tensors
        unlike = x * 0.15 if calibration == "dark" else 8 * (x + 1)
        splits["calibration"] = TensorDataset(unlike, y)
    return splits


class Chain(nn.Module):
    """Convolutions with BatchNorm, one after another."""

    def __init__(self) -> None:
        super().__init__()
        widths = (1, 24, 32, 32, 48)
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, 3, 1 if i % 2 else 2, 1, bias=False)
            for i, (a, b) in enumerate(pairwise(widths))
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for b in widths[1:])
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            image = F.relu(norm(conv(image)))
        return self.head(image.mean((2, 3)))

    def pairs(self) -> dict[str, tuple[nn.Module, nn.Module]]:
        return {f"convs.{i}": (self.norms[i - 1], self.convs[i]) for i in range(1, 4)}


class Residual(ResNet):
    """A ResNet of three blocks."""

    def __init__(self) -> None:
        super().__init__(1, 24, 10)

    def pairs(self) -> dict[str, tuple[nn.Module, nn.Module]]:
        return {f"layers.{i}.conv2": (b.bn1, b.conv2) for i, b in enumerate(self.layers)}


class Depthwise(nn.Module):
    """Depthwise convolutions, each before a pointwise one."""

    def __init__(self, width: int = 32, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, 2, 1)
        self.depth = nn.ModuleList(
            nn.Conv2d(width, width, 3, 1, 1, groups=width) for _ in range(blocks)
        )
        self.point = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(image))
        for depth, point in zip(self.depth, self.point, strict=True):
            x = F.relu(point(F.relu(depth(x))))
        return self.head(x.mean((2, 3)))

    def pairs(self) -> dict[str, tuple[nn.Module, nn.Module]]:
        return {f"point.{i}": (self.depth[i], self.point[i]) for i in range(len(self.point))}


class Perceptron(nn.Module):
    """Linear layers."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        sizes = (64, width, width, width)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.head = nn.Linear(width, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = image.flatten(1)
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(x)

    def pairs(self) -> dict[str, tuple[nn.Module, nn.Module]]:
        found = {f"layers.{i}": (self.layers[i - 1], self.layers[i]) for i in (1, 2)}
        return {**found, "head": (self.layers[2], self.head)}


class Pooled(nn.Module):
    """Convolutions without BatchNorm, and poolings between each two of them."""

    def __init__(self) -> None:
        super().__init__()
        widths = ((1, 24), (24, 24), (24, 40), (40, 40))
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, 1, 1) for a, b in widths)
        self.fc = nn.Linear(40 * 4, 48)
        self.head = nn.Linear(48, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        for i, conv in enumerate(self.convs):
            image = F.relu(conv(image))
            image = F.max_pool2d(image, 2) if i % 2 else image
        return self.head(F.relu(self.fc(image.flatten(1))))

    def pairs(self) -> dict[str, tuple[nn.Module, nn.Module]]:
        found = {f"convs.{i}": (self.convs[i - 1], self.convs[i]) for i in (1, 3)}
        return {**found, "head": (self.fc, self.head)}


class Sequence(nn.Module):
    """A mixer over the eight rows of an image."""

    def __init__(self, width: int = 32, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.mix = nn.ModuleList(nn.Linear(8, 8) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks))
        self.fc1 = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(blocks))
        self.fc2 = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.embed(image.squeeze(1))
        for mix, norm, fc1, fc2 in zip(self.mix, self.norms, self.fc1, self.fc2, strict=True):
            x = x + mix(x.transpose(1, 2)).transpose(1, 2)
            x = x + fc2(F.relu(fc1(norm(x))))
        return self.head(x.mean(1))

    def pairs(self) -> dict[str, tuple[nn.Module, nn.Module]]:
        return {f"fc2.{i}": (self.fc1[i], self.fc2[i]) for i in range(len(self.fc1))}


FAMILIES = {
    "chain": Chain,
    "residual": Residual,
    "depthwise": Depthwise,
    "perceptron": Perceptron,
    "pooled": Pooled,
    "sequence": Sequence,
}


def net(family: str) -> nn.Module:
    """Return a network of a family, untrained."""
    return FAMILIES[family]()


def trained(family: str, seed: int, epochs: int = 15) -> nn.Module:
    """Return a network that was trained on digits, in eval mode."""
    torch.manual_seed(seed)
    module = net(family).train()
    x, y = digits()["train"].tensors
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(module(x[rows]), y[rows]).backward()
            optimizer.step()
    return module.eval()
