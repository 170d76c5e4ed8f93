"""Open Inference Protocol v2 over HTTP: JSON tensors, and raw ones behind a JSON header.

A refusal is ``ValueError(status, message)``, as in :mod:`serve.worker.wire`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from serve.interface import Interface, Tensor
    from serve.worker.wire import Array

HEADER_LENGTH = "inference-header-content-length"
DATATYPES = {
    "bool": "BOOL",
    **{
        f"{kind}{bits}": f"{kind.upper()}{bits}"
        for kind in ("int", "uint")
        for bits in (8, 16, 32, 64)
    },
    **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)},
}
EXTENSIONS = ("binary_tensor_data",)


@dataclass(frozen=True)
class Request:
    """A request's inputs, and how its answer is wanted."""

    arrays: list[Array]
    """In the signature's order."""
    id: str | None = None
    outputs: tuple[str, ...] | None = None
    """Names of the outputs wanted; all where None."""
    binary: frozenset[str] = frozenset()
    """Names of the outputs wanted as raw bytes."""


def is_request(value: Any) -> bool:
    """Whether parsed JSON is of this protocol: a list of tensors, each an object."""
    inputs = value.get("inputs") if isinstance(value, dict) else None
    return isinstance(inputs, list) and bool(inputs) and isinstance(inputs[0], dict)


