"""Iterable data sets that a user would bring; 96 samples, of which one may end the process."""

import os
import signal
from pathlib import Path

import torch
from torch.utils.data import IterableDataset, TensorDataset

from tests.compress.training.nets import tensors

SAMPLES = 96


class Replayed(IterableDataset):
    """Has no state, and augments by torch's generator."""

    def __init__(self, trace: str = "", dies_at: int = 0, length: int | None = SAMPLES) -> None:
        self.samples = tensors(SAMPLES, 0)
        self.trace, self.dies_at, self.length, self.start, self.epoch = trace, dies_at, length, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("has no length")
        return self.length

    def __iter__(self):
        start, self.start = self.start, 0
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch))
        for self.position, index in enumerate(order[start:].tolist(), start + 1):
            number = self.epoch * SAMPLES + self.position
            if self.trace:
                with Path(self.trace).open("a") as file:
                    file.write(f"{number}\n")
            if number == self.dies_at and not Path(f"{self.trace}.died").exists():
                Path(f"{self.trace}.died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            x, y = (column[index] for column in self.samples)
            yield x + 0.1 * torch.randn(4), y


class Stateful(Replayed):
    """Goes on where its state says."""

    position = 0

    def state_dict(self):
        return {"position": self.position, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.start = self.position = state["position"]


def splits(kind: str = "stateful", **settings):
    kinds = {"stateful": Stateful, "replayed": Replayed}
    return {"train": kinds[kind](**settings), "val": TensorDataset(*tensors(64, 1))}


def parquet(path: str, trace: str = "", dies_at: int = 0, streaming: bool = True):
    import datasets

    def note(row, number):
        if trace:
            with Path(trace).open("a") as file:
                file.write(f"{number}\n")
            lines = len(Path(trace).read_text().splitlines())
            if lines == dies_at and not Path(f"{trace}.died").exists():
                Path(f"{trace}.died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return row

    def load(streamed):
        loaded = datasets.load_dataset(
            "parquet",
            data_files=path,
            split="train",
            streaming=streamed,
            cache_dir=f"{path}.cache",
        )
        return loaded.rename_column("label", "labels")

    train = load(streaming)
    if streaming:
        train = train.shuffle(seed=0, buffer_size=32).map(note, with_indices=True)
    return {"train": train.with_format("torch"), "val": load(False).with_format("torch")}
