"""The Open Inference Protocol (version 2): requests to arrays, arrays to answers.

Tensors are JSON, or by the binary extension their bytes behind it.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from serve.worker.http_errors import NOT_ACCEPTABLE, UNREADABLE, shown
from serve.worker.tensors import exact, in_order

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from serve.worker.tensors import Array, Named, Specs

HEADER_LENGTH = "inference-header-content-length"
"""The header that says where the JSON ends, and bytes begin."""
DATATYPES = {
    "bool": "BOOL",
    **{
        f"{sign}int{bits}": f"{sign}int{bits}".upper()
        for sign in ("", "u")
        for bits in (8, 16, 32, 64)
    },
    **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)},
}
WORDS = "BYTES"
"""The datatype of texts."""
PIECE = 1 << 16
"""Numbers that are written at once: for some 20 ms."""
LABELS = ("labels", "probabilities")
"""Further outputs, where classes have names: the likeliest of each row."""


def is_protocol(value: Any) -> bool:
    """Return whether a parsed body lists its tensors as the protocol does."""
    inputs = value.get("inputs") if isinstance(value, dict) else None
    return isinstance(inputs, list) and bool(inputs) and all(isinstance(i, dict) for i in inputs)


def split(body: bytes, header_length: str) -> tuple[bytes, memoryview]:
    """Return the JSON at a body's beginning, and the raw tensors behind it."""
    found = f"{HEADER_LENGTH} is {header_length[:40]!r}"
    if not header_length.isascii() or not header_length.isdigit():
        raise ValueError(UNREADABLE, f"{found}, expected a number")
    length = int(header_length)
    if length > len(body):
        raise ValueError(UNREADABLE, f"{found}, the body has {len(body)} bytes")
    return body[:length], memoryview(body)[length:]


def from_protocol(
    value: Named,
    specs: Specs,
    raw: memoryview | bytes = b"",
    read_texts: Callable[[list[str]], list[Array]] | None = None,
) -> list[Array]:
    """Return a request's arrays in the signature's order.

    Args:
        value: the parsed JSON.
        specs: name, shape and dtype of each input.
        raw: the bytes behind the JSON, of the tensors that say so, in order.
        read_texts: how texts become the inputs, where the model takes texts.
    """
    if not is_protocol(value):
        form = '{"inputs": [{"name", "shape", "datatype", ...}, ...]}'
        raise ValueError(UNREADABLE, f"the body is not {form}")
    tensors: dict[str, tuple[Named, memoryview | bytes]] = {}
    for tensor in value["inputs"]:
        size = parameters(tensor).get("binary_data_size")
        for key in ("name", "shape", "datatype", *(["data"] if size is None else [])):
            if key not in tensor:
                message = f"inputs: a tensor has {shown([*tensor])}, expected a {key!r}"
                raise ValueError(UNREADABLE, message)
        name = shown(tensor["name"])
        if size is not None and (type(size) is not int or not 0 <= size <= len(raw)):
            message = f"{name}: binary_data_size is {shown(size)}, and {len(raw)} bytes are left"
            raise ValueError(UNREADABLE, message)
        if not isinstance(tensor["name"], str) or tensor["name"] in tensors:
            raise ValueError(UNREADABLE, f"inputs: {name} is given twice, or no name")
        tensors[tensor["name"]] = (tensor, raw[: size or 0])
        raw = raw[size or 0 :]
    if len(raw):
        raise ValueError(UNREADABLE, f"{len(raw)} bytes follow the last tensor, expected none")
    first = value["inputs"][0]
    if read_texts and len(tensors) == 1 and first["datatype"] == WORDS and "data" in first:
        return read_texts(_texts(first))
    pairs = zip(in_order(tensors, specs), specs, strict=True)
    return [_array(tensor, data, spec) for (tensor, data), spec in pairs]


def _texts(tensor: Named) -> list[str]:
    texts, shape = tensor["data"], tensor["shape"]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(UNREADABLE, f"{tensor['name']}: data is not a list of texts")
    if shape not in ([len(texts)], [len(texts), 1]) or not texts:
        message = f"{tensor['name']} has shape {shown(shape)}, expected [{len(texts) or 1}]"
        raise ValueError(UNREADABLE, message)
    return texts


