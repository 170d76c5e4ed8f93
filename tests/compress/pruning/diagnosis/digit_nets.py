"""A small network with BatchNorm, and scikit-learn's digits, which are hard enough for it."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


def net() -> nn.Module:
    def block(a: int, b: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]

    layers = [*block(1, 16), *block(16, 16), *block(16, 32)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 10))


def data(calibration: float = 0.0) -> dict[str, TensorDataset]:
    """Return digits; calibration samples are this many times as wide."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)[order] / 8 - 1
    y = torch.tensor(labels, dtype=torch.int64)[order]
    splits = {"train": TensorDataset(x[:1000], y[:1000]), "val": TensorDataset(x[1000:], y[1000:])}
    if calibration:
        splits["calibration"] = TensorDataset(calibration * (x[:1000] + 1), y[:1000])
    return splits


class Residual(nn.Module):
    """A block whose output has the shape of its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.fc(x))


def deep_net() -> nn.Module:
    blocks = nn.Sequential(*(Residual(24) for _ in range(4)))
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), blocks, nn.Linear(24, 10))
