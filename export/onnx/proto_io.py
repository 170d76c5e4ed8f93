"""ONNX files: read, written in parts, and beside each the graph that maps its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx.external_data_helper import ExternalDataInfo, _get_all_tensors, uses_external_data
from onnx_ir.passes.common import CheckerPass

from compress.common.atomic_files import file_below
from compress.common.errors import ArtifactInvalid, StageFailed, raised_as
from compress.export.onnx.graph import sizes
from compress.graph.from_onnx.reading import find_weights_

WEIGHTS = "model.onnx.data"  # file of a large model's weights, beside the model's file
LARGEST = 2**31 - 2**20
"""Bytes of weights that one file may hold: protobuf ends at 2 GiB, the graph included."""
SMALLEST_OUTSIDE = 1024
"""Bytes from which a tensor is put beside the file; shapes stay in it, which inference reads."""
GRAPH = onnx.ModelProto.GRAPH_FIELD_NUMBER
RAW_DATA = onnx.TensorProto.RAW_DATA_FIELD_NUMBER
INITIALIZER = onnx.GraphProto.INITIALIZER_FIELD_NUMBER


def read(file: Path, *, weights: bool = False) -> ir.Model:
    """Read a model, on request with the weights beside its file; ArtifactInvalid if it is none."""
    try:
        proto = onnx.load(file, load_external_data=False)
    except Exception as error:  # protobuf's own, which has no types to name
        raise ArtifactInvalid(f"{file}: not an ONNX file, or truncated") from error
    if weights:
        load_weights_(proto, file)
    model = ir.from_proto(proto)
    find_weights_(model, file)
    return model


@contextmanager
def read_briefly(file: Path) -> Iterator[ir.Model]:
    """Read a model for a block; its weights leave memory with it."""
    model = read(file)
    try:
        yield model
    finally:
        free_weights_(model)


def load_weights_(model: onnx.ModelProto, file: Path) -> None:
    """Read the weights in files beside a model's into it; ArtifactInvalid where there are none."""
    # Not onnx's own, which takes neither links in Hugging Face's cache nor files with two names.
    for tensor in filter(uses_external_data, _get_all_tensors(model)):
        info = ExternalDataInfo(tensor)
        with (
            raised_as(ArtifactInvalid, f"{file}: weight {tensor.name!r} in a file beside it"),
            file_below(file, info.location).open("rb") as stream,
        ):
            stream.seek(info.offset or 0)
            tensor.raw_data = stream.read(info.length or -1)
        tensor.data_location = onnx.TensorProto.DEFAULT
        tensor.ClearField("external_data")


def write(model: ir.Model, file: Path) -> None:
    """Write a model, large weights in a second file; StageFailed where it is not valid ONNX."""
    try:
        CheckerPass(full_check=True)(model.clone())  # it reorders the tensors
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        reason = " ".join(str(error).split())
        raise StageFailed(f"the exported graph is not valid ONNX: {reason}") from error
    for value in model.graph.initializers.values():
        array = getattr(value.const_value, "raw", None)
        if isinstance(array, np.ndarray) and not array.flags.c_contiguous:
            # Such as folded transposes, which numpy writes element by element: 1.3 GB in 11 s.
            value.const_value = _written_at_once(array, value)
    if _is_large(model):
        ir.save(model, file, external_data=WEIGHTS, size_threshold_bytes=SMALLEST_OUTSIDE)
        return
    with file.open("wb") as stream:
        for part in _encode(model):
            if isinstance(part, bytes):
                stream.write(part)
            else:
                # Unlike tobytes without a copy. The protocol leaves it out, all tensors have it.
                part.tofile(stream)  # type: ignore[attr-defined]


def _written_at_once(array: np.ndarray, value: ir.Value) -> ir.LazyTensor:
    """Return a tensor that copies its array to contiguous memory for as long as it is written."""
    tensor = value.const_value
    assert tensor is not None
    dtype, shape = tensor.dtype, ir.Shape(sizes(tensor))
    return ir.LazyTensor(
        lambda: ir.Tensor(np.ascontiguousarray(array), dtype=dtype), dtype, shape, name=value.name
    )


