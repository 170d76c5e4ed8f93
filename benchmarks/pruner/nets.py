"""Networks of well-known shapes, with random weights."""

import torch
import torch.nn.functional as F
from torch import nn


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions around a shortcut (He et al., 2015)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x), inplace=True)


def resnet50(blocks: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000) -> nn.Module:
    """Return a network of ResNet-50's shape; other numbers of blocks make it deeper."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = 64
    for stage, count in enumerate(blocks):
        width = 64 * 2**stage
        for place in range(count):
            layers.append(Bottleneck(inputs, width, 2 if stage and not place else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def minilm(layers: int = 6) -> nn.Module:
    """Return a BERT of MiniLM's shape (hidden 384, 12 heads, feed-forward 1536)."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=384,
        num_hidden_layers=layers,
        num_attention_heads=12,
        intermediate_size=1536,
        return_dict=False,
    )
    return BertModel(config, add_pooling_layer=False)
