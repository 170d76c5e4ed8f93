"""Teachers and students of several widths and depths, and data that is partly without labels."""

import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self, width: int, depth: int, classes: int, trace: str) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, classes)
        self.unused = nn.Linear(2, 2)
        self.trace = trace

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if self.trace:
            with Path(self.trace).open("a") as stream:
                stream.write(f"{os.getpid()} {len(features)}\n")
        x = self.embed(features)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def net(width: int = 8, depth: int = 2, classes: int = 3, trace: str = "") -> nn.Module:
    return Net(width, depth, classes, trace)


def listed(width: int = 8) -> nn.Module:
    """Return a model that would run whatever module is added to it."""
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))


class Images(nn.Module):
    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.second = nn.Conv2d(width, 2 * width, 3, stride, padding=1)
        self.head = nn.Linear(2 * width, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        x = self.first(features.view(-1, 1, 2, 2)).relu()
        return self.head(self.second(x).relu().mean((2, 3)))


def images(width: int = 4, stride: int = 1) -> nn.Module:
    return Images(width, stride)


def points(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


class Noisy(Dataset):
    """Samples that are drawn anew each time they are read."""

    def __init__(self, samples: int) -> None:
        self.x, self.y = points(samples, 0)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index] + 0.1 * torch.randn(4), self.y[index]


class Partly(Dataset):
    """Samples of which every second has no label."""

    def __init__(self, samples: int) -> None:
        self.x, self.y = points(samples, 0)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.x[index], None if index % 2 else self.y[index]


def data(train: int = 96, kind: str = "tensors", unlabelled: int = 0) -> dict[str, Dataset]:
    kinds = {"tensors": lambda n: TensorDataset(*points(n, 0)), "noisy": Noisy, "partly": Partly}
    found = {"train": kinds[kind](train), "val": TensorDataset(*points(48, 1))}
    if unlabelled:
        x, y = points(unlabelled, 2)
        # Labels that are wrong, so that it shows when they are used.
        found["unlabelled"] = TensorDataset(x, (y + 1) % 3)
    return found
