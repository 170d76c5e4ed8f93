"""Reads a checkpoint of any supported format without executing anything in it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from compress.checkpoint.state_dict import StoredTensor, Weights, mismatches
from compress.common.atomic_files import file_beside, refuse_irregular, sha256_while_unchanged
from compress.common.errors import ArtifactInvalid, located
from compress.common.foreign.child_process import read_in_child
from compress.common.lazy_modules import torch

INDEX = ".safetensors.index.json"
PICKLE_INDEX = ".bin.index.json"
IN_FOLDERS = (
    *(f"model{INDEX}", "model.safetensors"),
    *(f"pytorch_model{PICKLE_INDEX}", "pytorch_model.bin"),
    *("pytorch_model_fsdp.bin", "pytorch_model_fsdp_0/.metadata"),
)
"""What Hugging Face's save_pretrained, Trainer and Accelerate write, and Accelerate with FSDP."""
# Under these keys trainers nest the weights; "app" is that of torch's own DCP examples.
NESTED_UNDER = ("app", "state_dict", "model", "model_state_dict")
DEEPEST = 16
IN_NAMES = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What torch.compile, FSDP and activation checkpointing put into names, before any part of them."""
INSTEAD = {
    "adapter_model.*": "it is an adapter of PEFT; merge it into its model by merge_and_unload(), "
    "and save that with save_pretrained(…)",
    "*_rank[0-9]*.bin": "each process saved its own shard; save it with Accelerate's "
    "SHARDED_STATE_DICT (use_dcp) or FULL_STATE_DICT",
}
"""Files of directories that cannot be read, and what to do."""
# Folders and files of checkpoints in the directory of a run.
CHECKPOINTS = ("checkpoint-*", "step-*", "*.ckpt", "*.pt", "*.pth", "*.safetensors")
log = logging.getLogger(__name__)


def read_state_dict(checkpoint: Path) -> Weights:
    """Return a checkpoint's tensors, on disk where the format allows, or raise ArtifactInvalid.

    Formats: ``.safetensors``, alone or sharded with a ``.safetensors.index.json``; a directory of
    torch.distributed.checkpoint; one of DeepSpeed's ZeRO stages; one of Hugging Face's
    save_pretrained, Trainer or Accelerate; and what torch.save wrote, such as Lightning's ``.ckpt``
    or a sharded ``.bin`` with its ``.bin.index.json``. Nothing in a pickle is executed: objects of
    other classes are skipped. Of several sets of weights that under a trainer's usual key is taken,
    and a warning names the others; where one of these has tensors of the same shapes, such as a
    moving average, the checkpoint is refused.
    """
    state = _read(_entry_point(checkpoint))
    average = state.get("average")
    taken, path, others = "", "", dict[Any, list[Any]]()
    for _ in range(DEEPEST):
        nested = {k: v for k, v in state.items() if k != "average" and not hasattr(v, "shape")}
        parts = {k: part for k, v in nested.items() if (part := _tensors_in(v))}
        usual = [key for key in NESTED_UNDER if key in parts]
        tensors = {k: v for k, v in state.items() if isinstance(k, str) and hasattr(v, "shape")}
        if not parts or (not usual and len(tensors) > sum(map(len, parts.values()))):
            break
        taken = usual[0] if usual else max(parts, key=lambda key: len(parts[key]))
        path += f"[{taken!r}]"
        others |= {key: part for key, part in parts.items() if key != taken}
        inner: Any = state[taken]
        state = inner if isinstance(inner, dict) else dict[Any, Any](enumerate(inner))
    else:
        raise ArtifactInvalid(
            f"checkpoint {checkpoint}: nests its weights more than {DEEPEST} deep, {path[:80]}…; "
            "save them by themselves: torch.save(model.state_dict(), …)"
        )
    if isinstance(average, dict):  # this toolkit's trainer evaluates and keeps the EMA weights
        tensors |= average
    if not tensors:
        raise ArtifactInvalid(f"checkpoint {checkpoint}: holds no tensors; expected a state_dict")
    shapes = _shapes([*tensors.values()])
    alike = [key for key, part in others.items() if _shapes(part) == shapes]
    if alike or (others and taken not in NESTED_UNDER):
        names = " and ".join(map(repr, (taken, *(alike or others))))
        raise ArtifactInvalid(
            f"checkpoint {checkpoint}: holds several sets of weights, {names}; save the one to use "
            f"by itself: torch.save(torch.load({checkpoint.name!r}){path}, …)"
        )
    if others:
        names = ", ".join(f"{key!r} ({len(part)} tensors)" for key, part in others.items())
        log.warning("checkpoint %s: read from %r; left out: %s", checkpoint, taken, names)
    return tensors


def _read(entry: Path) -> dict[str, Any]:
    from compress.checkpoint.safetensors_io import weight_map

    read: Callable[[Path], Mapping[str, Any]]
    if (entry / ".metadata").is_file():
        from compress.checkpoint.distributed_checkpoint import read_distributed as read
    elif entry.is_dir():
        from compress.checkpoint.torch_pickle import read_zero as read
    elif entry.name.endswith((INDEX, ".safetensors")):
        from compress.checkpoint.safetensors_io import read_safetensors as read
    else:
        from compress.checkpoint.torch_pickle import read_pickle as read
    is_index = entry.name.endswith((INDEX, PICKLE_INDEX))

    def read_entry() -> dict[str, Any]:
        if not is_index:
            return dict(read(entry))
        files = weight_map(entry)
        shards = {file: read(file) for file in sorted(set(files.values()))}
        for name, file in files.items():
            if not isinstance(shards[file].get(name), torch.Tensor | StoredTensor):
                raise ArtifactInvalid(f"checkpoint {entry}: {name} is not in {file.name}")
        return {name: shards[file][name] for name, file in files.items()}

    def read_all_but_bytes() -> None:
        for tensor in _tensors_in(read_entry()):
            getattr(tensor, "read_headers", int)()

    # In a child process first: its pickles may ask for any memory. Tensors stay in their files, so
    # that reading twice costs little.
    read_in_child(f"checkpoint {entry}", read_all_but_bytes, entry.parent if is_index else entry)
    return read_entry()


def _tensors_in(value: Any) -> list[Any]:
    """Return all tensors of nested mappings and sequences, but those of an optimizer's state."""
    tensors: list[Any] = []
    seen, left = set[int](), [value]
    while left:  # no recursion: a pickle may nest deeply, share parts or contain itself
        part = left.pop()
        if hasattr(part, "shape"):
            tensors.append(part)
        elif id(part) not in seen:
            seen.add(id(part))
            if isinstance(part, list | tuple):
                left += reversed(part)
            # torch writes an optimizer's state so, nested or with dotted names.
            elif isinstance(part, dict) and not (
                {str(name).partition(".")[0] for name in part} <= {"state", "param_groups"}
            ):
                left += reversed(part.values())
    return tensors


