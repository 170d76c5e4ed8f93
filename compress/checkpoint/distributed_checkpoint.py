"""Reads directories of torch.distributed.checkpoint without executing anything in them."""

from __future__ import annotations

import io
import pickle
from contextlib import suppress
from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp

from compress.checkpoint.safetensors_io import bytes_of, read_exactly
from compress.checkpoint.state_dict import StoredTensor
from compress.common.atomic_files import file_beside
from compress.common.errors import ArtifactInvalid, first_line

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

METADATA = ".metadata"
BYTES_AT_ONCE = 2**20
"""Largest temporary buffer, for regions whose bytes do not lie in the file's order."""
# Whatever torch (2.13) pickles in an index.
_ALLOWED: dict[tuple[str, str], Any] = {
    **{
        ("torch.distributed.checkpoint.metadata", name): getattr(dcp, name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    # The path where the checkpoint was written: read as text, never opened.
    # Python 3.13 moved the classes to pathlib._local.
    **{(m, "PosixPath"): PurePosixPath for m in ("pathlib", "pathlib._local")},
    **{(m, "WindowsPath"): PureWindowsPath for m in ("pathlib", "pathlib._local")},
}


# The index is a pickle. torch reads it with the plain unpickler, which executes whatever the pickle
# names; here it may name the index's own classes and nothing else.
class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise PermissionError(f"{module}.{name}")


def read_distributed(folder: Path) -> dict[Any, Any]:
    """Return the nested state dict, its tensors still on disk, or raise ArtifactInvalid."""
    try:
        metadata = _Unpickler(io.BytesIO((folder / METADATA).read_bytes())).load()
    except PermissionError as error:
        raise ArtifactInvalid(
            f"checkpoint {folder}: {METADATA} names {error}, which is not part of an index of "
            "torch.distributed.checkpoint and is never executed here; save the weights anew"
        ) from error
    except Exception as error:  # for bytes that are no pickle, the reader raises anything
        raise _unreadable(folder, error) from error
    if not isinstance(metadata, dcp.Metadata):
        raise ArtifactInvalid(
            f"checkpoint {folder}: {METADATA} holds a {type(metadata).__name__}, "
            "expected an index of torch.distributed.checkpoint"
        )
    state: dict[Any, Any] = {}
    try:
        paths = metadata.planner_data or {}
        for name, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, dcp.TensorStorageMetadata):
                *parents, leaf = paths.get(name, (name,))
                branch = state
                for parent in parents:
                    branch = branch.setdefault(parent, {})
                branch[leaf] = _stored(folder, metadata, name, entry)
    except ArtifactInvalid:
        raise
    except Exception as error:  # an index with values that torch never writes fails anywhere
        raise _unreadable(folder, error) from error
    return state


def _stored(
    folder: Path, metadata: dcp.Metadata, name: str, entry: dcp.TensorStorageMetadata
) -> StoredTensor:
    """Return a tensor that is assembled from its chunks when it is read."""
    chunks = []
    for chunk in entry.chunks:
        info = metadata.storage_data[dcp.MetadataIndex(name, chunk.offsets)]
        if info.transform_descriptors:
            raise ArtifactInvalid(
                f"checkpoint {folder}: {name} is stored with {info.transform_descriptors}, "
                "which cannot be read here; save it without extensions"
            )
        chunks.append((chunk, info, file_beside(folder / METADATA, info.relative_path)))
    stored, expected = sum(prod(c.sizes) for c in entry.chunks), prod(entry.size)
    if stored != expected:
        raise ArtifactInvalid(
            f"checkpoint {folder}: {name} has {stored} of {expected} entries; "
            "a process's part is missing"
        )
    shape, dtype = tuple(entry.size), entry.properties.dtype

    def assemble() -> torch.Tensor:
        try:
            tensor = torch.empty(shape, dtype=dtype)
        except (RuntimeError, TypeError) as error:
            raise _unreadable(folder, error) from error
        for chunk, info, file in chunks:
            try:
                ends = zip(chunk.offsets, chunk.sizes, strict=True)
                region = tensor[tuple(slice(begin, begin + size) for begin, size in ends)]
                if region.shape != chunk.sizes:
                    raise ValueError(f"a part of {tuple(chunk.sizes)} reaches beyond {shape}")
                with file.open("rb", buffering=0) as stream:
                    _read_tensor_(_Window(stream, info.offset, info.length), region)
            except Exception as error:
                raise ArtifactInvalid(
                    f"checkpoint {file}: {name} cannot be read, or truncated ({first_line(error)})"
                ) from error
        return tensor

    def read_headers() -> None:
        for _, info, file in chunks:
            with suppress(Exception), file.open("rb", buffering=0) as stream:
                _load_on_meta(io.BufferedReader(_Window(stream, info.offset, info.length)))

    return StoredTensor(shape, dtype, assemble, read_headers)


def _unreadable(folder: Path, error: Exception) -> ArtifactInvalid:
    return ArtifactInvalid(
        f"checkpoint {folder}: {METADATA} cannot be read, or truncated "
        f"({type(error).__name__}: {first_line(error)})"
    )


class _Window(io.RawIOBase):
    """A byte range of an open file, as a read-only file of its own; it does not close the file."""

    def __init__(self, file: io.FileIO, start: int, length: int) -> None:
        self.file, self.start, self.length, self.position = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.length}[whence]
        self.position = max(0, origin + offset)
        return self.position

    def readinto(self, buffer: WriteableBuffer) -> int:
        wanted = memoryview(buffer).cast("B")[: max(0, self.length - self.position)]
        self.file.seek(self.start + self.position)
        count = self.file.readinto(wanted) or 0
        self.position += count
        return count


def _load_on_meta(stream: io.BufferedReader[_Window]) -> torch.Tensor:
    """Return a saved tensor without its data; torch records the offset at which they begin."""
    saved: torch.Tensor = torch.load(stream, map_location="meta", weights_only=True)
    return saved


def _read_tensor_(window: _Window, region: torch.Tensor) -> None:
    """Read the tensor that torch.save wrote to a range of a file into another one, in place."""
    stream = io.BufferedReader(window)  # closes the window when it is not referenced any more
    saved = _load_on_meta(stream)
    if saved.shape != region.shape:
        raise ValueError(f"{tuple(saved.shape)} instead of {tuple(region.shape)}")
    start = getattr(saved.untyped_storage(), "_checkpoint_offset", None)
    axes = None
    if saved.layout == torch.strided and not (saved.is_conj() or saved.is_neg()):
        strides = saved.stride()
        by_stride = sorted(range(saved.dim()), key=lambda axis: -strides[axis])
        # None where the memory has gaps, as in a slice of a larger tensor.
        axes = by_stride if saved.permute(by_stride).is_contiguous() else None
    if start is None or axes is None or saved.dtype != region.dtype:
        # Loaded fully and then copied: the file's bytes are not the region's in its own order.
        stream.seek(0)
        region.copy_(torch.load(stream, weights_only=True))
    elif saved.numel():
        window.seek(start + saved.storage_offset() * saved.element_size())
        _fill_(region.permute(axes), window)


def _fill_(region: torch.Tensor, window: _Window) -> None:
    if region.is_contiguous():
        read_exactly(window, bytes_of(region))
    elif region.nbytes <= BYTES_AT_ONCE:
        buffer = torch.empty(region.shape, dtype=region.dtype)
        read_exactly(window, bytes_of(buffer))
        region.copy_(buffer)
    elif len(region) == 1:
        _fill_(region[0], window)
    else:
        for rows in torch.split(region, max(1, BYTES_AT_ONCE // region[0].nbytes)):
            _fill_(rows, window)
