"""Convolutional networks: groups, skips, gates, other normalisations and other dimensions."""

import torch
import torch.nn.functional as F
from torch import nn


def block(inputs: int, outputs: int, size: int = 3, **more) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False, **more),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(),
    )


class InvertedResidual(nn.Module):
    """Expansion, depthwise convolution, linear bottleneck and a skip (MobileNetV2)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = block(1, 8)
        self.expand, self.depthwise = block(8, 32, 1), block(32, 32, groups=32)
        self.project = nn.Sequential(nn.Conv2d(32, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.last = block(8, 32, 1)
        self.head = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + self.project(self.depthwise(self.expand(x)))
        return self.head(self.last(x).mean((2, 3)))


class Multiplier(nn.Module):
    """Depthwise convolutions that make several channels from each, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3)
        self.first = nn.Conv2d(8, 16, 3, groups=8)
        self.second = nn.Conv2d(16, 48, 3, groups=16)
        self.head = nn.Conv2d(48, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.elu(self.first(F.elu(self.stem(x))))
        return self.head(F.elu(self.second(x))).mean((2, 3))


class Inception(nn.Module):
    """Branches of different widths side by side, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.ModuleList([block(1, 8, 1), block(1, 16, 3), block(1, 4, 5)])
        self.two = nn.ModuleList([block(29, 8, 1), block(29, 12, 3)])
        self.head = nn.Linear(20, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([*(f(x) for f in self.one), F.avg_pool2d(x, 3, 1, 1)], 1)
        x = torch.cat([f(x) for f in self.two], dim=1)
        return self.head(F.adaptive_max_pool2d(x, 1).flatten(1))


class UNet(nn.Module):
    """Down, up and two skips joined by concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = block(1, 8), block(8, 16), block(16, 32)
        self.up2, self.up1 = nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
        self.join2, self.join1 = block(32, 16), block(16, 8)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.bottom(F.max_pool2d(b, 2))
        b = self.join2(torch.cat([self.up2(c), b], 1))
        return self.head(self.join1(torch.cat([self.up1(b), a], 1)))


class TransposedGroups(nn.Module):
    """Transposed convolutions in groups, depthwise and not."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.grouped = nn.ConvTranspose2d(16, 24, 2, 2, groups=4)
        self.depthwise = nn.ConvTranspose2d(24, 24, 3, 1, 1, groups=24)
        self.widened = nn.ConvTranspose2d(24, 48, 1, groups=24, bias=False)
        self.head = nn.Conv2d(48, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.grouped(F.gelu(self.stem(x))))
        return self.head(self.widened(F.gelu(self.depthwise(x))))


class GroupNormed(nn.Module):
    """GroupNorm after every convolution, with a skip."""

    def __init__(self, groups: int = 4, affine: bool = True) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(groups, 32)
        self.conv2 = nn.Conv2d(32, 32, 3, padding=1)
        self.norm2 = nn.GroupNorm(groups, 32, affine=affine)
        self.head = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(x + self.norm2(self.conv2(x)))
        return self.head(x.mean((2, 3)))


class Instance(nn.Module):
    """InstanceNorm with and without parameters, and padding by reflection."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1, padding_mode="reflect")
        self.norm1 = nn.InstanceNorm2d(16, affine=True)
        self.conv2 = nn.Conv2d(16, 24, 3, padding="same", dilation=2)
        self.norm2 = nn.InstanceNorm2d(24)
        self.head = nn.Conv2d(24, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        return self.head(F.relu(self.norm2(self.conv2(x))))


class Plain(nn.Module):
    """BatchNorm without affine parameters, and one without statistics before a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16, affine=False)
        self.conv2 = nn.Conv2d(16, 24, 3)
        self.norm2 = nn.BatchNorm2d(24, track_running_stats=False)
        self.head = nn.Linear(24, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.mish(self.norm1(self.conv1(x)))
        return self.head(F.relu(self.norm2(self.conv2(x))).mean((2, 3)))


class Signal(nn.Module):
    """Convolutions over time with growing dilation, gated by tanh and sigmoid (WaveNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(3, 16, 1)
        self.gates = nn.ModuleList(nn.Conv1d(16, 32, 3, dilation=d, padding=d) for d in (1, 2))
        self.outs = nn.ModuleList(nn.Conv1d(16, 16, 1) for _ in range(2))
        self.skips = nn.ModuleList(nn.Conv1d(16, 12, 1) for _ in range(2))
        self.head = nn.Conv1d(12, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skip = self.stem(x), 0.0
        for gate, out, side in zip(self.gates, self.outs, self.skips, strict=True):
            a, b = gate(x).chunk(2, 1)
            y = a.tanh() * b.sigmoid()
            x, skip = x + out(y), skip + side(y)
        return self.head(F.relu(skip))


class Volume(nn.Module):
    """Convolutions over three axes, pooled and flattened."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv3d(1, 8, 3, padding=1), nn.BatchNorm3d(8)
        self.conv2 = nn.Conv3d(8, 16, (1, 3, 3), padding=(0, 1, 1))
        self.up = nn.ConvTranspose3d(16, 8, 2, 2)
        self.head = nn.Linear(8 * 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool3d(F.relu(self.norm(self.conv1(x))), 2)
        x = F.interpolate(self.up(F.relu(self.conv2(x))), size=(2, 2, 2), mode="trilinear")
        return self.head(x.flatten(1))


class SelectiveKernel(nn.Module):
    """Branches weighed for each channel by a softmax over the branches (SKNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.three, self.five = block(1, 16, 3), block(1, 16, 5)
        self.squeeze = nn.Linear(16, 8)
        self.weigh = nn.ModuleList(nn.Linear(8, 16) for _ in range(2))
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branches = torch.stack([self.three(x), self.five(x)], 1)
        pooled = F.relu(self.squeeze(branches.sum(1).mean((2, 3))))
        weights = torch.stack([f(pooled) for f in self.weigh], 1).softmax(1)
        return self.head((branches * weights[..., None, None]).sum(1).mean((2, 3)))


class SoftmaxOverChannels(nn.Module):
    """Channel attention by a softmax over the channels, which must stay; others may go."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 24, 3, padding=1)
        self.conv3 = nn.Conv2d(24, 16, 3, padding=1)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv2(F.relu(self.conv1(x)))
        x = x * x.mean((2, 3), keepdim=True).softmax(1)
        return self.head(F.relu(self.conv3(x)).amax((2, 3)))
