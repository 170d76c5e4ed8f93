"""Attention in many hands: torch's own modules, windows, einsum, and heads written as numbers."""

import torch
import torch.nn.functional as F
from torch import nn


class SelfAttention(nn.Module):
    """nn.MultiheadAttention over one sequence with a padding mask; its weights are not used."""

    def __init__(self, batch_first: bool = True, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.attention = nn.MultiheadAttention(32, 4, dropout, bias=bias, batch_first=batch_first)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor, is_padding: torch.Tensor) -> torch.Tensor:
        places = torch.arange(is_padding.shape[1])
        is_padding = is_padding & (places > 0)  # one place is always there
        y = x if self.batch_first else x.transpose(0, 1)
        z, _ = self.attention(y, y, y, key_padding_mask=is_padding)
        z = z if self.batch_first else z.transpose(0, 1)
        return self.head(self.norm(x + z)).mean(1)


class CrossAttention(nn.Module):
    """nn.MultiheadAttention with keys and values of other widths, and a mask that is a buffer."""

    def __init__(self, need_weights: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, kdim=12, vdim=20, batch_first=True)
        self.need_weights = need_weights
        self.register_buffer("mask", torch.ones(5, 7).tril(2).log())
        self.head = nn.Linear(32, 3)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        x, _ = self.attention(q, k, v, need_weights=self.need_weights, attn_mask=self.mask)
        return self.head(x)


