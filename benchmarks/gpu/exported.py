"""Exported models on one GPU beside PyTorch itself: `python benchmarks/gpu/exported.py`.

Prints, for each model and batch size, the median latency in eager PyTorch, and how many times as
fast `torch.compile`, AOTInductor in float32 and float16, TorchScript and ONNX Runtime are, measured
in turn with it, with the cosine of the outputs. Weights are random. ONNX Runtime runs on the GPU
where onnxruntime-gpu is installed, and is left out elsewhere. `--small` runs tiny models on the
CPU, to see that everything works.
"""

import argparse
import contextlib
import functools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import nn
from torch.nn.functional import cosine_similarity

import compress
from compress.artifacts.artifact import Artifact
from compress.common.forward import torch_predictor
from compress.profiling.benchmark import compare_latencies

BATCHES = (1, 32)


class Logits(nn.Module):
    """A model of transformers that returns its first output alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).logits


def resnet(small: bool) -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]} if small else {}
    config = transformers.ResNetConfig(**sizes, num_labels=1000)
    edge = 32 if small else 224
    module = Logits(transformers.ResNetForImageClassification(config))
    return module, lambda batch: torch.randn(batch, 3, edge, edge)


def bert(small: bool) -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
    width = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**(width if small else {}))
    module = Logits(transformers.BertForSequenceClassification(config))
    return module, lambda batch: torch.randint(1000, (batch, 16 if small else 128))


MODELS = {"ResNet-50": resnet, "BERT base, 128 tokens": bert}


def export(model: str, name: str, folder: Path, small: bool) -> Artifact:
    """Write a model in a format."""
    module, inputs = made(model, small)
    given, device = {"example_inputs": (inputs(2),)}, "cpu" if small else "cuda"
    if name == "TorchScript":
        return compress.export_torchscript(module, **given, out=folder)
    if name == "ONNX Runtime":
        return compress.export_onnx(module, **given, out=folder)
    if name.endswith("float16"):
        samples = inputs(8)
        half = compress.convert_precision(module, dtype="float16", calibration=(samples, samples))
        return compress.export_aot(half, device=device, out=folder)
    return compress.export_aot(module, **given, device=device, out=folder)


FORMATS = ("AOTInductor", "AOTInductor, float16", "TorchScript", "ONNX Runtime")


def made(model: str, small: bool) -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
    torch.manual_seed(0)
    module, inputs = MODELS[model](small)
    return module.eval(), inputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--small", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--write", nargs=3, metavar=("MODEL", "FORMAT", "FOLDER"))
    given = parser.parse_args()
    if given.write:
        export(*given.write[:2], Path(given.write[2]), given.small)
        return
    device = "cpu" if given.small else "cuda"
    where = "CPU" if given.small else torch.cuda.get_device_name()
    print(f"{where}, torch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        begin, files = time.perf_counter(), written(Path(scratch), given.small)
        print(f"written in {time.perf_counter() - begin:.0f} s, beside one another")
        for model in MODELS:
            for batch in BATCHES:
                measure(model, files, batch, device, given.small)


def written(scratch: Path, small: bool) -> dict[tuple[str, str], Artifact]:
    """Write every model in every format, each in a process of its own."""
    processes = {}
    for i, key in enumerate((m, f) for m in MODELS for f in FORMATS):
        command = [sys.executable, __file__, "--write", *key, str(scratch / str(i))]
        processes[key] = subprocess.Popen([*command, *(["--small"] if small else [])])
    files = {}
    for i, (key, process) in enumerate(processes.items()):
        if process.wait(timeout=600):
            print(f"{key[0]}: {key[1]} was not written")
        else:
            files[key] = Artifact.from_directory(scratch / str(i))
    return files


def measure(
    model: str, files: dict[tuple[str, str], Artifact], batch: int, device: str, small: bool
) -> None:
    """Print the speeds of a model's files at a batch size."""
    module, inputs = made(model, small)
    module, x = module.to(device), inputs(batch)  # every call copies its input to the device
    torch.compiler.reset()
    with contextlib.ExitStack() as stack:
        opened = {
            name: stack.enter_context(torch_predictor(each, device, 1))
            for name, each in (("eager", module), ("torch.compile", torch.compile(module)))
        }
        for (of, name), file in files.items():
            if of == model and file.runs_on(device) == device:
                opened[name] = stack.enter_context(file.open(device, 1))
        latencies = compare_latencies(
            [functools.partial(contextlib.nullcontext, predict) for predict in opened.values()],
            [(x,)],
            seconds=1.0,
            threads=1,
        )
        (expected,) = opened["eager"](x)
        for i, (name, predict) in enumerate(opened.items()):
            compared = latencies.comparison(0, i)
            got = predict(x)[0].to(expected)
            alike = float(cosine_similarity(expected.flatten(), got.flatten(), dim=0))
            print(
                f"{model:24s}batch {batch:<4d}{name:24s}{compared.after.p50:8.3f} ms"
                f"{compared.speedup:7.2f}× ({compared.interval.low:.2f} to "
                f"{compared.interval.high:.2f})  cosine {alike:.6f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
