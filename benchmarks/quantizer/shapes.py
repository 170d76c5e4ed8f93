"""Latency of int8 at 224² and batch 1 over ONNX Runtime's float32, measured in turn, one thread."""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from compress import Context, QuantizeStatic, Splits
from compress.core.errors import CompressError
from export import ExportAot, ExportTorchScript
from quantizer.sources import HERE, at, image_model, megabytes, onnx


def main() -> None:
    parser = argparse.ArgumentParser("quantization.py shapes", description=__doc__)
    parser.add_argument("--small", action="store_true", help="ResNet-18's shape at 64²")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.path.insert(0, str(HERE))
    side = 64 if options.small else 224
    for factory in ("resnet18",) if options.small else ("resnet18", "resnet50"):
        print(f"\n{factory} at {side}²{'':18}{'size':>7}{'time':>7}")
        with tempfile.TemporaryDirectory() as folder:
            _rows(Path(folder), factory, side)


def _rows(root: Path, factory: str, side: int) -> None:
    model = image_model(root, factory, (3, side, side))
    images = torch.randn(32, 3, side, side, generator=torch.Generator().manual_seed(0))
    samples = TensorDataset(images, torch.zeros(len(images), dtype=torch.int64))
    data = Splits({"train": samples, "val": samples}, batch_size=8)
    context = Context(root=root / "x", data=data)
    whole = onnx(model, context, "float")
    ort = QuantizeStatic(calibration_samples=32)(model, at(context, "int8"))
    inductor = QuantizeStatic(calibration_samples=32, target="inductor-cpu")(
        model, at(context, "int8-inductor")
    )
    ways = {
        "float, AOTInductor": lambda: ExportAot()(model, at(context, "aot")),
        "float, TorchScript": lambda: ExportTorchScript()(model, at(context, "ts")),
        "int8, ONNX Runtime": lambda: onnx(ort, context, "int8"),
        "int8, AOTInductor": lambda: ExportAot()(inductor, at(context, "aot8")),
        "int8, TorchScript": lambda: ExportTorchScript()(ort, at(context, "ts8")),
    }
    for name, make in ways.items():
        try:
            made = make()
        except CompressError as error:
            print(f"{name:34}refused: {error}")
            continue
        ratio = 1 / context.compare_latency(whole, made, batch=1).speedup
        print(f"{name:34}{megabytes(made) / megabytes(whole):7.3f}{ratio:7.2f}", flush=True)
