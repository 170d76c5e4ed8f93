"""Recurrent layers in both directions, stacked, projected and written as loops."""

import torch
import torch.nn.functional as F
from torch import nn


class BothWays(nn.Module):
    """A stacked recurrent layer in both directions, its outputs and its last states used."""

    def __init__(self, kind: str = "LSTM", layers: int = 2, bias: bool = True) -> None:
        super().__init__()
        self.recurrent = getattr(nn, kind)(
            6, 16, layers, bias=bias, batch_first=True, bidirectional=True
        )
        self.head = nn.Linear(32, 3)
        self.last_head = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, state = self.recurrent(x)
        last = state[0] if isinstance(state, tuple) else state
        return self.head(y.mean(1)) + self.last_head(torch.cat([last[-2], last[-1]], -1))


class Projected(nn.Module):
    """A stacked LSTM with a projection, sequences first, and states given from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(6, 32, 2, proj_size=8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.recurrent(x.transpose(0, 1))
        return self.head(y[-1])


class GivenState(nn.Module):
    """A GRU that begins with zeros whose width is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_size = 32
        self.recurrent = nn.GRU(6, self.hidden_size, batch_first=True)
        self.head = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = torch.zeros(1, len(x), self.hidden_size, dtype=x.dtype)
        y, _ = self.recurrent(x, start)
        return self.head(y[:, -1])


class LearnedState(nn.Module):
    """An Elman network that begins with a learned state for each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.RNN(6, 32, 2, batch_first=True)
        self.start = nn.Parameter(torch.randn(2, 1, 32))
        self.head = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.recurrent(x, self.start.expand(-1, len(x), -1).contiguous())
        return self.head(y[:, -1])


class Cells(nn.Module):
    """Cells in a Python loop, one of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTMCell(6, 16)
        self.gru = nn.GRUCell(16, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, hidden = None, None
        for step in x.unbind(1):
            state = self.lstm(step, state)
            hidden = self.gru(state[0], hidden)
        return self.head(hidden)


class ByHand(nn.Module):
    """An LSTM's equations written out, its gates by chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 16
        self.inputs, self.hidden = nn.Linear(6, 64), nn.Linear(16, 64, bias=False)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = torch.zeros(len(x), self.width, dtype=x.dtype)
        for step in x.unbind(1):
            i, f, g, o = (self.inputs(step) + self.hidden(h)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return self.head(h)


class SpeechNet(nn.Module):
    """Convolutions over time, a recurrent layer in both directions whose sides are added."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, 16, 3, padding=1)
        self.norm = nn.BatchNorm1d(16)
        self.recurrent = nn.GRU(16, 24, bidirectional=True, batch_first=True)
        self.head = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv(x.transpose(1, 2)))).transpose(1, 2)
        y, _ = self.recurrent(x)
        return self.head(y.unflatten(-1, (2, -1)).sum(-2)).log_softmax(-1)
