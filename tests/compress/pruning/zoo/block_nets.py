"""Blocks of well-known architectures that were not written with pruning in mind."""

import torch
import torch.nn.functional as F
from torch import nn


class Res2Net(nn.Module):
    """Splits of one width, kept in an attribute, each fed with the one before (Res2Net)."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 8
        self.first, self.last = nn.Conv2d(1, 32, 1), nn.Conv2d(32, 4, 1)
        self.scales = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        *parts, rest = torch.split(F.relu(self.first(x)), self.width, 1)
        y, found = 0.0, []
        for part, scale in zip(parts, self.scales, strict=True):
            y = F.relu(scale(part + y))
            found.append(y)
        return self.last(torch.cat([*found, rest], 1))


class CrossStage(nn.Module):
    """A split with a residual over one part, and pooling at four sizes (YOLO)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Conv2d(1, 32, 1), nn.Conv2d(16, 16, 3, padding=1)
        self.join, self.reduce = nn.Conv2d(48, 32, 1), nn.Conv2d(32, 8, 1)
        self.head = nn.Conv2d(32, 18, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = list(F.silu(self.first(x)).chunk(2, 1))
        parts.append(parts[-1] + self.inner(parts[-1]))
        levels = [self.reduce(F.silu(self.join(torch.cat(parts, 1))))]
        for _ in range(3):
            levels.append(F.max_pool2d(levels[-1], 5, 1, 2))
        y = self.head(torch.cat(levels, 1))
        n, _, h, w = y.shape
        return y.view(n, 3, 6, h, w).permute(0, 1, 3, 4, 2)


class Ghost(nn.Module):
    """Cheap features beside dear ones, cut to a width kept in an attribute (GhostNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs = 24
        self.dear = nn.Conv2d(1, 16, 3, padding=1)
        self.cheap = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.head = nn.Conv2d(24, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dear = F.relu(self.dear(x))
        both = torch.cat([dear, F.relu(self.cheap(dear))], 1)
        return self.head(both[:, : self.outputs])


class Efficient(nn.Module):
    """A convolution over the channels as a gate, which must stay; the next layer may go (ECA)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 32, 3)
        self.gate = nn.Conv1d(1, 1, 3, padding=1)
        self.head = nn.Conv2d(32, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv1(x)
        gate = self.gate(x.mean((2, 3))[:, None])[:, 0].sigmoid()
        return self.head(F.relu(self.conv2(x * gate[..., None, None])))


class Rotary(nn.Module):
    """Heads turned by tables of cosines, keys and values shared by all heads or not (Llama)."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.shared = shared
        self.query = nn.Linear(16, 32)
        self.key, self.value = (nn.Linear(16, 8 if shared else 32) for _ in range(2))
        self.out = nn.Linear(32, 16)
        self.up, self.gate, self.down = nn.Linear(16, 48), nn.Linear(16, 48), nn.Linear(48, 3)
        angles = torch.arange(16)[:, None] * 100.0 ** -(torch.arange(0, 8, 2) / 8)
        self.register_buffer("cos", torch.cat([angles, angles], -1).cos())
        self.register_buffer("sin", torch.cat([angles, angles], -1).sin())

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        time = x.shape[-2]
        return x * self.cos[:time] + torch.cat([-b, a], -1) * self.sin[:time]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, _ = x.shape
        q, k, v = (
            f(x).view(n, t, -1, 8).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        if self.shared:
            k, v = (y.expand(-1, q.shape[1], -1, -1) for y in (k, v))
        y = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, -1))
        return self.down(F.silu(self.gate(x)) * self.up(x))


class StateSpace(nn.Module):
    """A selective state space with a causal depthwise convolution (Mamba)."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(8, 64)
        self.conv = nn.Conv1d(32, 32, 3, padding=2, groups=32)
        self.select, self.step = nn.Linear(32, 2 + 4 + 4), nn.Linear(2, 32)
        self.decay = nn.Parameter(torch.rand(32, 4))
        self.direct = nn.Parameter(torch.randn(32))
        self.out = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u, gate = self.inputs(x).chunk(2, -1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
        step, b, c = self.select(u).split([2, 4, 4], -1)
        step = F.softplus(self.step(step))
        state, found = 0.0, []
        for i in range(x.shape[1]):
            grown = step[:, i, :, None] * b[:, i, None] * u[:, i, :, None]
            state = torch.exp(-step[:, i, :, None] * self.decay) * state + grown
            found.append((state * c[:, i, None]).sum(-1))
        return self.out((torch.stack(found, 1) + u * self.direct) * F.silu(gate))


class Modulated(nn.Module):
    """LayerNorm without weights, scaled, shifted and gated by a condition, from zero (DiT)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16, elementwise_affine=False)
        self.condition = nn.Linear(8, 48)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        nn.init.zeros_(self.condition.weight)
        nn.init.zeros_(self.condition.bias)

    def forward(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        scale, shift, gate = self.condition(F.silu(by))[:, None].chunk(3, -1)
        y = self.norm(x) * (1 + scale) + shift
        return x + gate * self.down(F.gelu(self.up(y)))


class Quantized(nn.Module):
    """The nearest entries of a code book, which must stay, between layers that may go (VQ)."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
        self.codes = nn.Embedding(20, 16)
        self.decode = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        apart = (self.encode(x)[:, None] - self.codes.weight).square().sum(-1)
        return self.decode(self.codes(apart.argmin(-1)))


class Unfolded(nn.Module):
    """Patches by F.unfold into a linear layer, whose weight a 1×1 convolution uses, too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, padding=1)
        self.patch = nn.Linear(16 * 9, 24)
        self.mix, self.head = nn.Linear(24, 16), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.patch(F.unfold(F.relu(self.conv(x)), 3).transpose(1, 2)).transpose(1, 2)
        y = F.conv1d(F.relu(y), self.mix.weight.unsqueeze(-1), self.mix.bias)
        return self.head(y.relu().mean(-1))


class Resampled(nn.Module):
    """Pixels taken at places that another layer computes (spatial transformer)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.places = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(1, 2, 3, padding=1)
        self.head = nn.Conv2d(16, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grid = self.places(x).tanh().permute(0, 2, 3, 1)
        return self.head(F.relu(F.grid_sample(self.conv(x), grid, align_corners=False)))


class Graph(nn.Module):
    """Features mixed by an adjacency matrix that is an input; one score for each node (GCN)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 16)
        self.score, self.head = nn.Linear(16, 1, bias=False), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, adjacent: torch.Tensor) -> torch.Tensor:
        x = F.relu(adjacent @ self.second(F.relu(adjacent @ self.first(x))))
        return self.head((self.score(x).softmax(1) * x).sum(1))
