"""Decode request bodies to arrays, images and texts too; encode arrays to response bodies.

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
    audio/wav, audio/flac     one sound, if it was packed with ``audio``
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
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.serve.worker.tensors import (
    NOT_ACCEPTABLE,
    TOO_LARGE,
    UNKNOWN_FORM,
    abbreviated,
    dtype_name,
    in_signature_order,
    to_exact_array,
    top_classes,
    unreadable,
)

if TYPE_CHECKING:
    from compress.serve.worker.tensors import Array, Named, Specs

    Readers = Mapping[str, Callable[[Any], list[Array]]]

try:
    import pydantic_core
except ImportError:  # a TorchServe archive needs numpy and the model's runtime alone
    pydantic_core = None  # type: ignore[assignment]

fast_json: Any = pydantic_core  # reads and writes JSON in a tenth of json's time, where installed
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
TEXT_DATATYPE = "BYTES"  # the protocol's datatype of strings
JSON_CHUNK = 1 << 16  # numbers per call of `json.dumps`: 20 ms, in which no other thread runs
LABELS = ("labels", "probabilities")  # outputs of the likeliest classes, if they have names
JSON, NPY, NPZ = "application/json", "application/x-npy", "application/x-npz"
MEMBER_BYTES = 512  # per array in a zip's directory: 46 bytes, its name and extra fields
END_OF_ZIP = struct.Struct("<4s4H2LH")
RAW, TEXT, IMAGES = "application/octet-stream", "text/plain", ("image/png", "image/jpeg")
SOUNDS = ("audio/wav", "audio/x-wav", "audio/wave", "audio/flac", "audio/x-flac")
SOUND_FORMATS = ("WAV", "WAVEX", "FLAC")  # of those that libsndfile reads
MAX_SOUND = 64_000_000  # numbers of a decoded sound, in all channels
NO_BODY = f"the request has no body; send one as {JSON} or {NPZ}"
TENSORS = (NPY, NPZ, RAW)  # bodies of bytes that hold nothing but tensors
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_PIXELS = 64_000_000  # largest decoded image: a small file can decompress to any size
MOST_TOKENS_OF_CHARACTER = 4  # usually: of the bytes of an emoji
SPARE_TOKENS = 256
"""Tokens at the end of a text's part that may be others than in the text. A word of WordPiece is
one unknown token if it has more than 100 characters, and up to 100 tokens if not."""
DEEP_MODES = ("I", "F")  # first letters of Pillow's modes with more than 8 bits per channel


def is_protocol(value: Any) -> bool:
    """Return whether a parsed JSON body has the protocol's list of input tensors."""
    inputs = value.get("inputs") if isinstance(value, dict) else None
    return isinstance(inputs, list) and bool(inputs) and all(isinstance(i, dict) for i in inputs)


def split_body(body: bytes, header_length: str) -> tuple[bytes, memoryview]:
    """Split a body into its JSON and the raw tensors after it."""
    found = f"{HEADER_LENGTH} is {header_length[:40]!r}"
    if not header_length.isascii() or not header_length.isdigit():
        raise unreadable(f"{found}, expected a number")
    length = int(header_length)
    if length > len(body):
        raise unreadable(f"{found}, the body has {len(body)} bytes")
    return body[:length], memoryview(body)[length:]


def from_protocol(
    value: Named,
    specs: Specs,
    raw: memoryview | bytes = b"",
    read_texts: Callable[[list[str]], list[Array]] | None = None,
) -> list[Array]:
    """Return the arrays of a parsed request, and raw bytes behind it, in the signature's order."""
    if not is_protocol(value):
        form = '{"inputs": [{"name", "shape", "datatype", ...}, ...]}'
        raise unreadable(f"the body is not {form}")
    tensors: dict[str, tuple[Named, memoryview | bytes]] = {}
    for tensor in value["inputs"]:
        size = parameters_of(tensor).get("binary_data_size")
        for key in ("name", "shape", "datatype", *(["data"] if size is None else [])):
            if key not in tensor:
                raise unreadable(
                    f"inputs: a tensor has {abbreviated([*tensor])}, expected a {key!r}"
                )
        name = tensor["name"]
        if size is not None and (type(size) is not int or not 0 <= size <= len(raw)):
            found = f"{abbreviated(name)}: binary_data_size is {abbreviated(size)}"
            raise unreadable(f"{found}, and {len(raw)} bytes are left")
        if not isinstance(name, str) or name in tensors:
            raise unreadable(f"inputs: {abbreviated(name)} is given twice, or no name")
        tensors[name] = (tensor, raw[: size or 0])
        raw = raw[size or 0 :]
    if len(raw):
        raise unreadable(f"{len(raw)} bytes follow the last tensor, expected none")
    first = value["inputs"][0]
    if read_texts and len(tensors) == 1 and first["datatype"] == TEXT_DATATYPE and "data" in first:
        return read_texts(_texts(first))
    pairs = zip(in_signature_order(tensors, specs), specs, strict=True)
    return [_array(tensor, data, spec) for (tensor, data), spec in pairs]


