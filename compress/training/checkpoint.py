"""Checkpoints of a training: directories that are complete or not read at all, and their tensors.

A checkpoint is a directory `step-…` with the tensors as torch.distributed.checkpoint writes them,
each process its own part, `progress.json`, and `files.json` with the SHA-256 of every file and of
itself. Tensors have the names of the weights, however the model is sharded: a checkpoint of many
processes can be loaded by one, and the other way round.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from compress.checkpoint.safetensors_io import read_safetensors
from compress.checkpoint.state_dict import mismatches
from compress.common.atomic_files import sha256_of, sync, write_atomically
from compress.common.config import Settings
from compress.common.errors import ArtifactInvalid, StageFailed, first_line
from compress.common.sealed_json import read_sealed, write_sealed

if TYPE_CHECKING:
    from compress.artifacts.eager_model import EagerModel

log = logging.getLogger(__name__)

FOLDER = "checkpoints"
PROGRESS = "progress.json"
FILES = "files.json"
PARTIAL = ".partial"
DAMAGED = ".damaged"
STATE = "state."  # before the names of the optimizer's tensors: `state.<weight>.<entry>`

LossSum: TypeAlias = tuple[str, int, tuple[float, ...]]
"""Exact sum of losses as a fraction; their count; up to two distinct values among them."""

NO_LOSSES: LossSum = ("0", 0, ())

Tensors: TypeAlias = dict[str, torch.Tensor]


class Epoch(Settings):
    """Results of one epoch."""

    epoch: int
    """Counted from 1; 0 is the input model."""
    loss: float | None
    """Mean of the objective over the epoch's steps; None for epoch 0."""
    constant_loss: bool = False
    """Whether the loss was the same in every step, or 0: nothing can be learnt from it."""
    metric: float | None
    """The metric on `val` after the epoch; None without a `val` split."""
    learning_rate: float | None
    """Learning rate of the epoch's last step; None for epoch 0."""
    sent_bytes: int | None = None
    """Bytes of gradients, and with `zero1` and `fsdp` of weights, that each process sends in a
    step; None for a single process, and with `tensor`, `pipeline` and `deepspeed`."""
    sent_between_bytes: int | None = None
    """Bytes of them that leave the process's group of `hierarchical`; None without groups."""


class TrainProgress(Settings):
    """How far a training is; the same in all processes."""

    history: tuple[Epoch, ...] = ()
    """The finished epochs, with epoch 0 if the input model competes with them."""
    steps: int = 0
    """Steps taken in the unfinished epoch."""
    losses: LossSum = NO_LOSSES
    """The losses of these steps over all processes."""
    kept: Epoch | None = None
    """The epoch whose weights are the result so far."""
    kept_in: str | None = None
    """Name of the checkpoint with these weights; None for those of the input model."""
    scaler: dict[str, Any] = {}
    """State of the loss scaler of `fp16`; empty at other precisions."""
    layouts: tuple[str, ...] = ()
    """Layout of the processes (`Parallel.layout`), and each other one after a resumption."""

    @property
    def trained_epochs(self) -> int:
        """Number of epochs trained."""
        return sum(1 for epoch in self.history if epoch.epoch > 0)


def read_progress(checkpoint: Path) -> TrainProgress:
    """Read the progress recorded in a checkpoint."""
    return TrainProgress.model_validate_json((checkpoint / PROGRESS).read_bytes())


def newest_intact(folder: Path, trusted: str | None = None) -> Path | None:
    """Find the newest intact checkpoint; damaged ones are renamed, with a warning."""
    # The hashes of the one named `trusted` were just verified, and are not computed again.
    for checkpoint in reversed(checkpoints(folder)):
        damage = None if checkpoint.name == trusted else _damage(checkpoint)
        if damage is None:
            return checkpoint
        aside = checkpoint.with_name(checkpoint.name + DAMAGED)
        shutil.rmtree(aside, ignore_errors=True)
        checkpoint.replace(aside)
        log.warning("checkpoint %s is damaged (%s); the one before it is used", aside, damage)
    return None


