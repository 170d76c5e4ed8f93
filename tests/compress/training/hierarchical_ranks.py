"""One of four processes in two groups that average gradients: FOLDER; ranks from torchrun."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from compress.training.config.parallel import Parallel
from compress.training.distributed.gradient_compression import average_gradients_

STEPS = 20


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 41), nn.ReLU(), nn.Linear(41, 10))


def trained(parallel: Parallel) -> tuple[dict[str, torch.Tensor], list[tuple[int, int | None]]]:
    """Return the weights after some steps, and the bytes sent in each: all, and between groups."""
    module, generator, sent = net(), torch.Generator(), []
    # Buckets of a few kilobytes, so that a model has several.
    wrapped = DistributedDataParallel(module, find_unused_parameters=True, bucket_cap_mb=0.003)
    averaging = average_gradients_(wrapped, parallel)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    generator.manual_seed(dist.get_rank())
    for _ in range(STEPS):
        x = torch.randn(8, 24, generator=generator)
        y = torch.randint(10, (8,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        sent.append((averaging.sent_bytes(1), averaging.sent_between_bytes(1)))
    return module.state_dict(), sent


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    two_by_two = Parallel(processes=4, communication="hierarchical", group_processes=2)
    results = {"ddp": trained(Parallel(processes=4)), "hierarchical": trained(two_by_two)}
    torch.save(results, folder / f"rank-{os.environ['RANK']}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
