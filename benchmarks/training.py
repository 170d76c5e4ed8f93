"""Ratios of the trainer, measured in turn within one run: `python benchmarks/training.py`.

Prints the scaling from one process to two at an equal step, our DDP step against a bare loop, and
what activation checkpointing costs and saves. Each process has one thread.
"""

import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from compress.core.data import Batch
from compress.training.learner import Learner
from compress.training.objective import CrossEntropy
from compress.training.parallel import Alone, process_group, strategy_of
from compress.training.settings import Training

WIDTH, DEPTH, BATCH, STEPS, ROUNDS = 384, 6, 64, 5, 9


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block() for _ in range(DEPTH)])
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x).mean(1))


def batch(ranks: int) -> Batch:
    return Batch((torch.randn(BATCH // ranks, 16, WIDTH),), torch.randint(10, (BATCH // ranks,)))


def learner(strategy, **settings) -> Learner:
    training = Training(epochs=1, batch_size=BATCH, learning_rate=1e-3, **settings)
    loss = CrossEntropy().prepare("cpu")
    made = Learner.of(Net(), loss, training, strategy, "cpu")
    made.wrapped.train()
    return made


def seconds(step) -> float:
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    return time.perf_counter() - start


def bare_step(module, optimizer, data):
    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(module(*data.inputs), data.target).backward()
        optimizer.step()

    return step


def rank_main(rank: int, port: int, out) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    with process_group("cpu"):
        parallel = {"processes": 2, "static_graph": True}
        strategy = strategy_of(Training(epochs=1, parallel=parallel).parallel)
        half, whole = batch(2), batch(1)
        ours = learner(strategy, parallel=parallel)
        bare = DistributedDataParallel(Net(), static_graph=True)
        sgd = torch.optim.SGD(bare.parameters(), 1e-3, momentum=0.9, nesterov=True, fused=True)
        alone, forgetful = learner(Alone()), learner(Alone(), activation_checkpointing="full")
        together = {
            "ours": lambda: ours.step([half], 1e-3, 0),
            "bare": bare_step(bare, sgd, half),
        }
        single = {
            "alone": lambda: alone.step([whole], 1e-3, 0),
            "checkpointed": lambda: forgetful.step([whole], 1e-3, 0),
        }
        times = {name: [] for name in (*together, *single)}
        for _ in range(ROUNDS + 1):
            for name, step in together.items():
                dist.barrier()
                times[name].append(seconds(step))
            for name, step in single.items():
                dist.barrier()
                if rank == 0:
                    times[name].append(seconds(step))
            dist.barrier()
        if rank == 0:
            warm = {name: rounds[1:] for name, rounds in times.items()}
            out.put((warm, kept_mebibytes(alone), kept_mebibytes(forgetful)))


def kept_mebibytes(made: Learner) -> float:
    weights = {p.data_ptr() for p in made.module.parameters()}
    kept = {}

    def pack(tensor):
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = made.module(*batch(1).inputs).sum()
    size = sum(t.numel() * t.element_size() for t in kept.values()) / 2**20
    loss.backward()
    return size


def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main() -> None:
    out = mp.get_context("spawn").SimpleQueue()
    mp.spawn(rank_main, args=(free_port(), out), nprocs=2)
    times, plain, less = out.get()

    def ratio(over: str, under: str) -> str:
        each = [a / b for a, b in zip(times[over], times[under], strict=True)]
        return f"{statistics.median(each):5.2f}  ({min(each):.2f} to {max(each):.2f})"

    print(f"median of {ROUNDS} rounds of {STEPS} steps, in turn; batch {BATCH}, one thread each")
    print(f"speed, 2 processes over 1                 {ratio('alone', 'ours')}")
    print(f"speed, our DDP step over a bare loop's    {ratio('bare', 'ours')}")
    print(f"time, activations computed again          {ratio('checkpointed', 'alone')}")
    print(f"saved activations                         {less / plain:5.2f}  ", end="")
    print(f"({plain:.1f} to {less:.1f} MiB)")


if __name__ == "__main__":
    main()
