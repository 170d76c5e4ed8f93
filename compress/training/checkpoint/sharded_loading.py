"""Weights read into a sharded module that was built without them, each rank reading its part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from compress.checkpoint.safetensors_io import read_safetensors
from compress.checkpoint.state_dict import mismatches
from compress.common.errors import ArtifactInvalid

if TYPE_CHECKING:
    from pathlib import Path

    from compress.artifacts.eager_model import EagerModel


@dataclass(frozen=True)
class Unfilled:
    """Where the weights of a module lie whose parameters are on the meta device."""

    file: Path
    device: str
    """Where the weights belong."""

    @classmethod
    def of(cls, model: EagerModel, device: str) -> tuple[nn.Module, Unfilled | None]:
        """Return a model's module without weights, and what fills it; else the loaded module."""
        module = model.skeleton()
        if module is None:
            return model.load(device), None
        stored = read_safetensors(model.payload_path)
        problems = mismatches(module.state_dict(keep_vars=True), stored)
        if problems:
            raise ArtifactInvalid(f"{model.payload_path}: {'; '.join(problems)}")
        return module, cls(model.payload_path, device)

    def fill_(self, module: nn.Module, offloaded: bool) -> None:
        """Read each parameter's part that belongs to this rank, and the buffers, in place.

        Ties survive: a module's conversion puts new content into parameters that are sharded.

        Args:
            module: a module that ``fully_shard`` has sharded.
            offloaded: whether parameters stay in main memory.
        """
        stored = read_safetensors(self.file)
        names = {id(tensor): name for name, tensor in _tensors(module) if name in stored}
        device = "cpu" if offloaded else self.device

        def filled(tensor: torch.Tensor) -> torch.Tensor:
            name = names.pop(id(tensor), None)
            if isinstance(tensor, DTensor):
                return tensor if name is None else _part(self.file, name, tensor, device)
            whole = tensor if name is None else stored[name].read()
            return whole.to(self.device, tensor.dtype)

        module._apply(filled)  # type: ignore[no-untyped-call]


def _part(file: Path, name: str, tensor: DTensor, device: str) -> DTensor:
    """Return a tensor like the one given, with this rank's part of what the file holds."""
    mesh, placements = tensor.device_mesh, tensor.placements
    shape, start = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    borders = tuple(slice(a, a + size) for a, size in zip(start, shape, strict=True))
    local = torch.empty(shape, dtype=tensor.dtype, device=device)
    if local.numel():
        local.copy_(_slices(file, name)[borders])
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _slices(file: Path, name: str) -> Any:
    """Return a tensor of a file to take parts of; the file is let go of with it."""
    from safetensors import safe_open

    stream: Any = safe_open(file, framework="pt")
    return stream.get_slice(name if name in stream.keys() else stream.metadata()[name])  # noqa: SIM118


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    parameters = module.named_parameters(remove_duplicate=False)
    return [*parameters, *module.named_buffers(remove_duplicate=False)]
