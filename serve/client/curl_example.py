"""Example `curl` commands for a served model, to be copied into a shell."""

from __future__ import annotations

import json
import math
import shlex
from typing import TYPE_CHECKING, Any

import numpy as np

from serve.worker.wire import DATATYPES

if TYPE_CHECKING:
    from pathlib import Path

    from compress.common.signature import Signature, TensorSpec

MAX_JSON_VALUES = 1024
"""More values are sent as raw bytes, to keep the command short enough to read."""
EXAMPLE_LENGTH = 8
"""Size of named axes other than the batch, within their bounds."""


def bearer(token: str, made: bool, file: Path | None, variable: str) -> str:
    """Return curl's option for the token, quoted for a shell."""
    if made:
        return f"-H {shlex.quote(f'Authorization: Bearer {token}')}"
    # A token of the user's is not shown: the command reads it from its file or variable.
    source = f"${variable}" if file is None else f"$(cat {shlex.quote(str(file))})"
    return f'-H "Authorization: Bearer {source}"'


def open_inference_line(url: str, name: str, signature: Signature, authorization: str) -> str:
    """Return a command with an Open Inference Protocol request: zeros, and ones for integers."""
    tensors: list[dict[str, Any]] = []
    sizes = [_sizes(spec, signature) for spec in signature.inputs]
    counts = [math.prod(size) for size in sizes]
    as_bytes = sum(counts) > MAX_JSON_VALUES
    for spec, size, count in zip(signature.inputs, sizes, counts, strict=True):
        tensor = {"name": spec.name, "shape": size, "datatype": DATATYPES[spec.dtype]}
        if as_bytes:
            bytes_ = count * np.dtype(spec.dtype).itemsize
            tensors.append({**tensor, "parameters": {"binary_data_size": bytes_}})
        else:
            tensors.append({**tensor, "data": [_value(spec)] * count})
    body = json.dumps({"inputs": tensors}, separators=(",", ":"))
    target = f"{url}/v2/models/{name}/infer"
    if not as_bytes:
        return _post_json(authorization, body, target)
    zeros = sum(tensor["parameters"]["binary_data_size"] for tensor in tensors)
    length = f"-H 'Inference-Header-Content-Length: {len(body)}'"
    sent = f"(printf %s {shlex.quote(body)}; head -c {zeros} /dev/zero)"
    return f"{sent} | curl -sS {authorization} {length} --data-binary @- {target}"


def text_line(url: str, name: str, authorization: str) -> str:
    """Return a command that sends a text to the built-in server."""
    post = f"curl -sS {authorization} -H 'Content-Type: text/plain' -d 'A short text.'"
    return f"{post} {url}/v2/models/{name}/infer"


def completion_line(url: str, name: str, authorization: str) -> str:
    """Return a command that has a decoder continue a text."""
    body = json.dumps({"model": name, "prompt": "The ", "max_tokens": 32})
    return _post_json(authorization, body, f"{url}/v1/completions")


def torchserve_line(url: str, name: str, signature: Signature, token: str) -> str:
    """Return a command with a request to TorchServe: zeros, and ones for integers."""
    authorization = bearer(token, True, None, "")
    target = f"{url}/predictions/{name}"
    sizes = [_sizes(spec, signature) for spec in signature.inputs]
    counts = [math.prod(size) for size in sizes]
    if len(sizes) == 1 and counts[0] > MAX_JSON_VALUES:
        zeros = counts[0] * np.dtype(signature.inputs[0].dtype).itemsize
        shape = ",".join(map(str, sizes[0]))
        headers = f"-H 'Content-Type: application/octet-stream' -H 'X-Shape: {shape}'"
        post = f"curl -sS {authorization} {headers} --data-binary @- {target}"
        return f"head -c {zeros} /dev/zero | {post}"
    inputs = {
        spec.name: np.full(size, _value(spec)).tolist()
        for spec, size in zip(signature.inputs, sizes, strict=True)
    }
    body = json.dumps({"inputs": inputs}, separators=(",", ":"))
    return _post_json(authorization, body, target)


def _post_json(authorization: str, body: str, target: str) -> str:
    json_type = "-H 'Content-Type: application/json'"
    return f"curl -sS {authorization} {json_type} -d {shlex.quote(body)} {target}"


def _sizes(spec: TensorSpec, signature: Signature) -> list[int]:
    axes = {axis: signature.bounds(axis).nearest(EXAMPLE_LENGTH) for axis in signature.dynamic_axes}
    return [*spec.sized(axes | {signature.batch_axis or "": 1})]


def _value(spec: TensorSpec) -> int:
    return 0 if spec.dtype.startswith("float") else 1
