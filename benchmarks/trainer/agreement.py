"""How far each strategy's weights are from those of one process after 20 steps."""

import tempfile
from pathlib import Path

import torch

from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common import tensor_difference
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.data.splits import Splits
from compress.training.config.training import Training
from compress.training.fit import fit
from compress.training.objectives.objective import TargetLoss

HERE = Path(__file__).parent
WIDTH, DEPTH, LENGTH, BATCH, STEPS = 32, 4, 8, 16, 20
FSDP = {"strategy": "fsdp", "wrap": ["Block"]}
SETTINGS = {
    "accumulation of 4 parts": {"accumulate": 4},
    "activation checkpointing": {"activation_checkpointing": "full"},
    "ddp, 2 processes": {"parallel": {"processes": 2}},
    "ddp, 4 processes": {"parallel": {"processes": 4}},
    "fsdp full_shard, 2": {"parallel": {"processes": 2, **FSDP}},
    "fsdp full_shard, 4": {"parallel": {"processes": 4, **FSDP}},
    "fsdp hybrid_shard, 4": {"parallel": {"processes": 4, **FSDP, "sharding": "hybrid_shard"}},
    "zero1, 2": {"parallel": {"processes": 2, "strategy": "zero1"}},
    "zero2, 2": {"parallel": {"processes": 2, "strategy": "zero2", "wrap": ["Block"]}},
    "zero3, 2": {"parallel": {"processes": 2, "strategy": "zero3", "wrap": ["Block"]}},
    "tensor 2": {"parallel": {"processes": 2, "tensor": 2}},
    "tensor 2 x ddp, 4": {"parallel": {"processes": 4, "tensor": 2}},
    "tensor 2 x fsdp, 4": {"parallel": {"processes": 4, "tensor": 2, **FSDP}},
    "pipeline 2, gpipe": {"parallel": {"processes": 2, "pipeline": {"schedule": "gpipe"}}},
    "pipeline 2, 1f1b": {"parallel": {"processes": 2, "pipeline": {}}},
    "pipeline 2, interleaved_1f1b": {
        "parallel": {"processes": 2, "pipeline": {"schedule": "interleaved_1f1b"}}
    },
    "pipeline 2 x fsdp, 4": {"parallel": {"processes": 4, "pipeline": {}, **FSDP}},
    "tensor 2 x pipeline 2, 4": {"parallel": {"processes": 4, "tensor": 2, "pipeline": {}}},
}


def main() -> None:
    print(f"agreement: largest difference of any weight from one process after {STEPS} steps, fp32")
    print(f"{'':30s}{'sgd':>12s}{'adamw':>12s}")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", LENGTH, WIDTH)),))
        recipe = Recipe(
            factory="nets:Transformer", arguments={"width": WIDTH, "depth": DEPTH, "heads": 4}
        )
        source = import_checkpoint(root / "source", recipe, signature, checkpoint=None, folder=HERE)
        alone = {o: weights(source, root / f"alone-{o}", o, {}) for o in ("sgd", "adamw")}
        start = source.load().state_dict()
        for name, settings in SETTINGS.items():
            found = [
                largest(alone[o], weights(source, root / f"{name}-{o}", o, settings)) for o in alone
            ]
            print(f"{name:30s}{found[0]:12.1e}{found[1]:12.1e}", flush=True)
        moved = [largest(start, weight) for weight in alone.values()]
        print(f"{'(moved by training itself)':30s}{moved[0]:12.1e}{moved[1]:12.1e}")


def weights(source, root: Path, optimizer: str, settings: dict) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH * STEPS, LENGTH, WIDTH, generator=generator)
    y = torch.randint(10, (BATCH * STEPS,), generator=generator)
    data = Splits({"train": torch.utils.data.TensorDataset(x, y)})
    rate = {"sgd": 0.05, "adamw": 1e-3}[optimizer]
    training = Training(
        epochs=1, batch_size=BATCH, keep="last", optimizer=optimizer, learning_rate=rate, **settings
    )
    result = fit(source, training, TargetLoss(), Context(root=root, data=data), "train")
    return result.module.state_dict()


def largest(one, other) -> float:
    return tensor_difference.largest(
        tensor_difference.largest_difference(one[n], other[n]) for n in one
    )
