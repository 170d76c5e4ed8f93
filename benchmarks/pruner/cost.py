"""What the axis graph costs: `python benchmarks/pruner/cost.py`.

Prints seconds and peak memory of tracing, and of planning a proven cut, for a network of
ResNet-50's shape at 224×224 and a BERT of MiniLM's; then seconds against the number of operators.
Every line is measured in a process of its own, on one thread. Seconds are those the processor
worked, so that other processes count little; the clock's are beside them.
"""

import multiprocessing
import os
import sys
import time
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parents[2]))

from shapes import minilm, resnet50

from compress.profiling.rss import memory_kib, reset_peak

RESNET = "ResNet-50-shaped, 2×3×224×224"
MINILM = "MiniLM-shaped, 2×128 tokens"
DEPTHS = (1, 2, 4, 8)


def main() -> None:
    print(f"load average before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"\n{'':32s}{'trace':>22s}{'plan, cut proven':>22s}")
    print(f"{'':32s}{'CPU s':>6s}{'s':>7s}{'MiB':>9s}{'CPU s':>6s}{'s':>7s}{'MiB':>9s}")
    for name in (RESNET, MINILM):
        traced, planned = apart(measured, name, 1, "trace"), apart(measured, name, 1, "plan")
        print(f"{name:32s}{row(traced)}{row(planned)}")
    print(f"\n{'':32s}{'operators':>10s}{'export s':>10s}{'labels s':>10s}{'ms each':>9s}")
    for name in (RESNET, MINILM):
        for depth in DEPTHS:
            operators, export, labels = apart(split, name, depth)
            each = 1000 * (export + labels) / operators
            title = f"{name.partition(',')[0]}, depth ×{depth}"
            print(f"{title:32s}{operators:10d}{export:10.2f}{labels:10.2f}{each:9.2f}")
    print(f"\nload average after: {os.getloadavg()[0]:.1f}")


def row(found: tuple[float, float, float]) -> str:
    return f"{found[0]:6.1f}{found[1]:7.1f}{found[2]:9.0f}"


def apart(function, *arguments):
    """Return what a function gives in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply_async(function, arguments).get(timeout=600)


def model(name: str, depth: int) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Return a network, some times as deep, and its inputs, after a first run."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if name == RESNET:
        blocks = tuple(depth * count for count in (3, 4, 6, 3))
        module, inputs = resnet50(blocks), (torch.randn(2, 3, 224, 224),)
    else:
        module, inputs = minilm(6 * depth), (torch.randint(0, 1000, (2, 128)),)
    with torch.inference_mode():
        module.eval()(*inputs)
    warm_up()
    return module, inputs


def warm_up() -> None:
    """Import what the first use of torch.export and of the planner imports."""
    from tests.compress.pruning.planning import plan_slices

    small = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    plan_slices(small.eval(), (torch.randn(2, 4),), ratio=0.5)


def measured(name: str, depth: int, what: str) -> tuple[float, float, float]:
    """Return seconds of the processor, seconds of the clock, and MiB above what was there."""
    from compress.pruning.dependency.channel_groups import trace
    from tests.compress.pruning.planning import plan_slices

    module, inputs = model(name, depth)
    reset_peak()
    before = memory_kib("VmRSS")
    work, clock = time.process_time(), time.perf_counter()
    if what == "trace":
        assert trace(module, inputs).groups
    else:
        assert plan_slices(module, inputs, ratio=0.5).groups
    seconds = time.process_time() - work, time.perf_counter() - clock
    return *seconds, (memory_kib("VmHWM") - before) / 1024


def split(name: str, depth: int) -> tuple[int, float, float]:
    """Return the number of operators, the exporter's seconds and those of following labels."""
    from compress.pruning.dependency import channel_groups as graph

    module, inputs = model(name, depth)
    export, spent = graph.export_graph, []

    def timed(*arguments):
        start = time.process_time()
        spent.append((export(*arguments), time.process_time() - start))
        return spent[-1][0]

    graph.export_graph = timed
    start = time.process_time()
    graph.trace(module, inputs)
    whole = time.process_time() - start
    program, seconds = spent[0]
    operators = sum(node.op == "call_function" for node in program.graph.nodes)
    return operators, seconds, whole - seconds


if __name__ == "__main__":
    main()
