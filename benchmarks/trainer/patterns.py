"""How far each pattern of docs/training-patterns.md is from one process after some steps.

The page is the list: a row's settings are trained if its last cell is empty, and the figure is
written there. If all figures are there, all are measured anew.
"""

import re
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import yaml

from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.checkpoint.distributed_checkpoint import read_distributed
from compress.common import tensor_difference
from compress.common.signature import Signature, TensorSpec
from compress.core.metrics import Metric
from compress.data.loader_config import Loading
from compress.data.splits import DataReference
from compress.training.checkpoint import checkpoints
from compress.training.config.training import Training
from compress.training.distributed.base import Strategy
from compress.training.launch.worker import create_strategy
from compress.training.loop.train_state import Job
from compress.training.loop.trainer import train
from compress.training.objectives.objective import TargetLoss
from trainer.ranks import on_ranks

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "training-patterns.md"
WIDTH, DEPTH, LENGTH, BATCH, EPOCHS, STEPS = 32, 4, 8, 16, 4, 16
ROW = re.compile(r"^\| (.+?) \| (.+?) \| (.+?) \| (\S.*?|) ?\|$", re.MULTILINE)
FIGURE = re.compile(r"(\d+(\.\d+)?(e[-+]\d+)?)?")
USUAL = {"epochs": EPOCHS, "batch_size": BATCH, "keep": "last", "learning_rate": 0.05}
SAME_RESULT = (
    *("parallel", "accumulate", "activation_checkpointing", "compile", "loader"),
    *("checkpoints", "profile"),
)
"""Settings that change no result, which the training in one process lacks."""


@dataclass(frozen=True)
class Pattern:
    """A row of the page."""

    name: str
    setting: str
    figure: str

    @property
    def is_measured(self) -> bool:
        return FIGURE.fullmatch(self.figure) is not None

    @property
    def settings(self) -> dict:
        """Those of `train`, on two processes if it says nothing else; `loader` and `noise`."""
        settings = yaml.safe_load(self.setting)
        return {**settings, "parallel": {"processes": 2, **settings.get("parallel", {})}}

    @property
    def reference(self) -> dict:
        """The settings without those that change no result, for one process."""
        return {k: v for k, v in self.settings.items() if k not in SAME_RESULT}

    @property
    def source(self) -> str:
        return "normalized" if "sync_batchnorm" in self.setting else "transformer"


def main() -> None:
    measured = [pattern for pattern in read_page() if pattern.is_measured]
    patterns = [pattern for pattern in measured if not pattern.figure] or measured
    print(f"patterns: largest difference of any weight from one process, {STEPS} steps, sgd, fp32")
    groups = defaultdict(list)
    for pattern in patterns:
        parallel = training_of(pattern.settings).parallel
        # DeepSpeed and the compiler leave traces in a process, and come last: they compile C++.
        apart = (parallel.strategy == "deepspeed", "compile" in pattern.settings)
        groups[*apart, parallel.ranks].append(pattern)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        start = import_sources(root)
        references = {key_of_alone(p): (p.source, p.reference) for p in patterns}
        on_ranks(1, train_all, root, references)
        for (*_, ranks), group in sorted(groups.items()):
            on_ranks(ranks, train_all, root, {key(p.name): (p.source, p.settings) for p in group})
            for pattern in group:
                compare(pattern, root)
        weights = next(root / name for name in references if name.startswith("alone transformer"))
        moved = largest(start, read_weights(weights))
        print(f"{'(moved by training itself)':45s} {moved:.1e}")


def compare(pattern: Pattern, root: Path) -> None:
    """Print a row's figure, and write it into the page."""
    alone = read_weights(root / key_of_alone(pattern))
    figure = largest(alone, read_weights(root / key(pattern.name)))
    text = f"{figure:.1e}" if figure else "0"
    print(f"{pattern.name:45s} {text}", flush=True)
    write_figure(pattern, text)


def read_page() -> list[Pattern]:
    rows = ROW.findall(PAGE.read_text())
    return [
        Pattern(name, setting.strip("`"), figure)
        for name, setting, _, figure in rows
        if not name.startswith(("Pattern", "--"))
    ]


def write_figure(pattern: Pattern, figure: str) -> None:
    text = PAGE.read_text()
    (row,) = (m for m in ROW.finditer(text) if m[1] == pattern.name)
    head = text[: row.start()] + f"| {row[1]} | {row[2]} | {row[3]} | {figure} |"
    PAGE.write_text(head + text[row.end() :])


def key_of_alone(pattern: Pattern) -> str:
    return key(f"alone {pattern.source} {pattern.reference}")


def key(text: str) -> str:
    """Return a name for a folder."""
    return re.sub(r"[^-.\w]+", " ", text)


def training_of(settings: dict) -> Training:
    own = {k: v for k, v in settings.items() if k not in ("loader", "noise")}
    return Training(**{**USUAL, **own})


def import_sources(root: Path) -> dict:
    """Write the nets, and return the initial weights of the first."""
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", LENGTH, WIDTH)),))
    recipes = {
        "transformer": Recipe(
            factory="nets:Transformer", arguments={"width": WIDTH, "depth": DEPTH, "heads": 4}
        ),
        "normalized": Recipe(
            factory="nets:Normalized", arguments={"length": LENGTH, "width": WIDTH}
        ),
    }
    nets = [
        import_checkpoint(root / name, recipe, signature, checkpoint=None, folder=HERE)
        for name, recipe in recipes.items()
    ]
    return nets[0].load().state_dict()


def train_all(root: Path, trainings: dict[str, tuple[str, dict]]) -> None:
    """Train with each of the settings, in every process of a group."""
    for name, (source, settings) in trainings.items():
        training = training_of(settings)
        (folder := root / name).mkdir(exist_ok=True)
        arguments = {"train": BATCH * STEPS // EPOCHS, "length": LENGTH, "width": WIDTH}
        arguments["noise"] = settings.get("noise", 0.0)
        loading = Loading(**settings.get("loader", {}))
        job = Job(
            start=root / source,
            training=training,
            objective=TargetLoss(),
            data=DataReference("nets:sequences", arguments, HERE, BATCH, loading).load(),
            metric=Metric("loss"),
            reference=None,
            device="cpu",
            threads=1,
            seed=0,
            folder=folder,
            accept_start=False,
        )
        in_process = training.parallel.in_process
        strategy = Strategy() if in_process else create_strategy(training.parallel)
        train(job, strategy, lambda record: None)


def read_weights(folder: Path) -> dict:
    """Return the weights of the last checkpoint, with their average where there is one."""
    saved = read_distributed(checkpoints(folder)[-1])
    weights = {**saved["model"], **saved.get("average", {})}
    return {name: stored.read() for name, stored in weights.items()}


def largest(one: dict, other: dict) -> float:
    return tensor_difference.largest(
        tensor_difference.largest_difference(one[name], other[name]) for name in one
    )
