"""A U-Net with two scales below that of the image."""

import torch
from torch import nn
from torch.nn.functional import interpolate, max_pool2d


def block(channels: int, width: int) -> nn.Module:
    layers = []
    for count in (channels, width):
        layers += [nn.Conv2d(count, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
        layers += [nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    def __init__(self, classes: int = 11, width: int = 8) -> None:
        super().__init__()
        self.fine = block(1, width)
        self.middle = block(width, 2 * width)
        self.coarse = block(2 * width, 4 * width)
        self.up_middle = block(6 * width, 2 * width)
        self.up_fine = block(3 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        fine = self.fine(image)
        middle = self.middle(max_pool2d(fine, 2))
        coarse = self.coarse(max_pool2d(middle, 2))
        middle = self.up_middle(torch.cat([interpolate(coarse, scale_factor=2.0), middle], 1))
        return self.head(self.up_fine(torch.cat([interpolate(middle, scale_factor=2.0), fine], 1)))