def _array(tensor: Named, raw: memoryview | bytes, spec: Named) -> Array:
    name, shape, expected = tensor["name"], tensor["shape"], DATATYPES[spec["dtype"]]
    if tensor["datatype"] != expected:
        found = shown(tensor["datatype"])
        raise ValueError(UNREADABLE, f"{name}: datatype is {found}, expected {expected!r}")
    if not isinstance(shape, list) or not all(type(d) is int and 0 <= d < 2**31 for d in shape):
        raise ValueError(UNREADABLE, f"{name}: shape is {shown(shape)}, expected a list of sizes")
    if "binary_data_size" in parameters(tensor):
        return _from_bytes(raw, shape, spec)
    array = exact(tensor["data"], spec)
    nested = array.ndim > 1  # the data of a tensor may be flat, or nested as its shape is
    if array.size != math.prod(shape) or (nested and list(array.shape) != shape):
        size = list(array.shape) if nested else array.size
        message = f"{name}: data has {size} elements, expected those of shape {shape}"
        raise ValueError(UNREADABLE, message)
    return array.reshape(shape)


def _from_bytes(raw: memoryview | bytes, shape: list[int], spec: Named) -> Array:
    dtype = np.dtype(spec["dtype"]).newbyteorder("<")
    needed = math.prod(shape) * dtype.itemsize
    if len(raw) != needed:
        found = f"{spec['name']}: binary_data_size is {len(raw)}"
        raise ValueError(UNREADABLE, f"{found}, expected {needed} for shape {shape}")
    # A copy: the bytes begin anywhere, and native code may count on its types' alignment.
    return np.frombuffer(raw, dtype).reshape(shape).astype(spec["dtype"])


def wanted_of(value: Named, outputs: Sequence[str]) -> dict[str, Any]:
    """Return how the answer to a request is wanted: its ``id``, ``outputs``, those in ``binary``.

    Args:
        value: the parsed JSON.
        outputs: the names that may be asked for; all are, where the request names none.
    """
    everything = parameters(value).get("binary_data_output", False)
    asked = value.get("outputs") or [{"name": name} for name in outputs]
    if not isinstance(asked, list) or not all(isinstance(each, dict) for each in asked):
        raise ValueError(UNREADABLE, f"outputs is {shown(asked)}, expected objects with a 'name'")
    names = [each.get("name") for each in asked]
    for i, name in enumerate(names):
        if name not in outputs or name in names[:i]:
            found = f"outputs[{i}].name is {shown(name)}"
            raise ValueError(UNREADABLE, f"{found}, expected each once of {[*outputs]}")
    binary = [e["name"] for e in asked if parameters(e).get("binary_data", everything)]
    return {"id": value.get("id"), "outputs": names, "binary": binary}


def to_protocol(
    named: Named, wanted: Named, model_name: str, labels: list[list[dict[str, Any]]]
) -> tuple[bytes, dict[str, str]]:
    """Return an answer's body and headers.

    Args:
        named: the outputs by name; none of them holds NaN.
        wanted: what :func:`wanted_of` gave.
        model_name: under which the model is served.
        labels: the likeliest classes of each row, where they have names.
    """
    outputs = dict(named)
    for name, key in zip(LABELS, ("label", "probability"), strict=True) if labels else ():
        outputs[name] = np.array([[each[key] for each in row] for row in labels])
    tensors, raw = [], []
    for name in wanted["outputs"]:
        array = outputs[name]
        datatype = DATATYPES.get(str(array.dtype), WORDS)
        tensor: dict[str, Any] = {"name": name, "shape": list(array.shape), "datatype": datatype}
        in_bytes = name in wanted["binary"] and datatype != WORDS
        if in_bytes:
            raw.append(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
            tensor["parameters"] = {"binary_data_size": len(raw[-1])}
        elif array.dtype.kind == "f" and np.isinf(array).any():
            message = f"{name} holds infinity, which JSON cannot: ask for binary_data_output"
            raise ValueError(NOT_ACCEPTABLE, message)
        text = json.dumps(tensor)
        tensors.append(text if in_bytes else f'{text[:-1]}, "data": {flat_json(array)}}}')
    answer: dict[str, Any] = {"model_name": model_name}
    if wanted["id"] is not None:
        answer["id"] = str(wanted["id"])
    body = f'{json.dumps(answer)[:-1]}, "outputs": [{", ".join(tensors)}]}}'.encode()
    if not raw:
        return body, {"content-type": "application/json"}
    headers = {"content-type": "application/octet-stream", HEADER_LENGTH: str(len(body))}
    return b"".join([body, *raw]), headers


def flat_json(array: Array) -> str:
    """Return an array's elements as a JSON list.

    It is written in pieces: no other thread runs while ``json`` writes one.
    """
    flat = array.ravel()
    pieces = (flat[at : at + PIECE].tolist() for at in range(0, flat.size, PIECE))
    return f"[{', '.join(json.dumps(piece, allow_nan=False)[1:-1] for piece in pieces)}]"


def parameters(owner: Named) -> Named:
    """Return the protocol's ``parameters`` of a request, a tensor or an output."""
    found = owner.get("parameters") or {}
    if not isinstance(found, dict):
        raise ValueError(UNREADABLE, f"parameters is {shown(found)}, expected an object")
    return found
