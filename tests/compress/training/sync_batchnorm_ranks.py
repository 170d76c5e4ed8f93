"""Synchronized BatchNorm by the ranks of one process group: FOLDER. Each rank has a share of each
batch, and leaves what it computed."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from compress.training.distributed.base import process_group
from compress.training.distributed.ddp import synchronize_batch_norm_

SHARES = ((5, 1), (2, 4))
"""Samples of each rank, step by step."""
LAYERS = {
    "vectors": (lambda: nn.BatchNorm1d(3), ()),
    "sequences": (lambda: nn.BatchNorm1d(3, affine=False), (7,)),
    "images": (lambda: nn.BatchNorm2d(3, momentum=None), (4, 5)),
    "without statistics": (lambda: nn.BatchNorm2d(3, track_running_stats=False), (2, 2)),
    "float64": (lambda: nn.BatchNorm1d(3).double(), ()),
}


def values(name: str, step: int) -> torch.Tensor:
    """Return a batch far from zero, where a difference of squares would lose all digits."""
    generator = torch.Generator().manual_seed(step)
    shape = (sum(SHARES[step]), 3, *LAYERS[name][1])
    dtype = torch.float64 if name == "float64" else torch.float32
    return torch.randn(shape, generator=generator, dtype=dtype) * 3 + 100


def run(name: str, rank: int | None) -> dict[str, torch.Tensor]:
    """Take steps with a rank's share of each batch, or with all of it."""
    torch.manual_seed(0)
    layer = LAYERS[name][0]()
    for weight in layer.parameters():
        nn.init.normal_(weight)
    if rank is not None:
        synchronize_batch_norm_(layer, None)
    found = {}
    for step, (first, second) in enumerate(SHARES):
        whole = values(name, step)
        own = {None: slice(None), 0: slice(0, first), 1: slice(first, first + second)}[rank]
        inputs = whole[own].clone().requires_grad_()
        outputs = layer(inputs)
        # Other gradients for each value.
        (outputs * whole[own].sin()).sum().backward()
        found |= {f"outputs{step}": outputs.detach(), f"inputs{step}": inputs.grad}
    found |= {f"grad.{weight}": p.grad for weight, p in layer.named_parameters()}
    found |= {f"buffer.{buffer}": b for buffer, b in layer.named_buffers()}
    found["evaluated"] = layer.eval()(values(name, 0)).detach()
    return found


def main(folder: Path) -> None:
    with process_group("cpu"):
        rank = dist.get_rank()
        torch.save({name: run(name, rank) for name in LAYERS}, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
