"""Data whose user leaves collectives in flight when a training process ends."""

import atexit
import os
from pathlib import Path

import nets
import torch
import torch.distributed as dist


class Busy(nets.Behaving):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if "RANK" in os.environ and self.readings == 0:
            atexit.register(keep_busy, dist.group.WORLD, Path(self.trace))
        self.readings += 1
        return super().__getitem__(index)


def keep_busy(group: dist.ProcessGroup, trace: Path) -> None:
    for _ in range(300):
        tensor = torch.nn.Parameter(torch.ones(2000)).detach()
        group.allreduce([tensor])
    trace.with_name(f"rank-{os.environ['RANK']}").touch()


def busy(trace: str) -> dict[str, torch.utils.data.Dataset]:
    return {**nets.blobs(), "train": Busy("plain", trace)}
