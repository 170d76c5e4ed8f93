"""What tests of training share: one thread, and reading the last checkpoint of a training."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from compress.checkpoint.distributed_checkpoint import read_distributed
from compress.training.checkpoint import FOLDER, Epoch, checkpoints, read_progress


@dataclass
class Trained:
    """What the last checkpoint of a training says."""

    history: tuple[Epoch, ...]
    weights: dict[str, torch.Tensor]
    kept_weights: dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Tiny models on many threads crawl where other programs run."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def trained() -> Callable[[Path], Trained]:
    """Return a function that reads a training's folder."""

    def read(folder: Path) -> Trained:
        last = checkpoints(folder)[-1]
        progress = read_progress(last)
        kept = read_distributed(folder / FOLDER / progress.kept_in)
        kept_weights = {**kept["model"], **kept.get("average", {})}
        return Trained(
            progress.history,
            {name: stored.read() for name, stored in read_distributed(last)["model"].items()},
            {name: stored.read() for name, stored in kept_weights.items()},
        )

    return read
