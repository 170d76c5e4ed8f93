"""Small networks of linear layers, each with one habit that pruning tools stumble over."""

import torch
import torch.nn.functional as F
from torch import nn


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 3)
    )


class GatedBlock(nn.Module):
    """A gated feed-forward that chunks one projection (SwiGLU), with a residual."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 64)
        self.down = nn.Linear(32, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class Attention(nn.Module):
    """Split projections, and the number of heads written into the view."""

    def __init__(self, width: int = 16, heads: int = 4, key_heads: int = 4) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head_width = heads, key_heads, 6
        self.query = nn.Linear(width, heads * 6)
        self.key = nn.Linear(width, key_heads * 6)
        self.value = nn.Linear(width, key_heads * 6)
        self.out = nn.Linear(heads * 6, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, _ = x.shape
        q = self.query(x).view(n, t, self.heads, self.head_width).transpose(1, 2)
        k = self.key(x).view(n, t, self.key_heads, self.head_width).transpose(1, 2)
        v = self.value(x).view(n, t, self.key_heads, self.head_width).transpose(1, 2)
        grouped = self.heads != self.key_heads
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.out(y.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """Tied embeddings, pre-norm attention and a gated feed-forward."""

    def __init__(self, heads: int = 4, key_heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.places = nn.Parameter(torch.randn(1, 8, 16))
        self.norm = nn.LayerNorm(16)
        self.attention = Attention(16, heads, key_heads)
        self.feed_forward = GatedBlock(16)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.places
        x = x + self.attention(self.norm(x))
        return self.head(self.feed_forward(x))


class ByHand(nn.Module):
    """Attention without the fused operator; the heads' scale follows from a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 32) for _ in range(3))
        self.out = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, _ = x.shape
        q, k, v = (
            f(x).view(n, t, -1, 8).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(n, t, -1))


class Tied(nn.Module):
    """An autoencoder whose decoder is the encoder, transposed; and two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 16)
        self.third = nn.Linear(16, 16)
        self.third.weight = self.second.weight
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.second(F.relu(self.first(x))))
        return self.head(F.relu(self.third(x)))


class Recurrent(nn.Module):
    """A stacked LSTM and a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 16, num_layers=2, batch_first=True)
        self.gru = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(x)
        x, last = self.gru(x)
        return self.head(x[:, -1] + last[0])


class UnknownOperator(nn.Module):
    """A matrix inverse in the middle, and an ordinary layer beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 16)
        self.second = nn.Linear(4, 16)
        self.head = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        whitened = torch.linalg.pinv(y.view(-1, 4, 4)).flatten(1)
        return self.head(torch.cat([whitened, F.relu(self.second(x))], 1))


class HiddenWidth(nn.Module):
    """A mean over channels with the width read from a shape: the trace alone would be wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 32)
        self.second = nn.Linear(32, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.first(x))
        return self.head(F.relu(self.second(y / y.shape[1])))


class SplitByNumber(nn.Module):
    """Channels split at a place written into the code."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 32)
        self.second = nn.Linear(4, 32)
        self.head = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.first(x))
        return self.head(torch.cat([y[:, :12].sin(), y[:, 12:].cos()], 1) + self.second(x).exp())


class MultiHead(nn.Module):
    """torch's own attention, whose sizes are checked in its forward, and a feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)).mean(1)


class Everything(nn.Module):
    """Only channels that are inputs or outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.only(x)


class Fused(nn.Module):
    """One projection for queries, keys and values, taken apart by a view with three places."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.qkv = nn.Linear(8, 3 * 32)
        self.out = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, _ = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Transposed(nn.Module):
    """A decoder that is the encoder transposed, GPT-2's layout, and a normalised group."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 16)
        self.weight = nn.Parameter(torch.randn(8, 32))
        self.bias = nn.Parameter(torch.randn(32))
        self.norm = nn.GroupNorm(4, 32)
        self.hidden = nn.Linear(32, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.encoder(x)) @ self.encoder.weight
        x = self.norm(torch.addmm(self.bias, x, self.weight))
        return self.head(F.relu(self.hidden(x)))


class InPlaceOnAView(nn.Module):
    """An in-place operator on a part of the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 32)
        self.second = nn.Linear(32, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y.chunk(2, -1)[0].relu_()
        return self.head(F.relu(self.second(y)))


class Computed(nn.Module):
    """Layers whose weights are made anew at every call, and one in two directions."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 16))
        self.both_ways = nn.LSTM(16, 8, bidirectional=True, batch_first=True)
        self.plain = nn.Linear(16, 16)
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.both_ways(F.relu(self.normed(x)))
        return self.head(F.linear(F.relu(self.plain(y)), self.weight.tanh()))


class Outer(nn.Module):
    """A product of every channel of one layer with every channel of another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(4, 8)
        self.head = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((self.first(x)[:, :, None] * self.second(x)[:, None]).flatten(1))


class Disagreeing(nn.Module):
    """Two layers that may be cut one at a time: the answer changes when both are narrower."""

    def __init__(self, width: int = 32, change: float = 1.0) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.second = nn.Linear(4, width)
        self.first_head = nn.Linear(width, 3)
        self.second_head = nn.Linear(width, 3)
        self.full, self.change = 2 * width, change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = F.relu(self.first(x)), F.relu(self.second(x))
        both = 4 * max(first.shape[1], second.shape[1]) <= self.full
        return (self.first_head(first) + self.second_head(second)) * (1 + self.change * both)


class FloatAlone(nn.Module):
    """Insists on float32, and answers a little otherwise when it is narrower."""

    def __init__(self, change: float) -> None:
        super().__init__()
        self.first = nn.Linear(4, 512)
        self.head = nn.Linear(512, 3)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32:
            raise TypeError("float32 alone")
        y = self.first(x).cos()
        return self.head(y) * (1 + self.change * (y.shape[1] < 512))
