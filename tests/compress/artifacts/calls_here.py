"""What a user's own file looks like: forwards with parameters and outputs of every kind."""

from typing import NamedTuple

import torch
from torch import nn


class Answer(NamedTuple):
    scores: torch.Tensor
    total: torch.Tensor


class Keywords(nn.Module):
    """Not the same when its inputs are mixed up, and one of its parameters is left out."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(4, width)

    def forward(self, x, scale=None, ids=None, *, shift=None):
        scores = self.linear(x) + (0 if ids is None else ids.sum(1, keepdim=True))
        scores = scores if scale is None else scores * scale
        scores = scores if shift is None else scores + shift
        return {"scores": scores, "both": (scores.sum(1), scores.mean(1)), "note": None}


class Named(Keywords):
    def forward(self, x):
        answer = super().forward(x)
        return Answer(answer["scores"], answer["both"][0])


class Talking(Keywords):
    """One of its outputs is no tensor, as a cache of keys and values is none."""

    def forward(self, x):
        return {"scores": self.linear(x), "state": x, "cache": object()}
