"""Loading of sharded weights: each rank reads only its own slices of the safetensors file."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
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
class DeferredWeights:
    """Weights still to be loaded into a module that was built on the meta device."""

    file: Path
    device: str
    """Device of the loaded weights."""

    @classmethod
    def from_model(cls, model: EagerModel, device: str) -> tuple[nn.Module, DeferredWeights | None]:
        """Build a model's module on the meta device, with what is still to be loaded.

        Where that is not possible, the module is loaded at once, and nothing is left.
        """
        module = model.skeleton()
        if module is None:
            return model.load(device), None
        stored = read_safetensors(model.payload_path)
        problems = mismatches(module.state_dict(keep_vars=True), stored)
        if problems:
            raise ArtifactInvalid(f"{model.payload_path}: {'; '.join(problems)}")
        return module, cls(model.payload_path, device)

    def fill_(self, module: nn.Module, offloaded: bool) -> None:
        """Read this rank's slices of a sharded module's parameters, and all buffers, in place."""
        stored = read_safetensors(self.file)
        tensors = chain(
            module.named_parameters(remove_duplicate=False),
            module.named_buffers(remove_duplicate=False),
        )
        names = {id(tensor): name for name, tensor in tensors if name in stored}
        device = "cpu" if offloaded else self.device  # of parameters; buffers are never offloaded

        def load(tensor: torch.Tensor) -> torch.Tensor:
            name = names.pop(id(tensor), None)
            if isinstance(tensor, DTensor):
                return tensor if name is None else _read_shard(self.file, name, tensor, device)
            full = tensor if name is None else stored[name].read()
            return full.to(self.device, tensor.dtype)

        # Converts a parameter's content in place, so that tied weights stay tied.
        module._apply(load)  # type: ignore[no-untyped-call]


def _read_shard(file: Path, name: str, tensor: DTensor, device: str) -> DTensor:
    """Read this rank's shard of a tensor, with the placement of the given one."""
    from safetensors import safe_open

    mesh, placements = tensor.device_mesh, tensor.placements
    shape, start = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    local = torch.empty(shape, dtype=tensor.dtype, device=device)
    if local.numel():  # of fewer rows than ranks, some ranks have none
        slices = tuple(slice(a, a + size) for a, size in zip(start, shape, strict=True))
        stored: Any = safe_open(file, framework="pt")
        # Tied weights are stored once; the metadata maps the other names to that one.
        key = name if name in stored.keys() else stored.metadata()[name]  # noqa: SIM118
        local.copy_(stored.get_slice(key)[slices])
    # Not `DTensor.from_local`, which moves an offloaded shard to the device of the mesh.
    return DTensor(local, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
