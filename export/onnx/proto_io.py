"""ONNX models in protobuf: converted from torch's exporter, written to files, read back."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import torch
from onnxscript import ir

from compress.common.errors import ArtifactInvalid, StageFailed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch.onnx import ONNXProgram

SCOPES = "pkg.torch.onnx.name_scopes"
"""Property that torch's exporter gives each operator: names of its modules, as a list's text."""
WEIGHTS = "model.onnx.data"
"""File of a large model's weights, beside the model's file."""
LARGEST = 2**31 - 2**20
"""Bytes of weights that one file may hold: protobuf ends at 2 GiB, the graph included."""
SMALLEST_OUTSIDE = 1024
"""Bytes from which a tensor is put beside the file; shapes stay in it, which inference reads."""
GRAPH = onnx.ModelProto.GRAPH_FIELD_NUMBER
RAW_DATA = onnx.TensorProto.RAW_DATA_FIELD_NUMBER
INITIALIZER = onnx.GraphProto.INITIALIZER_FIELD_NUMBER
PLAIN_FIELDS = ("name", "dims", "data_type", "raw_data")
FIELD_NUMBERS_END = 2**29
"""protobuf's field numbers are smaller."""


def to_proto(exported: ONNXProgram, *, free_weights: bool) -> onnx.ModelProto:
    """Convert what torch's exporter returned to protobuf; its model then keeps no weights.

    Of what the exporter says of each operator, :data:`SCOPES` is kept.

    `free_weights` empties the tensors of its program as well, each as soon as it is copied.
    """
    # Deleting the program would not free them: onnxscript (0.7) references the last graphs that it
    # rewrote.
    graph = exported.model.graph
    for node in graph.all_nodes():
        scopes = node.metadata_props.get(SCOPES)
        node.metadata_props.clear()
        if scopes is not None:
            node.metadata_props[SCOPES] = scopes
    tensors: dict[str, Any] = {n: value.const_value for n, value in graph.initializers.items()}
    for value in graph.initializers.values():
        value.const_value = ir.tensor(np.empty(0, np.float32))
    model: onnx.ModelProto = exported.model_proto
    sources = {name: getattr(tensor, "raw", None) for name, tensor in tensors.items()}
    # A tensor may have several names, and is needed up to the last one.
    last_name = {id(tensor): name for name, tensor in sources.items()}
    program = exported.exported_program
    if free_weights and program is not None:
        _empty_(*(t for t in program.state_dict.values() if id(t) not in last_name))
    for proto in model.graph.initializer:
        name = proto.name
        tensor, source = tensors.pop(name), sources.pop(name)
        proto.dims[:] = tensor.shape.numpy()
        proto.data_type = tensor.dtype.value
        raw_data = tensor.tobytes()
        if free_weights and isinstance(source, torch.Tensor) and last_name[id(source)] == name:
            _empty_(source)
        del tensor, source
        proto.raw_data = raw_data
    return model


