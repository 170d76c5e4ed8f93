"""A ResNet for 8x8 grey images, after He et al., "Deep Residual Learning" (2015), section 4.2."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False),
                nn.BatchNorm2d(channels_out),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Three stages of `blocks` blocks; 6 * blocks + 2 layers with weights."""

    def __init__(self, blocks: int, width: int, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        layers: list[nn.Module] = []
        channels = width
        for stage in range(3):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(Block(channels, width * 2**stage, stride))
                channels = width * 2**stage
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.layers(F.relu(self.bn(self.conv(image))))
        return self.head(x.mean((2, 3)))


def resnet20(classes: int = 10, width: int = 32) -> nn.Module:
    """ResNet-20, twice as wide as the original by default."""
    return ResNet(3, width, classes)
