"""Which ONNX files benchmarks/onnx_in.py takes: samples, what they are for, and stages of ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import yaml
from safetensors.torch import save_file

from onnx_files import samples, scores

if TYPE_CHECKING:
    import torch

BENCHMARKS = Path(__file__).parents[1]
HEAD = """version: 1
name: {name}
threads: 1
code: {code}
model: {{file: {file}, inputs: [{input}]}}
data: {{factory: "peer_tools.stored_data:read", arguments: {{file: {data}}}, batch_size: 32}}
metric: {{name: "onnx_files.scores:{metric}", higher_is_better: true}}
"""
OPSET = 17
"""Peers get files of older operator sets in this one: their integers by channel need 13."""
STATIC = "stage: quantize_static, calibration_samples: {calibration}"
OURS = {"`quantize_static`": (STATIC,)}
DYNAMIC = {"`quantize_dynamic`": ("stage: quantize_dynamic",)}
CORRECTED = {**OURS, "with `corrections: auto`": (f"{STATIC}, corrections: auto",)}
SMALLER = (
    "stage: prune_channels, target: {{{{macs: {}}}}}, scope: global, importance: obs, round_to: 8, "
    "calibration_samples: 64"
)
RAPID = "rapidocr_onnxruntime/models"
SILERO = "silero_vad/data"


@dataclass(frozen=True)
class OnnxFile:
    """A file that others trained, where its samples come from, and what is compared."""

    title: str
    file: str
    """In the packages."""
    input: str
    """In YAML, as `model.inputs` takes it."""
    read: Callable[[Path, dict[str, int]], samples.Rows]
    metric: str
    """A function of `onnx_files.scores`."""
    score_title: str
    ours: dict[str, tuple[str, ...]]
    """Name of a row → the settings of each of our stages."""
    sizes: tuple[int, int, int] = (128, 128, 512)
    """Rows of `train`, which calibrates, of `val`, which judges, and of `test`."""
    about: str = "{} rows calibrate, {} judge, {} others are scored."
    """What these rows are for."""
    large_batch: int = 8
    fixed: tuple[str, ...] = ()
    """Inputs that become zeros of the file itself: the state before a recording."""
    rows_a_call: int = 16

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs, as a model of benchmarks/real.py has them."""
        return (self.input,)

    def input_specs(self) -> list[dict]:
        """Return the inputs as mappings."""
        return [yaml.safe_load(text) for text in self.inputs]

    def score(self, outputs: torch.Tensor, targets: torch.Tensor) -> float:
        """Return the figure that is compared."""
        return getattr(scores, self.metric)(outputs, targets)


FILES = {
    "orientation": OnnxFile(
        "Orientation of text (PaddleOCR v2)",
        f"{RAPID}/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        "{name: x, shape: [batch, 3, 48, 192]}",
        samples.orientation,
        "labels",
        "labels",
        OURS,
    ),
    "recognition": OnnxFile(
        "Text recognition (PP-OCRv4)",
        f"{RAPID}/ch_PP-OCRv4_rec_infer.onnx",
        "{name: x, shape: [batch, 3, 48, 320]}",
        samples.recognition,
        "characters",
        "1 - character error",
        CORRECTED,
        large_batch=4,
        sizes=(128, 64, 256),
    ),
    "detection": OnnxFile(
        "Text detection (PP-OCRv4)",
        f"{RAPID}/ch_PP-OCRv4_det_infer.onnx",
        "{name: x, shape: [batch, 3, 320, 320]}",
        samples.detection,
        "text_pixels",
        "F1 of text pixels",
        CORRECTED,
        large_batch=4,
        sizes=(64, 64, 128),
    ),
    "magika": OnnxFile(
        "File types (magika 1.0)",
        "magika/models/standard_v3_3/model.onnx",
        "{name: bytes, shape: [batch, 2048], dtype: int32}",
        samples.file_types,
        "labels",
        "labels",
        OURS | DYNAMIC,
    ),
    "silero": OnnxFile(
        "Speech (silero-vad 6.2, a sequence)",
        f"{SILERO}/silero_vad_16k_sequence.onnx",
        "{name: input, shape: [sequence_length, 576]}",
        samples.speech,
        "frames",
        "equal chunks",
        OURS | DYNAMIC,
        sizes=(512, 512, 2048),
        large_batch=32,
        fixed=("h", "c"),
        rows_a_call=2048,
    ),
}
PRUNED = replace(
    FILES["detection"],
    title="Text detection with channels removed, without its training code",
    ours={
        f"`prune_channels` to {percent} % of multiply-accumulates": (SMALLER.format(percent / 100),)
        for percent in (70, 50)
    },
    sizes=(128, 32, 128),
    about="""{} drawn pages without labels: `prune_channels` ranks channels by 64 of them (`obs`)
and fits the layers that read what is left; nothing is trained. {} others judge, {} others are
scored.""",
)
"""The text detector, pruned by unlabelled pages alone."""


def float_file(file: OnnxFile, packages: Path, folder: Path) -> Path:
    """Return the file that is compressed: the package's own, or with its state filled in."""
    source = packages / file.file
    if not file.fixed:
        return source
    made, model = folder / source.name, onnx.load(source)
    for value in [value for value in model.graph.input if value.name in file.fixed]:
        shape = [axis.dim_value for axis in value.type.tensor_type.shape.dim]
        zeros = onnx.numpy_helper.from_array(np.zeros(shape, np.float32), value.name)
        model.graph.initializer.append(zeros)
        model.graph.input.remove(value)
    onnx.save(model, made)
    return made


def peers_file(source: Path, folder: Path) -> Path:
    """Return a file for the peers, in a newer operator set where it has an old one."""
    model = onnx.load(source)
    (version,) = (x.version for x in model.opset_import if x.domain in ("", "ai.onnx"))
    if version >= 13:
        return source
    newer = folder / f"opset{OPSET}.onnx"
    onnx.save(onnx.version_converter.convert_version(model, OPSET), newer)
    return newer


def prepare(file: OnnxFile, packages: Path, folder: Path) -> tuple[Path, str]:
    """Write a file's samples; return the float file, and its pipeline up to the stages."""
    folder.mkdir(parents=True, exist_ok=True)
    source, data = float_file(file, packages, folder), folder / "data.safetensors"
    if not data.exists():
        from real import answers

        from compress.export.onnx.session import session_predictor

        tensors, sizes = {}, dict(zip(("train", "val", "test"), file.sizes, strict=True))
        for split, (inputs, targets) in file.read(packages, sizes).items():
            if targets is None:
                (targets, *_) = answers(session_predictor(source, 1), inputs, file.rows_a_call)
            tensors |= {f"{split}.input.0": inputs[0].contiguous(), f"{split}.target.0": targets}
        save_file(tensors, data)
    head = HEAD.format(
        name=folder.name,
        code=BENCHMARKS,
        file=source,
        input=file.input,
        data=data,
        metric=file.metric,
    )
    return source, head
