"""Metrics on `val` by the ranks of one process group: FILE, which rank 0 writes the values to."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torchmetrics  # noqa: F401 - before the ranks are forked

from compress.core.metrics import Metric
from compress.data.splits import Splits
from compress.training.config.training import Training
from compress.training.distributed.base import Strategy, process_group
from compress.training.launch.worker import create_strategy
from compress.training.loop.trainer import evaluate
from tests.compress.training.builders import load_data
from tests.compress.training.nets import plain

HERE = Path(__file__).parent
CLASSES = (("num_classes", 3), ("ignore_index", -100))
LABELS = [
    Metric(),
    Metric("loss"),
    Metric("torchmetrics.classification.MulticlassF1Score", CLASSES),
    Metric("torchmetrics.classification.MulticlassAUROC", CLASSES),
    Metric("own_metrics:weighted_by_position", direction=True, folder=HERE),
    Metric("own_metrics:MeanOfBatches", folder=HERE),
]
NUMBERS = [
    *map(Metric, ("mse", "mae", "r2")),
    Metric("torchmetrics.MeanSquaredError"),
    Metric("own_metrics:Composed", folder=HERE),
]
CASES = {
    f"{metric.name} {data}": (metric, data)
    for data, metrics in {
        "ignored": LABELS,  # 37 samples, of which one rank has one, and so one batch, more
        "odd": LABELS,  # 1 sample: the other ranks have none
        "numbers": NUMBERS,
    }.items()
    for metric in metrics
}


def job(metric: Metric, data: Splits) -> SimpleNamespace:
    training = Training(epochs=1)
    return SimpleNamespace(
        data=data,
        metric=metric.with_inferred_loss(data),
        device="cpu",
        reference=None,
        fixed_batch=None,
        training=training,
    )


def values(strategy: Strategy) -> dict[str, float | None]:
    torch.manual_seed(0)
    net = plain()
    return {
        name: evaluate(job(metric, load_data(data, batch_size=4)), net, strategy)
        for name, (metric, data) in CASES.items()
    }


def main(file: Path) -> None:
    with process_group("cpu"):
        ranks = torch.distributed.get_world_size()
        training = Training(epochs=1, batch_size=ranks, parallel={"processes": ranks})
        found = values(create_strategy(training.parallel))
        # Alone in the group, as rank 0 is at a gate: it waits for no other.
        if torch.distributed.get_rank() == 0:
            file.write_text(json.dumps({"together": found, "alone": values(Strategy())}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
