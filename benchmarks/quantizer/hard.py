"""PTQ against QAT on digits that are hard to read: accuracy on `test`, the mean over seeds."""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import torch

from compress import QuantizeAwareTraining, QuantizeStatic
from quantizer.sources import HERE, at, onnx, trained

NETS = ("narrow", "mobilenet")


def main() -> None:
    parser = argparse.ArgumentParser("quantization.py hard", description=__doc__)
    parser.add_argument("--small", action="store_true", help="one seed, few epochs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--tuning", type=int, default=4, help="epochs of QAT")
    parser.add_argument("--net", choices=NETS, help="only one of them")
    options = parser.parse_args()
    if options.small:
        options.seeds, options.epochs, options.tuning = 1, 3, 1
    torch.set_num_threads(1)
    sys.path.insert(0, str(HERE))
    for factory in [options.net] if options.net else NETS:
        rows: dict[str, list[float]] = {}
        for seed in range(options.seeds):
            with tempfile.TemporaryDirectory() as folder:
                for name, value in _rows(Path(folder), factory, seed, options):
                    rows.setdefault(name, []).append(value)
                    print(f"  seed {seed} {factory} {name}: {100 * value:.2f}", flush=True)
        print(f"\n{factory:34}{'accuracy':>9}{'seeds':>7}")
        for name, values in rows.items():
            print(f"{name:34}{100 * statistics.mean(values):9.2f}{len(values):7}", flush=True)


def _rows(root: Path, factory: str, seed: int, options: argparse.Namespace):
    model, context = trained(root, factory, "hard", seed, options.epochs)
    yield "float", context.score(model, "test")
    for name, stage in _stages(options.tuning).items():
        graph = stage(model, at(context, name))
        yield name, context.score(onnx(graph, context, name), "test")


def _stages(epochs: int) -> dict:
    training = {"epochs": epochs, "batch_size": 64, "learning_rate": 0.005}
    stages = {}
    for bits in (8, 4):
        ptq, qat = {"weight_bits": bits}, {"weight_bits": bits, **training}
        stages[f"W{bits}A8 PTQ"] = QuantizeStatic(**ptq)
        if bits < 8:
            stages[f"W{bits}A8 PTQ, bias corrected"] = QuantizeStatic(bias_correction=True, **ptq)
            stages[f"W{bits}A8 PTQ, AdaRound"] = QuantizeStatic(rounding="adaround", **ptq)
        stages[f"W{bits}A8 QAT"] = QuantizeAwareTraining(**qat)
    return stages
