"""A text encoder of two layers, and fragments of the modules of Python's library to tell apart."""

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

MODULES = ("ast", "mailbox", "tarfile", "turtle")
"""The classes."""
LENGTH = 48
"""Bytes of a fragment; each is a token."""
PARTS = {"train": 4096, "val": 256}
"""Split → its fragments."""


class Layer(nn.Module):
    """Attention and two linear layers, normalized before each."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        normed = self.norm1(x)
        query, key, value = (
            part(normed).view(rows, length, self.heads, self.head_width).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        read = F.scaled_dot_product_attention(query, key, value)
        width = self.heads * self.head_width
        x = x + self.out(read.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    """Embeddings of bytes and of places, layers, and a class by the mean of all tokens."""

    def __init__(self, layers: int, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.layers = nn.Sequential(*(Layer(width, heads, inner) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(MODULES))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.embed(ids) + self.places)
        return self.head(self.norm(x).mean(1))


def encoder() -> nn.Module:
    return Encoder(layers=2, width=128, heads=8, inner=512)


def fragments(seed: int = 0) -> dict[str, TensorDataset]:
    """Return fragments at random places; those of `val` are from the last fifth of each module."""
    generator = torch.Generator().manual_seed(seed)
    splits = {}
    for name, count in PARTS.items():
        ids, labels = [], []
        for label, module in enumerate(MODULES):
            text = (Path(sysconfig.get_path("stdlib")) / f"{module}.py").read_bytes()
            border = len(text) * 4 // 5
            start, end = (0, border) if name == "train" else (border, len(text))
            places = torch.randint(
                start, end - LENGTH, (count // len(MODULES),), generator=generator
            )
            ids += [list(text[place : place + LENGTH]) for place in places.tolist()]
            labels += [label] * len(places)
        splits[name] = TensorDataset(torch.tensor(ids), torch.tensor(labels))
    return splits
