"""Reading a user's checkpoint without executing anything in it."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any

from compress.common.atomic_files import refuse_irregular, sha256_of
from compress.common.errors import ArtifactInvalid, first_line

if TYPE_CHECKING:
    from collections.abc import Container
    from pathlib import Path

    from compress.checkpoint.state_dict import Weights

INDEX = ".safetensors.index.json"
NESTED_UNDER = ("app", "state_dict", "model", "model_state_dict")
NAMES_CODE = re.compile(r"unsupported (global|class)|allowlist", re.IGNORECASE)
"""What torch (2.13) says of a pickle that names anything but tensors and plain containers."""
PREFIXES = ("module.", "_orig_mod.")


def read_state_dict(checkpoint: Path) -> Weights:
    """Return a checkpoint's tensors, still on disk where the format allows.

    ``.safetensors``, alone or several with a ``.safetensors.index.json``; a directory written by
    torch.distributed.checkpoint; one of Hugging Face, with ``model.safetensors``, alone or with its
    index, or ``pytorch_model.bin``; or ``.pt``/``.pth``/``.bin`` read with ``weights_only``. A
    pickle that would execute code is refused and never executed.

    Raises:
        ArtifactInvalid: missing, truncated, holding code, or holding no tensors.
    """
    state = _read(_entry_of(checkpoint))
    average = state.get("average")
    for key in NESTED_UNDER:
        if isinstance(state.get(key), dict):
            state = state[key]
    if isinstance(average, dict):  # our trainer's: what it evaluated and kept
        state = {**state, **average}
    tensors = {k: v for k, v in state.items() if isinstance(k, str) and hasattr(v, "shape")}
    if not tensors:
        raise ArtifactInvalid(f"checkpoint {checkpoint}: holds no tensors; expected a state_dict")
    return tensors


def consolidate(checkpoint: Path, file: Path) -> None:
    """Write a checkpoint's weights as one safetensors file, a tensor at a time.

    Args:
        checkpoint: any that :func:`read_state_dict` takes; a directory of
            torch.distributed.checkpoint, say.
        file: where the ``.safetensors`` file shall lie; its folder must exist.

    Raises:
        ArtifactInvalid: the checkpoint cannot be read.
    """
    from compress.checkpoint.safetensors_io import write_safetensors

    write_safetensors(file, read_state_dict(checkpoint))


def without_wrappers(state: Weights, known: Container[str]) -> Weights:
    """Return a state dict without the prefixes of DDP and torch.compile, unless they are known."""
    while state and not any(key in known for key in state):
        prefix = next((p for p in PREFIXES if all(key.startswith(p) for key in state)), None)
        if prefix is None:
            break
        state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def checkpoint_digest(checkpoint: Path) -> str | None:
    """Return a SHA-256 of all that a checkpoint's weights depend on; None where it has none."""
    try:
        files = _files_of(_entry_of(checkpoint))
    except ArtifactInvalid:
        return None
    if len(files) == 1:
        return sha256_of(files[0])
    content = "".join(f"{f.name} {sha256_of(f) if f.is_file() else None}\n" for f in files)
    return hashlib.sha256(content.encode()).hexdigest()


def _files_of(entry: Path) -> list[Path]:
    if entry.name.endswith(INDEX):
        from compress.checkpoint.safetensors_index import weight_map

        return [entry, *(entry.parent / file for file in sorted(set(weight_map(entry).values())))]
    return sorted(f for f in entry.iterdir() if f.is_file()) if entry.is_dir() else [entry]


def _entry_of(checkpoint: Path) -> Path:
    """Return the file to begin with; a directory of torch.distributed.checkpoint is its own."""
    if not checkpoint.exists():
        raise ArtifactInvalid(f"checkpoint {checkpoint}: no such file")
    if not checkpoint.is_dir():
        try:
            refuse_irregular(checkpoint)
        except ArtifactInvalid as error:
            raise ArtifactInvalid(f"checkpoint {error}") from None
        return checkpoint
    if (checkpoint / ".metadata").is_file():
        return checkpoint
    for name in (f"model{INDEX}", "model.safetensors", "pytorch_model.bin"):
        if (checkpoint / name).is_file():
            return checkpoint / name
    raise ArtifactInvalid(
        f"checkpoint {checkpoint}: a directory without .metadata (torch.distributed.checkpoint), "
        f"model.safetensors, model{INDEX} or pytorch_model.bin (Hugging Face)"
    )


def _read(entry: Path) -> dict[str, Any]:
    if entry.is_dir():
        from compress.checkpoint.distributed_checkpoint import read_distributed

        return read_distributed(entry)
    if entry.name.endswith(INDEX):
        from compress.checkpoint.safetensors_index import read_indexed

        return dict(read_indexed(entry))
    if entry.suffix == ".safetensors":
        from compress.checkpoint.safetensors_index import read_safetensors

        return dict(read_safetensors(entry))
    return _read_pickle(entry)


def _reason(error: Exception) -> str:
    """Return what torch found, without its advice to load the file unsafely."""
    return first_line(Exception(str(error).rpartition("WeightsUnpickler error:")[2]))


def _read_pickle(file: Path) -> dict[str, Any]:
    import pickle

    import torch

    from compress.checkpoint.safe_zip import refuse_bomb

    refuse_bomb(file)
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of bytes that are no pickle torch's reader raises what it likes
        if isinstance(error, pickle.UnpicklingError) and NAMES_CODE.search(str(error)):
            raise ArtifactInvalid(
                f"checkpoint {file}: holds pickled code, which is never executed here; save the "
                "weights alone with torch.save(model.state_dict(), …) or as .safetensors"
            ) from error
        raise ArtifactInvalid(
            f"checkpoint {file}: cannot be read, or truncated "
            f"({type(error).__name__}: {_reason(error)})"
        ) from error
    if not isinstance(state, dict):
        raise ArtifactInvalid(
            f"checkpoint {file}: holds a {type(state).__name__}, expected a state_dict"
        )
    return state
