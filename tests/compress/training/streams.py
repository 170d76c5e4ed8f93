"""Iterable datasets that a user would bring; 96 samples, of which one may end the process."""

import os
import signal
from itertools import islice
from pathlib import Path

import torch
from torch.utils.data import IterableDataset, TensorDataset

from tests.compress.training.nets import tensors

SAMPLES = 96


class Shuffled(IterableDataset):
    """Is shuffled anew in each pass, and augments by torch's generator."""

    def __init__(self, trace: str = "", dies_at: int = 0, length: int | None = SAMPLES) -> None:
        self.samples = tensors(SAMPLES, 0)
        self.trace, self.dies_at, self.length, self.epoch = trace, dies_at, length, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("has no length")
        return self.length

    def __iter__(self):
        # What set_epoch says after this has no effect.
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch))
        return self.read(order.tolist(), self.epoch * SAMPLES)

    def read(self, order, first):
        for number, index in enumerate(order, first + 1):
            if self.trace:
                note(self.trace, f"{number}", number == self.dies_at)
            x, y = (column[index] for column in self.samples)
            yield x + 0.1 * torch.randn(4), y


def note(trace: str, line: str, is_last: bool) -> None:
    """Append a line to a file; the last one ends this process, unless one has ended so before."""
    with Path(trace).open("a") as file:
        file.write(f"{line}\n")
    if is_last and not Path(f"{trace}.died").exists():
        Path(f"{trace}.died").touch()
        os.kill(os.getpid(), signal.SIGKILL)


class Divided(Shuffled):
    """Gives each process a part of its own."""

    def __iter__(self):
        import torch.distributed as dist

        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return islice(super().__iter__(), rank, None, ranks)


def divided(**settings):
    return {"train": Divided(**settings), "val": TensorDataset(*tensors(64, 1))}


def splits(**settings):
    return {"train": Shuffled(**settings), "val": TensorDataset(*tensors(64, 1))}


def parquet(path: str, trace: str = "", dies_at: int = 0, streaming: bool = True):
    import datasets

    # Reading stops so long at the end of each pass: 10 s by default.
    datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0.1

    def traced(row):
        if trace:
            lines = Path(trace).read_text().count("\n") if Path(trace).exists() else 0
            note(trace, "", lines + 1 == dies_at)
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
        train = train.shuffle(seed=0, buffer_size=32).map(traced)
    return {"train": train.with_format("torch"), "val": load(False).with_format("torch")}
