"""A model as an ONNX graph, and its file as a runtime serves it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from export.onnx.graph import strip_
from export.onnx.passes.stored_integers import compact_
from export.onnx.proto_io import write
from export.onnx.session import session_predictor
from export.onnx.translate import translate

if TYPE_CHECKING:
    from pathlib import Path

    import onnx

    from compress.artifacts.eager_model import EagerModel
    from compress.artifacts.graph_model import GraphModel
    from compress.common.forward import Predictor
    from compress.common.signature import Signature


class ServedFile(NamedTuple):
    """A model in the form that its runtime reads."""

    bytes: int
    """Of its files together."""
    predict: Predictor


def graph_to_serve(model: EagerModel | GraphModel, title: str) -> onnx.ModelProto:
    """Return the graph that `export_onnx` writes, which is not compared with the model here."""
    graph, _ = translate(model, None, title)
    compact_(graph)
    strip_(graph)
    return graph


def write_alone(graph: onnx.ModelProto, folder: Path) -> Path:
    """Write a graph into a new folder of its own, and return the file."""
    folder.mkdir()
    write(graph, folder / "model.onnx")
    return folder / "model.onnx"


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
    from export.openvino import runtime as openvino

    model = file.parent / "openvino" / "model.xml"
    model.parent.mkdir()
    openvino.write(file, model, signature)
    size = sum(part.stat().st_size for part in model.parent.iterdir())
    return ServedFile(size, openvino.predictor(openvino.compiled(model, threads)))
