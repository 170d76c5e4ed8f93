"""Several trainings by the ranks of one process group: ROOT, then settings by name
as JSON: those of rank 0 alone, and those of all ranks."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from compress.core.data import DataReference
from compress.core.metrics import Metric
from compress.training.loop import Job, train
from compress.training.objective import CrossEntropy
from compress.training.parallel import Alone, process_group, strategy_of
from compress.training.settings import Training

HERE = Path(__file__).parent


def job(root: Path, name: str, processes: int, settings: dict) -> Job:
    settings = dict(settings)
    metric = Metric(settings.pop("metric", "accuracy"))
    parallel = {**settings.pop("parallel", {}), "processes": processes}
    settings = {"epochs": 4, "batch_size": 16, "keep": "last", "learning_rate": 0.01, **settings}
    folder = root / name
    folder.mkdir(exist_ok=True)
    return Job(
        start=root / "source",
        training=Training(**settings, parallel=parallel),
        objective=CrossEntropy(),
        data=DataReference("nets:uneven", {}, HERE, 16).load(),
        metric=metric,
        reference=None,
        device="cpu",
        threads=1,
        seed=0,
        folder=folder,
        accept_start=False,
    )


def in_two_halves(whole: Job) -> list[Job]:
    """Return a training cut after two epochs; its schedule does not depend on its length."""
    first = whole.training.model_copy(update={"epochs": 2})
    return [replace(whole, training=first), whole]


def main(root: Path, alone: dict[str, dict], trainings: dict[str, dict]) -> None:
    if os.environ["RANK"] == "0":
        for name, settings in alone.items():
            train(job(root, name, 1, settings), Alone(), lambda epoch: None)
    with process_group("cpu"):
        for name, settings in trainings.items():
            halves = settings.pop("halves", False)
            whole = job(root, name, torch.distributed.get_world_size(), settings)
            for part in in_two_halves(whole) if halves else [whole]:
                strategy = strategy_of(part.training.parallel)
                train(part, strategy, lambda epoch: None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))
