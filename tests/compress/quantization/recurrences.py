"""Classifiers of token sequences by recurrent layers."""

import torch
from torch import nn


class Classifier(nn.Module):
    """An embedding, a recurrent layer, a linear layer on the last state."""

    def __init__(self, kind: str = "LSTM", *, both_ways: bool = False, layers: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.rnn = getattr(nn, kind)(
            32, 48, layers, batch_first=True, bidirectional=both_ways, bias=layers == 1
        )
        self.head = nn.Linear(48 * (1 + both_ways), 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.rnn(self.embedding(tokens))
        return self.head(states[:, -1])


classifier = Classifier
