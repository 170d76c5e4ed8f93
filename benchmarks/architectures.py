"""Writes docs/architectures.md: what stages make of 63 architectures of transformers.

    python benchmarks/architectures.py

Each way is taken in a process of its own, with a limit of the processor's time. Results are kept in
`runs/architectures`, so that a run that was stopped continues; `--again` deletes them. With
names of architectures these alone are tried, and nothing is written.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from importlib import import_module
from importlib.metadata import version
from multiprocessing.pool import ThreadPool
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import tiny_transformers as zoo  # noqa: E402
from benchmarks.apart import within  # noqa: E402
from benchmarks.exporter.coverage import import_once  # noqa: E402
from compress.artifacts.artifact import Artifact  # noqa: E402
from compress.artifacts.eager_model import EagerModel  # noqa: E402
from compress.artifacts.importing import import_checkpoint  # noqa: E402
from compress.artifacts.recipe import Recipe  # noqa: E402
from compress.common.errors import CompressError  # noqa: E402
from compress.common.signature import AxisBounds, Signature  # noqa: E402
from compress.core.context import Context  # noqa: E402
from compress.data.splits import Splits  # noqa: E402
from compress.export.onnx.stage import ExportOnnx  # noqa: E402
from compress.pruning.prune_channels import PruneChannels  # noqa: E402
from compress.quantization.stages.static import QuantizeStatic  # noqa: E402
from tests.export.zoo.export_cell import OPENING, digest, outputs_of  # noqa: E402

PAGE = ROOT / "docs" / "architectures.md"
SECONDS = 300
"""What a way has of the processor's time."""
PROCESSES = int(os.environ.get("PROCESSES", "2"))
"""Ways taken at once."""
REASON = 400
"""Characters shown of a refusal."""
ACROSS_NORMS = "across_norms: true"
LEAST_SIZE = re.compile(r"model\.axes: \{(\w+): \{min: (\d+)\}\}")
"""Remedies that refusals name."""
IMPORTED = (
    *("compress.pruning.channel_pruner", "compress.quantization.ptq.calibrate"),
    *("compress.quantization.numeric_debug.compare", "compress.export.onnx.lowering"),
)
"""What the stages import when they run, imported once before processes are forked."""

HEAD = """Architectures of transformers with random weights, as `Class(Config(…))` makes them: two
layers or stages, a width of 16 to 64. Three stages are tried on each, with nothing set but what
stands here. This page is written by `python benchmarks/architectures.py`; {versions}.

- **prune_channels**: `ratio: 0.5`; the share of multiply-accumulates that is removed.
- **quantize_static**: int8 after calibration on 64 samples; the operators in int8.
- **export_onnx**: of the float model; the largest error relative to the largest output, on inputs
  that the stage did not compare.

A stage that refuses and names a setting as the remedy is tried with that setting, which then stands
in the table.

Each stage made its own checks: the pruned model is compared with its masked original, and the ONNX
file with its source at several sizes of the batch and of the text, on samples, and on constant,
tiny and huge inputs. Every artifact was opened again in a fresh process and gave the same outputs.
Batch and length of a text are named axes. **no**: there is no artifact; the reason is what the
stage says.

"""
LISTS = {
    "Common architectures": (
        zoo.COMMON,
        "Text encoders, decoders with a classification head, vision and speech models.",
    ),
    "40 more": (
        zoo.MORE,
        "Other kinds, chosen before any was tried: detection, segmentation, depth, "
        "super-resolution, encoders with other attention or none, encoder-decoders, more decoders, "
        "vision and speech models.",
    ),
}


def prune(source: EagerModel, context: Context, **settings: bool) -> tuple[str, Artifact]:
    """Return the share of multiply-accumulates that pruning removes, and the artifact."""
    pruned = PruneChannels(ratio=0.5, **settings)(source, context)
    return f"-{1 - pruned.macs() / source.macs():.0%}", pruned


def quantize(source: EagerModel, context: Context) -> tuple[str, Artifact]:
    """Return the number of int8 operators by kind, and the artifact."""
    int8 = QuantizeStatic(calibration_samples=64)(source, context)
    counts = int8.manifest.facts["quantized_operators"]
    return ", ".join(f"{count} {kind}" for kind, count in counts.items()), int8


def export(source: EagerModel, context: Context) -> tuple[str, Artifact]:
    """Return the largest relative error on inputs that the export did not compare; the artifact."""
    onnx = ExportOnnx()(source, context)
    pairs = zip(outputs_of(source), outputs_of(onnx), strict=True)
    errors = [float((b - a).abs().max() / a.abs().max().clamp_min(1e-12)) for a, b in pairs]
    return f"{max(errors):.0e}", onnx


WAYS = {"prune_channels": prune, "quantize_static": quantize, "export_onnx": export}