class SeenWeights(nn.Module):
    """nn.MultiheadAttention whose mean weights are an output: its heads must stay."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.hidden = nn.Linear(32, 64)
        self.head = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, weights = self.attention(x, x, x)
        return self.head(F.relu(self.hidden(y))), weights


class Encoder(nn.Module):
    """nn.TransformerEncoder with a padding mask, and a mean over what is not padding."""

    def __init__(
        self, norm_first: bool = False, activation: str = "relu", nested: bool = False
    ) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            32, 4, 64, 0.1, activation, batch_first=True, norm_first=norm_first
        )
        self.embed = nn.Embedding(13, 32)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
        self.head = nn.Linear(32, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        is_padding = (tokens == 0) & (torch.arange(tokens.shape[1]) > 0)
        x = self.encoder(self.embed(tokens), src_key_padding_mask=is_padding)
        there = (~is_padding).unsqueeze(-1).to(x.dtype)
        return self.head((x * there).sum(1) / there.sum(1))


class Decoder(nn.Module):
    """nn.TransformerDecoder with a causal mask and a memory; embeddings are shared."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(32, 4, 64, batch_first=True, norm_first=True)
        self.embed = nn.Embedding(13, 32)
        self.decoder = nn.TransformerDecoder(layer, 2, norm=nn.LayerNorm(32))
        self.head = nn.Linear(32, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, memory_tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        mask = mask.to(self.embed.weight.dtype)
        x, memory = self.embed(tokens), self.embed(memory_tokens)
        return self.head(self.decoder(x, memory, tgt_mask=mask, tgt_is_causal=True))


class WholeTransformer(nn.Module):
    """nn.Transformer, encoder and decoder, sequences first."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(16, 4, 1, 1, 32, 0.0)
        self.head = nn.Linear(16, 3)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        y = self.transformer(source.transpose(0, 1), target.transpose(0, 1))
        return self.head(y.transpose(0, 1))


class Window(nn.Module):
    """Attention in shifted windows with a table of relative positions (Swin)."""

    def __init__(self, width: int = 24, heads: int = 4, window: int = 4) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.stem = nn.Conv2d(1, width, 1)
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads))
        place = torch.stack(torch.meshgrid(*[torch.arange(window)] * 2, indexing="ij")).flatten(1)
        apart = (place[:, :, None] - place[:, None]) + window - 1
        self.register_buffer("index", apart[0] * (2 * window - 1) + apart[1])
        self.head = nn.Linear(width, 3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.stem(image).permute(0, 2, 3, 1)
        n, h, w, c = x.shape
        y = torch.roll(self.norm(x), (-2, -2), (1, 2))
        y = y.view(n, h // self.window, self.window, w // self.window, self.window, c)
        y = y.transpose(2, 3).reshape(-1, self.window**2, c)
        qkv = self.qkv(y).view(len(y), self.window**2, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        bias = self.table[self.index.flatten()].view(*self.index.shape, -1).permute(2, 0, 1)
        scores = qkv[0] @ qkv[1].transpose(-1, -2) * qkv.shape[-1] ** -0.5 + bias
        y = self.out((scores.softmax(-1) @ qkv[2]).transpose(1, 2).flatten(2))
        y = y.view(n, h // self.window, w // self.window, self.window, self.window, c)
        y = torch.roll(y.transpose(2, 3).reshape(n, h, w, c), (2, 2), (1, 2))
        return self.head((x + y).mean((1, 2)))


class Batched(nn.Module):
    """Attention by torch.bmm with heads folded into the batch, the number of heads in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.head_width = 4, 8
        self.query, self.key, self.value = (nn.Linear(16, 32) for _ in range(3))
        self.out = nn.Linear(32, 3)

    def fold(self, x: torch.Tensor) -> torch.Tensor:
        n, t, _ = x.shape
        x = x.view(n, t, self.heads, self.head_width).transpose(1, 2)
        return x.reshape(n * self.heads, t, self.head_width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, _ = x.shape
        q, k, v = self.fold(self.query(x)), self.fold(self.key(x)), self.fold(self.value(x))
        scores = torch.baddbmm(torch.zeros(1, 1, 1, dtype=x.dtype), q, k.transpose(1, 2))
        y = torch.bmm((scores * self.head_width**-0.5).softmax(-1), v)
        y = y.view(n, self.heads, t, self.head_width).transpose(1, 2)
        return self.out(y.reshape(n, t, self.heads * self.head_width))


class Einsum(nn.Module):
    """Projections and attention written with einsum; weights have three axes."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (
            nn.Parameter(torch.randn(16, 4, 8) / 4) for _ in range(3)
        )
        self.out = nn.Parameter(torch.randn(4, 8, 3) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (torch.einsum("ntc,chd->nhtd", x, w) for w in (self.query, self.key, self.value))
        weights = (torch.einsum("nhtd,nhsd->nhts", q, k) / 8**0.5).softmax(-1)
        return torch.einsum("nhts,nhsd,hdo->nto", weights, v, self.out)


class OneHead(nn.Module):
    """One head of attention, as a module of its own."""

    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (
            nn.Linear(width, head_width, bias=False) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = (self.query(x) @ self.key(x).mT * 8**-0.5).softmax(-1)
        return weights @ self.value(x)


class HeadsInAList(nn.Module):
    """A ModuleList of heads, concatenated; each head's widths can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(OneHead(16, 8) for _ in range(3))
        self.out = nn.Linear(24, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([head(x) for head in self.heads], -1))


class WrittenHeads(nn.Module):
    """Heads and their width written as numbers into the code: they become attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 32) for _ in range(3))
        self.out = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, _ = x.shape
        q, k, v = (
            f(x).reshape(n, t, 4, 8).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(n, t, 32))


class Configuration:
    """Sizes that every part reads."""

    def __init__(self) -> None:
        self.heads, self.width = 4, 32


class Layer(nn.Module):
    """Attention that reads the number of heads from a configuration at every call."""

    def __init__(self, config: Configuration) -> None:
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(16, 3 * config.width)
        self.out = nn.Linear(config.width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.config.heads
        q, k, v = (
            part.unflatten(-1, (heads, self.config.width // heads)).transpose(1, 2)
            for part in self.qkv(x).split(self.config.width, -1)
        )
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class SharedConfiguration(nn.Module):
    """Two layers that read their number of heads from one object: both change or none."""

    def __init__(self) -> None:
        super().__init__()
        config = Configuration()
        self.layers = nn.Sequential(Layer(config), Layer(config))
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))
