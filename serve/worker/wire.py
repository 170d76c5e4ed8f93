"""Bodies of requests and answers as arrays: pure functions of bytes, headers and the inputs' specs.

Requests (Content-Type decides, nothing is guessed from the bytes):

    application/x-npz         every input by name, as numpy.savez writes them; lossless
    application/x-npy         the input of a single-input model
    application/octet-stream  its bytes, little-endian, C order; X-Shape where axes vary, and
                              X-Dtype, where given, must be the model's
    application/json          [...] for a single input, {"inputs": {"name": [...], ...}}, or the
                              Open Inference Protocol's {"inputs": [{"name", "shape", ...}]},
                              with tensors' bytes behind it where Inference-Header-Content-Length
                              says where it ends
    image/png, image/jpeg     one image, where the archive was packed with ``image``
    text/plain                one text, where it was packed with ``text``; several as JSON [...]

Answers (Accept decides): ``application/x-npz``, lossless; ``application/octet-stream`` for a single
output, with X-Shape and X-Dtype; else JSON, ``{"outputs": {"name": [...], ...}}``, and ``"labels"``
where classes have names: the likeliest of each row. What came by the Open Inference Protocol is
answered by it.
"""

from __future__ import annotations

import io
import json
import math
import struct
import zipfile
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from serve.worker.http_errors import NOT_ACCEPTABLE, UNKNOWN_FORM, UNREADABLE, describe_error
from serve.worker.oip import (
    HEADER_LENGTH,
    from_protocol,
    is_protocol,
    split,
    to_protocol,
)
from serve.worker.tensors import exact, in_order, likeliest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from serve.worker.tensors import Array, Named, Specs

    Readers = Mapping[str, Callable[[Any], list[Array]]]

JSON, NPY, NPZ = "application/json", "application/x-npy", "application/x-npz"
MEMBER_BYTES = 512
"""Of a zip's directory for each array: 46 and its name, with what else zip programs may add."""
END_OF_ZIP = struct.Struct("<4s4H2LH")
RAW, TEXT, IMAGES = "application/octet-stream", "text/plain", ("image/png", "image/jpeg")


def decode(
    body: Any, content_type: str, headers: Named, specs: Specs, readers: Readers
) -> tuple[list[Array], Named]:
    """Return a body's arrays in the signature's order, and how the answer is wanted.

    Args:
        body: bytes, or JSON that was parsed already.
        content_type: what it is, without parameters, in lower case; where it is not said, bytes.
        headers: the request's others, their names in lower case.
        specs: name, shape and dtype of each input.
        readers: by content type, how the body of an image, and how a list of texts, is read.

    Returns:
        The arrays, and the request where it came by the Open Inference Protocol; else nothing.
    """
    encoding = headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise ValueError(UNKNOWN_FORM, f"Content-Encoding is {encoding[:40]}, expected none")
    if HEADER_LENGTH in headers:
        text, raw = split(bytes(body), headers[HEADER_LENGTH])
        value = parse(text)
        return from_protocol(value, specs, raw, readers.get(TEXT)), value
    own = (JSON, NPZ) if len(specs) > 1 else (JSON, NPZ, NPY, RAW)
    content_type = content_type or RAW
    if content_type not in (*own, *readers):
        taken = ", ".join((*own, *readers))
        raise ValueError(
            UNKNOWN_FORM, f"Content-Type is {content_type[:80]}, expected one of {taken}"
        )
    if isinstance(body, bytes | bytearray) and not body:
        names = [spec["name"] for spec in specs]
        raise ValueError(UNREADABLE, f"the body is empty, expected {names} as {JSON} or {NPZ}")
    if content_type == JSON:
        # TorchServe has parsed it already where decode_input_request is on, its default.
        value = parse(body) if isinstance(body, bytes | bytearray) else body
        if is_protocol(value):
            return from_protocol(value, specs, read_texts=readers.get(TEXT)), value
        return from_json(value, specs, readers), {}
    if content_type == NPZ:
        return in_order(from_npz(bytes(body), most=len(specs)), specs), {}
    if content_type == NPY:
        return [np.lib.format.read_array(io.BytesIO(bytes(body)), allow_pickle=False)], {}
    if content_type == RAW:
        return [from_raw(bytes(body), headers, specs[0])], {}
    if content_type == TEXT:
        return readers[TEXT]([bytes(body).decode()]), {}
    return readers[content_type](bytes(body)), {}


def from_raw(body: bytes, headers: Named, spec: Named) -> Array:
    """Return the array in bare bytes; its shape from X-Shape, else from the signature."""
    sent = headers.get("x-dtype", spec["dtype"])
    if sent != spec["dtype"]:
        raise ValueError(UNREADABLE, f"{spec['name']} is {sent[:40]}, expected {spec['dtype']}")
    shape = [-1 if isinstance(d, str) else d for d in spec["shape"]]
    if "x-shape" in headers:
        shape = _sizes(headers["x-shape"])
    elif shape.count(-1) > 1:
        message = f"X-Shape is missing, expected the sizes of {list(spec['shape'])}, such as 1,8"
        raise ValueError(UNREADABLE, message)
    little_endian = np.dtype(spec["dtype"]).newbyteorder("<")
    row = math.prod(d for d in shape if d > 0) * little_endian.itemsize
    if len(body) % row:
        found = f"the body has {len(body)} bytes as {RAW}"
        message = f"{found}, expected {spec['dtype']} of shape {list(spec['shape'])}"
        raise ValueError(UNREADABLE, message)
    return np.frombuffer(body, little_endian).reshape(shape).astype(spec["dtype"])


