"""Networks of blocks."""

import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self, width=8, out=None, strength=1.0):
        super().__init__()
        self.first, self.second = nn.Linear(width, 16), nn.Linear(16, out or width)
        self.widens = out is not None
        with torch.no_grad():
            self.second.weight.mul_(strength)
            self.second.bias.mul_(strength)

    def forward(self, x):
        change = self.second(self.first(x).relu())
        return change if self.widens else x + change


class Deep(nn.Module):
    """Blocks of different strength: the second and the fourth hardly do anything."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        strengths = (2.0, 0.01, 1.0, 0.001, 3.0)
        self.stem = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Residual(strength=s) for s in strengths)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Stages(nn.Module):
    """Two stages as in a ResNet, whose first blocks change the shape."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer1 = nn.Sequential(Residual(4, 8), Residual(8))
        self.layer2 = nn.Sequential(Residual(8, 12), Residual(12), Residual(12))
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        return self.head(self.layer2(self.layer1(x)))


class Together(nn.Module):
    """Shifts of which the first and the third nearly cancel each other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(4, 8)
        self.blocks = nn.Sequential(Shift(0.5), Shift(0.6), Shift(-0.7), Shift(3.0))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)))


class Shift(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.part = nn.Identity()
        self.by = nn.Parameter(torch.tensor(by))

    def forward(self, x):
        return self.part(x) + self.by


class Indexed(nn.Module):
    """Counts its blocks in a number that is nowhere an attribute."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Residual(4) for _ in range(3))

    def forward(self, x):
        for i in range(3):
            x = self.blocks[i](x)
        return x
