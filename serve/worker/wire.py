"""Bodies of requests and answers as arrays: pure functions of bytes, headers and the inputs' specs.

A refusal is ``ValueError(status, message)``; :func:`refusal` turns any exception into one.

Requests (Content-Type decides, nothing is guessed from the bytes):

    application/x-npz         every input by name, as numpy.savez writes them; lossless
    application/x-npy         the input of a single-input model
    application/octet-stream  its bytes, little-endian, C order; X-Shape where axes vary
    application/json          [...] for a single input, or {"inputs": {"name": [...], ...}}

Answers (Accept decides): ``application/x-npz``, lossless; ``application/octet-stream`` for a single
output, with X-Shape and X-Dtype; else JSON, ``{"outputs": {"name": [...], ...}}``.
"""

from __future__ import annotations

import io
import json
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    Array = npt.NDArray[Any]
    Named = Mapping[str, Any]
    Specs = Sequence[Named]

JSON, NPY, NPZ = "application/json", "application/x-npy", "application/x-npz"
RAW = "application/octet-stream"


def decode(body: Any, content_type: str, headers: Named, specs: Specs) -> list[Array]:
    """Return a body's arrays in the signature's order."""
    accepted = (JSON, NPZ) if len(specs) > 1 else (JSON, NPZ, NPY, RAW)
    if content_type not in accepted:
        raise ValueError(415, f"{content_type[:80]}: this model takes {', '.join(accepted)}")
    if content_type == JSON:
        # TorchServe has parsed it already where decode_input_request is on, its default.
        return from_json(json.loads(body) if isinstance(body, bytes | bytearray) else body, specs)
    if content_type == NPZ:
        return _in_order(from_npz(bytes(body)), specs)
    if content_type == NPY:
        return [np.lib.format.read_array(io.BytesIO(bytes(body)), allow_pickle=False)]
    return [from_raw(bytes(body), headers, specs[0])]


def from_raw(body: bytes, headers: Named, spec: Named) -> Array:
    """Return the array in bare bytes; its shape from X-Shape, else from the signature."""
    shape = [-1 if isinstance(d, str) else d for d in spec["shape"]]
    if "x-shape" in headers:
        shape = [int(d) for d in headers["x-shape"].split(",")]
    little_endian = np.dtype(spec["dtype"]).newbyteorder("<")
    return np.frombuffer(body, little_endian).reshape(shape).astype(spec["dtype"])


def from_json(value: Any, specs: Specs) -> list[Array]:
    """Return the arrays in a parsed JSON body: whole numbers for integers, 0 and 1 for booleans."""
    inputs = value.get("inputs") if isinstance(value, dict) else value
    if isinstance(inputs, list) and len(specs) == 1:
        inputs = {specs[0]["name"]: inputs}
    if not isinstance(inputs, dict):
        raise ValueError(400, 'the body is not {"inputs": {"name": [...], ...}}')
    arrays = []
    for array, spec in zip(_in_order(inputs, specs), specs, strict=True):
        found = np.asarray(array)
        whole = found.dtype.kind in "biuf"
        arrays.append(found.astype(spec["dtype"]) if whole else found)
        if not whole or (arrays[-1].dtype.kind != "f" and (arrays[-1] != found).any()):
            raise ValueError(400, f"{spec['name']} holds values that are not {spec['dtype']}")
    return arrays


def check(arrays: list[Array], specs: Specs, max_rows: int) -> None:
    """Raise ValueError for inputs that the signature does not allow."""
    sizes: dict[str, int] = {}
    for array, spec in zip(arrays, specs, strict=True):
        name, shape = spec["name"], spec["shape"]
        if array.dtype != spec["dtype"]:
            raise ValueError(400, f"{name} is {array.dtype}, expected {spec['dtype']}")
        fits = array.size and len(array.shape) == len(shape)
        for wanted, size in zip(shape, array.shape, strict=False):
            fits &= size == (sizes.setdefault(wanted, size) if isinstance(wanted, str) else wanted)
        if not fits:
            raise ValueError(400, f"{name} has shape {list(array.shape)}, expected {shape}")
        if array.dtype.kind == "f" and np.isnan(array).any():
            raise ValueError(400, f"{name} holds NaN")
    rows = sizes.get(next(iter(specs[0]["shape"]), ""), 0)
    if rows > max_rows:
        raise ValueError(413, f"{rows} rows, at most {max_rows} in one request")


def encode(named: dict[str, Array], accept: str) -> tuple[str | bytes, dict[str, str]]:
    """Return a body and its headers in the form that the client accepts."""
    if any(array.dtype.kind == "f" and np.isnan(array).any() for array in named.values()):
        raise ValueError(500, "the model answered NaN")
    if NPZ in accept:
        return to_npz(named), {"content-type": NPZ}
    if RAW in accept:
        (output, *others) = named.values()
        if others:
            raise ValueError(400, f"the model has {len(named)} outputs: accept {NPZ} or {JSON}")
        headers = {"X-Shape": ",".join(map(str, output.shape)), "X-Dtype": str(output.dtype)}
        little_endian = output.astype(output.dtype.newbyteorder("<"))
        return little_endian.tobytes(), {"content-type": RAW, **headers}
    outputs = {name: array.tolist() for name, array in named.items()}
    return json.dumps({"outputs": outputs}, allow_nan=False), {"content-type": JSON}


def to_npz(arrays: Named) -> bytes:
    """Return arrays as ``numpy.savez`` writes them, under any name, the same bytes every time."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)
    return stream.getvalue()


def from_npz(data: bytes) -> dict[str, Array]:
    """Return arrays by name; nothing is unpickled."""
    arrays = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED:  # few bytes could unfold to any size
                raise ValueError(400, "the npz is compressed: write it with numpy.savez")
            with archive.open(member) as stream:
                array = np.lib.format.read_array(stream, allow_pickle=False)
            arrays[member.filename.removesuffix(".npy")] = array
    return arrays


def refusal(error: Exception, status: int = 400) -> tuple[int, str]:
    """Return the status and the JSON body that tell a client of an error."""
    message = f"{type(error).__name__}: {str(error)[:160]}"
    if type(error) is ValueError and len(error.args) == 2:
        status, message = error.args
    return status, json.dumps({"code": status, "message": message})


def _in_order(named: Named, specs: Specs) -> list[Any]:
    names = [spec["name"] for spec in specs]
    if sorted(named) != sorted(names):
        raise ValueError(400, f"the inputs are {sorted(named)}, expected {names}")
    return [named[name] for name in names]
