"""Networks whose numbers do not all fit 16-bit floats."""

import torch
from torch import nn


class Encoder(nn.Module):
    """Attention with a mask made of the smallest float32, as transformers make it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 32)
        self.query = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 3)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        hidden = (1 - mask[:, None].float()) * torch.finfo(torch.float32).min
        scores = self.query(x) @ x.transpose(1, 2) / 32**0.5 + hidden
        x = self.norm(x + scores.softmax(-1) @ x)
        return self.head(x.mean(1))


class Wide(nn.Module):
    """Two products; the first one's result is far beyond what float16 holds."""

    def __init__(self) -> None:
        super().__init__()
        self.loud = nn.Linear(8, 16)
        self.plain = nn.Linear(16, 16)
        self.head = nn.Linear(16, 3)
        with torch.no_grad():
            self.loud.weight.mul_(1e6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.plain(self.loud(x) * 1e-6)))


class Faint(nn.Module):
    """A weight so small that float16 rounds most of it away, made up for afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.faint = nn.Linear(8, 16, bias=False)
        self.head = nn.Linear(16, 3)
        with torch.no_grad():
            self.faint.weight.mul_(1e-7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.faint(x) * 1e7)


class Tied(nn.Module):
    """One table read as an embedding and as the last layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 32)
        self.head = nn.Linear(32, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


encoder, wide, faint, tied = Encoder, Wide, Faint, Tied