def _texts(tensor: Named) -> list[str]:
    texts, shape = tensor["data"], tensor["shape"]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise unreadable(f"{tensor['name']}: data is not a list of texts")
    if shape not in ([len(texts)], [len(texts), 1]) or not texts:
        raise unreadable(
            f"{tensor['name']} has shape {abbreviated(shape)}, expected [{len(texts) or 1}]"
        )
    return texts


def _array(tensor: Named, raw: memoryview | bytes, spec: Named) -> Array:
    name, shape, expected = tensor["name"], tensor["shape"], DATATYPES[spec["dtype"]]
    if tensor["datatype"] != expected:
        found = abbreviated(tensor["datatype"])
        raise unreadable(f"{name}: datatype is {found}, expected {expected!r}")
    if not isinstance(shape, list) or not all(type(d) is int and 0 <= d < 2**31 for d in shape):
        raise unreadable(f"{name}: shape is {abbreviated(shape)}, expected a list of sizes")
    if "binary_data_size" in parameters_of(tensor):
        dtype = np.dtype(spec["dtype"]).newbyteorder("<")
        needed = math.prod(shape) * dtype.itemsize
        if len(raw) != needed:
            found = f"{name}: binary_data_size is {len(raw)}"
            raise unreadable(f"{found}, expected {needed} for shape {shape}")
        # A copy: the bytes start at any offset, and native code may rely on aligned data.
        return np.frombuffer(raw, dtype).reshape(shape).astype(spec["dtype"])
    array = to_exact_array(tensor["data"], spec)
    nested = array.ndim > 1  # the data of a tensor may be flat, or nested like its shape
    if array.size != math.prod(shape) or (nested and list(array.shape) != shape):
        size = list(array.shape) if nested else array.size
        raise unreadable(f"{name}: data has {size} elements, expected those of shape {shape}")
    return array.reshape(shape)


def requested_outputs(value: Named, outputs: Sequence[str]) -> dict[str, Any]:
    """Return the response's ``id``, the names of its ``outputs``, and of the ``binary`` ones."""
    binary_by_default = parameters_of(value).get("binary_data_output", False)
    requested = value.get("outputs") or [{"name": name} for name in outputs]
    if not isinstance(requested, list) or not all(isinstance(each, dict) for each in requested):
        raise unreadable(f"outputs is {abbreviated(requested)}, expected objects with a 'name'")
    names = [each.get("name") for each in requested]
    for i, name in enumerate(names):
        if name not in outputs or name in names[:i]:
            found = f"outputs[{i}].name is {abbreviated(name)}"
            raise unreadable(f"{found}, expected each once of {[*outputs]}")
    binary = [
        e["name"] for e in requested if parameters_of(e).get("binary_data", binary_by_default)
    ]
    return {"id": value.get("id"), "outputs": names, "binary": binary}


