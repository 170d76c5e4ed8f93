"""An ONNX file as a runtime serves it: the size of its files, and a predictor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from export.onnx.session import session_predictor

if TYPE_CHECKING:
    from pathlib import Path

    from compress.common.forward import Predictor
    from compress.common.signature import Signature


class ServedFile(NamedTuple):
    """A model in the form that its runtime reads."""

    bytes: int
    """Of its files together."""
    predict: Predictor


def open_as_served(
    file: Path, runtime: Literal["onnx", "openvino"], signature: Signature, threads: int
) -> ServedFile:
    """Open an ONNX file, alone in its folder, as `export_onnx` or `export_openvino` would write it.

    Raises:
        StageFailed: OpenVINO has no such operators.
        ArtifactInvalid: the runtime cannot load it.
    """
    if runtime == "onnx":
        size = sum(part.stat().st_size for part in file.parent.iterdir() if part.is_file())
        return ServedFile(size, session_predictor(file, threads))
    from export.openvino.runtime import compiled, predictor, write

    model = file.parent / "openvino" / "model.xml"
    model.parent.mkdir()
    write(file, model, signature)
    size = sum(part.stat().st_size for part in model.parent.iterdir())
    return ServedFile(size, predictor(compiled(model, threads)))
