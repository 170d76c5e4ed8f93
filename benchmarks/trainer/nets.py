"""Transformers of several sizes, and the state that trains them."""

import itertools

import torch
import torch.nn.functional as F
from torch import nn

from compress.data.batch import Batch
from compress.training.config.training import Training
from compress.training.distributed.base import Strategy
from compress.training.launch.worker import create_strategy
from compress.training.loop.train_state import TrainState
from compress.training.objectives.objective import TargetLoss


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # A bias of the keys has no gradient but rounding, which Adam would make steps of.
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.v_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        q, k, v = (
            project(normed).unflatten(-1, (-1, x.shape[-1] // self.heads)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.o_proj(mixed)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, width: int, depth: int, heads: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class ConvNet(nn.Module):
    """Convolutions of one width, whose few weights are used at each place of an image."""

    def __init__(self, width: int, depth: int, classes: int = 10) -> None:
        super().__init__()
        widths = [3, *[width] * depth]
        self.layers = nn.ModuleList(
            nn.Conv2d(before, after, 3, padding=1) for before, after in itertools.pairwise(widths)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(x.mean((2, 3)))


def batch(samples: int, length: int, width: int) -> Batch:
    return Batch((torch.randn(samples, length, width),), torch.randint(10, (samples,)))


def train_state(module: nn.Module, **settings) -> TrainState:
    """Create the state that trains a module; several processes need a process group."""
    training = Training(epochs=1, learning_rate=1e-3, **settings)
    strategy = Strategy() if training.parallel.ranks == 1 else create_strategy(training.parallel)
    loss = TargetLoss().prepare("cpu")
    state = TrainState(
        module, loss, training, strategy, "cpu", lambda: batch(2, 1, module.head.in_features)
    )
    state.wrapped.train()
    return state


class Normalized(nn.Sequential):
    """A net with BatchNorm, on the samples of :func:`sequences`."""

    def __init__(self, length: int, width: int, classes: int = 10) -> None:
        super().__init__(
            nn.Conv1d(length, width, 3, padding=1),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(width, classes),
        )


class Sequences(torch.utils.data.Dataset):
    """Random sequences of which every eighth has no label; with noise drawn at each reading."""

    def __init__(self, count: int, length: int, width: int, noise: float) -> None:
        generator = torch.Generator().manual_seed(count)
        self.inputs = torch.randn(count, length, width, generator=generator)
        self.labels = torch.randint(10, (count,), generator=generator)
        self.labels[::8] = -100
        self.noise = noise

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = self.noise * torch.randn(self.inputs[index].shape) if self.noise else 0.0
        return self.inputs[index] + noise, self.labels[index]


def sequences(train: int, length: int, width: int, noise: float = 0.0) -> dict[str, Sequences]:
    return {
        "train": Sequences(train, length, width, noise),
        "val": Sequences(train // 2, length, width, 0.0),
    }


def stack(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a batch, as a user's own `collate_fn`."""
    inputs, labels = zip(*samples, strict=True)
    return torch.stack(inputs), torch.stack(labels)