def _empty_(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        tensor.data = tensor.data.new_empty(0)


def read(file: Path, *, weights: bool = False) -> onnx.ModelProto:
    """Read a model, on request with the weights beside its file; ArtifactInvalid if it is none."""
    try:
        return onnx.load(file, load_external_data=weights)
    except Exception as error:  # protobuf's own, which has no types to name
        raise ArtifactInvalid(f"{file}: not an ONNX file, or truncated") from error


def write(model: onnx.ModelProto, file: Path) -> None:
    """Write a model and check it against the ONNX standard.

    What is too large for protobuf has its weights in a second file; ``model`` then keeps none.

    Raises:
        StageFailed: it breaks the standard.
    """
    _check(model)
    if sum(size_of(tensor) for tensor in model.graph.initializer) > LARGEST:
        external: dict[str, Any] = {"save_as_external_data": True, "all_tensors_to_one_file": True}
        external |= {"location": WEIGHTS, "size_threshold": SMALLEST_OUTSIDE}
        onnx.save_model(model, file, **external)
    else:
        with file.open("wb") as stream:
            stream.writelines(_encode(model))


def _check(model: onnx.ModelProto) -> None:
    """Check a model with large weights declared as inputs: the checker would copy them twice."""
    small = _without_weights(model)
    for tensor in model.graph.initializer:
        if size_of(tensor) < SMALLEST_OUTSIDE:
            small.graph.initializer.append(tensor)
        else:
            value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            small.graph.input.append(value)
    try:
        onnx.checker.check_model(small, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        reason = " ".join(str(error).split())
        raise StageFailed(f"the exported graph is not valid ONNX: {reason}") from error


def write_mapped(model: onnx.ModelProto, file: Path) -> None:
    """Write a written model's graph beside its file, with the weights left where they are there."""
    # onnxruntime reads a whole file into memory and copies the weights out of it, which takes more
    # than twice its size; weights in another file it maps. So an export is compared with its source
    # on the file's own bytes, and is in memory once.
    if any(tensor.data_location for tensor in model.graph.initializer):
        return  # its weights are in another file already
    small = _without_weights(model)
    end = len(_encode_up_to_weights(model))
    for tensor in model.graph.initializer:
        size, length = size_of(tensor), len(tensor.raw_data)
        end += len(_field_header(INITIALIZER, size)) + size
        if length < SMALLEST_OUTSIDE or not is_plain(tensor):
            small.graph.initializer.append(tensor)
            continue
        outside = small.graph.initializer.add()
        outside.CopyFrom(_without_data(tensor))
        outside.data_location = onnx.TensorProto.EXTERNAL
        # The raw data of a plain tensor is the last of its encoding.
        place = {"location": file.name, "offset": end - length, "length": length}
        for key, value in place.items():
            outside.external_data.add(key=key, value=str(value))
    _mapped_file(file).write_bytes(small.SerializeToString(deterministic=True))


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


def is_plain(tensor: onnx.TensorProto) -> bool:
    """Whether a tensor has a name, sizes, a type and raw data, and no other field."""
    return tensor.HasField("raw_data") and not any(
        len(getattr(tensor, field.name)) if field.is_repeated else tensor.HasField(field.name)
        for field in onnx.TensorProto.DESCRIPTOR.fields
        if field.name not in PLAIN_FIELDS
    )


def size_of(tensor: onnx.TensorProto) -> int:
    """Return a tensor's bytes in protobuf's encoding."""
    if not is_plain(tensor):
        return int(tensor.ByteSize())
    # ByteSize of a plain tensor would encode it, and have its data in memory three times.
    length = len(tensor.raw_data)
    return int(_without_data(tensor).ByteSize()) + len(_field_header(RAW_DATA, length)) + length


def _encode(model: onnx.ModelProto) -> Iterator[bytes]:
    """Yield a model in protobuf's encoding, each weight on its own."""
    # Serialized as a whole, a model is in memory twice.
    yield _encode_up_to_weights(model)
    for tensor in model.graph.initializer:
        yield _field_header(INITIALIZER, size_of(tensor))
        if is_plain(tensor):
            data = tensor.raw_data
            before = _without_data(tensor).SerializeToString(deterministic=True)
            yield before + _field_header(RAW_DATA, len(data))
            yield data
        else:
            yield tensor.SerializeToString(deterministic=True)
    yield _encode_fields(model.graph, after=INITIALIZER)
    yield _encode_fields(model, after=GRAPH)


def _encode_up_to_weights(model: onnx.ModelProto) -> bytes:
    before = _encode_fields(model.graph, before=INITIALIZER)
    after = _encode_fields(model.graph, after=INITIALIZER)
    sizes = [size_of(tensor) for tensor in model.graph.initializer]
    weights = sum(len(_field_header(INITIALIZER, size)) + size for size in sizes)
    header = _field_header(GRAPH, len(before) + weights + len(after))
    return _encode_fields(model, before=GRAPH) + header + before


def _encode_fields(message: Any, *, before: int = FIELD_NUMBERS_END, after: int = 0) -> bytes:
    """Encode the fields of a message whose numbers are in a range."""
    fields = [field for field, _ in message.ListFields() if not after < field.number < before]
    selected = _without(message, *(field.name for field in fields))
    encoded: bytes = selected.SerializeToString(deterministic=True)
    return encoded


def _without_data(tensor: onnx.TensorProto) -> onnx.TensorProto:
    return onnx.TensorProto(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type)


def _without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    small: onnx.ModelProto = _without(model, "graph")
    small.graph.CopyFrom(_without(model.graph, "initializer"))
    return small


def _without(message: Any, *names: str) -> Any:
    """Return a copy of a message without some of its fields."""
    copy = type(message)()
    for field, value in message.ListFields():
        if field.name in names:
            continue
        # How a field says that it is repeated depends on protobuf's version.
        if hasattr(value, "extend"):
            getattr(copy, field.name).extend(value)
        elif hasattr(value, "CopyFrom"):
            getattr(copy, field.name).CopyFrom(value)
        else:
            setattr(copy, field.name, value)
    return copy


def _field_header(field: int, size: int) -> bytes:
    """Return what protobuf writes before a field's bytes: its number and type 2, and its length."""
    return _varint(field << 3 | 2) + _varint(size)


def _varint(number: int) -> bytes:
    """Encode a number seven bits at a time, the lowest first."""
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes((*encoded, number))
