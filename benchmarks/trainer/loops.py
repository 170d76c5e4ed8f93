"""CPU time of a training step: our loop beside a bare one's, Lightning Fabric's and Accelerate's.

All train the same net on the same samples with the same optimizer, read the loss of each step, and
take turns epoch by epoch in one run, so that a busy machine slows down all alike. CPU time is that
of all threads of rank 0. Scaling is by the clock, for a net with many weights for its operations
and one with few, beside a bare loop's, and beside two processes that exchange nothing: that is what
the machine's cores allow.
"""

import functools
import itertools
import os
import shutil
import statistics
import tempfile
import time
import warnings
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from compress.core.metrics import Metric
from compress.data.splits import Splits
from compress.training.checkpoint import TrainProgress
from compress.training.config.training import Training
from compress.training.distributed.base import Strategy
from compress.training.launch.worker import create_strategy
from compress.training.loop.metrics import recording_metrics
from compress.training.loop.train_state import CheckpointManager, Job, TrainState
from compress.training.loop.trainer import _train_epoch
from compress.training.objectives.objective import TargetLoss
from compress.training.optim.optimizer import Schedule
from trainer.nets import ConvNet, Transformer
from trainer.ranks import on_ranks

WIDTH, DEPTH, LENGTH, BATCH = 256, 2, 32, 32
STEPS = int(os.environ.get("BENCHMARK_STEPS", "16"))
"""Of an epoch, which is what is timed."""
ROUNDS = int(os.environ.get("BENCHMARK_ROUNDS", "15"))
SAVE_EVERY = 8
LIBRARIES = ("lightning-fabric", "accelerate")
GOALS = {"single": "1.02", "ddp(2)": "1.02", f"saved every {SAVE_EVERY}": "1.10"}


def main() -> None:
    single = on_ranks(1, measure, {"single": False, f"saved every {SAVE_EVERY}": True})[0]
    both = on_ranks(2, measure, {"ddp(2)": False, f"ddp(2), saved every {SAVE_EVERY}": True})[0]
    print(f"loops: CPU ms a step, median of {ROUNDS} epochs of {STEPS} steps in turn;")
    print("our loop's time over another's (first to ninth decile)")
    print(f"{'':24s} {'ours':>8s}  {'over a bare loop':>20s}", end="")
    for name in LIBRARIES:
        print(f"  {'over ' + name:>22s}", end="")
    print("  goal, bare")
    for label, times in {**single, **both}.items():
        print(f"{label:24s} {statistics.median(times['ours']) / STEPS * 1e3:5.1f} ms", end="")
        for name, width in (("bare", 20), *((name, 22) for name in LIBRARIES)):
            cell = ratio(times["ours"], times[name]) if name in times else "not installed"
            print(f"  {cell:>{width}s}", end="")
        print(f"  {'≤ ' + GOALS[label] if label in GOALS else ''}")
    ours, bare_ones = (on_ranks(2, count_collectives, name)[0] for name in ("ours", "bare"))
    print(f"collectives in an epoch of {STEPS} steps of ddp(2): ours {ours}, bare {bare_ones}")
    print("1 → 2 processes, equal batch, by the clock; goal ≥ 1.8 from 20 ms a step on one:")
    for name, task in TASKS.items():
        times = on_ranks(2, measure_scaling, name)[0]
        weights = sum(p.numel() for p in task.net().parameters())
        print(f"{name}, {weights * 4 / 2**20:.1f} MiB of gradients")
        for label, one, two in (
            ("ours", "ours on one", "ours on two"),
            ("bare DDP", "bare on one", "bare on two"),
            ("no exchange", "bare on one", "half a batch"),
        ):
            milliseconds = statistics.median(times[one]) / STEPS * 1e3
            print(f"  {label:12s} {ratio(times[one], times[two])}, {milliseconds:.0f} ms on one")
    for name in LIBRARIES:
        if name in single["single"]:
            print(f"{name} {version(name)}")


def ratio(over: list[float], under: list[float]) -> str:
    each = sorted(a / b for a, b in zip(over, under, strict=True))
    tenth = len(each) // 10
    return f"{statistics.median(each):.3f} ({each[tenth]:.2f}–{each[-1 - tenth]:.2f})"


