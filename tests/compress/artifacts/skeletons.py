"""Factories that can, and that cannot, be built without the values of their parameters."""

import torch
from torch import nn


class Tied(nn.Module):
    """Tied weights, a weight given to two layers, buffers of both kinds, and an LSTM."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, width), nn.Linear(width, 8, bias=False)
        self.head.weight = self.embedding.weight
        shared = nn.Parameter(torch.randn(width))
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.first.bias, self.second.bias = shared, shared
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("positions", torch.arange(5.0), persistent=False)
        self.memory = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.memory(self.embedding(x.long().clamp(0, 7)))[0][:, 0]
        return self.head(self.norm(self.second(self.first(y).relu())) + self.positions[1])


def tied(width: int = 4) -> nn.Module:
    return Tied(width)


def scaled() -> nn.Module:
    """Return a module that needs a value to be built."""
    module = nn.Linear(4, 2)
    module.scale = module.weight.abs().max().item()
    return module


def derived(kind: str) -> nn.Module:
    """Return a module that keeps what it computed from its weights."""
    module = nn.Linear(4, 2)
    if kind == "buffer":
        module.register_buffer("norm", module.weight.detach().norm(), persistent=False)
    else:
        module.norms = [module.weight.detach().norm()]
    return module
