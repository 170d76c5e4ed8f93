"""One safetensors file, written a tensor at a time.

The format: the header's length in 8 bytes, the header (JSON), then the tensors' bytes. The bytes
are those that the safetensors library writes for the same tensors, its random order of tied names
apart.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from compress.core.chunks import bytes_of
from compress.core.errors import ArtifactInvalid
from compress.core.files import partial_of, sync
from compress.core.weights import StoredTensor, in_memory, place_of

if TYPE_CHECKING:
    from io import FileIO
    from pathlib import Path

    from compress.core.weights import Weights

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


def tensors_in(stream: FileIO) -> dict[str, StoredTensor]:
    """Return the tensors of an open file, each read when it is asked for; tied names but one lack.

    Mapped into memory, as the library reads, the file would count beside the module it fills.

    Raises:
        ArtifactInvalid: it is no such file, or truncated.
    """
    try:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        return {
            name: StoredTensor(
                tuple(entry["shape"]),
                DTYPES[entry["dtype"]],
                partial(_read, stream, 8 + length, name, entry),
            )
            for name, entry in header.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError) as error:
        raise ArtifactInvalid(
            f"{stream.name}: not a readable safetensors file, or truncated ({error})"
        ) from error


def _read(stream: FileIO, start: int, name: str, entry: dict[str, Any]) -> torch.Tensor:
    tensor = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]])
    begin, end = entry["data_offsets"]
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
