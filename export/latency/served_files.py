"""A model as an ONNX graph, and its file as a runtime serves it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

from compress.export.onnx.graph import strip_
from compress.export.onnx.passes.stored_integers import compact_
from compress.export.onnx.proto_io import write
from compress.export.onnx.session import opened_session
from compress.export.onnx.translate import translate

if TYPE_CHECKING:
    from pathlib import Path

    import onnx_ir as ir

    from compress.artifacts.eager_model import EagerModel
    from compress.artifacts.graph_model import GraphModel
    from compress.common.signature import Signature
    from compress.profiling.benchmark import Opener


class ServedFile(NamedTuple):
    """A model in the form that its runtime reads."""

    bytes: int
    """Of its files together."""
    open: Opener


def graph_to_serve(model: EagerModel | GraphModel, title: str) -> ir.Model:
    """Return the graph that `export_onnx` writes, which is not compared with the model here."""
    graph, _ = translate(model, None, title)
    compact_(graph)
    strip_(graph)
    return graph


def write_alone(graph: ir.Model, folder: Path) -> Path:
    """Write a graph into a new folder of its own, and return the file."""
    folder.mkdir()
    write(graph, folder / "model.onnx")
    return folder / "model.onnx"


def open_as_served(
    file: Path, runtime: Literal["onnx", "openvino"], signature: Signature, threads: int
) -> ServedFile:
    """Return the file of `export_onnx` or `export_openvino` for an ONNX file alone in its folder.

    Raises:
        StageFailed: OpenVINO has no such operators.
    """
    if runtime == "onnx":
        size = sum(part.stat().st_size for part in file.parent.iterdir() if part.is_file())
        return ServedFile(size, partial(opened_session, file, threads))
    from compress.export.openvino import runtime as openvino

    model = file.parent / "openvino" / "model.xml"
    model.parent.mkdir()
    openvino.write(file, model, signature)
    size = sum(part.stat().st_size for part in model.parent.iterdir())
    return ServedFile(size, partial(openvino.opened, model, threads))
