"""Reads directories of torch.distributed.checkpoint without executing anything in them."""

from __future__ import annotations

import io
import pickle
from math import prod
from pathlib import PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp

from compress.checkpoint.state_dict import StoredTensor
from compress.checkpoint.storage_reader import Window, read_tensor_
from compress.common.atomic_files import file_beside
from compress.common.errors import ArtifactInvalid, first_line

if TYPE_CHECKING:
    from pathlib import Path

METADATA = ".metadata"
# Whatever torch (2.13) pickles in an index.
_CLASSES = "torch.distributed.checkpoint.metadata"
_ALLOWED: dict[tuple[str, str], Any] = {
    **{
        (_CLASSES, name): getattr(dcp, name)
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
                    read_tensor_(Window(stream, info.offset, info.length), region)
            except Exception as error:
                raise ArtifactInvalid(
                    f"checkpoint {file}: {name} cannot be read, or truncated ({first_line(error)})"
                ) from error
        return tensor

    return StoredTensor(shape, dtype, assemble)


def _unreadable(folder: Path, error: Exception) -> ArtifactInvalid:
    return ArtifactInvalid(
        f"checkpoint {folder}: {METADATA} cannot be read, or truncated "
        f"({type(error).__name__}: {first_line(error)})"
    )
