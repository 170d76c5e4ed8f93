"""One cell of the coverage table: a model exported to a format, and compared with its source."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from compress.artifacts.eager_model import EagerModel
from compress.common.errors import CompressError
from compress.common.forward import run_in_eval
from compress.common.signature import AxisBounds
from compress.core.context import Context
from compress.export.aotinductor.stage import ExportAot
from compress.export.executorch.stage import ExportExecuTorch
from compress.export.exported_program import ExportProgram
from compress.export.onnx.stage import ExportOnnx
from compress.export.openvino.stage import ExportOpenVINO
from compress.export.torchscript.stage import ExportTorchScript
from tests.compress.pruning.zoo.registry import name_outputs

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from compress.artifacts.artifact import Artifact
    from tests.compress.pruning.zoo.registry import Case

FORMATS: Mapping[str, tuple[Any, ...]] = {
    "ONNX": (ExportOnnx(),),
    "TorchScript": (ExportTorchScript(), ExportTorchScript(method="script")),
    "torch.export": (ExportProgram(),),
    "AOTInductor": (ExportAot(),),
    "OpenVINO": (ExportOpenVINO(),),
    "ExecuTorch": (ExportExecuTorch(),),
}
"""The stages of each column, the next where one refuses; a stage compares what it made with the
source at batch sizes of 1, 3 and 8."""
LARGEST_SIZE = {"ExecuTorch": 64}
"""Format that needs a largest size of every named axis → the one that is declared for all."""
BATCH, SEED = 5, 7
"""Inputs that no stage has seen."""
LARGEST_ERROR = 1e-3
"""Relative to the largest output."""

OPENING = """
import sys
sys.path.insert(0, {folder!r})
import torch
torch.set_num_threads(1)
from compress.export.aotinductor import stage
from compress.export.executorch import stage
from compress.export.onnx import stage
from compress.export import exported_program
from compress.export.openvino import stage
from compress.export.torchscript import stage
from tests.export.zoo.export_cell import digest, outputs_of
from compress.artifacts.artifact import Artifact
for path in {paths!r}:
    print(digest(outputs_of(Artifact.from_directory(path))), flush=True)
"""
"""What a fresh process runs: prints a digest of the outputs of each artifact."""


@dataclass(frozen=True)
class Cell:
    """Result of exporting a model to a format."""

    refusal: str = ""
    """Why there is no artifact, in one line; empty where there is one."""
    error: float = 0.0
    """Largest difference to the source, relative to the largest output."""
    digest: str = ""
    """SHA-256 of the artifact's outputs in the process that made it."""


def formats_here() -> list[str]:
    """Return the formats whose libraries are installed."""
    return [
        name
        for name, (stage, *_) in FORMATS.items()
        if not any(need.missing() for need in stage.all_requirements())
    ]


def import_case(
    case: Case, path: Path, name: str = "", bounds: AxisBounds | None = None
) -> EagerModel:
    """Return a model of the zoo as an artifact, with the sizes that a format needs declared.

    `bounds` are those of every named axis but the batch, instead of the format's.
    """
    module = case.build()
    signature = case.signature
    count = len(run_in_eval(module, signature.example()))
    if (most := LARGEST_SIZE.get(name)) or bounds:
        axes = {
            axis: bounds or AxisBounds(min=signature.bounds(axis).min, max=most)
            for axis in signature.dynamic_axes
            if axis != signature.batch_axis
        }
        signature = signature.model_copy(update={"axes": axes})
    signature = name_outputs(signature, count)
    return EagerModel.create(path, case.recipe, module.state_dict(), signature, folder=case.folder)


def export_cell(model: EagerModel, name: str, path: Path) -> Cell:
    """Export a model to a format; errors other than the toolkit's own are raised."""
    refusal = ""
    for stage in FORMATS[name]:
        try:
            artifact = stage(model, Context(root=path))
            break
        except CompressError as error:
            refusal = refusal or str(error)
    else:
        return Cell(refusal=refusal)
    expected, outputs = outputs_of(model), outputs_of(artifact)
    errors = [_error(a, b) for a, b in zip(expected, outputs, strict=True)]
    return Cell(error=max(errors), digest=digest(outputs))


def outputs_of(artifact: Artifact) -> tuple[torch.Tensor, ...]:
    """Return the outputs for inputs of another batch size and seed than the stages compare."""
    inputs = artifact.signature.example(batch=BATCH, seed=SEED)
    with artifact.open() as predict:
        return tuple(output.clone() for output in predict(*inputs))


def digest(outputs: tuple[torch.Tensor, ...]) -> str:
    """Return a hash that tells outputs apart by a single bit."""
    hashed = hashlib.sha256()
    for output in outputs:
        hashed.update(f"{output.dtype}{tuple(output.shape)}".encode())
        hashed.update(output.contiguous().numpy().tobytes())
    return hashed.hexdigest()


def _error(expected: torch.Tensor, output: torch.Tensor) -> float:
    if not expected.is_floating_point():
        return float(not torch.equal(expected, output))
    return float((output - expected).abs().max() / expected.abs().max().clamp_min(1e-12))
