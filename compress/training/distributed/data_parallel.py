"""`dp`: DataParallel, by which one process divides each batch over its CUDA devices."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from compress.common.errors import StageFailed
from compress.training.distributed.base import SingleProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from compress.data.batch import Batch
    from compress.training.config.training import Training


def visible_devices(device: str) -> list[int]:
    """Return the CUDA devices that DataParallel uses, the given one first; none for a CPU."""
    if not device.startswith("cuda"):
        return []
    own = torch.device(device).index or 0
    return [own, *(index for index in range(torch.cuda.device_count()) if index != own)]


def check_replicable(training: Training, devices: int) -> None:
    """Refuse settings that do not work in DataParallel's threads, with several devices."""
    found = {
        # These call the original module's forward, whose weights are on the first device.
        f"compile: {training.compile}": training.compile != "none",
        f"activation_checkpointing: {training.activation_checkpointing}": (
            training.activation_checkpointing != "none"
        ),
        # torch 2.13 passes on that there is autocast, and not its dtype: fp16 in all threads.
        "precision: bf16": training.precision == "bf16",
    }
    for name, is_set in found.items():
        if is_set and devices > 1:
            raise StageFailed(
                f"strategy: dp over {devices} devices does not go with {name}; use strategy: ddp "
                f"with processes: {devices}, or leave it out"
            )


class DataParallelStrategy(SingleProcess):
    """One process whose threads compute a share of each batch on every CUDA device."""

    def __init__(self, devices: list[int]) -> None:
        self.devices = devices

    def wrap(
        self, module: nn.Module, training: Training, example: Callable[[], Batch]
    ) -> nn.Module:
        """Wrap the module in DataParallel, which copies it to all devices in every step."""
        if any(part._forward_hooks for part in module.modules()):
            raise StageFailed(
                f"strategy: dp over {len(self.devices)} devices does not go with losses that read "
                "a module's outputs by hooks, which threads would overwrite; use strategy: ddp"
            )
        return nn.DataParallel(module, device_ids=self.devices)

    @contextmanager
    def gradient_sync(self, wrapped: nn.Module, is_last: bool) -> Iterator[None]:
        """Seed all devices for a micro-batch; the training loop seeds the first one alone."""
        seed = int(torch.randint(2**62, ()))
        for index, generator in enumerate(torch.cuda.default_generators):
            generator.manual_seed(seed + index)
        yield