def _shapes(tensors: list[Any]) -> list[tuple[int, ...]]:
    """Return the shapes of tensors in ascending order, but for single numbers such as counters."""
    return sorted(tuple(tensor.shape) for tensor in tensors if len(tensor.shape))


def consolidate(checkpoint: Path, file: Path) -> None:
    """Write a checkpoint's weights as one safetensors file, a tensor at a time.

    The checkpoint is any that :func:`read_state_dict` takes, such as a directory of
    torch.distributed.checkpoint; the file's folder must exist. Raises as that function.
    """
    from compress.checkpoint.safetensors_io import write_safetensors

    write_safetensors(file, read_state_dict(checkpoint))


def match_names(state: Weights, own: Mapping[str, torch.Tensor], source: str) -> Weights:
    """Strip the prefix that a trainer put before a module's names, and leave out what lacks it.

    Such as Lightning's ``model.``, DistributedDataParallel's ``module.`` or both. Names that match
    none stay. Raises ArtifactInvalid: several prefixes give weights that fit, such as a teacher's.
    """
    for wrapper in IN_NAMES:
        if not any(wrapper in name for name in own):
            state = {name.replace(wrapper, ""): tensor for name, tensor in state.items()}
    if any(name in own for name in state):
        return state
    parts: dict[str, dict[str, Any]] = {}
    for known in own:  # the first that the checkpoint has; of tied names it may lack some
        for prefix in (n.removesuffix(known) for n in state if n.endswith(f".{known}")):
            parts[prefix] = {n[len(prefix) :]: t for n, t in state.items() if n.startswith(prefix)}
        if parts:
            break
    fitting = [prefix for prefix, part in parts.items() if not mismatches(own, part)]
    if len(fitting) > 1:
        raise ArtifactInvalid(
            f"{source}: holds weights of this model under {' and '.join(map(repr, fitting))}; save "
            "those to use by themselves: torch.save({k.removeprefix(P): v for k, v in weights."
            "items() if k.startswith(P)}, …)"
        )
    chosen = fitting or list(parts)
    if len(chosen) != 1:
        return state
    prefix = chosen[0]
    others = [name for name in state if not name.startswith(prefix)]
    more = f"; {len(others)} others are left out, such as {others[0]!r}" if others else ""
    count = len(state) - len(others)
    log.info("%s: read without the prefix %r of %d names%s", source, prefix, count, more)
    return parts[prefix]


def checkpoint_digest(checkpoint: Path) -> str | None:
    """Return a SHA-256 over all files that hold a checkpoint's weights; None without such files."""
    try:
        entry = _entry_point(checkpoint)
        files = [entry]
        if entry.name.endswith((INDEX, PICKLE_INDEX)):
            from compress.checkpoint.safetensors_io import weight_map

            files += sorted(set(weight_map(entry).values()))
        elif entry.is_dir():
            files = sorted(f for f in entry.iterdir() if f.is_file())
    except ArtifactInvalid:
        return None
    if len(files) == 1:
        return sha256_while_unchanged(files[0])
    digests = {f.name: sha256_while_unchanged(f) if f.is_file() else None for f in files}
    content = "".join(f"{name} {digest}\n" for name, digest in digests.items())
    return hashlib.sha256(content.encode()).hexdigest()


def _entry_point(checkpoint: Path) -> Path:
    from compress.checkpoint.torch_pickle import tag_folder

    if not checkpoint.exists():
        raise ArtifactInvalid(f"checkpoint {checkpoint}: no such file")
    if not checkpoint.is_dir():
        with located("checkpoint "):
            refuse_irregular(checkpoint)
        return checkpoint
    if (checkpoint / ".metadata").is_file():
        return checkpoint
    for name in IN_FOLDERS:
        if (checkpoint / name).is_file():
            entry = checkpoint / name.removesuffix("/.metadata")
            return file_beside(entry, entry.name)
    folder = tag_folder(checkpoint)
    if folder is not None:
        return folder
    for pattern, advice in INSTEAD.items():
        if next(checkpoint.glob(pattern), None) is not None:
            raise ArtifactInvalid(f"checkpoint {checkpoint}: {advice}")
    within = sorted(p.name for pattern in CHECKPOINTS for p in checkpoint.glob(pattern))
    raise ArtifactInvalid(
        f"checkpoint {checkpoint}: a directory without .metadata (torch.distributed.checkpoint), "
        f"{', '.join(IN_FOLDERS[:4])} (Hugging Face) or latest (DeepSpeed)"
        + (f"; name one of its checkpoints, such as {within[-1]}" if within else "")
    )
