"""One of two processes that average gradients under every setting: FOLDER."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from compress.training.config.parallel import Parallel
from compress.training.distributed.comm_hooks import ErrorFeedback, GradientCommunication

SETTINGS = {
    "none": {},
    "fp16": {},
    "bf16": {},
    "int8": {},
    "topk": {"topk_fraction": 0.1},
    "powersgd": {"powersgd_rank": 2},
}
STEPS = 3


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 10))


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters()}


def steps(communication: str, rank: int, folder: Path) -> list[dict]:
    own, shared = net(), net()
    parallel = Parallel(processes=2, communication=communication, **SETTINGS[communication])
    # Buckets of a few kilobytes, so that a model has several.
    wrapped = DistributedDataParallel(shared, find_unused_parameters=True, bucket_cap_mb=0.003)
    averaging, generator, record = GradientCommunication(wrapped, parallel), torch.Generator(), []
    generator.manual_seed(rank)
    for _ in range(STEPS):
        x = torch.randn(8, 24, generator=generator)
        y = torch.randint(10, (8,), generator=generator)
        for module in (own, wrapped):
            module.zero_grad()
            F.cross_entropy(module(x), y).backward()
        seen = {"own": gradients(own), "average": gradients(shared)}
        seen["lost"] = dict(getattr(averaging.hook, "residuals", {}))
        seen["bytes"] = averaging.sent_bytes(1)
        averaging.save(folder / communication)
        record.append(seen)
    if isinstance(averaging.hook, ErrorFeedback):
        fresh = GradientCommunication(DistributedDataParallel(net()), parallel)
        fresh.load(folder / communication)
        same = [
            torch.equal(fresh.hook.residuals[n], t) for n, t in averaging.hook.residuals.items()
        ]
        record[-1]["loaded"] = all(same) and len(same) == len(fresh.hook.residuals) == 4
    return record


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for communication in SETTINGS:
        (folder / communication).mkdir(exist_ok=True)
    dist.barrier()
    rank = dist.get_rank()
    record = {name: steps(name, rank, folder) for name in SETTINGS}
    torch.save(record, folder / f"rank-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