def require_intact(checkpoint: Path) -> None:
    """Refuse a damaged checkpoint."""
    if damage := _damage(checkpoint):
        raise StageFailed(
            f"checkpoint {checkpoint}, which holds the weights to keep, is damaged ({damage}); "
            f"remove {checkpoint.parent} to train anew"
        )


def checkpoints(folder: Path) -> list[Path]:
    """List the complete checkpoints of a training, the oldest first."""
    folders = (folder / FOLDER).glob("step-*")
    return sorted(c for c in folders if c.suffix not in (PARTIAL, DAMAGED))


def create_partial(folder: Path, step: int) -> Path:
    """Create the temporary directory for the checkpoint of a step; every process calls this."""
    partial = folder / FOLDER / f"{checkpoint_name(step)}{PARTIAL}"
    partial.mkdir(parents=True, exist_ok=True)
    return partial


def commit(partial: Path, progress: TrainProgress) -> Path:
    """Hash and rename a checkpoint after every process has written its part."""
    write_atomically(partial / PROGRESS, progress.model_dump_json())
    # Hashes and rename come last, so that a crash leaves either a valid checkpoint or none.
    files = {
        file.relative_to(partial).as_posix(): sha256_of(file)
        for file in sorted(partial.rglob("*"))
        if file.is_file()
    }
    training = partial.parent.parent.name
    content = {"training": training, "checkpoint": partial.stem, "files": files}
    write_sealed(partial / FILES, content)
    complete = partial.with_suffix("")
    shutil.rmtree(complete, ignore_errors=True)
    partial.replace(complete)
    sync(complete.parent)  # or the rename itself may be lost with the power
    return complete


def rotate(folder: Path, keep: int) -> None:
    """Remove all checkpoints but the newest and those with the best weights that these name."""
    every = checkpoints(folder)
    needed = {read_progress(checkpoint).kept_in for checkpoint in every[-keep:]}
    for checkpoint in every[:-keep]:
        if checkpoint.name not in needed:
            shutil.rmtree(checkpoint)


def checkpoint_name(step: int) -> str:
    """Return the directory name of the checkpoint after a step, counted over all epochs."""
    return f"step-{step:012d}"


def _damage(checkpoint: Path) -> str | None:
    """Describe what is wrong with a checkpoint; None if nothing is."""
    try:
        content = read_sealed(checkpoint / FILES, dict[str, Any])
        training = checkpoint.parent.parent.name
        if (content["training"], content["checkpoint"]) != (training, checkpoint.name):
            return "it is of another training or step"
        for name, digest in content["files"].items():
            if sha256_of(checkpoint / name) != digest:
                return f"{name} is not what was written"
        read_progress(checkpoint)
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except ArtifactInvalid as error:
        return str(error)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def read_(checkpoint: Path, state: dict[str, Any]) -> set[str]:
    """Read tensors from a checkpoint, in place, and return the names of those that it lacks."""
    # torch's index file is a pickle: only this training's own processes write to its folder, and
    # its hash was verified.
    with one_line_errors(f"checkpoint {checkpoint} cannot be read"):
        reader = FileSystemReader(checkpoint)
        saved = reader.read_metadata().state_dict_metadata
        known = {
            part: {name: t for name, t in tensors.items() if f"{part}.{name}" in saved}
            for part, tensors in state.items()
        }
        load(known, storage_reader=reader, no_dist=not torch.distributed.is_initialized())
    return {name for part in state for name in state[part] if name not in known[part]}


