"""ONNX models: from torch's exporter to protobuf, written to files and read back."""

from __future__ import annotations

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

WEIGHTS = "model.onnx.data"
"""Where the weights of a large model lie, beside its file."""
LARGEST = 2**31 - 2**20
"""Bytes of weights that one file may hold: protobuf ends at 2 GiB, the graph included."""
SMALLEST_OUTSIDE = 1024
"""Bytes from which a tensor is put beside the file; shapes stay in it, which inference reads."""
GRAPH = onnx.ModelProto.GRAPH_FIELD_NUMBER
NUMBERS = onnx.TensorProto.RAW_DATA_FIELD_NUMBER
INITIALIZER = onnx.GraphProto.INITIALIZER_FIELD_NUMBER
PLAIN = ("name", "dims", "data_type", "raw_data")
"""Fields of a tensor that has nothing to tell but its numbers."""
MOST = 2**29
"""No field has a larger number."""


def write(model: onnx.ModelProto, file: Path) -> None:
    """Write a model and check it against the ONNX standard.

    What is too large for protobuf has its weights in a second file; ``model`` then keeps none.

    Raises:
        StageFailed: it breaks the standard.
    """
    _check(model)
    if sum(size_of(tensor) for tensor in model.graph.initializer) > LARGEST:
        onnx.save_model(
            model,
            file,
            save_as_external_data=True,
            all_tensors_to_one_file=True,
            location=WEIGHTS,
            size_threshold=SMALLEST_OUTSIDE,
        )
    else:
        with file.open("wb") as stream:
            stream.writelines(_parts(model))


