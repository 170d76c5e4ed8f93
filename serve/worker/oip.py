"""The Open Inference Protocol v2: requests to arrays, arrays to responses.

Tensors are JSON; with the binary tensor data extension, raw bytes after the JSON.
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

try:
    import pydantic_core
except ImportError:  # a TorchServe archive needs numpy and the model's runtime alone
    pydantic_core = None  # type: ignore[assignment]

from compress.serve.worker.http_errors import NOT_ACCEPTABLE, UNREADABLE, abbreviated
from compress.serve.worker.tensors import dtype_name, in_signature_order, to_exact_array

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from compress.serve.worker.tensors import Array, Named, Specs

fast_json: Any = pydantic_core
"""Reads and writes JSON in a tenth of json's time, where it is installed."""
HEADER_LENGTH = "inference-header-content-length"
"""The HTTP header with the length of the JSON, after which raw tensors begin."""
DATATYPES = {
    "bool": "BOOL",
    **{
        f"{sign}int{bits}": f"{sign}int{bits}".upper()
        for sign in ("", "u")
        for bits in (8, 16, 32, 64)
    },
    **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)},
}
TEXT_DATATYPE = "BYTES"
"""The protocol's datatype of strings."""
JSON_CHUNK = 1 << 16
"""Numbers per call of `json.dumps`: about 20 ms, during which no other thread runs."""
LABELS = ("labels", "probabilities")
"""Additional outputs if classes have names: the most probable ones of each row."""


def is_protocol(value: Any) -> bool:
    """Return whether a parsed JSON body has the protocol's list of input tensors."""
    inputs = value.get("inputs") if isinstance(value, dict) else None
    return isinstance(inputs, list) and bool(inputs) and all(isinstance(i, dict) for i in inputs)


def split_body(body: bytes, header_length: str) -> tuple[bytes, memoryview]:
    """Split a body into its JSON and the raw tensors after it."""
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
    """Return the arrays of a parsed request, and the raw bytes after it, in the signature's order.

    `read_texts` converts texts to the inputs, if the model takes texts.
    """
    if not is_protocol(value):
        form = '{"inputs": [{"name", "shape", "datatype", ...}, ...]}'
        raise ValueError(UNREADABLE, f"the body is not {form}")
    tensors: dict[str, tuple[Named, memoryview | bytes]] = {}
    for tensor in value["inputs"]:
        size = parameters_of(tensor).get("binary_data_size")
        for key in ("name", "shape", "datatype", *(["data"] if size is None else [])):
            if key not in tensor:
                message = f"inputs: a tensor has {abbreviated([*tensor])}, expected a {key!r}"
                raise ValueError(UNREADABLE, message)
        name = tensor["name"]
        if size is not None and (type(size) is not int or not 0 <= size <= len(raw)):
            found = f"{abbreviated(name)}: binary_data_size is {abbreviated(size)}"
            raise ValueError(UNREADABLE, f"{found}, and {len(raw)} bytes are left")
        if not isinstance(name, str) or name in tensors:
            message = f"inputs: {abbreviated(name)} is given twice, or no name"
            raise ValueError(UNREADABLE, message)
        tensors[name] = (tensor, raw[: size or 0])
        raw = raw[size or 0 :]
    if len(raw):
        raise ValueError(UNREADABLE, f"{len(raw)} bytes follow the last tensor, expected none")
    first = value["inputs"][0]
    if read_texts and len(tensors) == 1 and first["datatype"] == TEXT_DATATYPE and "data" in first:
        return read_texts(_texts(first))
    pairs = zip(in_signature_order(tensors, specs), specs, strict=True)
    return [_array(tensor, data, spec) for (tensor, data), spec in pairs]


def _texts(tensor: Named) -> list[str]:
    texts, shape = tensor["data"], tensor["shape"]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(UNREADABLE, f"{tensor['name']}: data is not a list of texts")
    if shape not in ([len(texts)], [len(texts), 1]) or not texts:
        message = f"{tensor['name']} has shape {abbreviated(shape)}, expected [{len(texts) or 1}]"
        raise ValueError(UNREADABLE, message)
    return texts


