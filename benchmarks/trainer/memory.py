"""Peak memory of each process while a transformer of about 200 M weights is trained."""

import torch
from torch.distributed.tensor import DTensor

from compress.profiling.rss import memory_kib, reset_peak
from trainer.nets import Transformer, batch, train_state
from trainer.ranks import on_ranks

WIDTH, DEPTH, HEADS, LENGTH, BATCH = 1024, 16, 16, 16, 4
SETTINGS = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2", "wrap": ["Block"]},
    "fsdp full_shard": {"strategy": "fsdp", "wrap": ["Block"]},
}


def main() -> None:
    print("memory of each process, MiB: weights, gradients and AdamW's state of its own,")
    print(
        "and the growth of its resident set to its peak in 2 steps after the model is distributed"
    )
    print(f"{'':18s}{'processes':>10s}{'state':>8s}{'peak':>8s}{'state over ddp':>15s}", end="")
    print(f"{'peak over ddp':>15s}")
    for ranks in (2, 4):
        base = None
        for name, parallel in SETTINGS.items():
            each = on_ranks(ranks, measure, ranks, parallel)
            state, peak = (max(values) for values in zip(*each, strict=True))
            base = base or (state, peak)
            print(f"{name:18s}{ranks:10d}{state:8.0f}{peak:8.0f}", end="")
            print(f"{state / base[0]:15.2f}{peak / base[1]:15.2f}")


def measure(ranks: int, parallel: dict) -> tuple[float, float]:
    empty = memory_kib("VmRSS")
    torch.manual_seed(0)
    state = train_state(
        Transformer(WIDTH, DEPTH, HEADS),
        batch_size=BATCH,
        optimizer="adamw",
        parallel={"processes": ranks, **parallel},
    )
    reset_peak()
    data = batch(BATCH // ranks, LENGTH, WIDTH)
    for step in range(2):
        state.train_step([data], step)
    return state_mebibytes(state), (memory_kib("VmHWM") - empty) / 1024


def state_mebibytes(state) -> float:
    """Return the MiB of this process's weights, gradients and optimizer state."""
    tensors = [*state.module.parameters()]
    tensors += [p.grad for p in state.module.parameters() if p.grad is not None]
    inner = getattr(state.optimizer, "optim", state.optimizer)  # ZeRO 1 has one of its own inside
    tensors += [t for s in inner.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    own = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in own) / 2**20
