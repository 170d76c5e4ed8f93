"""How a client writes requests and reads answers: an npz, or the Open Inference Protocol.

All but JSON carry the same bits as the process has.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

import numpy as np

from serve.worker.oip import DATATYPES, HEADER_LENGTH
from serve.worker.wire import JSON, NPZ, RAW, from_npz, to_npz

if TYPE_CHECKING:
    from collections.abc import Mapping

    from serve.worker.tensors import Array

    Headers = Mapping[str, str]

DTYPES = {datatype: dtype for dtype, datatype in DATATYPES.items()}


class Form(Protocol):
    """A form of requests and answers."""

    def path(self, model_name: str) -> str:
        """Return where a model is asked."""
        ...

    def request(self, named: Mapping[str, Array]) -> tuple[bytes, dict[str, str]]:
        """Return a body and its headers."""
        ...

    def outputs(self, body: bytes, headers: Headers) -> dict[str, Array]:
        """Return the arrays in an answer; its headers' names are taken in any case."""
        ...


class Npz:
    """Every tensor by name, as ``numpy.savez`` writes them; both servers take it."""

    def __init__(self, folder: str = "/predictions/", ending: str = "") -> None:
        """Remember what stands before and behind a model's name in the path."""
        self.folder, self.ending = folder, ending

    def path(self, model_name: str) -> str:
        """Return where a model is asked."""
        return f"{self.folder}{quote(model_name, safe='')}{self.ending}"

    def request(self, named: Mapping[str, Array]) -> tuple[bytes, dict[str, str]]:
        """Return an npz."""
        return to_npz(named), {"Content-Type": NPZ, "Accept": f"{NPZ}, {JSON}"}

    def outputs(self, body: bytes, headers: Headers) -> dict[str, Array]:
        """Return the arrays of an npz."""
        return from_npz(body)


class OpenInference:
    """Open Inference Protocol v2: tensors as bytes behind a JSON header, or as JSON."""

    def __init__(self, *, binary: bool = True) -> None:
        """Remember which."""
        self.binary = binary

    def path(self, model_name: str) -> str:
        """Return where a model is asked."""
        return f"/v2/models/{quote(model_name, safe='')}/infer"

    def request(self, named: Mapping[str, Array]) -> tuple[bytes, dict[str, str]]:
        """Return the tensors; answers are asked for in the same way."""
        tensors: list[dict[str, Any]] = []
        raw: list[bytes] = []
        for name, array in named.items():
            tensor: dict[str, Any] = {"name": name, "shape": [*array.shape]}
            tensor["datatype"] = DATATYPES[str(array.dtype)]
            if self.binary:
                raw.append(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
                tensor["parameters"] = {"binary_data_size": len(raw[-1])}
            else:
                tensor["data"] = array.ravel().tolist()
            tensors.append(tensor)
        value = {"inputs": tensors, "parameters": {"binary_data_output": self.binary}}
        text = json.dumps(value).encode()
        if not self.binary:
            return text, {"Content-Type": JSON}
        return b"".join([text, *raw]), {"Content-Type": RAW, HEADER_LENGTH: str(len(text))}

    def outputs(self, body: bytes, headers: Headers) -> dict[str, Array]:
        """Return the arrays of an answer."""
        length = int(headers.get(HEADER_LENGTH) or len(body))
        at, outputs = length, {}
        for tensor in json.loads(body[:length])["outputs"]:
            dtype = np.dtype(DTYPES[tensor["datatype"]])
            size = tensor.get("parameters", {}).get("binary_data_size")
            if size is None:
                array = np.asarray(tensor["data"], dtype)
            else:
                array = np.frombuffer(body[at : at + size], dtype.newbyteorder("<")).astype(dtype)
                at += size
            outputs[tensor["name"]] = array.reshape(tensor["shape"])
        return outputs
