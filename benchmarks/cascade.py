"""Measure the stage `cascade` on the quickstart's net; writes a part of docs/certificate.md.

    python benchmarks/cascade.py [--docs docs/certificate.md]

int8 answers noised digits, and float those of a small margin, so that at most 0.2 % get another
label than by float, with 95 % confidence. Both files and the cascade are timed in turn. A `val` is
drawn from a pool 1,000 times, with replacement, as in benchmarks/certificate.py, and each chooses a
threshold; of the whole pool it is known whether the limit holds.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch.utils.data import TensorDataset

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "digits")]

from benchmarks.certificate import CONFIDENCE, DRAWS, trained  # noqa: E402
from benchmarks.page import write_part  # noqa: E402
from compress import Artifact, Context, QuantizeStatic  # noqa: E402
from compress.core.bounds import score_threshold, share_bound  # noqa: E402
from compress.core.objectives.loss import Loss  # noqa: E402
from compress.core.objectives.task import TASKS  # noqa: E402
from compress.data.splits import Splits  # noqa: E402
from compress.export import Cascade, ExportOnnx  # noqa: E402
from compress.profiling.benchmark import compare_latencies, measured_batches  # noqa: E402

PERCENT, SAMPLES, POOL, NOISE, SECONDS = 0.2, 5_000, 20_000, 0.35, 4
CALIBRATED = {"clean": "clean digits", "noised": "noised digits, as `val` has"}


def noised(x: torch.Tensor, y: torch.Tensor, count: int, seed: int) -> TensorDataset:
    """Return so many of some digits with noise."""
    random = torch.Generator().manual_seed(seed)
    chosen = torch.randint(0, len(x), (count,), generator=random)
    return TensorDataset(
        x[chosen] + NOISE * torch.randn(count, *x.shape[1:], generator=random), y[chosen]
    )


def scores(model: Artifact, x: torch.Tensor) -> torch.Tensor:
    """Return a model's outputs."""
    with model.open() as predict:
        return torch.cat([predict(part)[0] for part in x.split(500)])


