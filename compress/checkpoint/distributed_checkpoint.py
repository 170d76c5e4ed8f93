"""Reads directories of torch.distributed.checkpoint without executing anything in them."""

from __future__ import annotations

import io
import pickle
from contextlib import suppress
from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.utils import _create_file_view

from compress.checkpoint.safetensors_io import read_exactly
from compress.checkpoint.state_dict import StoredTensor
from compress.common.atomic_files import file_beside
from compress.common.errors import ArtifactInvalid, located, raised_as
from compress.common.forward import bytes_of

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
    # How Python 3.11.0 to 3.11.3 (Debian 12's is 3.11.2) pickle a member of an enum, by its name;
    # all others by its value (cpython #26658).
    ("builtins", "getattr"): lambda _, name: dcp._MEM_FORMAT_ENCODING[name],
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
        raise ArtifactInvalid(
            f"names {module}.{name}, which is not part of an index of torch.distributed.checkpoint "
            "and is never executed here; save the weights anew"
        )


def read_distributed(folder: Path) -> dict[Any, Any]:
    """Return the nested state dict, its tensors still on disk, or raise ArtifactInvalid."""
    unreadable = f"checkpoint {folder}: {METADATA} cannot be read, or truncated"
    with raised_as(ArtifactInvalid, unreadable), located(f"checkpoint {folder}: {METADATA} "):
        metadata = _Unpickler(io.BytesIO((folder / METADATA).read_bytes())).load()
    if not isinstance(metadata, dcp.Metadata):
        raise ArtifactInvalid(
            f"checkpoint {folder}: {METADATA} holds a {type(metadata).__name__}, "
            "expected an index of torch.distributed.checkpoint"
        )
    state: dict[Any, Any] = {}
    with raised_as(ArtifactInvalid, unreadable):  # values that torch never writes fail anywhere
        paths = metadata.planner_data or {}
        for name, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, dcp.TensorStorageMetadata):
                *parents, leaf = paths.get(name, (name,))
                branch = state
                for parent in parents:
                    branch = branch.setdefault(parent, {})
                branch[leaf] = _stored(folder, metadata, name, entry)
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
        unreadable = f"{name} cannot be read, or truncated"
        with raised_as(ArtifactInvalid, f"checkpoint {folder}: {unreadable}"):
            tensor = torch.empty(shape, dtype=dtype)
        for chunk, info, file in chunks:
            with raised_as(ArtifactInvalid, f"checkpoint {file}: {unreadable}"):
                ends = zip(chunk.offsets, chunk.sizes, strict=True)
                region = tensor[tuple(slice(begin, begin + size) for begin, size in ends)]
                if region.shape != chunk.sizes:
                    raise ValueError(f"a part of {tuple(chunk.sizes)} reaches beyond {shape}")
                with file.open("rb") as stream:
                    _read_tensor_(_create_file_view(stream, info.offset, info.length), region)
        return tensor

    def read_headers() -> None:
        for _, info, file in chunks:
            with suppress(Exception), file.open("rb") as stream:
                _load_on_meta(_create_file_view(stream, info.offset, info.length))

    return StoredTensor(shape, dtype, assemble, read_headers)


def _load_on_meta(stream: Any) -> torch.Tensor:
    """Return a saved tensor without its data; torch records the offset at which they begin."""
    saved: torch.Tensor = torch.load(stream, map_location="meta", weights_only=True)
    return saved


def _read_tensor_(stream: Any, region: torch.Tensor) -> None:
    """Read the tensor that torch.save wrote to a range of a file into another one, in place."""
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
        stream.seek(start + saved.storage_offset() * saved.element_size())
        _fill_(region.permute(axes), stream)


def _fill_(region: torch.Tensor, stream: Any) -> None:
    if region.is_contiguous():
        read_exactly(stream, bytes_of(region))
    elif region.nbytes <= BYTES_AT_ONCE:
        buffer = torch.empty(region.shape, dtype=region.dtype)
        read_exactly(stream, bytes_of(buffer))
        region.copy_(buffer)
    elif len(region) == 1:
        _fill_(region[0], stream)
    else:
        for rows in torch.split(region, max(1, BYTES_AT_ONCE // region[0].nbytes)):
            _fill_(rows, stream)
