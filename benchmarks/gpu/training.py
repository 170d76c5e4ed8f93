"""Training a transformer of over a billion weights on one GPU: `python benchmarks/gpu/training.py`.

Prints tokens per second and MFU (model FLOPs utilisation, Chowdhery et al., "PaLM", 2022) for
autocast, compilation, FSDP and activation checkpointing, and what the prefetcher gains. Speeds of
the prefetcher are ratios of times measured in turn. `--small` runs a tiny model on the CPU, to see
that everything works.
"""

import argparse
import os
import socket
import statistics
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from compress.data.batch import Batch
from compress.training.config.training import Training
from compress.training.distributed.base import Strategy, process_group
from compress.training.launch.worker import create_strategy
from compress.training.loop.train_state import TrainState
from compress.training.loop.trainer import on_device
from compress.training.objectives.objective import TargetLoss

FSDP = {"strategy": "fsdp", "wrap": ["Block"]}
SETTINGS = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "bf16, compiled blocks": {"precision": "bf16", "compile": "blocks"},
    "bf16, fsdp": {"precision": "bf16", "parallel": FSDP},
    "bf16, fsdp, compiled blocks": {"precision": "bf16", "parallel": FSDP, "compile": "blocks"},
    "bf16, compiled, activations again": {
        "precision": "bf16",
        "compile": "blocks",
        "activation_checkpointing": "full",
    },
    "bf16, compiled, selective": {
        "precision": "bf16",
        "compile": "blocks",
        "activation_checkpointing": "selective",
    },
}


@dataclass(frozen=True)
class Size:
    """A model, its batches, and how long it is watched."""

    width: int = 2048
    depth: int = 24
    heads: int = 16
    words: int = 32000
    length: int = 1024
    batch: int = 8
    steps: int = 10
    image: int = 512
    device: str = "cuda:0"


SMALL = Size(
    width=64, depth=2, heads=4, words=100, length=16, batch=2, steps=2, image=32, device="cpu"
)


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.up = nn.Linear(size.width, 4 * size.width, bias=False)
        self.down = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Language(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words = nn.Embedding(size.words, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).transpose(1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU")
    parser.add_argument(
        "--peak-teraflops", type=float, default=989.0, help="dense bf16 peak (H100 and H200: 989)"
    )
    given = parser.parse_args()
    size = SMALL if given.small else Size()
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1])}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    torch.manual_seed(0)
    where = torch.cuda.get_device_name(size.device) if size.device != "cpu" else "CPU"
    with torch.device("meta"):
        weights = sum(p.numel() for p in Language(size).parameters())
    print(f"{where}, torch {torch.__version__}; {weights / 1e9:.2f} G weights, AdamW, ", end="")
    print(f"{size.batch} x {size.length} tokens a step; median of {size.steps} steps")
    print(f"{'':36s}{'tokens/s':>10s}{'MFU':>8s}{'peak GiB':>10s}")
    with process_group(size.device):
        for name, settings in SETTINGS.items():
            seconds, peak = measure(size, settings)
            tokens = size.batch * size.length / seconds
            mfu = tokens * flops_per_token(size, weights) / (given.peak_teraflops * 1e12)
            print(f"{name:36s}{tokens:10.0f}{mfu:8.3f}{peak:10.1f}", flush=True)
        each = prefetching(size)
    print(
        f"prefetcher: steps per second with it over without, {statistics.median(each):.2f} ", end=""
    )
    print(f"({min(each):.2f} to {max(each):.2f})")


def flops_per_token(size: Size, weights: int) -> float:
    """Return the model's own work, forward and backward: what is computed again does not count."""
    return 6 * (weights - size.words * size.width) + 12 * size.depth * size.width * size.length / 2


def measure(size: Size, settings: dict) -> tuple[float, float]:
    """Return the median seconds of a step and the peak of memory in GiB."""
    fixed = {"epochs": 1, "optimizer": "adamw", "learning_rate": 1e-4}
    training = Training(batch_size=size.batch, **fixed, **settings)
    strategy = create_strategy(training.parallel) if "parallel" in settings else Strategy()
    module = Language(size).to(size.device)
    loss = TargetLoss().prepare(size.device)
    state = TrainState(module, loss, training, strategy, size.device, lambda: batch)
    state.wrapped.train()
    tokens = torch.randint(size.words, (size.batch, size.length + 1), device=size.device)
    batch = Batch((tokens[:, :-1],), tokens[:, 1:])
    if size.device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(size.device)
    warm_up = 3
    times = [
        timed(lambda: state.train_step([batch], 0), size.device)
        for _ in range(warm_up + size.steps)
    ]
    peak = 0.0 if size.device == "cpu" else torch.cuda.max_memory_allocated(size.device) / 2**30
    return statistics.median(times[warm_up:]), peak


def prefetching(size: Size) -> list[float]:
    """Return the ratios of times without and with the prefetcher, measured in turn."""
    module = nn.Sequential(
        nn.Conv2d(3, 64, 7, stride=4), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.AdaptiveAvgPool2d(1)
    ).to(size.device)
    shape = (32, 3, size.image, size.image)
    pinned = [Batch((torch.randn(shape),), torch.zeros(32)) for _ in range(4)]
    if size.device != "cpu":
        pinned = [batch.pin_memory() for batch in pinned]

    def each(batches) -> None:
        for batch in batches:
            moved = batch.to(size.device)  # nothing is left to do where it has been prefetched
            module(moved.inputs[0]).sum().backward()

    ratios = []
    for turn in range(12):
        many = pinned * 4
        plain = timed(lambda many=many: each(many), size.device)
        ahead = timed(lambda many=many: each(on_device(many, size.device)), size.device)
        if turn > 1:
            ratios.append(plain / ahead)
    return ratios


def timed(step, device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    step()
    if device != "cpu":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
