"""Safetensors files, one or several with an index, read and written tensor by tensor.

The format: the header's length in 8 bytes, the header (JSON), then the tensors' bytes. The files
are byte for byte those of the safetensors library, except that it orders tied names at random.
"""

# The library's own writer takes all tensors in memory at once: from 8 tensors of 64 MiB on disk its
# peak is 512 MiB, and this one's is 64. Its reader maps the file, whose pages count as this
# process's memory beside the module that they are copied into.

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from io import BufferedReader, FileIO
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field, ValidationError

from compress.checkpoint.file_kinds import SAFETENSORS, unreadable
from compress.checkpoint.state_dict import StoredTensor, Weights, in_memory, storage_key
from compress.common.atomic_files import file_beside, open_atomically, open_regular
from compress.common.config import Settings
from compress.common.errors import ArtifactInvalid, located, raised_as
from compress.common.forward import bytes_of
from compress.common.sealed_json import load_strictly

if TYPE_CHECKING:
    import io

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
LARGEST_HEADER = 100_000_000  # bytes of a header that the safetensors library (0.8) accepts
MOST_TENSORS = 200_000
"""All files of a mixture of 256 experts in 61 layers (DeepSeek-V3) have 92,000; a million take
2 GiB and 20 s to check."""
Size = Annotated[int, Field(ge=0, lt=2**63, strict=True)]


class Entry(Settings):
    """A tensor in a file's header."""

    dtype: str
    shape: tuple[Size, ...]
    data_offsets: tuple[Size, Size]
    """Where its bytes begin and end, counted from the end of the header."""


def write_safetensors(file: Path, state: Weights) -> None:
    """Write a state dict as one file, with at most one tensor from disk in memory at a time.

    Raises ArtifactInvalid: a tensor is not what its index says, or the format lacks its dtype.
    """
    # A tensor with several names is written once; the header's metadata lists the others.
    first_name: dict[tuple[object, ...], str] = {}
    for name, tensor in state.items():
        if tensor.dtype not in CODES:
            raise ArtifactInvalid(f"{name}: safetensors files have no {tensor.dtype}")
        first_name.setdefault(storage_key(tensor), name)
    stored_as = {name: first_name[storage_key(tensor)] for name, tensor in state.items()}
    tied = {name: first for name, first in stored_as.items() if name != first}
    names = sorted(state.keys() - tied.keys(), key=lambda n: (RANKS[state[n].dtype], n))

    header: dict[str, object] = {"__metadata__": {"format": "pt", **tied}}
    begin = 0
    for name in names:
        end = begin + state[name].nbytes
        shape, offsets = list(state[name].shape), [begin, end]
        header[name] = {"dtype": CODES[state[name].dtype], "shape": shape, "data_offsets": offsets}
        begin = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes

    with open_atomically(file) as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            # No variable here: its tensor would stay in memory while the next one is read.
            stream.write(bytes_of(_load_announced(name, state[name])))


def _load_announced(name: str, stored: torch.Tensor | StoredTensor) -> torch.Tensor:
    tensor = in_memory(stored).detach().cpu().contiguous()
    # The header is written before the tensors are read: one that its own index announced otherwise
    # would shift all that follow it.
    if (tensor.dtype, tensor.shape) != (stored.dtype, torch.Size(stored.shape)):
        raise ArtifactInvalid(
            f"{name}: is {tensor.dtype} {tuple(tensor.shape)} and was announced as "
            f"{stored.dtype} {tuple(stored.shape)}"
        )
    return tensor


def read_safetensors(file: Path) -> dict[str, StoredTensor]:
    """Return a file's tensors, tied names included, still on disk, or raise ArtifactInvalid."""

    def read(start: int, name: str, entry: Entry) -> torch.Tensor:
        try:
            with open_regular(file) as stream:
                return _read_tensor(stream, start, name, entry)
        except (ArtifactInvalid, OSError) as error:
            raise ArtifactInvalid(f"checkpoint {error}") from error

    try:
        with located("checkpoint "), open_regular(file) as stream:
            size, entries, tied = read_header(stream)
            state = _stored_tensors(size, entries, file, read)
    except OSError as error:
        raise unreadable(file, SAFETENSORS, error, "checkpoint ") from error
    return state | {name: state[first] for name, first in tied.items() if first in state}


