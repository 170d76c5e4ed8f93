"""Your own model: any callable that returns a torch.nn.Module."""

from torch import nn


def classifier(hidden: int = 128) -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 10),
    )
