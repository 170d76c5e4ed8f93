"""Safetensors files, one or several with an index, read tensor by tensor."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

from compress.checkpoint.state_dict import StoredTensor, refuse_elsewhere
from compress.common.atomic_files import open_regular
from compress.common.errors import ArtifactInvalid
from compress.common.strict_json import reject_duplicate_keys

if TYPE_CHECKING:
    from pathlib import Path


def read_safetensors(file: Path) -> dict[str, StoredTensor]:
    """Return a file's tensors, still on disk.

    Raises:
        ArtifactInvalid: missing, truncated, or with a name that stands twice.
    """
    from safetensors import SafetensorError, safe_open

    from compress.checkpoint.safetensors_io import read_header

    try:
        with open_regular(file) as header:
            read_header(header)
        stream: Any = safe_open(file, framework="pt")
        tied = {k: v for k, v in (stream.metadata() or {}).items() if k != "format"}
        state = {name: _stored(stream, name) for name in stream.keys()}  # noqa: SIM118
    except ArtifactInvalid as error:
        raise ArtifactInvalid(f"checkpoint {error}") from error
    except (SafetensorError, OSError) as error:
        raise ArtifactInvalid(
            f"checkpoint {file}: not a readable safetensors file, or truncated ({error})"
        ) from error
    return state | {name: state[kept] for name, kept in tied.items() if kept in state}


def read_indexed(index: Path) -> dict[str, StoredTensor]:
    """Return the tensors of safetensors files listed in a `….safetensors.index.json`.

    Raises:
        ArtifactInvalid: the index or a file of it is missing, truncated, or lacks a tensor.
    """
    files = {name: index.parent / file for name, file in weight_map(index).items()}
    shards = {file: read_safetensors(file) for file in sorted(set(files.values()))}
    for name, file in files.items():
        if name not in shards[file]:
            raise ArtifactInvalid(f"checkpoint {index}: {name} is not in {file.name}")
    return {name: shards[file][name] for name, file in files.items()}


def weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor, as the index says.

    Raises:
        ArtifactInvalid: it is not an index, or names a file elsewhere.
    """
    try:
        with open_regular(index) as stream:
            text = stream.read()
        found = json.loads(text, object_pairs_hook=reject_duplicate_keys)["weight_map"]
    except ArtifactInvalid as error:
        raise ArtifactInvalid(f"checkpoint {error}") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactInvalid(
            f"checkpoint {index}: not a readable index with a weight_map "
            f"({type(error).__name__}: {error})"
        ) from error
    if not isinstance(found, dict) or not found:
        raise ArtifactInvalid(f"checkpoint {index}: its weight_map names no tensors")
    for file in found.values():
        refuse_elsewhere(index, file)
    return found


def _stored(stream: Any, name: str) -> StoredTensor:
    from compress.checkpoint.safetensors_io import DTYPES

    part = stream.get_slice(name)
    if part.get_dtype() not in DTYPES:
        raise ArtifactInvalid(f"checkpoint: {name} is {part.get_dtype()}, which is not read here")
    dtype = DTYPES[part.get_dtype()]
    return StoredTensor(tuple(part.get_shape()), dtype, partial(stream.get_tensor, name))
