"""ONNX files: checked and written, in one file or with the weights beside it, and read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx

from compress.core.errors import ArtifactInvalid, StageFailed

if TYPE_CHECKING:
    from pathlib import Path

WEIGHTS = "model.onnx.data"
"""Where the weights of a large model lie, beside its file."""
LARGEST = 2**31 - 2**20
"""Bytes of weights that one file may hold: protobuf ends at 2 GiB, the graph included."""
SMALLEST_OUTSIDE = 1024
"""Bytes from which a tensor is put beside the file; shapes stay in it, which inference reads."""


def write(model: onnx.ModelProto, file: Path) -> None:
    """Write a model and check it against the ONNX standard.

    What is too large for protobuf has its weights in a second file; ``model`` then keeps none.

    Raises:
        StageFailed: it breaks the standard.
    """
    if sum(len(tensor.raw_data) for tensor in model.graph.initializer) > LARGEST:
        onnx.save_model(
            model,
            file,
            save_as_external_data=True,
            all_tensors_to_one_file=True,
            location=WEIGHTS,
            size_threshold=SMALLEST_OUTSIDE,
        )
    else:
        file.write_bytes(model.SerializeToString(deterministic=True))
    try:
        onnx.checker.check_model(str(file), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        told = " ".join(str(error).split())
        raise StageFailed(f"the exported graph is not valid ONNX: {told}") from error


def read(file: Path, *, weights: bool = False) -> onnx.ModelProto:
    """Read a model.

    Args:
        file: the model.
        weights: whether those beside the file are read too.

    Raises:
        ArtifactInvalid: the file is not ONNX, or truncated.
    """
    try:
        return onnx.load(file, load_external_data=weights)
    except Exception as error:  # protobuf's own, which has no types to name
        raise ArtifactInvalid(f"{file}: not an ONNX file, or truncated") from error
