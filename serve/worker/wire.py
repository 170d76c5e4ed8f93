"""Decode request bodies to arrays, encode arrays to response bodies.

Requests (by Content-Type; nothing is guessed from the bytes):

    application/x-npz         every input by name, as numpy.savez writes them; lossless
    application/x-npy         the input of a single-input model
    application/octet-stream  its bytes, little-endian, C order; X-Shape where axes vary, and
                              X-Dtype, if sent, must be the model's
    application/json          [...] for a single input, {"inputs": {"name": [...], ...}}, or the
                              Open Inference Protocol's {"inputs": [{"name", "shape", ...}]},
                              followed by raw tensors if Inference-Header-Content-Length is
                              sent: the length of the JSON
    image/png, image/jpeg     one image, if the archive was packed with ``image``
    text/plain                one text, if it was packed with ``text``; several as JSON [...]

Responses (by Accept): ``application/x-npz``, lossless; ``application/octet-stream`` for a single
output, with X-Shape and X-Dtype; else JSON, ``{"outputs": {"name": [...], ...}}``, with
``"labels"``, the most probable classes of each row, if they have names. Requests of the Open
Inference Protocol get responses of that protocol.
"""

from __future__ import annotations

import io
import json
import math
import struct
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.serve.worker.http_errors import (
    NOT_ACCEPTABLE,
    UNKNOWN_FORM,
    UNREADABLE,
    describe_error,
)
from compress.serve.worker.tensors import (
    dtype_name,
    in_signature_order,
    to_exact_array,
    top_classes,
)
from compress.serve.worker.wire import (
    HEADER_LENGTH,
    fast_json,
    from_protocol,
    is_protocol,
    split_body,
    to_protocol,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from compress.serve.worker.tensors import Array, Named, Specs

    Readers = Mapping[str, Callable[[Any], list[Array]]]

JSON, NPY, NPZ = "application/json", "application/x-npy", "application/x-npz"
MEMBER_BYTES = 512
"""Allowed per array in a zip's central directory: 46 bytes, its name, and extra fields."""
END_OF_ZIP = struct.Struct("<4s4H2LH")
RAW, TEXT, IMAGES = "application/octet-stream", "text/plain", ("image/png", "image/jpeg")
TENSORS = (NPY, NPZ, RAW)
"""Bodies of bytes that hold nothing but tensors."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def decode(
    body: Any, content_type: str, headers: Named, specs: Specs, readers: Readers
) -> tuple[list[Array], Named]:
    """Decode a request body.

    Args:
        body: bytes, or JSON that is parsed already.
        content_type: without parameters, in lower case; raw bytes if empty.
        headers: the request's other headers, their names in lower case.
        specs: name, shape and dtype of each input.
        readers: preprocessing functions by content type, of an image's bytes or a list of texts.

    Returns:
        The arrays in the signature's order, and the parsed request if it is one of the Open
        Inference Protocol, else an empty dictionary.
    """
    encoding = headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise ValueError(UNKNOWN_FORM, f"Content-Encoding is {encoding[:40]}, expected none")
    if HEADER_LENGTH in headers:
        text, raw = split_body(bytes(body), headers[HEADER_LENGTH])
        value = parse_json(text)
        return from_protocol(value, specs, raw, readers.get(TEXT)), value
    tensor_types = (JSON, NPZ) if len(specs) > 1 else (JSON, NPZ, NPY, RAW)
    content_type = content_type or RAW
    if content_type not in (*tensor_types, *readers):
        accepted = ", ".join((*tensor_types, *readers))
        raise ValueError(
            UNKNOWN_FORM, f"Content-Type is {content_type[:80]}, expected one of {accepted}"
        )
    if isinstance(body, bytes | bytearray) and not body:
        names = [spec["name"] for spec in specs]
        raise ValueError(UNREADABLE, f"the body is empty, expected {names} as {JSON} or {NPZ}")
    if content_type == JSON:
        # TorchServe parses JSON itself if decode_input_request is on, its default.
        value = parse_json(body) if isinstance(body, bytes | bytearray) else body
        if is_protocol(value):
            return from_protocol(value, specs, read_texts=readers.get(TEXT)), value
        return from_json(value, specs, readers), {}
    if content_type == NPZ:
        return in_signature_order(from_npz(bytes(body), most=len(specs)), specs), {}
    if content_type == NPY:
        return [np.lib.format.read_array(io.BytesIO(bytes(body)), allow_pickle=False)], {}
    if content_type == RAW:
        return [from_raw(bytes(body), headers, specs[0])], {}
    if content_type == TEXT:
        return readers[TEXT]([str(body, "utf-8")]), {}
    return readers[content_type](bytes(body)), {}


def from_raw(body: bytes, headers: Named, spec: Named) -> Array:
    """Return the array in raw bytes; its shape from X-Shape, else from the signature."""
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
    # str.isdigit alone also takes digits of other scripts, and superscripts.
    if not all(size.isascii() and size.isdigit() and len(size) < 10 for size in sizes):
        message = f"X-Shape is {text[:40]!r}, expected sizes with commas, such as 1,8"
        raise ValueError(UNREADABLE, message)
    return [int(size) for size in sizes]


def parse_json(body: bytes | bytearray) -> Any:
    """Parse JSON in UTF-8, and NaN and Infinity, which `check` refuses by the input's name."""
    text = body.removeprefix(BYTE_ORDER_MARK)  # RFC 8259, section 8.1, lets a parser ignore it
    try:
        if fast_json is not None:  # five times as fast as json, which holds up all other requests
            return fast_json.from_json(text)
        return json.loads(text.decode())
    except (RecursionError, ValueError) as error:
        message = f"the body is not JSON: {str(error)[:120]}"
        if "recursion" in message:
            message = "the body is JSON nested too deeply for any tensor"
        raise ValueError(UNREADABLE, message) from None


def from_json(value: Any, specs: Specs, readers: Readers) -> list[Array]:
    """Return the arrays of a parsed JSON body; numbers must fit the inputs' dtypes exactly."""
    inputs = value.get("inputs") if isinstance(value, dict) else value
    are_texts = (
        isinstance(inputs, list) and bool(inputs) and all(isinstance(i, str) for i in inputs)
    )
    if are_texts and TEXT in readers:
        return readers[TEXT](inputs)
    if isinstance(inputs, list) and len(specs) == 1:
        inputs = {specs[0]["name"]: inputs}
    if not isinstance(inputs, dict):
        raise ValueError(UNREADABLE, 'the body is not {"inputs": {"name": [...], ...}}')
    ordered = zip(in_signature_order(inputs, specs), specs, strict=True)
    return [to_exact_array(values, spec) for values, spec in ordered]


def encode(
    named: dict[str, Array], accept: str, wanted: Named, model_name: str, classes: Named | None
) -> tuple[bytes, dict[str, str]]:
    """Encode outputs, none of which holds NaN; return the response's body and headers.

    Args:
        named: the outputs by name.
        accept: the Accept header, in lower case.
        wanted: ``requested_outputs`` of an Open Inference Protocol request; else empty.
        model_name: name of the served model.
        classes: ``names``, ``top`` and ``softmax`` of the first output, if its classes have names.
    """
    if NPZ in accept:
        return to_npz(named), {"content-type": NPZ}
    labels = top_classes(next(iter(named.values())), classes) if classes else []
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


def to_npz(arrays: Named) -> bytes:
    """Return arrays as ``numpy.savez`` writes them, but with any names and reproducible bytes."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)
    return stream.getvalue()


def from_npz(data: bytes, most: int | None = None) -> dict[str, Array]:
    """Read an npz as ``numpy.savez`` writes it, of at most so many arrays; nothing is unpickled."""
    if most is not None and directory_bytes(data) > most * MEMBER_BYTES:
        raise ValueError(UNREADABLE, f"the npz holds more than the {most} arrays expected")
    arrays: dict[str, Array] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        # A few bytes could decompress to any size.
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise ValueError(UNREADABLE, "the npz is compressed: write it with numpy.savez")
        if sum(member.file_size for member in members) > len(data):
            raise ValueError(UNREADABLE, "the npz holds arrays that share their bytes")
        for member in members:
            name = member.filename.removesuffix(".npy")
            if name in arrays:  # entries that share bytes could be read any number of times
                raise ValueError(UNREADABLE, f"the npz holds {name[:80]} twice")
            with archive.open(member) as stream:
                arrays[name] = np.lib.format.read_array(stream, allow_pickle=False)
    return arrays


def directory_bytes(data: bytes) -> int:
    """Return the size of a zip's central directory, of which Python makes an object per entry."""
    end = data[-END_OF_ZIP.size :]
    if len(end) < END_OF_ZIP.size or end[:4] != b"PK\5\6":
        raise ValueError(UNREADABLE, "the body is not a zip archive, as numpy.savez writes it")
    if data[-END_OF_ZIP.size - 20 :][:4] == b"PK\6\7":  # a zip64 end record overrides this one
        raise ValueError(UNREADABLE, "the npz is a zip64: it holds more than 2 GiB, or many arrays")
    size: int = END_OF_ZIP.unpack(end)[5]
    return size


def error_body(error: Exception, status: int = UNREADABLE) -> tuple[int, str]:
    """Return the status and the JSON body of a TorchServe error response."""
    status, message = describe_error(error, status)
    return status, json.dumps({"code": status, "message": message})
