"""Networks for images: pixels that become channels, scales, drops, and numbers in the code."""

import torch
import torch.nn.functional as F
from torch import nn


class SpaceToDepth(nn.Module):
    """PixelUnshuffle after a convolution and PixelShuffle at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.down = nn.PixelUnshuffle(2)
        self.conv2 = nn.Conv2d(32, 32, 3, padding=1)
        self.up = nn.Sequential(nn.Conv2d(32, 4, 1), nn.PixelShuffle(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(F.relu(self.conv2(self.down(F.relu(self.conv1(x))))))


class ConvNext(nn.Module):
    """Depthwise convolution, channels last, a wide MLP, LayerScale and stochastic depth."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 2, 2)
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.randn(width))
        self.head = nn.Linear(width, 3)

    def drop(self, y: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return y
        keep = torch.rand(len(y), 1, 1, 1) < 0.8
        return y * keep / 0.8

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return self.head((x + self.drop(y.permute(0, 3, 1, 2))).mean((2, 3)))


class ViT(nn.Module):
    """Patches, a class token, learned positions, fused projections and a pre-norm block."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.patch = nn.Conv2d(1, width, 2, 2)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, 17, width))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))
        self.head = nn.Linear(width, 3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        n, t, _ = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(n, t, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        x = x + self.out(y.reshape(n, t, self.num_heads * self.head_dim))
        return self.head((x + self.mlp(self.norm2(x)))[:, 0])


class Mixer(nn.Module):
    """An MLP over places and one over channels (MLP-Mixer)."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, 24, 2, 2)
        self.norm = nn.LayerNorm(24)
        self.places = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.channels = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))
        self.head = nn.Linear(24, 3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = x + self.places(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return self.head((x + self.channels(self.norm(x))).mean(1))


class WrittenView(nn.Module):
    """A flattened width written into the code, `view(-1, 256)`: it becomes an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1)
        self.fc1, self.head = nn.Linear(256, 32), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return self.head(F.relu(self.fc1(x.view(-1, 256))))


class KeptView(nn.Module):
    """A flattened width kept in an attribute: it is mended."""

    def __init__(self) -> None:
        super().__init__()
        self.features = 16 * 4 * 4
        self.conv = nn.Conv2d(1, 16, 3, padding=1)
        self.head = nn.Linear(self.features, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.max_pool2d(F.relu(self.conv(x)), 2).view(-1, self.features))


class Reparametrized(nn.Module):
    """Spectral and weight norm around layers, which must stay; the plain one in between may go."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Conv2d(1, 8, 3))
        self.plain = nn.Conv2d(8, 32, 3)
        self.second = nn.Conv2d(32, 16, 1)
        self.last = nn.utils.parametrizations.weight_norm(nn.Conv2d(16, 4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.relu(self.second(F.relu(self.plain(self.first(x))))))


class Standardized(nn.Conv2d):
    """A convolution whose weight is standardised over its inputs at every call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        std = self.weight.std((1, 2, 3), keepdim=True)
        return F.conv2d(x, (self.weight - mean) / (std + 1e-5), self.bias, padding=1)


class WeightStandardized(nn.Module):
    """Weights standardised at every call stay; the layers around them may go."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Standardized(1, 16, 3), nn.Conv2d(16, 32, 3)
        self.head = nn.Conv2d(32, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.second(F.relu(self.first(x)))))


class Pyramid(nn.Module):
    """Lateral layers, added top-down; one head for all levels; the outputs are in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(i, o, 3, 2, 1) for i, o in ((1, 8), (8, 16), (16, 32)))
        self.lateral = nn.ModuleList(nn.Conv2d(i, 16, 1) for i in (8, 16, 32))
        self.tower = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
        self.classes, self.boxes = nn.Conv2d(16, 3, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        levels = []
        for down in self.down:
            x = F.relu(down(x))
            levels.append(x)
        x, found = None, {"aux": None}
        for i in (2, 1, 0):
            side = self.lateral[i](levels[i])
            x = side if x is None else side + F.interpolate(x, size=side.shape[-2:])
            y = self.tower(x)
            found |= {f"classes{i}": self.classes(y), f"boxes{i}": self.boxes(y)}
        return found


class Stretched(nn.Module):
    """A map of one channel added to many, and x + net(x) where x has one channel."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU())
        self.mask = nn.Sequential(nn.Conv2d(16, 8, 1), nn.ReLU(), nn.Conv2d(8, 1, 1))
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.body(x)
        return self.head((y * self.mask(y).sigmoid()).mean((2, 3)))
