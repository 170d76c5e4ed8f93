"""Datasets that draw random numbers from generators of several kinds while they are read."""

import os
import random
from functools import partial

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

MODULE_RNG = np.random.default_rng()


def tensors(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long()


def from_global_generators() -> float:
    return float(torch.rand(1)) + np.random.rand() + random.random()


def from_the_module() -> float:
    return MODULE_RNG.random()


def from_the_system() -> float:
    return int.from_bytes(os.urandom(4), "little") / 2**32


class Lazy:
    """Makes its generator when a process first needs it."""

    rng = None

    def __call__(self) -> float:
        if self.rng is None:
            self.rng = np.random.default_rng()
        return self.rng.random()


def _torch_draw(generator: torch.Generator) -> float:
    return float(torch.rand(1, generator=generator))


def draw_from(kind: str):
    """Return a function that returns a random number."""
    if kind == "torch":
        return partial(_torch_draw, torch.Generator().manual_seed(torch.seed() % 2**32))
    if kind == "closure":
        rng = np.random.default_rng()
        return lambda: rng.random()
    return {
        "global": from_global_generators,
        "module": from_the_module,
        "numpy": np.random.default_rng().random,
        "legacy numpy": np.random.RandomState().rand,
        "python": random.Random().random,
        "lazy": Lazy(),
        "system": from_the_system,
    }[kind]


class Augmented(Dataset):
    """Samples that a chain of transforms adds noise to."""

    def __init__(self, kind: str, samples: int, seed: int) -> None:
        self.x, self.y = tensors(samples, seed)
        self.transforms = [{"noise": draw_from(kind)}]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index] + self.transforms[0]["noise"](), self.y[index]


class Dictionaries(Augmented):
    """Sentences of random length."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = 1 + int(8 * self.transforms[0]["noise"]()) % 8
        return {"ids": torch.full((words,), index), "labels": self.y[index]}


def data(kind: str, seed: int = 0) -> dict[str, Dataset]:
    """Return splits whose training samples are augmented, inside datasets of torch."""
    dataset = Augmented(kind, 80, seed)
    parts = [Subset(dataset, range(40)), Subset(dataset, range(40, 80))]
    return {"train": ConcatDataset(parts), "val": TensorDataset(*tensors(48, 1))}