def _sizes(text: str) -> list[int]:
    sizes = [size.strip() for size in text.split(",")]
    if not all(size.isascii() and size.isdigit() and len(size) < 10 for size in sizes):
        message = f"X-Shape is {text[:40]!r}, expected sizes with commas, such as 1,8"
        raise ValueError(UNREADABLE, message)
    return [int(size) for size in sizes]


def parse(body: bytes | bytearray) -> Any:
    """Return what a JSON text holds; NaN and Infinity are not JSON."""
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError(UNREADABLE, "the body is JSON nested too deeply for any tensor") from None
    except ValueError as error:
        raise ValueError(UNREADABLE, f"the body is not JSON: {str(error)[:120]}") from None


def _refuse_constant(word: str) -> None:
    raise ValueError(f"it holds {word}")


def from_json(value: Any, specs: Specs, readers: Readers) -> list[Array]:
    """Return the arrays in a parsed JSON body: whole numbers for integers, 0 and 1 for booleans."""
    inputs = value.get("inputs") if isinstance(value, dict) else value
    words = isinstance(inputs, list) and bool(inputs) and all(isinstance(i, str) for i in inputs)
    if words and TEXT in readers:
        return readers[TEXT](inputs)
    if isinstance(inputs, list) and len(specs) == 1:
        inputs = {specs[0]["name"]: inputs}
    if not isinstance(inputs, dict):
        raise ValueError(UNREADABLE, 'the body is not {"inputs": {"name": [...], ...}}')
    ordered = zip(in_order(inputs, specs), specs, strict=True)
    return [exact(values, spec) for values, spec in ordered]


def encode(
    named: dict[str, Array], accept: str, wanted: Named, model_name: str, classes: Named | None
) -> tuple[bytes, dict[str, str]]:
    """Return a body and its headers in the form that the client accepts.

    Args:
        named: the outputs by name; none of them holds NaN.
        accept: the Accept header, in lower case.
        wanted: how, where the request came by the Open Inference Protocol; else nothing.
        model_name: under which the model is served.
        classes: ``names``, ``top`` and ``softmax`` for the first output; None where it has none.
    """
    if NPZ in accept:
        return to_npz(named), {"content-type": NPZ}
    labels = likeliest(next(iter(named.values())), classes) if classes else []
    if wanted:
        return to_protocol(named, wanted, model_name, labels)
    if RAW in accept:
        (output, *others) = named.values()
        if others:
            message = f"the model has {len(named)} outputs: accept {NPZ} or {JSON}"
            raise ValueError(NOT_ACCEPTABLE, message)
        headers = {"X-Shape": ",".join(map(str, output.shape)), "X-Dtype": dtype_name(output.dtype)}
        little_endian = output.astype(output.dtype.newbyteorder("<"), copy=False)
        return little_endian.tobytes(), {"content-type": RAW, **headers}
    for name, array in named.items():
        if array.dtype.kind == "f" and np.isinf(array).any():
            message = f"{name} holds infinity, which JSON cannot: accept {NPZ}"
            raise ValueError(NOT_ACCEPTABLE, message)
    outputs = {name: array.tolist() for name, array in named.items()}
    answer = {"outputs": outputs, **({"labels": labels} if labels else {})}
    return json.dumps(answer, allow_nan=False).encode(), {"content-type": JSON}


@cache
def dtype_name(dtype: Any) -> str:
    """Return a dtype's name, which numpy takes longer to write than a small answer."""
    return str(dtype)


def to_npz(arrays: Named) -> bytes:
    """Return arrays as ``numpy.savez`` writes them, under any name, the same bytes every time."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)
    return stream.getvalue()


def from_npz(data: bytes, most: int | None = None) -> dict[str, Array]:
    """Return arrays by name; nothing is unpickled.

    Args:
        data: an npz as ``numpy.savez`` writes it.
        most: number of arrays that are taken; any, where left out.
    """
    if most is not None and directory_bytes(data) > most * MEMBER_BYTES:
        raise ValueError(UNREADABLE, f"the npz holds more than the {most} arrays expected")
    arrays: dict[str, Array] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            # few bytes could unfold to any size
            raise ValueError(UNREADABLE, "the npz is compressed: write it with numpy.savez")
        if sum(member.file_size for member in members) > len(data):
            raise ValueError(UNREADABLE, "the npz holds arrays that share their bytes")
        for member in members:
            name = member.filename.removesuffix(".npy")
            if name in arrays:  # entries that share their bytes could be read any number of times
                raise ValueError(UNREADABLE, f"the npz holds {name[:80]} twice")
            with archive.open(member) as stream:
                arrays[name] = np.lib.format.read_array(stream, allow_pickle=False)
    return arrays


def directory_bytes(data: bytes) -> int:
    """Return the size of a zip's directory, which Python reads entry by entry."""
    end = data[-END_OF_ZIP.size :]
    if len(end) < END_OF_ZIP.size or end[:4] != b"PK\5\6":
        raise ValueError(UNREADABLE, "the body is no zip, as numpy.savez writes it")
    if data[-END_OF_ZIP.size - 20 :][:4] == b"PK\6\7":  # another directory, of zip64, counts
        raise ValueError(UNREADABLE, "the npz is a zip64: it holds more than 2 GiB, or many arrays")
    size: int = END_OF_ZIP.unpack(end)[5]
    return size


def refusal(error: Exception, status: int = UNREADABLE) -> tuple[int, str]:
    """Return the status and the JSON body with which TorchServe tells a client of an error."""
    status, message = describe_error(error, status)
    return status, json.dumps({"code": status, "message": message})
