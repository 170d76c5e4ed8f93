"""A small transformer as people write them, in the ways that matter to parallelism; and tokens."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

WORDS = 11


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, views: str, normed: bool, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.embed_dim = heads, width // heads, width
        # A key's bias has no gradient but rounding errors, which Adam would make steps of.
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.v_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.q_norm = nn.LayerNorm(width // heads) if normed else nn.Identity()
        self.views, self.dropout = views, dropout

    def split(self, x: torch.Tensor) -> torch.Tensor:
        shape = {
            "by size": (-1, self.head_dim),
            "by number": (self.num_heads, -1),
            "by both": (self.num_heads, self.head_dim),
            "by hand": (2, -1),
        }[self.views]
        return x.view(*x.shape[:2], *shape).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.split(layer(x)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(self.q_norm(q), k, v, dropout_p=dropout)
        width = self.embed_dim if self.views == "by both" else -1
        return self.o_proj(y.transpose(1, 2).reshape(*x.shape[:2], width))


class Layer(nn.Module):
    def __init__(self, width: int, dropout: float, **attention: object) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, dropout=0.0, **attention)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, None]:
        hidden = hidden + self.dropout(self.attn(self.norm1(hidden))) * scale
        return hidden + self.fc2(F.gelu(self.fc1(self.norm2(hidden)))), None


class Transformer(nn.Module):
    def __init__(self, depth: int, width: int, tied: bool, **layer: object) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(torch.randn(6, width) / 4)
        self.layers = nn.ModuleList(Layer(width, **layer) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.register_buffer("scale", torch.ones(1))
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens) + self.places[: tokens.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden, scale=self.scale)[0]
        return self.head(self.norm(hidden).mean(1))


class Skipping(nn.Module):
    """Blocks of which a later one takes what an earlier one gave."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)
        )
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0](self.words(tokens))
        last = self.blocks[3](self.blocks[2](self.blocks[1](first))) + first
        return self.head(last.mean(1))


def skipping() -> nn.Module:
    return Skipping()


def transformer(
    depth: int = 4,
    width: int = 16,
    heads: int = 4,
    views: str = "by size",
    normed: bool = False,
    tied: bool = False,
    dropout: float = 0.0,
    frozen_layers: int = 0,
) -> nn.Module:
    net = Transformer(depth, width, tied, heads=heads, views=views, normed=normed, dropout=dropout)
    if frozen_layers:
        net.places.requires_grad_(False)
        for part in (net.words, *net.layers[:frozen_layers]):
            part.requires_grad_(False)
    return net


def batch(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(WORDS, (samples, 6), generator=torch.Generator().manual_seed(seed))
    return tokens, (tokens[:, 0] + tokens[:, 1]) % WORDS


def tokens(train: int = 48, val: int = 37) -> dict[str, Dataset]:
    """Return sequences, of which two in eleven have an ignored label in `train`."""
    inputs, labels = batch(train, 0)
    labels[inputs[:, 2] < 2] = -100
    return {"train": TensorDataset(inputs, labels), "val": TensorDataset(*batch(val, 1))}
