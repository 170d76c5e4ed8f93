"""A model's way into a format and out of its file: export, comparison, a fresh process."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from compress.artifacts.eager_model import EagerModel, name_outputs, run_in_eval
from compress.common.errors import CompressError
from compress.core.stage import Context
from export.aotinductor.stage import ExportAot
from export.exported_program import ExportProgram
from export.onnx.stage import ExportOnnx
from export.torchscript.stage import ExportTorchScript

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
}
"""The stages of each column, the next where one refuses; a stage compares what it made with the
source at batch sizes of 1, 3 and 8."""
BATCH, SEED = 5, 7
"""Inputs that no stage has seen."""
LARGEST_ERROR = 1e-3
"""Relative to the largest output."""

OPENING = """
import sys
sys.path.insert(0, {folder!r})
import torch
torch.set_num_threads(1)
import export.aotinductor.stage, export.onnx.stage
import export.exported_program, export.torchscript.stage
from tests.export.zoo.walk import answers, digest
from compress.artifacts.artifact import Artifact
for path in {paths!r}:
    print(digest(answers(Artifact.from_directory(path))), flush=True)
"""
"""What a fresh process runs; a line for each artifact."""


@dataclass(frozen=True)
class Cell:
    """What became of a model in a format."""

    refusal: str = ""
    """Why there is no artifact, in one line; empty where there is one."""
    error: float = 0.0
    """Largest difference to the source, relative to the largest output."""
    digest: str = ""
    """SHA-256 of the artifact's answers in the process that made it."""


def imported(case: Case, path: Path) -> EagerModel:
    """Return a model of the zoo as an artifact."""
    module = case.build()
    count = len(run_in_eval(module, case.signature.example()))
    signature = name_outputs(case.signature, count)
    return EagerModel.create(path, case.recipe, module.state_dict(), signature, folder=case.folder)


def walk(model: EagerModel, name: str, path: Path) -> Cell:
    """Export a model into a format; whatever is not a refusal of ours goes to the caller."""
    refusal = ""
    for stage in FORMATS[name]:
        try:
            made = stage(model, Context(root=path))
            break
        except CompressError as error:
            refusal = refusal or str(error)
    else:
        return Cell(refusal=refusal)
    expected, found = answers(model), answers(made)
    errors = [_error(a, b) for a, b in zip(expected, found, strict=True)]
    return Cell(error=max(errors), digest=digest(found))


def answers(artifact: Artifact) -> tuple[torch.Tensor, ...]:
    """Return the outputs for inputs of another batch size and seed than the stages take."""
    inputs = artifact.signature.example(batch=BATCH, seed=SEED)
    with artifact.open() as predict:
        return tuple(output.clone() for output in predict(*inputs))


def digest(outputs: tuple[torch.Tensor, ...]) -> str:
    """Return a hash that tells outputs apart by a single bit."""
    found = hashlib.sha256()
    for output in outputs:
        found.update(f"{output.dtype}{tuple(output.shape)}".encode())
        found.update(output.contiguous().numpy().tobytes())
    return found.hexdigest()


def _error(expected: torch.Tensor, found: torch.Tensor) -> float:
    if not expected.is_floating_point():
        return float(not torch.equal(expected, found))
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-12))
