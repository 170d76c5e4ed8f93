"""Scaling from one process to two, and our DDP step beside a bare loop's and other libraries'."""

import statistics
import time
import warnings
from importlib.metadata import version

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from trainer.nets import Transformer, batch, train_state
from trainer.ranks import on_ranks

WIDTH, DEPTH, LENGTH, BATCH, STEPS, ROUNDS = 256, 4, 32, 32, 4, 15
TWO = {"processes": 2, "static_graph": True}


def main() -> None:
    times, activations = on_ranks(2, measure)[0]

    def ratio(over: str, under: str) -> str:
        each = [a / b for a, b in zip(times[over], times[under], strict=True)]
        return f"{statistics.median(each):5.2f}  ({min(each):.2f} to {max(each):.2f})"

    print(f"speed: median of {ROUNDS} rounds of {STEPS} steps in turn (least to largest)")
    print(f"2 processes over 1, equal global batch    {ratio('one process', 'ours')}")
    print(f"our DDP step over a bare loop's           {ratio('bare', 'ours')}")
    for name in ("lightning-fabric", "accelerate"):
        if name in times:
            label = f"our DDP step over {name} {version(name)}'s"
            print(f"{label:41s} {ratio(name, 'ours')}")
        else:
            print(f"{name}: not installed, not compared")
    print(f"time, all activations recomputed           {ratio('checkpointed', 'one process')}")
    print(
        f"activations saved                         {activations[1] / activations[0]:5.2f}  ",
        end="",
    )
    print(f"({activations[0]:.1f} to {activations[1]:.1f} MiB)")


def measure() -> tuple[dict[str, list[float]], tuple[float, float]]:
    half, whole = batch(BATCH // 2, LENGTH, WIDTH), batch(BATCH, LENGTH, WIDTH)
    ours = train_state(net(), batch_size=BATCH, parallel=TWO)
    together = {"ours": lambda: ours.train_step([half], 0), "bare": bare(half)}
    for name, build in (("lightning-fabric", fabric), ("accelerate", accelerate)):
        try:
            together[name] = build(half)
        except ImportError:
            continue
    alone = train_state(net(), batch_size=BATCH)
    again = train_state(net(), batch_size=BATCH, activation_checkpointing="full")
    single = {
        "one process": lambda: alone.train_step([whole], 0),
        "checkpointed": lambda: again.train_step([whole], 0),
    }
    times = {name: [] for name in (*together, *single)}
    for turn in range(ROUNDS + 1):
        for name, step in {**together, **single}.items():
            dist.barrier()
            if name in together or dist.get_rank() == 0:
                taken = seconds(step)
                if turn:  # the first round warms up
                    times[name].append(taken)
    dist.barrier()
    return times, (
        activation_mebibytes(alone.module, whole),
        activation_mebibytes(again.module, whole),
    )


def net() -> Transformer:
    torch.manual_seed(0)
    return Transformer(WIDTH, DEPTH)


def sgd(module) -> torch.optim.Optimizer:
    """Create the optimizer that is our default."""
    return torch.optim.SGD(module.parameters(), 1e-3, momentum=0.9, nesterov=True, fused=True)


def bare(data):
    module = DistributedDataParallel(net(), static_graph=True)
    return plain_step(module, sgd(module), data, torch.Tensor.backward)


def plain_step(module, optimizer, data, backward):
    """Return a function that takes one step of a plain training loop and reads the loss."""

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(module(*data.inputs), data.target)
        backward(loss)
        optimizer.step()
        loss.item()

    return step


def fabric(data):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from lightning_fabric import Fabric
        from lightning_fabric.plugins.environments import TorchElasticEnvironment
        from lightning_fabric.strategies import DDPStrategy

        strategy = DDPStrategy(
            process_group_backend="gloo",
            cluster_environment=TorchElasticEnvironment(),
            static_graph=True,
        )
        runner = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        runner.launch()
        own = net()
        module, optimizer = runner.setup(own, sgd(own))
    return plain_step(module, optimizer, data, runner.backward)


def accelerate(data):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs

        runner = Accelerator(
            cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(static_graph=True)]
        )
        own = net()
        module, optimizer = runner.prepare(own, sgd(own))
    if runner.num_processes != 2 or not isinstance(module, DistributedDataParallel):
        raise RuntimeError(
            f"accelerate runs {runner.num_processes} processes: not what is compared"
        )
    return plain_step(module, optimizer, data, runner.backward)


def seconds(step) -> float:
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    return time.perf_counter() - start


def activation_mebibytes(module: torch.nn.Module, data) -> float:
    """Measure the MiB of the activations saved for the backward pass."""
    weights = {p.data_ptr() for p in module.parameters()}
    saved = {}

    def pack(tensor):
        if tensor.data_ptr() not in weights:
            saved[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = module(*data.inputs).sum()
    size = sum(t.numel() * t.element_size() for t in saved.values()) / 2**20
    loss.backward()
    return size
