"""A line that asks a served model, to be copied into a shell."""

from __future__ import annotations

import json
import math
import shlex
from typing import TYPE_CHECKING, Any

import numpy as np

from serve.worker.oip import DATATYPES

if TYPE_CHECKING:
    from pathlib import Path

    from compress.common.signature import Signature, TensorSpec

WRITTEN_OUT = 1024
"""Values above which they are sent as bytes: the line is to stay one that people read."""
SOME_LENGTH = 8


def bearer(token: str, made: bool, file: Path | None, variable: str) -> str:
    """Return the header that carries the token, quoted for a shell.

    A token that was given is not shown: the line says where it is.
    """
    if made:
        return f"-H {shlex.quote(f'Authorization: Bearer {token}')}"
    source = f"${variable}" if file is None else f"$(cat {shlex.quote(str(file))})"
    return f'-H "Authorization: Bearer {source}"'


def open_inference_line(url: str, name: str, signature: Signature, authorization: str) -> str:
    """Return a line that asks in Open Inference Protocol v2: zeros, and ones for integers."""
    tensors: list[dict[str, Any]] = []
    sizes = [_sizes(spec, signature) for spec in signature.inputs]
    counts = [math.prod(size) for size in sizes]
    as_bytes = sum(counts) > WRITTEN_OUT
    for spec, size, count in zip(signature.inputs, sizes, counts, strict=True):
        tensor = {"name": spec.name, "shape": size, "datatype": DATATYPES[spec.dtype]}
        if as_bytes:
            bytes_ = count * np.dtype(spec.dtype).itemsize
            tensors.append({**tensor, "parameters": {"binary_data_size": bytes_}})
        else:
            tensors.append({**tensor, "data": [_value(spec)] * count})
    body = json.dumps({"inputs": tensors}, separators=(",", ":"))
    to = f"{url}/v2/models/{name}/infer"
    if not as_bytes:
        return f"curl -sS {authorization} -H 'Content-Type: application/json' -d {_q(body)} {to}"
    zeros = sum(tensor["parameters"]["binary_data_size"] for tensor in tensors)
    length = f"-H 'Inference-Header-Content-Length: {len(body)}'"
    sent = f"(printf %s {_q(body)}; head -c {zeros} /dev/zero)"
    return f"{sent} | curl -sS {authorization} {length} --data-binary @- {to}"


def torchserve_line(url: str, name: str, signature: Signature, token: str) -> str:
    """Return a line that asks TorchServe: zeros, and ones for integers."""
    authorization = bearer(token, True, None, "")
    to = f"{url}/predictions/{name}"
    sizes = [_sizes(spec, signature) for spec in signature.inputs]
    counts = [math.prod(size) for size in sizes]
    if len(sizes) == 1 and counts[0] > WRITTEN_OUT:
        zeros = counts[0] * np.dtype(signature.inputs[0].dtype).itemsize
        shape = ",".join(map(str, sizes[0]))
        headers = f"-H 'Content-Type: application/octet-stream' -H 'X-Shape: {shape}'"
        return (
            f"head -c {zeros} /dev/zero | curl -sS {authorization} {headers} --data-binary @- {to}"
        )
    inputs = {
        spec.name: np.full(size, _value(spec)).tolist()
        for spec, size in zip(signature.inputs, sizes, strict=True)
    }
    body = json.dumps({"inputs": inputs}, separators=(",", ":"))
    return f"curl -sS {authorization} -H 'Content-Type: application/json' -d {_q(body)} {to}"


def _sizes(spec: TensorSpec, signature: Signature) -> list[int]:
    axes = {axis: signature.bounds(axis).nearest(SOME_LENGTH) for axis in signature.dynamic_axes}
    return [*spec.sized(axes | {signature.batch_axis or "": 1})]


def _value(spec: TensorSpec) -> int:
    return 0 if spec.dtype.startswith("float") else 1


def _q(text: str) -> str:
    return shlex.quote(text)
