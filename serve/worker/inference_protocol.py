"""The Open Inference Protocol's JSON tensors (version 2): requests to arrays, arrays to answers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from serve.worker.tensors import exact, in_order

if TYPE_CHECKING:
    from collections.abc import Callable

    from serve.worker.tensors import Array, Named, Specs

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


def is_protocol(value: Any) -> bool:
    """Return whether a parsed body lists its tensors as the protocol does."""
    inputs = value.get("inputs") if isinstance(value, dict) else None
    return isinstance(inputs, list) and bool(inputs) and all(isinstance(i, dict) for i in inputs)


def from_protocol(
    value: Named, specs: Specs, read_texts: Callable[[list[str]], list[Array]] | None = None
) -> list[Array]:
    """Return a request's arrays in the signature's order.

    Args:
        value: the parsed body.
        specs: name, shape and dtype of each input.
        read_texts: how texts become the inputs, where the model takes texts.
    """
    tensors: dict[str, Named] = {}
    for tensor in value["inputs"]:
        for key in ("name", "shape", "datatype", "data"):
            if key not in tensor:
                raise ValueError(400, f"inputs: a tensor has {sorted(tensor)}, expected a {key!r}")
        if tensor["name"] in tensors:
            raise ValueError(400, f"inputs: {tensor['name']} is given twice")
        tensors[tensor["name"]] = tensor
    for output in value.get("outputs") or ():
        if not isinstance(output, dict) or not isinstance(output.get("name"), str):
            raise ValueError(400, f"outputs: found {str(output)[:80]}, expected a 'name'")
    first = value["inputs"][0]
    if read_texts and len(tensors) == 1 and first["datatype"] == WORDS:
        return read_texts(_texts(first))
    return [_array(t, spec) for t, spec in zip(in_order(tensors, specs), specs, strict=True)]


def _texts(tensor: Named) -> list[str]:
    texts, shape = tensor["data"], tensor["shape"]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(400, f"{tensor['name']}: data is not a list of texts")
    if shape not in ([len(texts)], [len(texts), 1]) or not texts:
        raise ValueError(400, f"{tensor['name']} has shape {shape}, expected [{len(texts) or 1}]")
    return texts


def _array(tensor: Named, spec: Named) -> Array:
    name, shape, expected = tensor["name"], tensor["shape"], DATATYPES[spec["dtype"]]
    if tensor["datatype"] != expected:
        raise ValueError(400, f"{name}: datatype is {tensor['datatype']!r}, expected {expected!r}")
    if not isinstance(shape, list) or not all(type(d) is int and d >= 0 for d in shape):
        raise ValueError(400, f"{name}: shape is {str(shape)[:80]}, expected a list of sizes")
    found = exact(tensor["data"], spec)
    nested = found.ndim > 1  # the data of a tensor may be flat, or nested as its shape is
    if found.size != math.prod(shape) or (nested and list(found.shape) != shape):
        size = list(found.shape) if nested else found.size
        raise ValueError(400, f"{name}: data has {size} elements, expected those of shape {shape}")
    return found.reshape(shape)


def to_protocol(
    named: Named, asked: Named, model_name: str, labels: list[list[dict[str, Any]]]
) -> dict[str, Any]:
    """Return the answer to a request, the likeliest classes as two further outputs."""
    outputs = {name: _tensor(name, array) for name, array in named.items()}
    for name, key, datatype in (
        ("labels", "label", WORDS),
        ("probabilities", "probability", "FP64"),
    ):
        flat = [each[key] for row in labels for each in row]
        if flat:
            shape = [len(labels), len(labels[0])]
            outputs[name] = {"name": name, "shape": shape, "datatype": datatype, "data": flat}
    wanted = [output["name"] for output in asked.get("outputs") or ()] or list(outputs)
    for name in wanted:
        if name not in outputs:
            raise ValueError(400, f"outputs: {name!r} is asked for, expected {list(outputs)}")
    answer: dict[str, Any] = {"model_name": model_name}
    if "id" in asked:
        answer["id"] = asked["id"]
    return answer | {"outputs": [outputs[name] for name in wanted]}


def _tensor(name: str, array: Array) -> dict[str, Any]:
    datatype = DATATYPES[str(array.dtype)]
    data = array.ravel().tolist()
    return {"name": name, "shape": list(array.shape), "datatype": datatype, "data": data}
