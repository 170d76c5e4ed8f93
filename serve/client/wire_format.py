"""Wire formats of the client: npz, or the Open Inference Protocol; all but JSON are lossless."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

import numpy as np

from compress.serve.worker.wire import DATATYPES, HEADER_LENGTH, JSON, NPZ, RAW, from_npz, to_npz

if TYPE_CHECKING:
    from collections.abc import Mapping

    from compress.serve.worker.tensors import Array

    Headers = Mapping[str, str]

DTYPES = {datatype: dtype for dtype, datatype in DATATYPES.items()}


class Form(Protocol):
    """A wire format of requests and responses."""

    def path(self, model_name: str) -> str:
        """Return the path of a model's inference requests."""
        ...

    def request(self, named: Mapping[str, Array]) -> tuple[bytes, dict[str, str]]:
        """Encode a request; return its body and headers."""
        ...

    def outputs(self, body: bytes, headers: Headers) -> dict[str, Array]:
        """Decode a response body; the headers' names are case-insensitive."""
        ...


class Npz:
    """Every tensor by name, as ``numpy.savez`` writes them; both servers accept it."""

    def __init__(self, folder: str = "/predictions/", ending: str = "") -> None:
        """Set the parts of the path before and after the model's name."""
        self.folder, self.ending = folder, ending

    def path(self, model_name: str) -> str:
        """Return the path of a model's inference requests."""
        return f"{self.folder}{quote(model_name, safe='')}{self.ending}"

    def request(self, named: Mapping[str, Array]) -> tuple[bytes, dict[str, str]]:
        """Encode inputs as npz."""
        return to_npz(named), {"Content-Type": NPZ, "Accept": f"{NPZ}, {JSON}"}

    def outputs(self, body: bytes, headers: Headers) -> dict[str, Array]:
        """Decode outputs from npz."""
        return from_npz(body)


class OpenInference:
    """Open Inference Protocol v2: tensors as raw bytes after a JSON header, or as JSON."""

    def __init__(self, *, binary: bool = True) -> None:
        """Choose raw bytes (lossless) or JSON."""
        self.binary = binary

    def path(self, model_name: str) -> str:
        """Return the path of a model's inference requests."""
        return f"/v2/models/{quote(model_name, safe='')}/infer"

    def request(self, named: Mapping[str, Array]) -> tuple[bytes, dict[str, str]]:
        """Encode inputs; request outputs in the same encoding."""
        tensors: list[dict[str, Any]] = []
        raw: list[bytes] = []
        for name, array in named.items():
            tensor: dict[str, Any] = {"name": name, "shape": [*array.shape]}
            tensor["datatype"] = DATATYPES[str(array.dtype)]
            if self.binary:  # the protocol's raw tensors are little-endian
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
        """Decode outputs."""
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