def to_protocol(
    named: Named, wanted: Named, model: str, labels: list[list[dict[str, Any]]], version: str = ""
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
    named_version = f', "model_version": "{version}"' if version else ""
    answer = f'"model_name": {quoted(model)}{named_version}{request_id}'
    body = f'{{{answer}, "outputs": [{", ".join(tensors)}]}}'.encode()
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
        raise unreadable(f"parameters is {abbreviated(found)}, expected an object")
    return found


def decode(
    body: Any, content_type: str, headers: Named, specs: Specs, readers: Readers
) -> tuple[list[Array], Named]:
    """Decode a request body: bytes, or JSON that is parsed already; raw bytes without a type.

    `readers` are the preprocessing functions of images' bytes, or lists of texts, by content type.
    Returns the arrays in the signature's order, and the parsed request if it is one of the Open
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
        raise unreadable(f"the body is empty, expected {names} as {JSON} or {NPZ}")
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
        raise unreadable(f"{spec['name']} is {sent[:40]}, expected {spec['dtype']}")
    shape = [-1 if isinstance(d, str) else d for d in spec["shape"]]
    if "x-shape" in headers:
        sizes = [size.strip() for size in headers["x-shape"].split(",")]
        # str.isdigit alone also takes digits of other scripts, and superscripts.
        if not all(size.isascii() and size.isdigit() and len(size) < 10 for size in sizes):
            found = f"X-Shape is {headers['x-shape'][:40]!r}"
            raise unreadable(f"{found}, expected sizes with commas, such as 1,8")
        shape = [int(size) for size in sizes]
    elif shape.count(-1) > 1:
        raise unreadable(
            f"X-Shape is missing, expected the sizes of {list(spec['shape'])}, such as 1,8"
        )
    little_endian = np.dtype(spec["dtype"]).newbyteorder("<")
    row = math.prod(d for d in shape if d > 0) * little_endian.itemsize
    if len(body) % row:
        found = f"the body has {len(body)} bytes as {RAW}"
        raise unreadable(f"{found}, expected {spec['dtype']} of shape {list(spec['shape'])}")
    return np.frombuffer(body, little_endian).reshape(shape).astype(spec["dtype"])


def without_mark(body: bytes | bytearray) -> bytes | bytearray:
    """Return JSON without a byte order mark, which RFC 8259, section 8.1, lets a parser ignore."""
    # Not removeprefix, which copies a bytearray: that is a third of what reading a body takes.
    return body[len(BYTE_ORDER_MARK) :] if body.startswith(BYTE_ORDER_MARK) else body


def parse_json(body: bytes | bytearray) -> Any:
    """Parse JSON in UTF-8, and NaN and Infinity, which `check` refuses by the input's name."""
    text = without_mark(body)
    try:
        if fast_json is not None:  # five times as fast as json, which holds up all other requests
            return fast_json.from_json(text)
        return json.loads(text.decode())
    except (RecursionError, ValueError) as error:
        if "recursion" in str(error):
            raise unreadable("the body is JSON nested too deeply for any tensor") from None
        raise unreadable(f"the body is not JSON: {str(error)[:120]}") from None


def from_json(value: Any, specs: Specs, readers: Readers) -> list[Array]:
    """Return the arrays of a parsed JSON body; numbers must fit the inputs' dtypes exactly."""
    inputs = value.get("inputs") if isinstance(value, dict) else value
    if isinstance(inputs, list):
        if inputs and TEXT in readers and all(isinstance(i, str) for i in inputs):
            return readers[TEXT](inputs)
        if len(specs) == 1:
            inputs = {specs[0]["name"]: inputs}
    if not isinstance(inputs, dict):
        raise unreadable('the body is not {"inputs": {"name": [...], ...}}')
    ordered = zip(in_signature_order(inputs, specs), specs, strict=True)
    return [to_exact_array(values, spec) for values, spec in ordered]


def encode(
    named: dict[str, Array],
    accept: str,
    wanted: Named,
    model_name: str,
    classes: Named | None,
    version: str = "",
) -> tuple[bytes, dict[str, str]]:
    """Encode outputs, none of which holds NaN; return the response's body and headers.

    `accept` is the Accept header in lower case, `wanted` the ``requested_outputs`` of an Open
    Inference Protocol request, `classes` the settings of the first output's class names, if any.
    """
    if NPZ in accept:
        return to_npz(named), {"content-type": NPZ}
    labels = top_classes(next(iter(named.values())), classes) if classes else []
    if wanted:
        return to_protocol(named, wanted, model_name, labels, version)
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
        raise unreadable(f"the npz holds more than the {most} arrays expected")
    arrays: dict[str, Array] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        # A few bytes could decompress to any size.
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise unreadable("the npz is compressed: write it with numpy.savez")
        if sum(member.file_size for member in members) > len(data):
            raise unreadable("the npz holds arrays that share their bytes")
        for member in members:
            name = member.filename.removesuffix(".npy")
            if name in arrays:  # entries that share bytes could be read any number of times
                raise unreadable(f"the npz holds {name[:80]} twice")
            with archive.open(member) as stream:
                arrays[name] = np.lib.format.read_array(stream, allow_pickle=False)
    return arrays


def directory_bytes(data: bytes) -> int:
    """Return the size of a zip's central directory, of which Python makes an object per entry."""
    end = data[-END_OF_ZIP.size :]
    if len(end) < END_OF_ZIP.size or end[:4] != b"PK\5\6":
        raise unreadable("the body is not a zip archive, as numpy.savez writes it")
    if data[-END_OF_ZIP.size - 20 :][:4] == b"PK\6\7":  # a zip64 end record overrides this one
        raise unreadable("the npz is a zip64: it holds more than 2 GiB, or many arrays")
    size: int = END_OF_ZIP.unpack(end)[5]
    return size


def create_readers(settings: Named, specs: Specs, folder: Path) -> Readers:
    """Return the preprocessing function of each content type that the archive accepts."""
    readers: dict[str, Callable[[Any], list[Array]]] = {}
    if settings.get("image"):
        readers |= dict.fromkeys(IMAGES, image_reader(settings["image"], specs[0]))
    if settings.get("audio"):
        readers |= dict.fromkeys(SOUNDS, audio_reader(settings["audio"], specs[0]))
    if settings.get("text"):
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / settings["text"]["tokenizer"]))
        readers[TEXT] = text_reader(settings["text"], specs, tokenizer, settings.get("max_rows"))
    return readers


