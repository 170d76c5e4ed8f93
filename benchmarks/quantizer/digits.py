"""Static int8 of two networks on digits: accuracy, size and latency compared with other tools.

Accuracy is that on `test`, the mean over seeds; size and time are ratios to the float ONNX file in
ONNX Runtime at batch 32, measured alternately.
"""

import argparse
import math
import statistics
import sys
import tempfile
from pathlib import Path

import torch

from compress import QuantizeStatic
from compress.profiling.benchmark import compare_latency
from export.onnx.session import session_predictor
from quantizer.peers import peers
from quantizer.sources import HERE, at, megabytes, onnx, trained

SAMPLES = 512


def main() -> None:
    parser = argparse.ArgumentParser("quantization.py digits", description=__doc__)
    parser.add_argument("--small", action="store_true", help="one seed, few epochs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=12)
    options = parser.parse_args()
    if options.small:
        options.seeds, options.epochs = 1, 4
    torch.set_num_threads(1)
    sys.path.insert(0, str(HERE))
    for factory in ("resnet20", "mobilenet"):
        rows: dict[str, list[tuple[float, float, float]]] = {}
        for seed in range(options.seeds):
            with tempfile.TemporaryDirectory() as folder:
                for name, row in _rows(Path(folder), factory, seed, options.epochs):
                    rows.setdefault(name, []).append(row)
        _table(factory, rows)


def _rows(root: Path, factory: str, seed: int, epochs: int):
    model, context = trained(root, factory, "easy", seed, epochs)
    float_onnx = onnx(model, context, "float")
    graph = QuantizeStatic(calibration_samples=SAMPLES)(model, at(context, "int8"))
    ours = onnx(graph, context, "int8")
    sample = [
        {"image": batch.inputs[0].numpy()} for batch in context.data.calibration(SAMPLES, seed)
    ]
    files = {"float": float_onnx.payload_path, "compress": ours.payload_path}
    files |= dict(peers(float_onnx.payload_path, sample, root))
    x, y = context.data.datasets["test"].tensors
    baseline = session_predictor(float_onnx.payload_path, 1)
    for name, file in files.items():
        predict = session_predictor(file, 1)
        accuracy = float((predict(x)[0].argmax(1) == y).float().mean())
        ratio = compare_latency(baseline, predict, [(x[:32],)]).share or math.nan
        # Some tools write weights into a file beside the model.
        size = sum(part.stat().st_size for part in file.parent.glob(f"{file.name}*"))
        yield name, (accuracy, size / 1e6 / megabytes(float_onnx), ratio)


def _table(factory: str, rows: dict[str, list[tuple[float, float, float]]]) -> None:
    print(f"\n{factory:34}{'accuracy':>9}{'size':>7}{'time':>7}{'seeds':>7}")
    for name, measured in rows.items():
        accuracy, size, time = map(statistics.mean, zip(*measured, strict=True))
        print(f"{name:34}{100 * accuracy:9.2f}{size:7.3f}{time:7.2f}{len(measured):7}", flush=True)
