"""A written ONNX file's graph beside it, with the weights left where they lie in the file.

onnxruntime reads a whole file into memory and copies the weights out of it, which takes more than
twice its size; weights in another file it maps. So an export is compared with its source on the
file's own bytes, and is in memory once.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import onnx

from export.onnx.proto_io import SMALLEST_OUTSIDE, bare, is_plain, places, without_weights

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def write_mapped(model: onnx.ModelProto, file: Path) -> None:
    """Write the graph of a model that was written to a file, for :func:`mapped`.

    What has its weights outside already has them mapped.
    """
    if any(tensor.data_location for tensor in model.graph.initializer):
        return
    small = without_weights(model)
    for tensor, end in zip(model.graph.initializer, places(model), strict=True):
        length = len(tensor.raw_data)
        if length < SMALLEST_OUTSIDE or not is_plain(tensor):
            small.graph.initializer.append(tensor)
            continue
        outside = small.graph.initializer.add()
        outside.CopyFrom(bare(tensor))
        outside.data_location = onnx.TensorProto.EXTERNAL
        place = {"location": file.name, "offset": end - length, "length": length}
        for key, value in place.items():
            outside.external_data.add(key=key, value=str(value))
    _data_file(file).write_bytes(small.SerializeToString(deterministic=True))


@contextmanager
def mapped(file: Path) -> Iterator[Path]:
    """Give the file to load a model from; what was written beside it for that goes afterwards."""
    beside = _data_file(file)
    try:
        yield beside if beside.exists() else file
    finally:
        beside.unlink(missing_ok=True)


def _data_file(file: Path) -> Path:
    return file.with_name(f".{file.name}.mapped")