def image_reader(settings: Named, spec: Named) -> Callable[[bytes], list[Array]]:
    """Return a function that decodes a PNG or JPEG to one row of the model's only input."""
    from PIL import Image

    def read(body: bytes) -> list[Array]:
        try:
            with Image.open(io.BytesIO(body), formats=("PNG", "JPEG")) as image:
                pixels = image.width * image.height
                if pixels > MAX_PIXELS:
                    message = f"the image has {pixels} pixels, at most {MAX_PIXELS}"
                    raise ValueError(TOO_LARGE, message)
                if image.mode.startswith(DEEP_MODES):
                    raise unreadable(f"the image's mode is {image.mode}, expected 8 bits")
                fitted = fit(upright(image).convert(settings["mode"]), settings)
        except (OSError, SyntaxError, Image.DecompressionBombError):
            raise unreadable("the body is no PNG or JPEG image, or truncated") from None
        return [normalized(np.asarray(fitted), settings, spec["dtype"])]

    return read


def upright(image: Any) -> Any:
    """Turn a Pillow image as its camera was held, which transformers does, too."""
    from PIL import ImageOps

    image.getexif()
    image.info.pop("exif", None)  # Pillow would write it anew, odd entries too
    return ImageOps.exif_transpose(image)


def fit(image: Any, settings: Named) -> Any:
    """Resize a Pillow image to an exact size, or its shorter side, and cut out the center."""
    from PIL import Image

    height, width = settings["size"]
    shorter = settings["shorter_side"]
    sides = [*reversed(settings.get("squashed_to") or (height, width))]
    if shorter is not None:  # as torchvision's Resize(shorter) does
        sides = [shorter * side // min(image.size) for side in image.size]
    if sides[0] * sides[1] > MAX_PIXELS:
        message = f"the image would be scaled to {sides}, at most {MAX_PIXELS} pixels"
        raise ValueError(TOO_LARGE, message)
    scaled = image.resize(sides, Image.Resampling[settings.get("resample", "bilinear").upper()])
    cut = sides[0] - width, sides[1] - height
    if settings.get("crop_rounding") == "down":
        left, top = cut[0] // 2, cut[1] // 2
    else:
        left, top = round(cut[0] / 2), round(cut[1] / 2)
    return scaled.crop((left, top, left + width, top + height))


def normalized(pixels: Array, settings: Named, dtype: str) -> Array:
    """Normalize pixels to one row of the model's input, (1, C, H, W) or (1, H, W, C).

    uint8 inputs stay as they are; others are scaled to 0..1, minus mean, divided by std.
    """
    row = pixels.reshape(1, *pixels.shape[:2], -1)
    if dtype != "uint8":
        row = (row / 255 - np.asarray(settings["mean"])) / np.asarray(settings["std"])
    if settings["layout"] == "chw":
        row = row.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(row, dtype)


def audio_reader(settings: Named, spec: Named) -> Callable[[bytes], list[Array]]:
    """Return a function that decodes a WAV or FLAC file to one row of the model's only input."""
    import soundfile

    rate, length = settings["rate"], settings["samples"]
    extract: Any = None
    if extractor := settings["extractor"]:
        import transformers

        extract = getattr(transformers, extractor["feature_extractor_type"])(**extractor)

    def read(body: bytes) -> list[Array]:
        try:
            with soundfile.SoundFile(io.BytesIO(body)) as file:
                if file.format not in SOUND_FORMATS:
                    raise unreadable(f"found {file.format}, expected WAV or FLAC")
                # One second more, for the filter that changes the rate.
                frames, channels, own_rate = file.frames, file.channels, file.samplerate
                needed = frames if length is None else min(frames, (length // rate + 2) * own_rate)
                if not needed:
                    raise unreadable("the sound has no samples")
                if needed * max(channels, rate / own_rate) > MAX_SOUND:
                    found = f"{frames} frames of {channels} channels at {own_rate} Hz"
                    raise ValueError(TOO_LARGE, f"{found}, expected at most {MAX_SOUND} numbers")
                sound = file.read(needed, "float32", always_2d=True).mean(1)
        except soundfile.SoundFileError:
            raise unreadable("the body is no WAV or FLAC file, or truncated") from None
        if own_rate != rate:
            import soxr

            sound = soxr.resample(sound, own_rate, rate)
        sound = sound[:length]
        if extract:
            found = extract(sound, sampling_rate=rate, return_tensors="np")[spec["name"]]
            return [np.ascontiguousarray(found, spec["dtype"])]
        if settings["normalize"]:  # as transformers does, before it fills up
            sound = (sound - sound.mean()) / np.sqrt(sound.var() + 1e-7)
        sound = np.pad(sound, (0, max(0, (length or 0) - len(sound))))
        axes = [1] * (len(spec["shape"]) - 1)
        return [np.ascontiguousarray(sound.reshape(*axes, -1), spec["dtype"])]

    return read


def text_reader(
    settings: Named, specs: Specs, tokenizer: Any, max_rows: int | None = None
) -> Callable[[list[str]], list[Array]]:
    """Return a function that tokenizes texts to the model's inputs, one row per text.

    The `tokenizer`, of Hugging Face's tokenizers, becomes the function's own.
    """
    most = settings["max_length"]
    cut_side = (tokenizer.truncation or {}).get("direction", "right")
    padding = tokenizer.padding or {}

    def count_tokens(text: str) -> int:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return len(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0])

    def read(texts: list[str]) -> list[Array]:
        if max_rows is not None and len(texts) > max_rows:
            raise ValueError(TOO_LARGE, f"{len(texts)} rows, at most {max_rows} in one request")
        if most:
            texts = [clipped(text, most, count_tokens, cut_side) for text in texts]
            tokenizer.enable_truncation(most, direction=cut_side)
        tokenizer.enable_padding(
            direction=padding.get("direction", "right"),
            pad_id=settings["pad_id"],
            pad_type_id=padding.get("pad_type_id", 0),
            pad_token=settings["pad_token"],
            length=settings["length"],
        )
        encodings = tokenizer.encode_batch(texts)
        fields = [settings["fields"][spec["name"]] for spec in specs]
        columns = [[getattr(each, field) for each in encodings] for field in fields]
        return [np.array(c, spec["dtype"]) for c, spec in zip(columns, specs, strict=True)]

    return read


def clipped(text: str, most: int, count_tokens: Callable[[str], int], side: str = "right") -> str:
    """Return a text without characters that lie far behind its first `most` tokens.

    What tokenizing costs then depends on `most`, not on the text. Longer parts are tried until one
    has clearly more tokens than that: those near its end may be others than the text's. With the
    side `left` the end is kept.
    """
    enough = most + most // 8 + SPARE_TOKENS
    size = enough // MOST_TOKENS_OF_CHARACTER
    while size < len(text):
        part = text[-size:] if side == "left" else text[:size]
        count = count_tokens(part)
        if count > enough:
            return part
        # Not far beyond what it will take, if the text goes on like that.
        size = max(size * 5 // 4, min(2 * size, size * enough * 9 // (8 * max(1, count))))
    return text
