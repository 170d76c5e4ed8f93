"""Several trainings by the ranks of one process group: ROOT, then settings by name
as JSON: those of rank 0 alone, and those of all ranks. `halves/NAME` goes on where NAME was after
the first of two epochs, and so do `other/NAME` and, of rank 0 alone, `alone/NAME`."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from compress.core.metrics import Metric
from compress.data.splits import DataReference
from compress.training.checkpoint import FOLDER, Epoch, checkpoints
from compress.training.config.training import Training
from compress.training.distributed.base import Strategy, process_group
from compress.training.launch.worker import create_strategy
from compress.training.loop.train_state import Job
from compress.training.loop.trainer import train
from compress.training.objectives.objective import TargetLoss

HERE = Path(__file__).parent


def job(root: Path, name: str, processes: int, settings: dict) -> Job:
    settings = dict(settings)
    name_of_metric, *arguments = settings.pop("metric", "accuracy").split(" ")
    metric = Metric(name_of_metric, tuple(("num_classes", int(number)) for number in arguments))
    parallel = {**settings.pop("parallel", {}), "processes": processes}
    source, data = settings.pop("source", "source"), settings.pop("data", "nets:uneven")
    settings = {"epochs": 2, "batch_size": 16, "keep": "last", "learning_rate": 0.01, **settings}
    folder = root / name
    folder.mkdir(exist_ok=True, parents=True)
    return Job(
        start=root / source,
        training=Training(**settings, parallel=parallel),
        objective=TargetLoss(),
        data=DataReference(data, {}, HERE, 16).load(),
        metric=metric,
        reference=None,
        device="cpu",
        threads=1,
        seed=0,
        folder=folder,
        accept_start=False,
    )


def copy_first_epoch(root: Path, name: str) -> None:
    """Let a training begin with the checkpoint of the first epoch of that after the slash."""
    before, _ = checkpoints(root / Path(name).name)
    shutil.copytree(before, root / name / FOLDER / before.name)


@contextmanager
def compiled_by(backend: str) -> Iterator[None]:
    """Let modules be compiled by another backend: some trace alike and write no code."""
    usual = nn.Module.compile
    nn.Module.compile = lambda module, **options: usual(module, backend=backend, **options)
    try:
        yield
    finally:
        nn.Module.compile = usual


def main(root: Path, alone: dict[str, dict], trainings: dict[str, dict]) -> None:
    first = os.environ["RANK"] == "0"
    if first:
        for name, settings in alone.items():
            train(job(root, name, 1, settings), Strategy(), silent)
    left_to_one = {name: trainings.pop(name) for name in [*trainings] if "alone/" in name}
    with process_group("cpu"):
        ranks = torch.distributed.get_world_size()
        for name, settings in trainings.items():
            if first and "/" in name:
                copy_first_epoch(root, name)
            with compiled_by(settings.pop("backend", "inductor")):
                shared = job(root, name, ranks, settings)
                train(shared, create_strategy(shared.training.parallel), silent)
    for name, settings in left_to_one.items() if first else []:
        copy_first_epoch(root, name)
        train(job(root, name, 1, settings), Strategy(), silent)


def silent(epoch: Epoch) -> None:
    pass


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))