def parse(text: bytes) -> Any:
    """Return parsed JSON; NaN and Infinity, which JSON does not have, are refused."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise ValueError(400, "the body is JSON nested too deeply") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(400, f"the body is no JSON: {error}") from None


def split(body: bytes, header_length: str) -> tuple[Any, memoryview]:
    """Return the parsed header of a body, and the raw tensors behind it."""
    if not header_length.isascii() or not header_length.isdigit():
        _refuse(f"Inference-Header-Content-Length is {header_length[:40]!r}, expected a number")
    length = int(header_length)
    if length > len(body):
        _refuse(f"Inference-Header-Content-Length is {length}, the body has {len(body)} bytes")
    return parse(body[:length]), memoryview(body)[length:]


def decode(
    value: Any, raw: memoryview, inputs: Sequence[Tensor], outputs: Sequence[str]
) -> Request:
    """Return a parsed request.

    Args:
        value: the JSON.
        raw: what follows it.
        inputs: the model's inputs, in order.
        outputs: names of its outputs.
    """
    if not is_request(value):
        _refuse('the body is not {"inputs": [{"name", "shape", "datatype", "data"}, ...]}')
    given: dict[str, Array] = {}
    known = {tensor.name: tensor for tensor in inputs}
    for i, tensor in enumerate(value["inputs"]):
        name = tensor.get("name") if isinstance(tensor, dict) else None
        if not isinstance(name, str) or name not in known or name in given:
            _refuse(f"inputs[{i}].name is {_shown(name)}, expected each once of {[*known]}")
        given[name], raw = _array(tensor, known[name], raw)
    if len(given) != len(known):
        _refuse(f"the inputs are {sorted(given)}, expected {[*known]}")
    if len(raw):
        _refuse(f"{len(raw)} bytes follow the last tensor, expected none")
    wanted, binary = _wanted(value, outputs)
    id_ = value.get("id")
    return Request(
        [given[name] for name in known], None if id_ is None else str(id_), wanted, binary
    )


def encode(
    model_name: str, named: Mapping[str, Array], request: Request
) -> tuple[bytes, dict[str, str]]:
    """Return an answer's body and headers.

    Raises:
        ValueError: an output is NaN, or infinite and wanted as JSON, which cannot say so.
    """
    tensors, raw = [], []
    for name in request.outputs or named:
        array = named[name]
        if array.dtype.kind == "f" and np.isnan(array).any():
            raise ValueError(500, f"the model answered NaN in {name}")
        tensor: dict[str, Any] = {"name": name, "datatype": DATATYPES[str(array.dtype)]}
        tensor["shape"] = [*array.shape]
        if name in request.binary:
            raw.append(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes())
            tensor["parameters"] = {"binary_data_size": len(raw[-1])}
        else:
            tensor["data"] = array.ravel().tolist()
        tensors.append(tensor)
    answer: dict[str, Any] = {"model_name": model_name, "model_version": "1", "outputs": tensors}
    if request.id is not None:
        answer["id"] = request.id
    text = json.dumps(answer, allow_nan=False).encode()
    if not raw:
        return text, {"content-type": "application/json"}
    headers = {"content-type": "application/octet-stream", HEADER_LENGTH: str(len(text))}
    return b"".join([text, *raw]), headers


def model_metadata(name: str, kind: str, interface: Interface) -> dict[str, Any]:
    """Return what ``GET /v2/models/{name}`` answers."""
    return {
        "name": name,
        "versions": ["1"],
        "platform": kind,
        "inputs": [_described(tensor) for tensor in interface.inputs],
        "outputs": [_described(tensor) for tensor in interface.outputs],
    }


def _described(tensor: Tensor) -> dict[str, Any]:
    datatype = DATATYPES[tensor.dtype]
    return {"name": tensor.name, "datatype": datatype, "shape": [*tensor.shape]}


def _array(tensor: dict[str, Any], expected: Tensor, raw: memoryview) -> tuple[Array, memoryview]:
    """Return one input, and the raw bytes that are left for the next."""
    name, datatype = expected.name, DATATYPES[expected.dtype]
    if tensor.get("datatype") != datatype:
        _refuse(f"{name}: datatype is {_shown(tensor.get('datatype'))}, expected {datatype}")
    shape = tensor.get("shape")
    if not isinstance(shape, list) or not all(type(d) is int and 0 <= d < 2**31 for d in shape):
        _refuse(f"{name}: shape is {_shown(shape)}, expected sizes such as {[*expected.shape]}")
    count = math.prod(shape)
    parameters = tensor.get("parameters")
    size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
    if size is None:
        if "data" not in tensor:
            _refuse(f"{name}: found neither data nor parameters.binary_data_size")
        return _from_numbers(tensor["data"], expected, shape, count), raw
    dtype = np.dtype(expected.dtype).newbyteorder("<")
    needed = count * dtype.itemsize
    if size != needed or len(raw) < needed:
        found = f"{_shown(size)} of {len(raw)} bytes that are left"
        _refuse(f"{name}: binary_data_size is {found}, expected {needed} for shape {shape}")
    array = np.frombuffer(raw[:needed], dtype).reshape(shape)
    return array.astype(expected.dtype, copy=False), raw[needed:]


def _from_numbers(data: Any, expected: Tensor, shape: list[int], count: int) -> Array:
    name = expected.name
    try:
        found = np.asarray(data)
    except (ValueError, OverflowError):
        _refuse(f"{name}: data is no regular list of numbers")
    if found.size != count:
        _refuse(f"{name}: data holds {found.size} values, expected {count} for shape {shape}")
    if found.dtype.kind not in "biuf" and count:
        _refuse(f"{name}: data holds values that are not {DATATYPES[expected.dtype]}")
    with np.errstate(over="ignore", invalid="ignore"):
        array = found.astype(expected.dtype)
    if array.dtype.kind != "f" and (array != found).any():
        _refuse(f"{name}: data holds values that are not {DATATYPES[expected.dtype]}")
    return array.reshape(shape)


def _wanted(
    value: dict[str, Any], outputs: Sequence[str]
) -> tuple[tuple[str, ...] | None, frozenset[str]]:
    """Return the outputs asked for, and those of them asked for as bytes."""
    everything = _flag(value, "binary_data_output")
    asked = value.get("outputs")
    if asked is None:
        return None, frozenset(outputs if everything else ())
    if not isinstance(asked, list) or not all(isinstance(each, dict) for each in asked):
        _refuse(f"outputs is {_shown(asked)}, expected a list of objects")
    names = tuple(each.get("name") for each in asked)
    for i, name in enumerate(names):
        if name not in outputs:
            _refuse(f"outputs[{i}].name is {_shown(name)}, expected one of {[*outputs]}")
    binary = {each["name"] for each in asked if _flag(each, "binary_data", everything)}
    return names or None, frozenset(binary if names else outputs if everything else ())


def _flag(owner: dict[str, Any], key: str, default: bool = False) -> bool:
    parameters = owner.get("parameters") or {}
    if not isinstance(parameters, dict):
        _refuse(f"parameters is {_shown(parameters)}, expected an object")
    return bool(parameters.get(key, default))


def _no_number(found: str) -> NoReturn:
    _refuse(f"the body holds {found}, which is no JSON number")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _refuse(message: str) -> NoReturn:
    raise ValueError(400, message)
