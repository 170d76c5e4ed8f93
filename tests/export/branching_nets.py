"""Networks that exporters stumble over."""

import sys

import torch
from torch import nn


def scaled_by_sign(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if bool(x.sum() > 0) else x - 1


class Branching(nn.Module):
    """A branch that depends on the data, within a scripted function: torch.export gives up."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.scaled = torch.jit.script(scaled_by_sign)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(self.linear(x))


class Guessing(nn.Module):
    """The same in plain Python, of which a trace records one branch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if bool(y.sum() > 0):
            return y * 2
        return y - 1


class Halving(nn.Module):
    """Divides until all is small: a loop whose length depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        while bool(y.abs().max() > 0.1):
            y = y / 2
        return y


class Untraceable(nn.Module):
    """A loop in a part that can be scripted, within a whole that cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.halving = Halving()
        self.head = nn.Linear(4, 3)

    def forward(self, *inputs: torch.Tensor, **options: int) -> torch.Tensor:
        return self.head(self.halving(sum(inputs) * 1.0, **options))


class Talking(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("forward was called", file=sys.stderr)
        return super().forward(x)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.GELU()),
        )
        self.head = nn.Linear(256, 3)
        for layer in self.body:
            if isinstance(layer, nn.BatchNorm2d):
                nn.init.uniform_(layer.running_var, 0.5, 2)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(image).flatten(1))


branching, guessing, halving, untraceable = Branching, Guessing, Halving, Untraceable
convolutions, talking = Convolutions, Talking
