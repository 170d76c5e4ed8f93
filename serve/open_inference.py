"""The Open Inference Protocol's binary extension and metadata, over its JSON of the handler.

A refusal is ``ValueError(status, message)``, as in :mod:`serve.worker.wire`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from serve.worker.inference_protocol import DATATYPES, from_protocol, is_protocol
from serve.worker.tensors import in_order
from serve.worker.wire import parse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from serve.interface import Interface, Tensor
    from serve.worker.tensors import Array, Named, Specs

HEADER_LENGTH = "inference-header-content-length"
EXTENSIONS = ("binary_tensor_data",)


@dataclass(frozen=True)
class Wanted:
    """How the answer to a request of the protocol is wanted."""

    id: str | None
    outputs: tuple[str, ...]
    binary: frozenset[str]
    """Those of the outputs that are wanted as bytes."""


def split(body: bytes, header_length: str) -> tuple[Any, memoryview]:
    """Return the parsed JSON at a body's beginning, and the raw tensors behind it."""
    if not header_length.isascii() or not header_length.isdigit():
        _refuse(f"Inference-Header-Content-Length is {header_length[:40]!r}, expected a number")
    length = int(header_length)
    if length > len(body):
        _refuse(f"Inference-Header-Content-Length is {length}, the body has {len(body)} bytes")
    value = parse(body[:length])
    if not is_protocol(value):
        _refuse('the body is not {"inputs": [{"name", "shape", "datatype", ...}, ...]}')
    return value, memoryview(body)[length:]


def arrays_of(value: Named, raw: memoryview, specs: Specs) -> list[Array]:
    """Return a request's arrays in the signature's order.

    Args:
        value: the parsed JSON.
        raw: the bytes behind it, of the tensors that say so, in order.
        specs: name, shape and dtype of each input.
    """
    known = {spec["name"]: spec for spec in specs}
    arrays: dict[str, Array] = {}
    for i, tensor in enumerate(value["inputs"]):
        name = tensor.get("name")
        if not isinstance(name, str) or name not in known or name in arrays:
            _refuse(f"inputs[{i}].name is {_shown(name)}, expected each once of {[*known]}")
        size = _parameters(tensor).get("binary_data_size")
        if size is None:
            (arrays[name],) = from_protocol({"inputs": [tensor]}, [known[name]])
        else:
            arrays[name] = _from_bytes(tensor, size, raw, known[name])
            raw = raw[arrays[name].nbytes :]
    if len(raw):
        _refuse(f"{len(raw)} bytes follow the last tensor, expected none")
    return in_order(arrays, specs)


def wanted_of(value: Named, outputs: Sequence[str]) -> Wanted:
    """Return how a request wants its answer.

    Args:
        value: the parsed JSON.
        outputs: names of the model's outputs.
    """
    everything = bool(_parameters(value).get("binary_data_output"))
    asked = value.get("outputs") or [{"name": name} for name in outputs]
    if not isinstance(asked, list) or not all(isinstance(each, dict) for each in asked):
        _refuse(f"outputs is {_shown(asked)}, expected a list of objects")
    names = [each.get("name") for each in asked]
    for i, name in enumerate(names):
        if name not in outputs or name in names[:i]:
            _refuse(f"outputs[{i}].name is {_shown(name)}, expected each once of {[*outputs]}")
    binary = (e["name"] for e in asked if _parameters(e).get("binary_data", everything))
    id_ = None if value.get("id") is None else str(value["id"])
    return Wanted(id_, tuple(names), frozenset(binary))


def encode(
    model_name: str, named: Mapping[str, Array], wanted: Wanted
) -> tuple[bytes, dict[str, str]]:
    """Return an answer's body and headers.

    Raises:
        ValueError: an output that is wanted as JSON is infinite, which JSON cannot say.
    """
    tensors, raw = [], []
    for name in wanted.outputs:
        array = named[name]
        tensor: dict[str, Any] = {"name": name, "shape": [*array.shape]}
        tensor["datatype"] = DATATYPES[str(array.dtype)]
        if name in wanted.binary:
            raw.append(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
            tensor["parameters"] = {"binary_data_size": len(raw[-1])}
        elif array.dtype.kind == "f" and np.isinf(array).any():
            message = f"{name} holds infinity, which JSON cannot: ask for binary_data_output"
            raise ValueError(406, message)
        else:
            tensor["data"] = array.ravel().tolist()
        tensors.append(tensor)
    answer: dict[str, Any] = {"model_name": model_name, "model_version": "1", "outputs": tensors}
    if wanted.id is not None:
        answer["id"] = wanted.id
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


def _from_bytes(tensor: Named, size: Any, raw: memoryview, spec: Named) -> Array:
    name, shape, expected = spec["name"], tensor.get("shape"), DATATYPES[spec["dtype"]]
    if tensor.get("datatype") != expected:
        _refuse(f"{name}: datatype is {_shown(tensor.get('datatype'))}, expected {expected!r}")
    if not isinstance(shape, list) or not all(type(d) is int and 0 <= d < 2**31 for d in shape):
        _refuse(f"{name}: shape is {_shown(shape)}, expected a list of sizes")
    dtype = np.dtype(spec["dtype"]).newbyteorder("<")
    needed = math.prod(shape) * dtype.itemsize
    if size != needed or len(raw) < needed:
        found = f"{_shown(size)}, and {len(raw)} bytes are left"
        _refuse(f"{name}: binary_data_size is {found}, expected {needed} for shape {shape}")
    # A copy: the bytes begin anywhere, and native code may count on its types' alignment.
    return np.frombuffer(raw[:needed], dtype).reshape(shape).astype(spec["dtype"])


def _parameters(owner: Named) -> Named:
    parameters = owner.get("parameters") or {}
    if not isinstance(parameters, dict):
        _refuse(f"parameters is {_shown(parameters)}, expected an object")
    return parameters


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _refuse(message: str) -> NoReturn:
    raise ValueError(400, message)
