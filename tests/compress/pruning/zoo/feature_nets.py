"""Networks of linear layers: gates, splits, indices, buffers, and several inputs and outputs."""

import torch
import torch.nn.functional as F
from torch import nn


class Glu(nn.Module):
    """F.glu, and a gate whose halves are slices of half the width."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 64), nn.Linear(32, 48)
        self.head = nn.Linear(24, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(F.glu(self.first(x)))
        half = y.shape[-1] // 2
        return self.head(y[..., :half] * y[..., half:].sigmoid())


class SplitBySizes(nn.Module):
    """One projection split by sizes kept in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = (16, 8, 8)
        self.first = nn.Linear(8, 32)
        self.gate = nn.Linear(8, 16)
        self.hidden = nn.Linear(16, 32)
        self.head = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = torch.split(self.first(x), self.sizes, -1)
        y = torch.cat([b.tanh(), c.sin()], -1) * self.gate(x)
        return self.head(F.relu(self.hidden(a * y)))


class Indexed(nn.Module):
    """Channels picked by index and by gather, which must stay; the next layer's may go."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(8, 16)
        self.register_buffer("order", torch.randperm(16))
        self.hidden, self.head = nn.Linear(16, 32), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).index_select(-1, self.order)
        z = self.second(x)
        z = z.gather(-1, self.order.flip(0).expand(len(x), -1))
        return self.head(F.relu(self.hidden(F.relu(y) + z)))


class Buffers(nn.Module):
    """Buffers that go with the channels: a running mean, a mask of zeros and ones, a sign."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 32), nn.Linear(32, 3)
        self.register_buffer("mean", torch.randn(32))
        self.register_buffer("mask", (torch.arange(32) % 3 > 0).float())
        self.register_buffer("is_kept", torch.arange(32) % 5 > 0)
        self.register_buffer("sign", torch.where(torch.arange(32) % 2 > 0, 1, -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (self.first(x) - self.mean) * self.mask * self.sign
        return self.head(F.relu(torch.where(self.is_kept, y, 0.0)))


class SeveralWays(nn.Module):
    """Two inputs, one of them words; outputs in a nest of a dictionary, a tuple and None."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 16)
        self.image = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.join = nn.Linear(32, 32)
        self.heads = nn.ModuleDict({"a": nn.Linear(32, 3), "b": nn.Linear(32, 1)})

    def forward(self, tokens: torch.Tensor, image: torch.Tensor) -> dict[str, object]:
        x = torch.cat([self.embed(tokens).mean(1), self.image(image).flatten(1)], 1)
        x = F.relu(self.join(x))
        return {"logits": (self.heads["a"](x), None), "score": self.heads["b"](x).squeeze(-1)}


class Frozen(nn.Module):
    """A frozen trunk, a half-frozen layer and a head that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.middle = nn.Linear(16, 32)
        self.head = nn.Linear(32, 3)
        self.trunk.requires_grad_(False)
        self.middle.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.trunk(x)
        return self.head(F.relu(self.middle(x)))


class SharedEmbedding(nn.Module):
    """One embedding for two inputs and the output, projected up and down (ALBERT)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 16)
        self.up, self.hidden, self.down = nn.Linear(16, 32), nn.Linear(32, 48), nn.Linear(48, 16)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.up(self.embed(left) + self.embed(right)))
        return F.linear(self.down(F.relu(self.hidden(x))), self.embed.weight)


class Film(nn.Module):
    """Features scaled and shifted by another input's layer (FiLM)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.condition = nn.Conv2d(1, 16, 3), nn.Linear(4, 32)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        scale, shift = self.condition(by)[..., None, None].chunk(2, 1)
        return self.head(F.relu(self.body(x) * (1 + scale) + shift).mean((2, 3)))


class Experts(nn.Module):
    """A soft mixture of experts whose weights lie in one tensor, by bmm and einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.up, self.down = (nn.Parameter(torch.randn(4, *s) / 4) for s in ((8, 32), (32, 3)))
        self.shift = nn.Parameter(torch.randn(4, 1, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(torch.baddbmm(self.shift, x.expand(4, -1, -1), self.up))
        return torch.einsum("neo,ne->no", (hidden @ self.down).transpose(0, 1), self.gate(x))


class Normalized(nn.Module):
    """An RMS norm and a cosine written by hand: channels they go over must stay."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.hidden, self.second = (
            nn.Linear(8, 16),
            nn.Linear(16, 48),
            nn.Linear(48, 16),
        )
        self.gain = nn.Parameter(torch.randn(16))
        self.prototypes = nn.Parameter(torch.randn(5, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain
        x = F.normalize(self.second(F.relu(self.hidden(x))), dim=-1)
        return x @ F.normalize(self.prototypes, dim=-1).T


class Maxout(nn.Module):
    """The largest of three pieces, and every second channel by a stride."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = nn.Linear(8, 3 * 16)
        self.twice = nn.Linear(16, 32)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.twice(self.pieces(x).view(len(x), 3, -1).amax(1))
        return self.head(y[:, ::2].relu() * y[:, 1::2].sigmoid())


class Hyper(nn.Module):
    """A layer whose weight another layer makes: it stays, the ones before may go."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.make = nn.Linear(8, 32), nn.Linear(32, 8 * 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.make(F.relu(self.first(x))).view(-1, 8, 3)
        return torch.bmm(x[:, None], weight)[:, 0]


class Rest(nn.Module):
    """Layers seldom met: bilinear, embedding bag, local response norm over flat features."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(13, 16)
        self.left, self.right = nn.Linear(16, 12), nn.Linear(16, 12)
        self.both = nn.Bilinear(12, 12, 24)
        self.head = nn.Linear(24, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bag(tokens))
        return self.head(F.relu(self.both(self.left(x).tanh(), self.right(x).tanh())))


class Half(nn.Module):
    """A product of two layers' channels, one of them flipped, and a cumulative sum over time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(8, 32)
        self.head = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).cumsum(1) * self.second(x).flip(-1)
        return self.head(F.softplus(y)).amax(1)