@contextmanager
def one_line_errors(what: str) -> Iterator[None]:
    """Convert errors of torch.distributed.checkpoint into one line; they are BaseExceptions."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        message = f"{type(cause).__name__}: {first_line(cause)}"
        raise StageFailed(f"{what} (process {rank}: {message})") from error


@dataclass(frozen=True)
class DeferredWeights:
    """Weights still to be loaded into a module that was built on the meta device."""

    file: Path
    device: str
    """Device of the loaded weights."""

    @classmethod
    def from_model(cls, model: EagerModel, device: str) -> tuple[nn.Module, DeferredWeights | None]:
        """Build a model's module with weights on the meta device, and what is still to be loaded.

        Buffers, which are small, are loaded at once. Where the factory reads weights, the whole
        module is, and nothing is left.
        """
        module = model.skeleton()
        if module is None:
            return model.load(device), None
        stored = read_safetensors(model.payload_path)
        problems = mismatches(module.state_dict(keep_vars=True), stored)
        if problems:
            raise ArtifactInvalid(f"{model.payload_path}: {'; '.join(problems)}")
        for name, buffer in list(module.named_buffers(remove_duplicate=False)):
            full = stored[name].read() if name in stored else buffer
            parent, _, own = name.rpartition(".")
            setattr(module.get_submodule(parent), own, full.to(device, buffer.dtype))
        return module, cls(model.payload_path, device)

    @contextmanager
    def mapped(self, module: nn.Module) -> Iterator[None]:
        """Give a module whole weights for a block: on the CPU, memory-mapped from the file.

        The operating system can drop their pages at any time, as it can read them again.
        """
        tensors, names = list(_tensors_with_owners(module)), self._stored_names(module)
        whole: dict[int, torch.Tensor] = {}
        file: Any = safe_open(self.file, framework="pt")
        with ExitStack() as stack:
            for owner, key, tensor in tensors:
                if id(tensor) not in whole:  # tied weights stay tied
                    full = tensor.detach()
                    if tensor.is_meta:
                        full = file.get_tensor(_key_in(file, names[id(tensor)])).to(tensor.dtype)
                    whole[id(tensor)] = _like(tensor, full.cpu())
                stack.callback(setattr, owner, key, tensor)
                setattr(owner, key, whole[id(tensor)])
            yield

    def fill_(self, module: nn.Module, offloaded: bool) -> None:
        """Read this rank's slices of sharded parameters, and all of the others, in place."""
        stored = read_safetensors(self.file)
        tensors, names = list(_tensors_with_owners(module)), self._stored_names(module)
        device = "cpu" if offloaded else self.device
        whole: dict[int, torch.Tensor] = {}
        for owner, key, tensor in tensors:
            if not tensor.is_meta or isinstance(tensor, DTensor):
                continue
            if id(tensor) not in whole:  # tied weights stay tied
                full = stored[names[id(tensor)]].read().to(device, tensor.dtype)
                whole[id(tensor)] = _like(tensor, full)
            setattr(owner, key, whole[id(tensor)])

        def load(tensor: torch.Tensor) -> torch.Tensor:
            name = names.pop(id(tensor), None)
            if name is None or not isinstance(tensor, DTensor):
                return tensor
            return _read_shard(self.file, name, tensor, device)

        # Converts a shard's content in place: FSDP refers to the parameters.
        module._apply(load)  # type: ignore[no-untyped-call]

    def _stored_names(self, module: nn.Module) -> dict[int, str]:
        """Return the id of each parameter → a name under which the file has it."""
        stored = read_safetensors(self.file)
        weights = module.named_parameters(remove_duplicate=False)
        return {id(weight): name for name, weight in weights if name in stored}


def _tensors_with_owners(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for owner in module.modules():
        for key, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None:
                yield owner, key, tensor


def _like(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(values, requires_grad=tensor.requires_grad)
    return values


def _key_in(file: Any, name: str) -> str:
    # Tied weights are stored once; the metadata maps the other names to that one.
    key: str = name if name in file.keys() else file.metadata()[name]  # noqa: SIM118
    return key


def _read_shard(file: Path, name: str, tensor: DTensor, device: str) -> DTensor:
    """Read this rank's shard of a tensor, with the placement of the given one."""
    mesh, placements = tensor.device_mesh, tensor.placements
    shape, start = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    local = torch.empty(shape, dtype=tensor.dtype, device=device)
    if local.numel():  # of fewer rows than ranks, some ranks have none
        slices = tuple(slice(a, a + size) for a, size in zip(start, shape, strict=True))
        stored: Any = safe_open(file, framework="pt")
        local.copy_(stored.get_slice(_key_in(stored, name))[slices])
    # Not `DTensor.from_local`, which moves an offloaded shard to the device of the mesh.
    return DTensor(local, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