def measure(cases: dict[str, bool]) -> dict[str, dict[str, list[float]]]:
    """Return CPU seconds of each epoch by case and by loop; a case is whether it saves."""
    results = {}
    for label, saves in cases.items():
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            loops = {"ours": our_epochs(folder / "ours", dist.get_world_size(), saves)}
            for name, build in (("bare", bare), *zip(LIBRARIES, (fabric, accelerate), strict=True)):
                try:
                    loops[name] = build(folder / name, saves)
                except ImportError:
                    continue
            results[label] = take_turns(loops, time.process_time)
            loops["ours"].close()
    return results


def count_collectives(name: str) -> int:
    """Count the collectives that rank 0 starts in an epoch, DDP's included."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        epochs = our_epochs(path, 2, saves=False) if name == "ours" else bare(path, saves=False)
        next(epochs)  # DDP rebuilds its buckets in the first one
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            next(epochs)
        epochs.close()
    return sum(event.count for event in profiler.key_averages() if event.key.startswith("gloo:"))


def measure_scaling(name: str) -> dict[str, list[float]]:
    """Return seconds by the clock of each epoch on one process, the other waiting, and on two."""
    task, first = TASKS[name], dist.get_rank() == 0
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        loops = {
            "ours on one": our_epochs(at / "one", 1, False, task) if first else idle(),
            "ours on two": our_epochs(at / "two", 2, False, task),
            "bare on one": bare(at, False, task, 1) if first else itertools.repeat(None),
            "bare on two": bare(at, False, task),
            "half a batch": bare(at, False, task, 1, BATCH // 2),
        }
        results = take_turns(loops, time.perf_counter)
        for epochs in loops.values():
            if hasattr(epochs, "close"):
                epochs.close()
    return results


def take_turns(loops, clock) -> dict[str, list[float]]:
    times = {name: [] for name in loops}
    for turn in range(ROUNDS + 1):
        for name, epochs in loops.items():
            dist.barrier()
            start = clock()
            next(epochs)
            if turn:  # the first round warms up
                times[name].append(clock() - start)
    dist.barrier()
    return times


def idle():
    dist.new_group(backend="gloo")  # a collective, which the other rank's CheckpointManager calls
    while True:
        yield


class Task(NamedTuple):
    """A net and the shape of its inputs."""

    net: functools.partial
    shape: tuple[int, ...]


TASKS = {
    "transformer": Task(functools.partial(Transformer, WIDTH, DEPTH), (LENGTH, WIDTH)),
    "convolutions": Task(functools.partial(ConvNet, 64, 4), (3, 16, 16)),
}


def our_epochs(folder: Path, processes: int, saves: bool, task: Task = TASKS["transformer"]):
    """Train an epoch whenever the next is asked for, as `train` does, but for its checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    training = Training(
        epochs=ROUNDS + 1,
        batch_size=BATCH,
        learning_rate=1e-3,
        schedule="constant",
        keep="last",
        parallel={"processes": processes, "static_graph": processes > 1},
        # One more would be that of the epoch, which the others do not write.
        checkpoints={"every_steps": SAVE_EVERY if saves else None},
    )
    job = Job(
        start=folder,
        training=training,
        objective=TargetLoss(),
        data=Splits({"train": samples(task)}, BATCH),
        metric=Metric(),
        reference=None,
        device="cpu",
        threads=1,
        seed=0,
        folder=folder,
        accept_start=False,
    )
    strategy = create_strategy(training.parallel) if processes > 1 else Strategy()
    loss = TargetLoss(label_smoothing=0.0).prepare("cpu")
    state = TrainState(net(task), loss, training, strategy, "cpu", job.example_batch)
    schedule = Schedule(state.optimizer, training, job.steps_per_epoch, job.metric)
    with (
        job.data.keep_workers(),
        recording_metrics(job, strategy) as metrics,
        manager_of(folder, training, strategy) as manager,
    ):
        progress = TrainProgress()
        while True:
            progress = _train_epoch(
                state, job, progress, None, manager, metrics, schedule, lambda record: None
            )
            if saves:
                manager.wait()
            yield


