"""One float model given to all tools, and a table of what each made of it."""

import argparse
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from compress.common.errors import CompressError
from compress.data.splits import Splits
from compress.export.onnx.session import session_predictor
from compress.profiling.benchmark import compare_latency
from peer_tools.environments import cpu_seconds, run_tool

Score = Callable[[tuple[torch.Tensor, ...], torch.Tensor], float]
"""Outputs and targets of `test` → the figure compared."""


@dataclass(frozen=True)
class Contest:
    """A float model, its data, and how its answers are judged."""

    name: str
    pipeline: str
    """The pipeline file up to its stages."""
    data: Splits
    inputs: tuple[str, ...]
    score: Score
    score_title: str
    small_batch: int
    large_batch: int
    samples: int
    transformer: bool = False

    def table(
        self, title: str, recipe: str, ours: dict[str, str], folder: Path, given: argparse.Namespace
    ) -> str:
        """Return a table in Markdown of our pipelines' files and the peers'.

        Args:
            title: heading of the table.
            recipe: the function of the peers' scripts.
            ours: name of the row → the pipeline's stage before the export.
            folder: where everything is written.
            given: the command line.
        """
        float_file = folder / "float" / "artifacts" / "onnx" / "model.onnx"
        seconds = None if float_file.exists() else self.run_pipeline("", folder / "float")
        rows = [self._row("float", float_file, float_file, seconds)]
        for number, (name, stage) in enumerate(ours.items()):
            out = folder / f"{recipe}-{number}"
            seconds = self.run_pipeline(stage, out)
            file = out / "artifacts" / "onnx" / "model.onnx"
            rows.append(self._row(f"**compress**, {name}", file, float_file, seconds))
        samples = self.calibration_file(folder / "samples.npz")
        settings = {"recipe": recipe, "model": float_file, "samples": samples}
        for peer in given.peers:
            if recipe not in RECIPES.get(peer, ()):
                continue
            file = folder / f"{recipe}-{peer}.onnx"
            job = {**settings, "output": file, "transformer": self.transformer}
            rows.append(self._row(peer, file, float_file, run_tool(peer, given.environments, job)))
        small, large = (f"time, {n} at once" for n in (self.small_batch, self.large_batch))
        head = f"| | {self.score_title} | size | {small} | {large} | CPU s |\n{'|---' * 6}|"
        return "\n".join([f"## {title}\n", head, *rows])

    def run_pipeline(self, stage: str, out: Path) -> float | str:
        """Run a pipeline by `compress run`; return its CPU seconds, or why it failed."""
        out.mkdir(parents=True)
        file = out.with_suffix(".yaml")
        export = "  - {name: onnx, stage: export_onnx, gates: [{gate: min_speedup, ratio: 0.01}]}\n"
        file.write_text(f"{self.pipeline}stages:\n{stage}{export}")
        command = [sys.executable, "-m", "compress.cli", "run", file, "--out", out]
        return cpu_seconds(command, Path(__file__).parents[2])

    def calibration_file(self, file: Path) -> Path:
        """Write the samples that the stages calibrate on, for the peers; return the file."""
        batches = list(self.data.calibration(self.samples, seed=0))
        columns = zip(*(batch.inputs for batch in batches), strict=True)
        arrays = {n: torch.cat(c).numpy() for n, c in zip(self.inputs, columns, strict=True)}
        np.savez(file, **arrays)
        return file

    def _row(self, name: str, file: Path, float_file: Path, seconds: float | str | None) -> str:
        if isinstance(seconds, str):
            return f"| {name} | failed: {_short(seconds)} | | | | |"
        try:
            predict, baseline = (session_predictor(each, 1) for each in (file, float_file))
            *inputs, targets = self.test_tensors()
            score = self.score(predict(*inputs), targets)
            times = [
                _time(baseline, predict, [tuple(x[:size] for x in inputs)])
                for size in (self.small_batch, self.large_batch)
            ]
        except (CompressError, RuntimeError) as error:
            return f"| {name} | does not run: {_short(str(error))} | | | | |"
        share = _bytes(file) / _bytes(float_file)
        cpu = "" if seconds is None else f"{seconds:.1f}"
        return f"| {name} | {score} | {share:.3f} | {times[0]} | {times[1]} | {cpu} |"

    def test_tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all inputs of `test`, and its targets."""
        return self.data.datasets["test"].tensors


RECIPES = {
    "onnxruntime": ("static", "dynamic", "weights"),
    "nncf": ("static", "weights"),
    "neural_compressor": ("static", "dynamic", "weights"),
    "olive": ("static", "dynamic", "weights"),
}
"""What each peer's script can do."""


def _time(baseline, predict, batches) -> str:
    openers = (partial(nullcontext, one) for one in (baseline, predict))
    found = compare_latency(*openers, batches, threads=1)
    if found.share is None:
        return "not measurable"
    return f"{found.share:.2f} ({1 / found.interval.high:.2f} to {1 / found.interval.low:.2f})"


def _short(message: str) -> str:
    """Return the beginning of a message for a table's cell, without folders of this machine."""
    words = message.splitlines()[0].replace("|", "/").split()
    return " ".join(Path(word).name if word.startswith("/") else word for word in words)[:120]


def _bytes(file: Path) -> int:
    # Some tools write weights into a file beside the model.
    return sum(part.stat().st_size for part in file.parent.glob(f"{file.name}*"))


def percent(share: float) -> str:
    return f"{100 * share:.2f} %" if math.isfinite(share) else "none"