def _array(tensor: Named, raw: memoryview | bytes, spec: Named) -> Array:
    name, shape, expected = tensor["name"], tensor["shape"], DATATYPES[spec["dtype"]]
    if tensor["datatype"] != expected:
        found = abbreviated(tensor["datatype"])
        raise ValueError(UNREADABLE, f"{name}: datatype is {found}, expected {expected!r}")
    if not isinstance(shape, list) or not all(type(d) is int and 0 <= d < 2**31 for d in shape):
        raise ValueError(
            UNREADABLE, f"{name}: shape is {abbreviated(shape)}, expected a list of sizes"
        )
    if "binary_data_size" in parameters_of(tensor):
        return _from_bytes(raw, shape, spec)
    array = to_exact_array(tensor["data"], spec)
    nested = array.ndim > 1  # the data of a tensor may be flat, or nested like its shape
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
    # A copy: the bytes start at any offset, and native code may rely on aligned data.
    return np.frombuffer(raw, dtype).reshape(shape).astype(spec["dtype"])


def requested_outputs(value: Named, outputs: Sequence[str]) -> dict[str, Any]:
    """Return the response's ``id``, the names of its ``outputs``, and of the ``binary`` ones."""
    binary_by_default = parameters_of(value).get("binary_data_output", False)
    requested = value.get("outputs") or [{"name": name} for name in outputs]
    if not isinstance(requested, list) or not all(isinstance(each, dict) for each in requested):
        raise ValueError(
            UNREADABLE, f"outputs is {abbreviated(requested)}, expected objects with a 'name'"
        )
    names = [each.get("name") for each in requested]
    for i, name in enumerate(names):
        if name not in outputs or name in names[:i]:
            found = f"outputs[{i}].name is {abbreviated(name)}"
            raise ValueError(UNREADABLE, f"{found}, expected each once of {[*outputs]}")
    binary = [
        e["name"] for e in requested if parameters_of(e).get("binary_data", binary_by_default)
    ]
    return {"id": value.get("id"), "outputs": names, "binary": binary}


def to_protocol(
    named: Named, wanted: Named, model_name: str, labels: list[list[dict[str, Any]]]
) -> tuple[bytes, dict[str, str]]:
    """Return the body and headers of a response to what :func:`requested_outputs` found.

    None of the outputs holds NaN; `labels` are the most probable classes of each row, if named.
    """
    outputs = dict(named)
    for name, key in zip(LABELS, ("label", "probability"), strict=True) if labels else ():
        outputs[name] = np.array([[each[key] for each in row] for row in labels])
    tensors, raw = [], []
    for name in wanted["outputs"]:
        array = outputs[name]
        datatype = DATATYPES.get(dtype_name(array.dtype), TEXT_DATATYPE)
        head = f'"name": {quoted(name)}, "shape": {[*array.shape]}, "datatype": "{datatype}"'
        in_bytes = name in wanted["binary"] and datatype != TEXT_DATATYPE
        if in_bytes:
            raw.append(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
            value = f'"parameters": {{"binary_data_size": {len(raw[-1])}}}'
        elif array.dtype.kind == "f" and np.isinf(array).any():
            message = f"{name} holds infinity, which JSON cannot: ask for binary_data_output"
            raise ValueError(NOT_ACCEPTABLE, message)
        else:
            value = f'"data": {flat_json(array)}'
        tensors.append(f"{{{head}, {value}}}")
    request_id = f', "id": {json.dumps(str(wanted["id"]))}' if wanted["id"] is not None else ""
    answer = f'"model_name": {quoted(model_name)}{request_id}, "outputs": [{", ".join(tensors)}]'
    body = f"{{{answer}}}".encode()
    if not raw:
        return body, {"content-type": "application/json"}
    headers = {"content-type": "application/octet-stream", HEADER_LENGTH: str(len(body))}
    return b"".join([body, *raw]), headers


@lru_cache
def quoted(name: str) -> str:
    """Return a name as JSON."""
    return json.dumps(name)


def flat_json(array: Array) -> str:
    """Return an array's elements as a JSON list, written in chunks to let other threads run."""
    flat = array.ravel()
    chunks = (flat[i : i + JSON_CHUNK].tolist() for i in range(0, flat.size, JSON_CHUNK))
    if fast_json is not None and array.dtype.kind in "biuf":  # a tenth of json's time
        return f"[{','.join(str(fast_json.to_json(chunk)[1:-1], 'ascii') for chunk in chunks)}]"
    return f"[{', '.join(json.dumps(chunk, allow_nan=False)[1:-1] for chunk in chunks)}]"


def parameters_of(owner: Named) -> Named:
    """Return the ``parameters`` object of a request, a tensor or an output."""
    found = owner.get("parameters") or {}
    if not isinstance(found, dict):
        raise ValueError(UNREADABLE, f"parameters is {abbreviated(found)}, expected an object")
    return found
