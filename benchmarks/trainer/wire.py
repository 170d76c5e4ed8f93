"""Bytes that a training step puts on the wire, counted by the kernel, beside the history's count.

Two processes in two network namespaces, connected by a virtual cable, over which nothing else is
sent; each reads what its end has sent in /proc/net/dev. The namespaces need Linux with `unshare`
and `ip`, and no rights where users may create namespaces.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from compress.training.distributed.base import process_group
from trainer.nets import Transformer, batch, train_state

WIDTH, DEPTH, LENGTH, SAMPLES, STEPS = 128, 4, 8, 4, 8
FSDP = {"strategy": "fsdp", "wrap": ["Block"]}
SETTINGS = {
    "ddp": {},
    **{f"ddp, {name}": {"communication": name} for name in ("fp16", "bf16", "int8")},
    "ddp, powersgd": {"communication": "powersgd", "powersgd_rank": 4},
    "ddp, topk": {"communication": "topk", "topk_fraction": 0.01},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2", "wrap": ["Block"]},
    "zero3": {"strategy": "zero3", "wrap": ["Block"]},
    "fsdp, no_shard": {**FSDP, "sharding": "no_shard"},
    "fsdp, bf16": {**FSDP, "precision": "bf16"},
    "fsdp, bf16, reduce_dtype bf16": {**FSDP, "precision": "bf16", "reduce_dtype": "bf16"},
}


def main() -> None:
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    command = ["unshare", "--map-root-user", "--net", sys.executable, "-m", "trainer.wire", "0"]
    try:
        subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"wire: needs two network namespaces (util-linux and iproute2): {error}")


def meet(rank: int) -> None:
    """Lay the cable from rank 0's namespace to a new one with rank 1, and set both addresses."""
    if rank == 0:
        command = ["unshare", "--net", sys.executable, "-m", "trainer.wire", "1"]
        other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        other.stdout.readline()  # it is in its namespace
        ip(f"link add wire0 type veth peer name wire1 netns {other.pid}")
        other.stdin.close()
    else:
        print("ready", flush=True)
        sys.stdin.read()
    ip(f"address add 10.0.0.{rank + 1}/24 dev wire{rank}")
    for device in (f"wire{rank}", "lo"):
        ip(f"link set {device} up")
    os.environ |= {
        **{"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"},
        **{"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400"},
        "GLOO_SOCKET_IFNAME": f"wire{rank}",
    }


def ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)


def measure(parallel: dict) -> tuple[float, int | None]:
    """Return the bytes that this process sends in a step, by the kernel and by the history."""
    torch.manual_seed(0)
    precision = parallel.pop("precision", "fp32")
    settings = {"processes": 2, **parallel}
    state = train_state(Transformer(WIDTH, DEPTH), precision=precision, parallel=settings)
    batches = [batch(SAMPLES, LENGTH, WIDTH) for _ in range(STEPS)]
    for step in range(2):
        state.train_step(batches[:1], step)
    state.strategy.sent_bytes(2)
    dist.barrier()
    before = bytes_sent()
    for step in range(STEPS):
        state.train_step(batches[step : step + 1], step + 2)
    dist.barrier()
    return (bytes_sent() - before) / STEPS, state.strategy.sent_bytes(STEPS)


def bytes_sent() -> int:
    (line,) = [row for row in Path("/proc/net/dev").read_text().splitlines() if "wire" in row]
    return int(line.partition(":")[2].split()[8])


def run(rank: int) -> None:
    meet(rank)
    torch.set_num_threads(1)
    with process_group("cpu"):
        if rank == 0:
            print(f"wire: 2 processes, mean of both over {STEPS} steps; bytes a step")
            print(f"{'':32s}{'kernel':>12s}{'history':>12s}{'ratio':>8s}")
        for name, parallel in SETTINGS.items():
            sums = [None, None]
            dist.all_gather_object(sums, measure(dict(parallel)))
            if rank:
                continue
            kernel = sum(measured for measured, _ in sums) / 2
            counts = [count for _, count in sums if count is not None]
            history = sum(counts) / 2 if counts else None
            ends = f"{history:12.0f}{kernel / history:8.3f}" if history else f"{'none':>12s}"
            print(f"{name:32s}{kernel:12.0f}{ends}", flush=True)


if __name__ == "__main__":
    run(int(sys.argv[1]))
