"""One safetensors file, written a tensor at a time.

The format: the header's length in 8 bytes, the header (JSON), then the tensors' bytes. The bytes
are those that the safetensors library writes for the same tensors, its random order of tied names
apart.
"""

from __future__ import annotations

import json
import os
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field, ValidationError

from compress.checkpoint.state_dict import StoredTensor, in_memory, place_of
from compress.checkpoint.storage_reader import bytes_of
from compress.common.atomic_files import partial_of, sync
from compress.common.config import Settings
from compress.common.errors import ArtifactInvalid
from compress.common.strict_json import reject_duplicate_keys

if TYPE_CHECKING:
    from collections.abc import Mapping
    from io import BufferedReader, FileIO
    from pathlib import Path

    from compress.checkpoint.state_dict import Weights

DTYPES = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The format's names of dtypes, in the order in which tensors are laid out."""
CODES = {dtype: code for code, dtype in DTYPES.items()}
RANKS = {dtype: rank for rank, dtype in enumerate(CODES)}
LARGEST_HEADER = 100_000_000
"""Bytes of a header that the safetensors library (0.8) takes."""
Size = Annotated[int, Field(ge=0, lt=2**63, strict=True)]


class Entry(Settings):
    """A tensor in a file's header."""

    dtype: str
    """The format's name of its dtype."""
    shape: tuple[Size, ...]
    data_offsets: tuple[Size, Size]
    """Where its bytes begin and end, counted from the end of the header."""


def write_safetensors(file: Path, state: Weights) -> None:
    """Write a state dict as one file; of tensors on disk, one is in memory at a time.

    What is one tensor under several names is written once, and the header's metadata says which
    names are tied to it. The file is either the old one or the whole new one.

    Raises:
        ArtifactInvalid: a tensor cannot be read, is not what its index says, or has a dtype that
            the format does not know.
    """
    tied = _tied_names(state)
    for name, tensor in state.items():
        if tensor.dtype not in CODES:
            raise ArtifactInvalid(f"{name}: safetensors files have no {tensor.dtype}")
    names = sorted(state.keys() - tied.keys(), key=lambda n: (RANKS[state[n].dtype], n))
    partial = partial_of(file)
    try:
        with partial.open("wb") as stream:
            stream.write(_header(state, names, tied))
            for name in names:
                stream.write(bytes_of(_as_announced(name, state[name])))
        sync(partial)
        partial.replace(file)
        sync(file.parent)
    finally:
        partial.unlink(missing_ok=True)


def tensors_in(stream: FileIO | BufferedReader) -> dict[str, StoredTensor]:
    """Return the tensors of an open file, each read when it is asked for; tied names but one lack.

    Mapped into memory, as the library reads, the file would count beside the module it fills.

    Raises:
        ArtifactInvalid: it is no such file, or truncated.
    """
    start, entries = read_header(stream)
    for name, entry in entries.items():
        if entry.dtype not in DTYPES:
            raise ArtifactInvalid(f"{stream.name}: {name} is {entry.dtype}, which is not read here")
    return {
        name: StoredTensor(
            entry.shape, DTYPES[entry.dtype], partial(_read, stream, start, name, entry)
        )
        for name, entry in entries.items()
    }


def read_header(stream: FileIO | BufferedReader) -> tuple[int, dict[str, Entry]]:
    """Return where a file's tensors begin, and the place of each.

    Raises:
        ArtifactInvalid: it is no such file, or truncated; a name stands twice, of which readers
            take either; or tensors share bytes, leave some out, or are not as long as they say.
    """
    try:
        length = int.from_bytes(stream.read(8), "little")
        if length > LARGEST_HEADER:
            raise ValueError(f"the header has {length} bytes, expected at most {LARGEST_HEADER}")
        text = stream.read(length)
        if len(text) < length:
            raise ValueError(f"the header has {len(text)} of {length} bytes")
        header = json.loads(text, object_pairs_hook=reject_duplicate_keys)
        header.pop("__metadata__", None)
        entries = {name: Entry.model_validate(entry) for name, entry in header.items()}
        size = os.fstat(stream.fileno()).st_size - 8 - length
        _refuse_other_layout(entries, size)
    except ValidationError as error:
        why = error.errors()[0]["msg"]
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        why = str(error)
    else:
        return 8 + length, entries
    raise ArtifactInvalid(f"{stream.name}: not a readable safetensors file, or truncated ({why})")


def _refuse_other_layout(entries: Mapping[str, Entry], size: int) -> None:
    """Raise ValueError unless the tensors lie side by side and fill the file."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        if begin != position or end < begin:
            raise ValueError(f"{name[:80]!r} has bytes {begin} to {end}, expected from {position}")
        dtype = DTYPES.get(entry.dtype)
        if dtype is not None and end - begin != prod(entry.shape) * dtype.itemsize:
            raise ValueError(f"{name[:80]!r} is not as long as its shape says")
        position = end
    if position != size:
        raise ValueError(f"the tensors have {position} bytes, and the file {size}")


def _read(stream: FileIO | BufferedReader, start: int, name: str, entry: Entry) -> torch.Tensor:
    tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    begin, end = entry.data_offsets
    stream.seek(start + begin)
    numbers: Any = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else bytearray()
    wanted = memoryview(numbers)
    position = 0
    while position < len(wanted):
        count = stream.readinto(wanted[position:])
        if not count:
            raise ArtifactInvalid(f"{stream.name}: truncated within {name}")
        position += count
    if position != end - begin:
        raise ArtifactInvalid(f"{stream.name}: {name} is not as long as its shape says")
    return tensor


def _tied_names(state: Weights) -> dict[str, str]:
    """Return for each name of a tensor but its first one, that first one."""
    first: dict[tuple[object, ...], str] = {}
    for name, tensor in state.items():
        first.setdefault(place_of(tensor), name)
    kept = {name: first[place_of(tensor)] for name, tensor in state.items()}
    return {name: other for name, other in kept.items() if name != other}


def _header(state: Weights, names: list[str], tied: dict[str, str]) -> bytes:
    content: dict[str, object] = {"__metadata__": {"format": "pt", **tied}}
    begin = 0
    for name in names:
        end = begin + state[name].nbytes
        content[name] = {
            "dtype": CODES[state[name].dtype],
            "shape": list(state[name].shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _as_announced(name: str, announced: torch.Tensor | StoredTensor) -> torch.Tensor:
    tensor = in_memory(announced).detach().cpu().contiguous()
    if (tensor.dtype, tensor.shape) != (announced.dtype, torch.Size(announced.shape)):
        raise ArtifactInvalid(
            f"{name}: is {tensor.dtype} {tuple(tensor.shape)} and was announced as "
            f"{announced.dtype} {tuple(announced.shape)}"
        )
    return tensor
