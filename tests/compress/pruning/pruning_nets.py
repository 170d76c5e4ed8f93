"""Small convolutional networks, each with one habit that pruning tools stumble over."""

import torch
import torch.nn.functional as F
from torch import nn


class Flattened(nn.Module):
    """conv → flatten → linear: one channel takes several columns."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, padding=1)
        self.head = nn.Linear(16 * 16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.max_pool2d(torch.sigmoid(self.conv(x)), 2).flatten(1))


class Separable(nn.Module):
    """Depthwise-separable convolutions and squeeze-and-excitation (MobileNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.depthwise = nn.Conv2d(16, 32, 3, padding=1, groups=16)
        self.squeeze = nn.Conv2d(32, 8, 1)
        self.excite = nn.Conv2d(8, 32, 1)
        self.pointwise = nn.Conv2d(32, 24, 1)
        self.head = nn.Linear(24, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.hardswish(self.depthwise(F.relu6(self.norm(self.stem(x)))))
        x = x * F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))))
        return self.head(F.silu(self.pointwise(x)).mean((2, 3)))


class Dense(nn.Module):
    """Concatenated skips (DenseNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.growth1 = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.growth2 = nn.Conv2d(16, 8, 3, padding=1)
        self.head = nn.Linear(24, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(x))
        x = torch.cat([x, self.growth1(x)], 1)
        x = torch.cat([x, self.growth2(F.relu(self.norm(x)))], 1)
        return self.head(x.mean((2, 3)))


class Shuffled(nn.Module):
    """Grouped convolutions with a channel shuffle between them (ShuffleNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.grouped1 = nn.Conv2d(16, 16, 1, groups=2)
        self.grouped2 = nn.Conv2d(16, 16, 3, padding=1, groups=2)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.grouped1(F.relu(self.stem(x))))
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        return self.head(self.grouped2(x).mean((2, 3)))


class Grouped(nn.Module):
    """A convolution in four groups between dense ones (ResNeXt)."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Conv2d(1, 16, 3, padding=1)
        self.grouped = nn.Conv2d(16, 32, 3, padding=1, groups=4)
        self.after = nn.Conv2d(32, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(F.relu(self.grouped(F.relu(self.before(x))))).mean((2, 3))


class ZeroPadded(nn.Module):
    """A shortcut widened by zeros (He et al., 2015, option A)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.conv1 = nn.Conv2d(8, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(x))
        y = self.conv2(F.relu(self.conv1(x)))
        return self.head(F.relu(y + F.pad(x, (0, 0, 0, 0, 4, 4))).mean((2, 3)))


class Upsampled(nn.Module):
    """Transposed convolution, upsampling and a skip (U-Net)."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 16, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.skip = nn.Conv2d(1, 8, 3, padding=1)
        self.head = nn.Conv2d(16 + 16, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.down(x))
        z = F.prelu(self.up(y) + self.skip(x), torch.tensor([0.1], dtype=x.dtype))
        wide = F.interpolate(y, scale_factor=2, mode="nearest")
        return self.head(torch.cat([wide, z, self.skip(x)], 1))


class PixelShuffled(nn.Module):
    """Channels that become pixels (super-resolution)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8 * 4, 3, padding=1)
        self.head = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(F.pixel_shuffle(self.conv(x), 2)))


class Reused(nn.Module):
    """One layer applied twice, also held under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.shared = nn.Conv2d(16, 16, 3, padding=1)
        self.again = self.shared
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.shared(F.relu(self.stem(x))))
        return self.head(self.again(x).mean((2, 3)))


class Raw(nn.Module):
    """Weights held as plain parameters and buffers, and a learned scale for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(16, 1, 3, 3))
        self.scale = nn.Parameter(torch.randn(16, 1, 1))
        self.register_buffer("shift", torch.randn(1, 16, 1, 1))
        self.gain = nn.Parameter(torch.randn(1))
        self.mix = nn.Parameter(torch.randn(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.conv2d(x, self.kernel) * self.scale + self.shift
        return (F.leaky_relu(x) * self.gain).mean((2, 3)) @ self.mix


def in_place() -> nn.Module:
    """Activations that overwrite their input."""
    activations = (nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.Hardtanh, nn.Hardsigmoid)
    layers = [nn.Conv2d(1, 16, 3), *(layer(inplace=True) for layer in activations)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))


class Tower(nn.Module):
    """Residual blocks of a given number, each with an inner width of its own."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
            for _ in range(depth)
        )
        self.back = nn.ModuleList(nn.Conv2d(12, 8, 1) for _ in range(depth))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block, back in zip(self.blocks, self.back, strict=True):
            x = x + back(block(x))
        return self.head(x.mean((2, 3)))


class ThreeRows(nn.Module):
    """Keeps something for each of three rows, as a recurrent layer its hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.arange(3.0)[:, None])
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x + self.rows)
