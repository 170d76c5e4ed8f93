"""Directories that torch.distributed.checkpoint wrote, read without executing anything.

Their index, `.metadata`, is a pickle, which torch itself reads with
all that a pickle may do. Here it may name the index's own classes and nothing else.
"""

from __future__ import annotations

import io
import pickle
from functools import partial
from math import prod
from pathlib import PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp

from compress.checkpoint.state_dict import StoredTensor, refuse_elsewhere
from compress.checkpoint.storage_reader import Window, read_saved_
from compress.common.errors import ArtifactInvalid, first_line

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

METADATA = ".metadata"
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
    # Where the checkpoint was written: kept as words, never followed.
    **{(m, "PosixPath"): PurePosixPath for m in ("pathlib", "pathlib._local")},
    **{(m, "WindowsPath"): PureWindowsPath for m in ("pathlib", "pathlib._local")},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise PermissionError(f"{module}.{name}")


def read_distributed(folder: Path) -> dict[Any, Any]:
    """Return the nested state that torch.distributed.checkpoint saved, its tensors still on disk.

    Raises:
        ArtifactInvalid: the index cannot be read, names code, or does not fit the files.
    """
    metadata = _read_metadata(folder)
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
    except Exception as error:  # an index of other values than torch writes fails anywhere
        raise _unreadable(folder, error) from error
    return state


def _read_metadata(folder: Path) -> dcp.Metadata:
    try:
        metadata = _Unpickler(io.BytesIO((folder / METADATA).read_bytes())).load()
    except PermissionError as error:
        raise ArtifactInvalid(
            f"checkpoint {folder}: {METADATA} names {error}, which is no part of an index of "
            "torch.distributed.checkpoint and is never executed here; save the weights anew"
        ) from error
    except Exception as error:  # of bytes that are no pickle, the reader raises what it likes
        raise _unreadable(folder, error) from error
    if not isinstance(metadata, dcp.Metadata):
        raise ArtifactInvalid(
            f"checkpoint {folder}: {METADATA} holds a {type(metadata).__name__}, "
            "expected an index of torch.distributed.checkpoint"
        )
    return metadata


def _stored(
    folder: Path, metadata: dcp.Metadata, name: str, entry: dcp.TensorStorageMetadata
) -> StoredTensor:
    """Return a tensor that is put together from its chunks when it is read."""
    places = []
    for chunk in entry.chunks:
        info = metadata.storage_data[dcp.MetadataIndex(name, chunk.offsets)]
        refuse_elsewhere(folder, info.relative_path)
        if info.transform_descriptors:
            raise ArtifactInvalid(
                f"checkpoint {folder}: {name} is stored with {info.transform_descriptors}, "
                "which cannot be read here; save it without extensions"
            )
        places.append((chunk, info))
    held, expected = sum(prod(c.sizes) for c in entry.chunks), prod(entry.size)
    if held != expected:
        raise ArtifactInvalid(
            f"checkpoint {folder}: {name} has {held} of {expected} entries; "
            "a process's part is missing"
        )
    dtype = entry.properties.dtype
    read = partial(_assemble, folder, name, tuple(entry.size), dtype, places)
    return StoredTensor(tuple(entry.size), dtype, read)


def _assemble(
    folder: Path,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    places: Sequence[tuple[dcp.ChunkStorageMetadata, filesystem._StorageInfo]],
) -> torch.Tensor:
    try:
        whole = torch.empty(shape, dtype=dtype)
    except (RuntimeError, TypeError) as error:
        raise _unreadable(folder, error) from error
    for chunk, info in places:
        file = folder / info.relative_path
        try:
            region = whole[
                tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            ]
            if region.shape != chunk.sizes:
                raise ValueError(f"a part of {tuple(chunk.sizes)} reaches beyond {shape}")
            with file.open("rb", buffering=0) as stream:
                read_saved_(Window(stream, info.offset, info.length), region)
        except Exception as error:
            raise ArtifactInvalid(
                f"checkpoint {file}: {name} cannot be read, or truncated ({first_line(error)})"
            ) from error
    return whole


def _unreadable(folder: Path, error: Exception) -> ArtifactInvalid:
    return ArtifactInvalid(
        f"checkpoint {folder}: {METADATA} cannot be read, or truncated "
        f"({type(error).__name__}: {first_line(error)})"
    )
