"""Reads a checkpoint of any supported format without executing anything in it."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any

from compress.common.atomic_files import refuse_irregular, sha256_of
from compress.common.errors import ArtifactInvalid

if TYPE_CHECKING:
    from collections.abc import Container
    from pathlib import Path

    from compress.checkpoint.state_dict import Weights

INDEX = ".safetensors.index.json"
# Under these keys trainers nest the weights; "app" is that of torch's own DCP examples.
NESTED_UNDER = ("app", "state_dict", "model", "model_state_dict")
NAMES_CODE = re.compile(r"unsupported (global|class)|allowlist", re.IGNORECASE)
"""In torch's (2.13) error for a pickle that names anything but tensors and plain containers."""
PREFIXES = ("module.", "_orig_mod.")
"""What DistributedDataParallel and torch.compile put before each name."""


def read_state_dict(checkpoint: Path) -> Weights:
    """Return a checkpoint's tensors, still on disk where the format allows.

    Formats: ``.safetensors``, alone or sharded with a ``.safetensors.index.json``; a directory of
    torch.distributed.checkpoint; a Hugging Face directory with ``model.safetensors``, alone or with
    its index, or ``pytorch_model.bin``; ``.pt``/``.pth``/``.bin``, read with ``weights_only``. A
    pickle that would execute code is refused and never executed.

    Raises:
        ArtifactInvalid: missing, truncated, holding code, or holding no tensors.
    """
    entry = _entry_point(checkpoint)
    state: dict[str, Any]
    if entry.is_dir():
        from compress.checkpoint.distributed_checkpoint import read_distributed

        state = read_distributed(entry)
    elif entry.name.endswith(INDEX):
        from compress.checkpoint.safetensors_io import read_indexed

        state = dict(read_indexed(entry))
    elif entry.suffix == ".safetensors":
        from compress.checkpoint.safetensors_io import read_safetensors

        state = dict(read_safetensors(entry))
    else:
        state = _read_pickle(entry)
    average = state.get("average")
    for key in NESTED_UNDER:
        if isinstance(state.get(key), dict):
            state = state[key]
    if isinstance(average, dict):  # this toolkit's trainer evaluates and keeps the EMA weights
        state = {**state, **average}
    tensors = {k: v for k, v in state.items() if isinstance(k, str) and hasattr(v, "shape")}
    if not tensors:
        raise ArtifactInvalid(f"checkpoint {checkpoint}: holds no tensors; expected a state_dict")
    return tensors


def consolidate(checkpoint: Path, file: Path) -> None:
    """Write a checkpoint's weights as one safetensors file, a tensor at a time.

    Args:
        checkpoint: any that :func:`read_state_dict` takes, such as a directory of
            torch.distributed.checkpoint.
        file: the ``.safetensors`` file to write; its folder must exist.

    Raises:
        ArtifactInvalid: the checkpoint cannot be read.
    """
    from compress.checkpoint.safetensors_io import write_safetensors

    write_safetensors(file, read_state_dict(checkpoint))


def without_wrappers(state: Weights, known: Container[str]) -> Weights:
    """Strip the prefixes of DDP and torch.compile from a state dict, unless the module has them.

    Args:
        state: the weights.
        known: names in the module's own state dict.
    """
    while state and not any(key in known for key in state):
        prefix = next((p for p in PREFIXES if all(key.startswith(p) for key in state)), None)
        if prefix is None:
            break
        state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def checkpoint_digest(checkpoint: Path) -> str | None:
    """Return a SHA-256 over all files that hold a checkpoint's weights; None without such files."""
    try:
        entry = _entry_point(checkpoint)
        files = [entry]
        if entry.name.endswith(INDEX):
            from compress.checkpoint.safetensors_io import weight_map

            files += [entry.parent / file for file in sorted(set(weight_map(entry).values()))]
        elif entry.is_dir():
            files = sorted(f for f in entry.iterdir() if f.is_file())
    except ArtifactInvalid:
        return None
    if len(files) == 1:
        return sha256_of(files[0])
    content = "".join(f"{f.name} {sha256_of(f) if f.is_file() else None}\n" for f in files)
    return hashlib.sha256(content.encode()).hexdigest()


def _entry_point(checkpoint: Path) -> Path:
    """Return the file to open first, or the directory itself for torch.distributed.checkpoint."""
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


def _read_pickle(file: Path) -> dict[str, Any]:
    import pickle

    import torch

    from compress.checkpoint.safe_zip import refuse_bomb

    refuse_bomb(file)
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # for bytes that are no pickle, torch's reader raises anything
        if isinstance(error, pickle.UnpicklingError) and NAMES_CODE.search(str(error)):
            raise ArtifactInvalid(
                f"checkpoint {file}: holds pickled code, which is never executed here; save the "
                "weights alone with torch.save(model.state_dict(), …) or as .safetensors"
            ) from error
        # Without torch's advice, which comes first, to load the file with weights_only=False.
        reason = str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
        raise ArtifactInvalid(
            f"checkpoint {file}: cannot be read, or truncated ({type(error).__name__}: {reason})"
        ) from error
    if not isinstance(state, dict):
        raise ArtifactInvalid(
            f"checkpoint {file}: holds a {type(state).__name__}, expected a state_dict"
        )
    return state
