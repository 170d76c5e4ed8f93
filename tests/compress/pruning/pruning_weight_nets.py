"""Networks whose weights are set to zero."""

import torch
import torch.nn.functional as F
from torch import nn


class Many(nn.Module):
    """A kernel, groups, a depthwise kernel, a product by hand, an embedding and attention."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.grouped = nn.Conv2d(8, 16, 3, padding=1, groups=2)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.raw = nn.Parameter(torch.randn(12, 16) / 4)
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)
        self.norm = nn.BatchNorm2d(16)
        self.head = nn.Linear(12, 10)

    def forward(self, x):
        x = self.norm(self.depthwise(self.grouped(self.conv(x).relu()).relu()))
        x = F.linear(x.flatten(2).transpose(1, 2), self.raw)
        return self.head(self.attention(x, x, x)[0].mean(1))


class Text(nn.Module):
    """An embedding whose table is the last layer's weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 8)
        self.inner = nn.Linear(8, 8)
        self.last = nn.Linear(8, 20, bias=False)
        self.last.weight = self.embed.weight

    def forward(self, x):
        return self.last(self.inner(self.embed(x)).mean(1))


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 32), nn.Linear(32, 3)

    def forward(self, x):
        return self.down(self.up(x).relu())


def wide():
    return Wide()


def square():
    torch.manual_seed(0)
    return nn.Linear(128, 128)


class Transposed(nn.Module):
    """A layer whose weight lies the other way round, as in GPT-2."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.bias = nn.Parameter(torch.randn(8, 12)), nn.Parameter(torch.randn(12))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)