def attempt(name: str, way: str, folder: Path) -> dict:
    """Take an architecture one way; the answer is what the page shows, or the stage's refusal.

    Where a refusal names a setting as the remedy, the way is taken once more with that.
    """
    signature = zoo.signature(name)
    row = _attempt(name, way, folder / "first", signature, {})
    if found := LEAST_SIZE.search(row["refusal"]):
        axis, least = found.groups()
        signature = signature.model_copy(update={"axes": {axis: AxisBounds(min=int(least))}})
        again = _attempt(name, way, folder / "again", signature, {})
    elif ACROSS_NORMS in row["refusal"]:
        found = [ACROSS_NORMS]
        again = _attempt(name, way, folder / "again", signature, {"across_norms": True})
    else:
        return row
    if not again["refusal"]:
        again["result"] += f" with `{found[0]}`"
    return again


def _attempt(name: str, way: str, folder: Path, signature: Signature, settings: dict) -> dict:
    recipe = Recipe(factory=f"{zoo.__name__}:build", arguments={"name": name})
    data = Splits(zoo.splits(name), input_names=tuple(spec.name for spec in signature.inputs))
    torch.manual_seed(0)
    try:
        source = import_checkpoint(
            folder / "source", recipe, signature, checkpoint=None, folder=None
        )
        context = Context(root=folder / way, data=data)
        result, artifact = WAYS[way](source, context, **settings)
    except CompressError as error:
        return {"refusal": " ".join(str(error).split())}
    digests = {str(artifact.path): digest(outputs_of(artifact))}
    return {"refusal": "", "result": result, "digests": digests}


def cell(name: str, way: str, folder: Path) -> dict:
    """Take a way in a process of its own, or return what is known of it."""
    file = folder / f"{name}-{way}.json"
    if file.exists():
        return json.loads(file.read_text())
    shutil.rmtree(file.with_suffix(""), ignore_errors=True)
    began = time.monotonic()
    row = within(SECONDS, attempt, name, way, file.with_suffix(""))
    if not isinstance(row, dict):
        row = {"refusal": f"not refused, but failed: {row or f'no answer in {SECONDS} s'}"}
    print(f"{name:14} {way:16} {time.monotonic() - began:4.0f} s ", end="")
    print(row["refusal"] or row["result"], flush=True)
    file.write_text(json.dumps(row))
    return row


def open_again(rows: list[dict]) -> None:
    """Mark, in place, what answers otherwise in a fresh process."""
    digests = {path: value for row in rows for path, value in row.get("digests", {}).items()}
    code = OPENING.format(folder=str(ROOT), paths=[*digests])
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    again = dict(zip(digests, done.stdout.splitlines(), strict=False))
    print(f"opened {len(again)} of {len(digests)} artifacts in a fresh process")
    for row in rows:
        if any(again.get(path) != value for path, value in row.get("digests", {}).items()):
            row["refusal"] = "it answers otherwise in a fresh process"


def section(title: str, about: str, classes: dict[str, str], rows: dict[tuple, dict]) -> str:
    """Return a list of architectures as a table, with the number of ways that pass."""
    passed = sum(not rows[name, way]["refusal"] for name in classes for way in WAYS)
    text = f"## {title}\n\n{about} **{passed} of {len(classes) * len(WAYS)} ways pass.**\n\n"
    text += f"| class | {' | '.join(WAYS)} | reason |\n|{' --- |' * (len(WAYS) + 2)}\n"
    for name, model in classes.items():
        cells, reasons = [], []
        for way in WAYS:
            refusal = rows[name, way]["refusal"]
            cells.append("**no**" if refusal else rows[name, way]["result"])
            if refusal:
                short = refusal if len(refusal) <= REASON else f"{refusal[: REASON - 1]}…"
                reasons.append(f"{way}: {short}".replace("|", "/"))
        text += f"| {model} | {' | '.join(cells)} | {'; '.join(reasons)} |\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures; all by default")
    parser.add_argument("--ways", nargs="*", default=[*WAYS], choices=WAYS, help="ways tried")
    parser.add_argument("--again", action="store_true", help="delete earlier results")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "architectures")
    options = parser.parse_args()
    names = options.names or [*zoo.CLASSES]
    if options.again:
        for file in options.folder.glob("*.json"):
            if (
                file.stem.rpartition("-")[0] in names
                and file.stem.rpartition("-")[2] in options.ways
            ):
                file.unlink()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    import_once()
    for module in IMPORTED:
        import_module(module)
    wanted = [(name, way) for way in options.ways for name in names]
    with ThreadPool(PROCESSES) as pool:
        found = pool.map(lambda key: cell(*key, options.folder), wanted, chunksize=1)
    open_again(found)
    rows = dict(zip(wanted, found, strict=True))
    if len(wanted) < len(zoo.CLASSES) * len(WAYS):
        return
    versions = ", ".join(
        f"{package} {version(package)}"
        for package in ("torch", "transformers", "onnx", "onnxruntime")
    )
    text = "# Architectures tried\n\n"
    text += HEAD.format(versions=f"Python {platform.python_version()}, {versions}")
    parts = [section(title, about, classes, rows) for title, (classes, about) in LISTS.items()]
    PAGE.write_text(text + "\n".join(parts))
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