def tensors_in(stream: FileIO | BufferedReader) -> dict[str, StoredTensor]:
    """Return the tensors of an open file without the tied names, each read when it is needed."""
    size, entries, _ = read_header(stream)
    return _stored_tensors(size, entries, stream.name, partial(_read_tensor, stream))


def weight_map(index: Path) -> dict[str, Path]:
    """Return each tensor's file from an index; raise ArtifactInvalid for one in another folder."""
    what = f"{index}: not a readable index with a weight_map"
    with located("checkpoint "), raised_as(ArtifactInvalid, what), open_regular(index) as stream:
        files = load_strictly(stream.read())["weight_map"]
    if not isinstance(files, dict) or not files:
        raise ArtifactInvalid(f"checkpoint {index}: its weight_map names no tensors")
    return {name: file_beside(index, file) for name, file in files.items()}


def read_header(stream: FileIO | BufferedReader) -> tuple[int, dict[str, Entry], dict[str, str]]:
    """Return where tensors begin, entries, other names → stored ones; or raise ArtifactInvalid."""
    try:
        length = int.from_bytes(stream.read(8), "little")
        if length > LARGEST_HEADER:
            raise ValueError(f"the header has {length} bytes, expected at most {LARGEST_HEADER}")
        text = stream.read(length)
        if len(text) < length:
            raise ValueError(f"the header has {len(text)} of {length} bytes")
        if (count := text.count(b'"data_offsets"')) > MOST_TENSORS:
            raise ValueError(f"it has {count} tensors, expected at most {MOST_TENSORS}")
        header = load_strictly(text)
        metadata = header.pop("__metadata__", None) or {}
        tied = {name: str(first) for name, first in metadata.items() if name != "format"}
        entries = {name: Entry.model_validate(entry) for name, entry in header.items()}
        # The tensors must lie side by side and fill the file: else readers may disagree on it.
        position = 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
            begin, end = entry.data_offsets
            if begin != position or end < begin:
                raise ValueError(
                    f"{name[:80]!r} has bytes {begin} to {end}, expected from {position}"
                )
            dtype = DTYPES.get(entry.dtype)
            if dtype is not None and end - begin != prod(entry.shape) * dtype.itemsize:
                raise ValueError(f"{name[:80]!r} is not as long as its shape says")
            position = end
        size = os.fstat(stream.fileno()).st_size - 8 - length
        if position != size:
            raise ValueError(f"the tensors have {position} bytes, and the file {size}")
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        reason = str(error)
    else:
        return 8 + length, entries, tied
    raise unreadable(Path(stream.name), SAFETENSORS, reason)


def _stored_tensors(
    start: int,
    entries: dict[str, Entry],
    file: object,
    read: Callable[[int, str, Entry], torch.Tensor],
) -> dict[str, StoredTensor]:
    stored = {}
    for name, entry in entries.items():
        if entry.dtype not in DTYPES:
            raise ArtifactInvalid(f"{file}: {name} is {entry.dtype}, which is not read here")
        load = partial(read, start + entry.data_offsets[0], name, entry)
        stored[name] = StoredTensor(entry.shape, DTYPES[entry.dtype], load)
    return stored


def _read_tensor(
    stream: FileIO | BufferedReader, start: int, name: str, entry: Entry
) -> torch.Tensor:
    tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    stream.seek(start)
    try:
        read_exactly(stream, bytes_of(tensor))
    except EOFError as error:
        raise ArtifactInvalid(f"{stream.name}: truncated within {name}") from error
    return tensor


def read_exactly(stream: io.RawIOBase | BufferedReader, buffer: memoryview) -> None:
    """Fill a buffer from a stream; raise EOFError if that ends before."""
    while buffer:
        count = stream.readinto(buffer)
        if not count:
            raise EOFError(f"{len(buffer)} bytes are missing")
        buffer = buffer[count:]
