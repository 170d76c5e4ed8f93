"""From a torch.export program to an ONNX model, by torch's own exporter."""

from __future__ import annotations

import logging
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import onnx
import torch

from compress.core.errors import StageFailed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch.export import ExportedProgram

    from compress.core.signature import Signature


def lower(program: ExportedProgram, signature: Signature, opset: int | None) -> onnx.ModelProto:
    """Translate a program; inputs, outputs and axes bear the signature's names.

    Raises:
        StageFailed: an operator has no ONNX form, or the operator set is not available.
    """
    sizes = {name: torch.export.Dim(name) for name in signature.dynamic_axes}
    shapes: Any = tuple(
        {axis: sizes[d] for axis, d in enumerate(spec.shape) if isinstance(d, str)} or None
        for spec in signature.inputs
    )
    try:
        with _quiet():
            exported = torch.onnx.export(
                program,
                dynamo=True,
                input_names=[spec.name for spec in signature.inputs],
                output_names=[spec.name for spec in signature.outputs],
                dynamic_shapes=shapes,
                opset_version=opset,
                verbose=False,
            )
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        raise StageFailed(
            f"the model has no ONNX form: {type(error).__name__}: {first_line}"
        ) from error
    if exported is None:
        raise StageFailed("torch.onnx.export gave nothing back, expected a model")
    model: onnx.ModelProto = exported.model_proto
    found = model.opset_import[0].version
    if opset is not None and found != opset:
        raise StageFailed(f"opset {opset} was asked for and the exporter wrote {found}")
    return model


def write(model: onnx.ModelProto, file: Path) -> None:
    """Check a model against the ONNX standard and write it.

    Raises:
        StageFailed: it breaks the standard.
    """
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise StageFailed(f"the exported graph is not valid ONNX: {error}") from error
    file.write_bytes(model.SerializeToString(deterministic=True))


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide notes of the exporter that no user can act on."""

    def matters(record: logging.LogRecord) -> bool:
        return "torchvision is not installed" not in record.getMessage()

    registry = logging.getLogger("torch.onnx._internal.exporter._registration")
    registry.addFilter(matters)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")
            # Inputs that share a named axis are meant to.
            warnings.filterwarnings("ignore", message=r"# The axis name: .* will not be used")
            yield
    finally:
        registry.removeFilter(matters)