def write_mapped(model: ir.Model, file: Path) -> None:
    """Write a written model's graph beside its file, with the weights left where they are there."""
    # onnxruntime reads a whole file into memory and copies the weights out of it, which takes more
    # than twice its size; weights in another file it maps. So an export is compared with its source
    # on the file's own bytes, and is in memory once.
    if _is_large(model):
        return  # its weights are in another file already
    places, place = dict[int, int](), 0
    for part in _encode(model):
        if not isinstance(part, bytes):
            places[id(part)] = place
        place += _size(part)
    small = model.clone()
    for name, value in small.graph.initializers.items():
        tensor = value.const_value
        if id(tensor) in places and tensor is not None and tensor.nbytes >= SMALLEST_OUTSIDE:
            where = (file.name, places[id(tensor)], tensor.nbytes, tensor.dtype)
            shape = ir.Shape(sizes(tensor))
            value.const_value = ir.ExternalTensor(*where, shape=shape, name=name)
    proto = ir.to_proto(small)
    _mapped_file(file).write_bytes(proto.SerializeToString(deterministic=True))


def free_weights_(model: ir.Model) -> None:
    """Empty the weights of a written model, and so those of the program that it was made of."""
    # Deleting both would not free them: a graph's parts refer to one another, and onnxscript (0.7)
    # references the last graphs that it rewrote.
    for value in model.graph.initializers.values():
        raw = getattr(value.const_value, "raw", None)
        if isinstance(raw, torch.Tensor):
            raw.data = raw.data.new_empty(0)
        value.const_value = None


@contextmanager
def mapped(file: Path) -> Iterator[Path]:
    """Give the file of :func:`write_mapped`, or the model's own, and remove the former."""
    graph = _mapped_file(file)
    try:
        yield graph if graph.exists() else file
    finally:
        graph.unlink(missing_ok=True)


def _mapped_file(file: Path) -> Path:
    return file.with_name(f".{file.name}.mapped")


def _is_large(model: ir.Model) -> bool:
    return sum(tensor.nbytes for tensor in model.graph.initializers.tensors()) > LARGEST


def _encode(model: ir.Model) -> list[bytes | ir.TensorProtocol]:
    """Return the parts of a model in protobuf's encoding, of which weights are the data alone."""
    # Serialized as a whole, a model is in memory twice.
    small = model.clone()
    small.graph.initializers.clear()
    proto = ir.to_proto(small)
    before, after = _split(proto.graph, INITIALIZER)
    before_graph, after_graph = _split(proto, GRAPH)
    parts: list[bytes | ir.TensorProtocol] = []
    for name, tensor in model.graph.initializers.tensor_items():
        if tensor.dtype == ir.DataType.STRING:  # which has no raw data
            whole = ir.to_proto(tensor).SerializeToString(deterministic=True)
            parts.append(_header(INITIALIZER, len(whole)) + whole)
            continue
        head = onnx.TensorProto(name=name, data_type=tensor.dtype, dims=tensor.shape.numpy())
        start = head.SerializeToString(deterministic=True) + _header(RAW_DATA, tensor.nbytes)
        parts += [_header(INITIALIZER, len(start) + tensor.nbytes) + start, tensor]
    length = len(before) + sum(map(_size, parts)) + len(after)
    return [before_graph + _header(GRAPH, length) + before, *parts, after + after_graph]


def _size(part: bytes | ir.TensorProtocol) -> int:
    return len(part) if isinstance(part, bytes) else part.nbytes


def _split(message: Any, number: int) -> tuple[bytes, bytes]:
    """Encode the fields of a message before a number, and those after it; protobuf orders them."""
    parts = type(message)(), type(message)()
    for part in parts:
        part.CopyFrom(message)
    for field, _ in message.ListFields():
        for part, is_in in zip(parts, (field.number < number, field.number > number), strict=True):
            if not is_in:
                part.ClearField(field.name)
    before, after = (part.SerializeToString(deterministic=True) for part in parts)
    return before, after


def _header(field: int, size: int) -> bytes:
    """Return what protobuf writes before a field's bytes: its number and type 2, and its length."""
    return _varint(field << 3 | 2) + _varint(size)


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes((*encoded, number))
