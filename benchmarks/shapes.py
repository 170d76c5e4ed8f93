"""Networks of well-known shapes, with random weights."""

import torch
import torch.nn.functional as F
from torch import nn


class Inverted(nn.Module):
    """Widen, filter each channel, narrow (Sandler et al., "MobileNetV2", 2018)."""

    def __init__(self, inputs: int, outputs: int, stride: int, widening: int = 6) -> None:
        super().__init__()
        inner = inputs * widening
        self.narrow = nn.Sequential(
            *filtered(inputs, inner, 1, 1, 1),
            *filtered(inner, inner, 3, stride, inner),
            nn.Conv2d(inner, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(x) if self.shortcut else self.narrow(x)


def filtered(inputs: int, outputs: int, kernel: int, stride: int, groups: int) -> list[nn.Module]:
    """Return a convolution without bias, BatchNorm and ReLU6."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, 1, groups, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU6()]


def mobilenet() -> nn.Module:
    """Return a small MobileNetV2 for 8×8 grey images."""
    return nn.Sequential(
        *filtered(1, 16, 3, 1, 1),
        Inverted(16, 24, 1),
        Inverted(24, 32, 2),
        Inverted(32, 32, 1),
        Inverted(32, 64, 2),
        Inverted(64, 64, 1),
        *filtered(64, 256, 1, 1, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def mobilenet_v2() -> nn.Module:
    """Return a network of MobileNetV2's shape."""
    layers, inputs = filtered(3, 32, 3, 2, 1), 32
    widths = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2))
    widths += ((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for widening, outputs, count, stride in widths:
        for place in range(count):
            layers.append(Inverted(inputs, outputs, 1 if place else stride, widening))
            inputs = outputs
    layers += [*filtered(inputs, 1280, 1, 1, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(1280, 1000))


class Residual(nn.Module):
    """Two 3×3 convolutions, or a bottleneck of three, around a shortcut (He et al., 2015)."""

    def __init__(self, inputs: int, outputs: int, stride: int, inner: int | None) -> None:
        super().__init__()
        shapes = [(inputs, outputs, 3, stride), (outputs, outputs, 3, 1)]
        if inner:
            shapes = [(inputs, inner, 1, 1), (inner, inner, 3, stride), (inner, outputs, 1, 1)]
        layers: list[nn.Module] = []
        for i, o, kernel, step in shapes:
            layers += [nn.Conv2d(i, o, kernel, step, kernel // 2, bias=False), nn.BatchNorm2d(o)]
            layers.append(nn.ReLU())
        self.body = nn.Sequential(*layers[:-1])
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet18() -> nn.Module:
    """Return a network of ResNet-18's shape."""
    return _resnet((2, 2, 2, 2), 1)


def resnet50(blocks: tuple[int, ...] = (3, 4, 6, 3)) -> nn.Module:
    """Return a network of ResNet-50's shape; other numbers of blocks make it deeper."""
    return _resnet(blocks, 4)


def _resnet(blocks: tuple[int, ...], widening: int) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = 64
    for stage, count in enumerate(blocks):
        width = 64 * 2**stage
        for place in range(count):
            inner = width if widening > 1 else None
            stride = 2 if stage and not place else 1
            layers.append(Residual(inputs, width * widening, stride, inner))
            inputs = width * widening
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


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


def decoder(layers: int = 4) -> nn.Module:
    """Return a small GPT-2 (hidden 256, 4 heads, 8000 words)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 256, "n_head": 4, "n_layer": layers, "vocab_size": 8000, "n_positions": 256}
    return GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0))


def chain(width: int = 64) -> nn.Module:
    """Return five convolutions in a row, for images of one channel, and a linear layer."""
    parts: list[nn.Module] = []
    for inputs in (1, *[width] * 4):
        parts += [nn.Conv2d(inputs, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
