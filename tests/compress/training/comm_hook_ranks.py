"""One of two processes that average gradients under every setting: FOLDER."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from compress.training.config.parallel import Parallel
from compress.training.distributed.gradient_compression import (
    ErrorFeedback,
    Int8,
    average_gradients_,
)

SETTINGS = {
    "none": {},
    "fp16": {},
    "bf16": {},
    "int8": {},
    "int8-stochastic": {"communication": "int8", "int8_rounding": "stochastic"},
    "topk": {"topk_fraction": 0.1},
    "powersgd": {"powersgd_rank": 2},
}
STEPS = 3
ROUNDINGS = 4000
SECONDS_UNTIL_DEADLOCK = 30


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 10))


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters()}


def steps(name: str, rank: int, folder: Path) -> list[dict]:
    own, shared = net(), net()
    parallel = Parallel(processes=2, **{"communication": name, **SETTINGS[name]})
    torch.manual_seed(rank)
    # Buckets of a few kilobytes, so that a model has several.
    wrapped = DistributedDataParallel(shared, find_unused_parameters=True, bucket_cap_mb=0.003)
    averaging, generator, record = average_gradients_(wrapped, parallel), torch.Generator(), []
    generator.manual_seed(rank)
    for _ in range(STEPS):
        x = torch.randn(8, 24, generator=generator)
        y = torch.randint(10, (8,), generator=generator)
        for module in (own, wrapped):
            module.zero_grad()
            F.cross_entropy(module(x), y).backward()
        seen = {"own": gradients(own), "average": gradients(shared)}
        seen["lost"] = dict(getattr(averaging, "residuals", {}))
        seen["bytes"] = averaging.sent_bytes(1)
        averaging.save(folder / name)
        record.append(seen)
    if isinstance(averaging, ErrorFeedback):
        fresh = average_gradients_(DistributedDataParallel(net()), parallel)
        fresh.load(folder / name)
        same = [torch.equal(fresh.residuals[n], t) for n, t in averaging.residuals.items()]
        record[-1]["loaded"] = all(same) and len(same) == len(fresh.residuals) == 4
    if name != "none":
        wrapped(torch.randn(8, 24)).sum().backward()  # with the buckets that DDP has rebuilt
        record[-1]["done"] = done_when_returned(wrapped, averaging, name)
    return record


def done_when_returned(wrapped: nn.Module, hook, name: str) -> list[bool]:
    """Return whether rank 0's hook returned averages that were done, before rank 1 sent any."""
    done, average, store = [], hook.average, dist.distributed_c10d._get_default_store()

    def observed(bucket):
        future = average(bucket)
        if not done:
            done.append(future.done())
            store.set(f"{name} has returned", "")
        return future

    loss = wrapped(torch.randn(8, 24)).sum()
    if dist.get_rank() == 0:
        hook.average = observed
    else:
        store.wait([f"{name} has returned"], timedelta(seconds=SECONDS_UNTIL_DEADLOCK))
    loss.backward()
    return done


def mean_of_roundings() -> dict[str, torch.Tensor]:
    """Return a gradient, and the mean of what is sent and averaged in many stochastic roundings."""
    torch.manual_seed(dist.get_rank())
    gradient = torch.linspace(-1, 1, 40) ** 3
    exchange = Int8(nn.Linear(1, 1), "stochastic").compress((), [gradient] * ROUNDINGS)
    try:
        next(exchange)
    except StopIteration as ended:
        work, sent, means = ended.value
    work.wait()
    sent, means = torch.stack(sent), torch.stack(means())
    return {"gradient": gradient, "one": sent[0], "sent": sent.mean(0), "means": means.mean(0)}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in SETTINGS:
        (folder / name).mkdir(exist_ok=True)
    dist.barrier()
    rank = dist.get_rank()
    record = {name: steps(name, rank, folder) for name in SETTINGS}
    record["roundings"] = mean_of_roundings()
    torch.save(record, folder / f"rank-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
