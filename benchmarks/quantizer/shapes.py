"""Latency of int8 at 224² and batch 1 over ONNX Runtime's float32, measured in turn, one thread.

Weights are random and samples few: only time and size are measured.
"""

import argparse
import math
import sys
import tempfile
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from compress import Context, QuantizeStatic, Splits
from compress.common.errors import CompressError
from compress.export import ExportAot, ExportTorchScript
from quantizer.sources import HERE, at, image_model, megabytes, onnx

SHAPES = ("resnet18", "resnet50")
CALIBRATION_IMAGES, VAL_IMAGES = 16, 4


def main() -> None:
    parser = argparse.ArgumentParser("quantization.py shapes", description=__doc__)
    parser.add_argument("--small", action="store_true", help="ResNet-18's shape at 64²")
    parser.add_argument("--shape", choices=SHAPES, help="only one of them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.path.insert(0, str(HERE))
    side = 64 if options.small else 224
    chosen = [options.shape] if options.shape else list(SHAPES)
    for factory in chosen[:1] if options.small else chosen:
        print(f"\n{factory} at {side}²{'':18}{'size':>7}{'time':>7}")
        with tempfile.TemporaryDirectory() as folder:
            _rows(Path(folder), factory, side)


def _rows(root: Path, factory: str, side: int) -> None:
    model = image_model(root, factory, (3, side, side))
    generator = torch.Generator().manual_seed(0)
    train, val = (
        TensorDataset(torch.randn(n, 3, side, side, generator=generator), torch.arange(n))
        for n in (CALIBRATION_IMAGES, VAL_IMAGES)
    )
    data = Splits({"train": train, "val": val}, batch_size=4)
    context = Context(root=root / "x", data=data)
    float_onnx = onnx(model, context, "float")
    sample = {"calibration_samples": CALIBRATION_IMAGES}
    ort = QuantizeStatic(**sample)(model, at(context, "int8"))
    stage = QuantizeStatic(target="inductor-cpu", **sample)
    inductor = stage(model, at(context, "int8-inductor"))
    exports = {
        "float, AOTInductor": lambda: ExportAot()(model, at(context, "aot")),
        "float, TorchScript": lambda: ExportTorchScript()(model, at(context, "ts")),
        "int8, ONNX Runtime": lambda: onnx(ort, context, "int8"),
        "int8, AOTInductor": lambda: ExportAot()(inductor, at(context, "aot8")),
        "int8, TorchScript": lambda: ExportTorchScript()(ort, at(context, "ts8")),
    }
    for name, export in exports.items():
        try:
            exported = export()
        except CompressError as error:
            print(f"{name:34}refused: {error}")
            continue
        ratio = context.compare_latency(float_onnx, exported, batch=1).share or math.nan
        print(
            f"{name:34}{megabytes(exported) / megabytes(float_onnx):7.3f}{ratio:7.2f}", flush=True
        )
