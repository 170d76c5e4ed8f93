"""Bytes of gradients on the wire, and what is learnt in equal epochs, for each communication."""

import sys
import tempfile
from pathlib import Path

from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.data.splits import DataReference
from compress.training.config.training import Training
from compress.training.fit import fit
from compress.training.objectives.objective import TargetLoss

DIGITS = Path(__file__).parents[2] / "examples" / "digits"
SETTINGS = {
    "none": {},
    "fp16": {"communication": "fp16"},
    "bf16": {"communication": "bf16"},
    "int8": {"communication": "int8"},
    "topk 10 %": {"communication": "topk", "topk_fraction": 0.1},
    "topk 1 %": {"communication": "topk", "topk_fraction": 0.01},
    "powersgd rank 4": {"communication": "powersgd", "powersgd_rank": 4},
    "powersgd rank 1": {"communication": "powersgd", "powersgd_rank": 1},
}


def main(epochs: int = 6, seeds: int = 1) -> None:
    print(f"communication: digits ResNet-20, 2 processes, {epochs} epochs, last epoch kept")
    print(f"{'':18s}{'bytes a step':>14s}{'of dense':>10s}{'val accuracy':>14s}")
    dense = None
    for name, parallel in SETTINGS.items():
        with tempfile.TemporaryDirectory() as folder:
            last = train(Path(folder), epochs, parallel)
        dense = dense or last.sent_bytes
        print(f"{name:18s}{last.sent_bytes:14d}{last.sent_bytes / dense:10.3f}", end="")
        print(f"{last.metric:14.4f}", flush=True)


def train(root: Path, epochs: int, parallel: dict):
    signature = Signature(inputs=(TensorSpec(name="image", shape=("batch", 1, 8, 8)),))
    recipe = Recipe(factory="models:resnet20")
    source = import_checkpoint(root / "source", recipe, signature, checkpoint=None, folder=DIGITS)
    data = DataReference("data:digits", {}, DIGITS, 128).load()
    training = Training(epochs=epochs, keep="last", parallel={"processes": 2, **parallel})
    where = Context(root=root / "train", data=data)
    return fit(source, training, TargetLoss(), where, "train").history[-1]


if __name__ == "__main__":
    sys.exit("run benchmarks/training.py communication")