def _check(model: onnx.ModelProto) -> None:
    """Check a model; its weights stand as inputs, as the checker would copy them twice."""
    small = without_weights(model)
    for tensor in model.graph.initializer:
        if size_of(tensor) < SMALLEST_OUTSIDE:
            small.graph.initializer.append(tensor)
        else:
            value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            small.graph.input.append(value)
    try:
        onnx.checker.check_model(small, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        told = " ".join(str(error).split())
        raise StageFailed(f"the exported graph is not valid ONNX: {told}") from error


def _parts(model: onnx.ModelProto) -> Iterator[bytes]:
    """Yield a model's bytes in protobuf's encoding, each weight on its own.

    Serialized as a whole, a model is in memory twice.
    """
    yield _before_weights(model)
    for tensor in model.graph.initializer:
        yield _head(INITIALIZER, size_of(tensor))
        yield from _fields(tensor)
    yield _only(model.graph, after=INITIALIZER)
    yield _only(model, after=GRAPH)


def places(model: onnx.ModelProto) -> Iterator[int]:
    """Yield where each weight ends in the file that a model is written to, in bytes.

    Its numbers are the last of it, where it :func:`is_plain`.
    """
    place = len(_before_weights(model))
    for tensor in model.graph.initializer:
        place += len(_head(INITIALIZER, size_of(tensor))) + size_of(tensor)
        yield place


def _before_weights(model: onnx.ModelProto) -> bytes:
    """Return what stands before the weights in a model's file."""
    first, then = (
        _only(model.graph, before=INITIALIZER),
        _only(model.graph, after=INITIALIZER),
    )
    sizes = [size_of(tensor) for tensor in model.graph.initializer]
    weights = sum(len(_head(INITIALIZER, size)) + size for size in sizes)
    head = _head(GRAPH, len(first) + weights + len(then))
    return _only(model, before=GRAPH) + head + first


def bare(tensor: onnx.TensorProto) -> onnx.TensorProto:
    """Return a tensor without its numbers."""
    return onnx.TensorProto(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type)


def is_plain(tensor: onnx.TensorProto) -> bool:
    """Whether a tensor is a name, sizes, a type, and then its numbers as bytes."""
    return tensor.HasField("raw_data") and not any(
        len(getattr(tensor, field.name)) if field.is_repeated else tensor.HasField(field.name)
        for field in onnx.TensorProto.DESCRIPTOR.fields
        if field.name not in PLAIN
    )


def size_of(tensor: onnx.TensorProto) -> int:
    """Return a tensor's bytes in protobuf's encoding.

    To count them, protobuf writes them, and then has the numbers in memory three times: a plain
    tensor's are counted here.
    """
    if not is_plain(tensor):
        return int(tensor.ByteSize())
    length = len(tensor.raw_data)
    return int(bare(tensor).ByteSize()) + len(_head(NUMBERS, length)) + length


def _fields(tensor: onnx.TensorProto) -> tuple[bytes, ...]:
    """Return a tensor's bytes, its numbers on their own: protobuf would copy them twice."""
    if not is_plain(tensor):
        return (tensor.SerializeToString(deterministic=True),)
    numbers = tensor.raw_data
    first = bare(tensor).SerializeToString(deterministic=True)
    return first + _head(NUMBERS, len(numbers)), numbers


def _only(message: Any, *, before: int = MOST, after: int = 0) -> bytes:
    """Return the bytes of some of a message's fields, which are told apart by their numbers."""
    fields = [field for field, _ in message.ListFields() if not after < field.number < before]
    kept = _without(message, *(field.name for field in fields))
    serialized: bytes = kept.SerializeToString(deterministic=True)
    return serialized


def without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model's graph alone."""
    small: onnx.ModelProto = _without(model, "graph")
    small.graph.CopyFrom(_without(model.graph, "initializer"))
    return small


def _without(message: Any, *names: str) -> Any:
    """Return a copy of a message without some of its fields."""
    kept = type(message)()
    for field, value in message.ListFields():
        if field.name in names:
            continue
        if hasattr(value, "extend"):  # how to tell depends on protobuf's version
            getattr(kept, field.name).extend(value)
        elif hasattr(value, "CopyFrom"):
            getattr(kept, field.name).CopyFrom(value)
        else:
            setattr(kept, field.name, value)
    return kept


def _head(field: int, size: int) -> bytes:
    """Return what stands before a part of some bytes: its field's number, and its length."""
    return bytes(_varint(field << 3 | 2)) + bytes(_varint(size))


def _varint(number: int) -> Iterator[int]:
    """Yield a number seven bits at a time, the lowest first."""
    while number > 127:
        yield number & 127 | 128
        number >>= 7
    yield number


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


def proto_of(exported: ONNXProgram, *, emptied: bool) -> onnx.ModelProto:
    """Return an exported program as protobuf.

    Stack traces are left out: they outweigh the weights of a small model.

    Args:
        exported: what torch's exporter returned; its model keeps no weights.
        emptied: whether the tensors of its program go as well, each as soon as it is copied.
            Letting go of the program does not do it: onnxscript (0.7) holds the last graphs that
            it rewrote.
    """
    graph = exported.model.graph
    for node in graph.all_nodes():
        node.metadata_props.clear()
    tensors: dict[str, Any] = {n: value.const_value for n, value in graph.initializers.items()}
    for value in graph.initializers.values():
        value.const_value = ir.tensor(np.empty(0, np.float32))
    model: onnx.ModelProto = exported.model_proto
    raw = {name: getattr(tensor, "raw", None) for name, tensor in tensors.items()}
    # A tensor may have several names, and is needed up to the last one.
    last = {id(tensor): name for name, tensor in raw.items()}
    program = exported.exported_program
    if emptied and program is not None:
        _empty_(*(t for t in program.state_dict.values() if id(t) not in last))
    for proto in model.graph.initializer:
        name = proto.name
        tensor, held = tensors.pop(name), raw.pop(name)
        proto.dims[:] = tensor.shape.numpy()
        proto.data_type = tensor.dtype.value
        numbers = tensor.tobytes()
        if emptied and isinstance(held, torch.Tensor) and last[id(held)] == name:
            _empty_(held)
        del tensor, held
        proto.raw_data = numbers
    return model


def _empty_(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        tensor.data = tensor.data.new_empty(0)