def draws(small: torch.Tensor, large: torch.Tensor) -> tuple[np.ndarray, str]:
    """Return what the thresholds of many drawn `val` do on the whole pool, as columns.

    Before it the rows of the `val` whose share of fallbacks is the median.
    """
    first, second = small.topk(2, 1).values.unbind(1)
    margin, changed = (first - second).numpy(), (small.argmax(1) != large.argmax(1)).numpy()
    random, found = np.random.default_rng(0), []
    for _ in range(DRAWS):
        drawn = random.integers(0, len(margin), SAMPLES)
        half, other = drawn[::2], drawn[1::2]
        threshold = score_threshold(margin[half], changed[half], PERCENT / 100, CONFIDENCE)
        assert threshold is not None
        left = changed & (margin > threshold)
        bound = share_bound(int(left[other].sum()), len(other), CONFIDENCE)
        found.append((left.mean(), (margin <= threshold).mean(), 100 * bound <= PERCENT, drawn))
    left, share, confirmed = (np.array([each[i] for each in found]) for i in range(3))
    low, middle, high = (100 * np.quantile(share, q) for q in (0.05, 0.5, 0.95))
    numbers = np.median(left), (100 * left > PERCENT).mean(), confirmed.mean()
    cells = [f"{middle:.3g} % ({low:.3g} to {high:.3g})", *(f"{100 * n:.3g} %" for n in numbers)]
    return found[np.argsort(share)[DRAWS // 2]][3], " | ".join(cells)


def rows(folder: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Yield for each calibration a row of the draws, one of the latencies, and notes."""
    from data import digits

    splits = digits()
    held = [torch.cat([splits[n].tensors[i] for n in ("val", "test")]) for i in (0, 1)]
    pool, (fresh, _) = noised(*held, POOL, 0), noised(*held, POOL, 1).tensors
    before, clean = trained("digits", folder)
    context = Context(
        root=folder / "float",
        data=Splits(splits, batch_size=500),
        loss=Loss(task=TASKS["classification"]),
    )
    large = ExportOnnx().run_checked(before, context)
    like_val = Splits({**splits, "calibration": noised(*splits["train"].tensors, 512, 3)}, 500)
    for name, title in CALIBRATED.items():
        graph = clean
        if name != "clean":
            own = Context(root=folder / f"{name}_graph", data=like_val)
            graph = QuantizeStatic().run_checked(before, own)
        small = ExportOnnx().run_checked(graph, context.with_root(folder / name))
        drawn, several = draws(*(scores(each, pool.tensors[0]) for each in (small, large)))
        made = Context(
            root=folder / f"{name}_cascade",
            data=Splits({"val": TensorDataset(*pool[drawn])}, batch_size=500),
            loss=context.loss,
            artifacts={"float": large},
        )
        model = Cascade(fallback="float", percent=PERCENT).run_checked(small, made)
        truth = scores(large, fresh).argmax(1)
        alone, left = (
            100 * float((scores(each, fresh).argmax(1) != truth).double().mean())
            for each in (small, model)
        )
        facts = model.manifest.facts["cascade"]
        one = f"{100 * facts['fallback_share']:.3g} % | {alone:.3g} % | {left:.3g} %"
        batches = measured_batches(made.data, small.signature, 1, 0, mixed=True)
        models = [partial(each.open_anew, "cpu", 1) for each in (small, model, large)]
        timed = compare_latencies(models, batches, SECONDS, threads=1, mixed=True)
        cells = [f"{each.mean:.3f} / {each.p99:.3f}" for each in timed.latencies]
        for i in (0, 2):
            compared = timed.comparison(1, i)
            low, high = compared.interval
            cells.append(f"{compared.speedup:.2f} ({low:.2f} to {high:.2f})")
        doubt = [each.disturbed for each in timed.latencies if each.disturbed][:1]
        yield (
            f"| {title} | {several} | {one} |",
            f"| {title} | {' | '.join(cells)} |",
            [f"{title}: {d} while it was timed" for d in doubt],
        )


def main() -> None:
    """Make both cascades, draw, time, print the tables and write them into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", type=Path)
    parser.add_argument("--runs", type=Path, help="Folder that keeps the trained models.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = options.runs or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        found = list(rows(folder))
    versions = f"PyTorch {torch.__version__}, ONNX Runtime {onnxruntime.__version__}"
    parts = [
        "ResNet-20, digits; int8 by `quantize_static`, calibrated on digits without or with noise. "
        f"A `val` of {SAMPLES:,} digits with noise is drawn {DRAWS:,} times from a pool of "
        f"{POOL:,}, for at most {PERCENT:g} % other labels with {100 * CONFIDENCE:g} % confidence. "
        "Falls back: median, and 5 % to 95 % of the draws. The file is that of the `val` whose "
        f"share is the median, and fresh are {POOL:,} digits with other noise; Python "
        f"{platform.python_version()}, {versions}.",
        "| calibrated on | falls back | other labels | broken | the other half shows it, too | "
        "file: falls back | int8 alone, fresh | cascade, fresh |\n"
        + "|---" * 8
        + "|\n"
        + "\n".join(draw for draw, _, _ in found),
        "Milliseconds of a call with one row, mean / 99th percentile, one thread, in turn; "
        "last the cascade's mean over another's, and its 95 % interval:",
        "| calibrated on | int8 | cascade | float | over int8 | over float |\n"
        + "|---" * 6
        + "|\n"
        + "\n".join(time for _, time, _ in found),
        *(note for _, _, notes in found for note in notes),
    ]
    print("\n\n".join(parts))
    if options.docs:
        write_part("A cascade", "\n\n".join(parts), options.docs.resolve())


if __name__ == "__main__":
    main()