def manager_of(folder: Path, training: Training, strategy) -> CheckpointManager:
    return CheckpointManager(folder, training.checkpoints, strategy)


def samples(task: Task, count: int = STEPS * BATCH) -> TensorDataset:
    """Return an epoch's samples."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, *task.shape, generator=generator)
    return TensorDataset(inputs, torch.randint(10, (count,), generator=generator))


def net(task: Task = TASKS["transformer"]) -> torch.nn.Module:
    torch.manual_seed(0)
    return task.net()


def sgd(module) -> torch.optim.Optimizer:
    """Create the optimizer that is our default."""
    return torch.optim.SGD(module.parameters(), 1e-3, momentum=0.9, nesterov=True, fused=True)


def loader(task: Task = TASKS["transformer"], ranks: int | None = None, batch: int = BATCH):
    ranks = ranks or dist.get_world_size()
    data = samples(task, STEPS * batch)
    sampler = DistributedSampler(data) if ranks > 1 else None
    return DataLoader(data, batch // ranks, shuffle=sampler is None, sampler=sampler)


def plain_epochs(module, optimizer, batches, backward, save):
    """Train by the usual loop; ``save`` is called every few steps, but not after the last one."""
    for epoch in itertools.count():
        if isinstance(getattr(batches, "sampler", None), DistributedSampler):
            batches.sampler.set_epoch(epoch)
        for step, (inputs, targets) in enumerate(batches, 1):
            optimizer.zero_grad()
            loss = F.cross_entropy(module(inputs), targets)
            backward(loss)
            optimizer.step()
            loss.item()
            if save and step % SAVE_EVERY == 0 and step < STEPS:
                save()
        yield


def bare(
    folder: Path,
    saves: bool,
    task: Task = TASKS["transformer"],
    ranks: int | None = None,
    batch: int = BATCH,
):
    """Train by a loop of torch alone; with one rank by each process for itself."""
    module = net(task)
    optimizer = sgd(module)
    if (ranks or dist.get_world_size()) > 1:
        module = DistributedDataParallel(module, static_graph=True)

    def save() -> None:
        if dist.get_rank() == 0:
            folder.mkdir(exist_ok=True)
            state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, folder / "checkpoint.pt")

    batches = loader(task, ranks, batch)
    return plain_epochs(module, optimizer, batches, torch.Tensor.backward, saves and save)


def fabric(folder: Path, saves: bool):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from lightning_fabric import Fabric
        from lightning_fabric.plugins.environments import TorchElasticEnvironment
        from lightning_fabric.strategies import DDPStrategy

        ranks, settings = dist.get_world_size(), {}
        if ranks > 1:
            settings["strategy"] = DDPStrategy(
                process_group_backend="gloo",
                cluster_environment=TorchElasticEnvironment(),
                static_graph=True,
            )
        runner = Fabric(accelerator="cpu", devices=ranks, **settings)
        runner.launch()
        own = net()
        module, optimizer = runner.setup(own, sgd(own))
        batches = runner.setup_dataloaders(loader(), use_distributed_sampler=False)

    def save() -> None:
        runner.save(folder / "checkpoint.ckpt", {"model": module, "optimizer": optimizer})

    return plain_epochs(module, optimizer, batches, runner.backward, saves and save)


def accelerate(folder: Path, saves: bool):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs

        runner = Accelerator(
            cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(static_graph=True)]
        )
        own = net()
        batches = DataLoader(
            samples(TASKS["transformer"]), BATCH // dist.get_world_size(), shuffle=True
        )
        module, optimizer, batches = runner.prepare(own, sgd(own), batches)
    if runner.num_processes != dist.get_world_size():
        raise RuntimeError(f"accelerate runs {runner.num_processes} processes: not comparable")

    def save() -> None:
        shutil.rmtree(folder, ignore_errors=True) if runner.is_main_process else None
        runner.wait_for_everyone()
        runner.save_state(str(folder))

    return plain_epochs(module, optimizer, batches, runner.backward, saves and save)
