"""Read checkpoints' tensors, which have the names of the weights; each rank its own slices.

The names do not depend on how the model is sharded: a checkpoint of many processes can be loaded by
one, and the other way round.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from compress.checkpoint.safetensors_io import read_safetensors
from compress.checkpoint.state_dict import mismatches
from compress.common.errors import ArtifactInvalid, StageFailed, first_line

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from compress.artifacts.eager_model import EagerModel


STATE = "state."


@contextmanager
def no_group_expected() -> Iterator[None]:
    """Ignore torch's warnings that checkpoints are of one process, which is intended, in a block.

    Not around each call: the warnings come from threads too.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


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
        from safetensors import safe_open

        tensors = list(_tensors_with_owners(module))
        names = dict(self._stored_names(module))
        whole: dict[int, torch.Tensor] = {}
        file: Any = safe_open(self.file, framework="pt")
        for owner, key, tensor in tensors:
            if id(tensor) not in whole:  # tied weights stay tied
                full = tensor.detach()
                if tensor.is_meta:
                    full = file.get_tensor(_key_in(file, names[id(tensor)])).to(tensor.dtype)
                whole[id(tensor)] = _like(tensor, full.cpu())
            setattr(owner, key, whole[id(tensor)])
        try:
            yield
        finally:
            for owner, key, tensor in tensors:
                setattr(owner, key, tensor)

    def fill_(self, module: nn.Module, offloaded: bool) -> None:
        """Read this rank's slices of sharded parameters, and all of the others, in place."""
        stored = read_safetensors(self.file)
        tensors = list(_tensors_with_owners(module))
        names = dict(self._stored_names(module))
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

    def _stored_names(self, module: nn.Module) -> Iterator[tuple[int, str]]:
        """Yield the id of each parameter with a name under which the file has it."""
        stored = read_safetensors(self.file)
        for name, weight in module.named_parameters(remove_duplicate=False):
            if name in stored:
                yield id(weight), name


def _tensors_with_owners(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Yield each parameter and buffer with the module that has it and its name there."""
    for owner in module.modules():
        for key, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None:
                yield owner, key, tensor


def _like(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return values as a parameter where a tensor is one."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(values, requires_grad=tensor.requires_grad)
    return values


def _key_in(file: Any, name: str) -> str:
    """Return the name under which an open safetensors file stores a tensor."""
    # Tied weights are stored once; the metadata maps the other names to that one.
    key: str = name if name in file.keys() else file.metadata()[name]  # noqa: SIM118
    return key


def _read_shard(file: Path, name: str, tensor: DTensor, device: str) -> DTensor:
    """Read this rank's shard of a tensor, with the placement of the given one."""
    from safetensors import safe_open

    mesh, placements = tensor.device_mesh, tensor.placements
    shape, start = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    local = torch.empty(shape, dtype=tensor.dtype, device=device)
    if local.numel():  # of fewer rows than ranks, some ranks have none
        slices = tuple(slice(a, a + size) for a, size in zip(start, shape, strict=True))
        stored: Any = safe_open(file, framework="pt")
        local.copy_(stored.get_slice(_key_in(stored, name))[slices])
    # Not `DTensor.from_local`, which moves an offloaded shard to the device of the mesh.
    return DTensor(local, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
