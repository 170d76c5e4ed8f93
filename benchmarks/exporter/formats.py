"""Measure each format of a model: latency relative to eager, cost of the export and of loading.

- `batch 1`, `batch 8`: time of a call as a ratio to the eager module's, all measured call by call
  in turn in one process, one thread; below 1 is faster.
- `export s`, `peak`: seconds of the export with its comparison, in its own process, and its peak
  memory above that of the process after all imports, as a multiple of the weights' bytes; of a
  compiler that it starts, which is another process, the peak counts where that is larger.
- `net`: `peak` minus that of exporting one small layer in the same process.
- `run`: peak memory of loading the eager model and running a batch of 8, which an export does too:
  activations count, whatever the weights.
- `load s`: from an interpreter with PyTorch imported to the first answer.
- `size`: of the file, as a multiple of the weights' bytes.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import ExitStack, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from compress import Context
from compress.artifacts.artifact import Artifact
from compress.artifacts.eager_model import EagerModel
from compress.common.errors import CompressError
from compress.common.forward import torch_predictor
from compress.export import ExportAot, ExportOnnx, ExportTorchScript
from compress.profiling.benchmark import compare_latencies
from compress.profiling.rss import memory_kib, reset_peak
from exporter.models import MODELS, build_model, import_dependencies

STAGES = {
    "ONNX": ExportOnnx,
    "TorchScript": ExportTorchScript,
    "AOTInductor": ExportAot,
}
EAGER, COMPILED = "eager", "torch.compile"
BATCHES = (1, 8)
TIMEOUT = 1800


def main() -> None:
    parser = argparse.ArgumentParser("export.py formats", description=__doc__)
    parser.add_argument("--small", action="store_true", help="two models at 64², one short round")
    parser.add_argument("--models", nargs="+", choices=MODELS)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if options.one:
        what, name, path = options.one
        parts = {"load": load, "run": run, "export": lambda path: export(name, path)}
        print(json.dumps(parts[what](Path(path))))
        return
    for name in options.models or (["mobilenet_v2", "gpt2"] if options.small else MODELS):
        with tempfile.TemporaryDirectory() as folder:
            _table(name, Path(folder) / name, small=options.small)


def _table(name: str, root: Path, *, small: bool) -> None:
    model = build_model(name, root, small=small)
    weights = model.payload_bytes
    run = apart("run", EAGER, root)["peak"] / weights
    print(f"\n{name}, {weights / 1e6:.1f} MB of weights; run {run:.2f}")
    columns = ("batch 1", "batch 8", "export s", "peak", "net", "load s", "size")
    print(f"{'':16}{''.join(f'{column:>10}' for column in columns)}")
    rows: dict[str, dict] = {EAGER: apart("load", EAGER, model.path), COMPILED: {}}
    for kind in STAGES:
        result = apart("export", kind, root)
        if "refused" in result:
            print(f"{kind:16}refused: {result['refused']}")
        else:
            rows[kind] = result | apart("load", kind, root / kind)
    for kind, ratios in _ratios(model, root, list(rows), small=small).items():
        row = rows[kind]
        size = 1.0 if kind == EAGER else _bytes(root / kind) / weights if kind in STAGES else None
        peaks = (row[k] / weights if k in row else None for k in ("peak", "net"))
        values = (*ratios, row.get("export"), *peaks, row.get("load"), size)
        cells = ("–" if value is None else f"{value:.2f}" for value in values)
        print(f"{kind:16}{''.join(f'{cell:>10}' for cell in cells)}", flush=True)


def _bytes(path: Path) -> int:
    return Artifact.from_directory(path).payload_bytes


def apart(what: str, kind: str, path: Path) -> dict:
    """Return the measurements of `export`, `run` or `load` in a fresh process."""
    command = [sys.executable, sys.argv[0], "formats", "--one", what, kind, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    if done.returncode:
        sys.exit(f"{what} {kind}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def export(kind: str, root: Path) -> dict:
    """Export the model in a folder; return seconds, and peak memory in bytes."""
    model, stage = EagerModel.from_directory(root / "source"), STAGES[kind]()
    import_dependencies(root.name)
    fixed = _warm_up(kind, root / "warm")
    before = memory_kib("VmRSS")
    reset_peak()
    began = time.perf_counter()
    try:
        stage(model, Context(root=root / kind))
    except CompressError as error:
        return {"refused": str(error)}
    seconds = time.perf_counter() - began
    compiler = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    result = {"export": seconds, "peak": 1024 * max(memory_kib("VmHWM") - before, compiler)}
    return result if fixed is None else result | {"net": result["peak"] - fixed}


def run(root: Path) -> dict:
    """Load the eager model and run it once; return its peak memory in bytes."""
    model = EagerModel.from_directory(root / "source")
    import_dependencies(root.name)
    before = memory_kib("VmRSS")
    reset_peak()
    with model.open() as predict:
        predict(*model.signature.example(batch=max(BATCHES)))
    return {"peak": 1024 * (memory_kib("VmHWM") - before)}


def _warm_up(kind: str, folder: Path) -> int | None:
    """Import what a first export imports; return the peak memory of a second one, in bytes."""
    if kind == "AOTInductor":
        import_module("torch._inductor.compile_fx")
        return None
    small = torch.nn.Linear(4, 2)
    tiny = EagerModel.from_module(
        small,
        factory="torch.nn:Linear",
        arguments={"in_features": 4, "out_features": 2},
        example_inputs=(torch.zeros(2, 4),),
        root=folder / "source",
    )
    STAGES[kind]()(tiny, Context(root=folder / "made"))
    before = memory_kib("VmRSS")
    reset_peak()
    STAGES[kind]()(tiny, Context(root=folder / "again"))
    return 1024 * (memory_kib("VmHWM") - before)


def load(path: Path) -> dict:
    """Return the seconds from opening the file to a first output."""
    began = time.perf_counter()
    artifact = Artifact.from_directory(path)
    with artifact.open() as predict:
        predict(*artifact.signature.example(batch=1))
    return {"load": time.perf_counter() - began}


def _ratios(model: EagerModel, root: Path, kinds: list[str], *, small: bool) -> dict:
    """Return for each kind the times of its calls over those of eager ones, by batch size."""
    with ExitStack() as stack:
        openers = []
        for kind in kinds:
            if kind == COMPILED:
                compiled = torch.compile(model.load(), dynamic=False)
                opened = torch_predictor(compiled, "cpu", 1)
            else:
                opened = (model if kind == EAGER else Artifact.from_directory(root / kind)).open()
            openers.append(partial(nullcontext, stack.enter_context(opened)))
        by_batch = []
        for batch in BATCHES:
            inputs = model.signature.example(batch=batch)
            measured = compare_latencies(
                openers, [inputs], 0.2 if small else 3.0, threads=1
            ).latencies
            medians = [math.nan if found.doubt_of("p50") else found.p50 for found in measured]
            by_batch.append([median / medians[0] for median in medians])
    return dict(zip(kinds, zip(*by_batch, strict=True), strict=True))
