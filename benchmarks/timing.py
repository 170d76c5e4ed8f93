"""Whether latencies can be trusted: on a busy machine, and of a file beside its copy.

    python benchmarks/timing.py stress [--runs 10] [--threads 1]
    python benchmarks/timing.py copies [--runs 100]

`stress` prints speedups on the machine as it is, then beside two busy loops for each processor.
`copies` counts comparisons of a file with its copy whose 95 % interval excludes 1; at most 5 of 100
should. Wants a machine with nothing else to do.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
HERE = Path(__file__).parent
sys.path[:1] = [str(HERE.parent), str(HERE.parent / "examples" / "digits")]

import torch  # noqa: E402
from models import resnet20  # noqa: E402

import compress  # noqa: E402
from compress.artifacts.artifact import Artifact  # noqa: E402
from compress.common.forward import torch_predictor  # noqa: E402
from compress.profiling.benchmark import compare_latencies  # noqa: E402

SMALL, LARGE = torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 48, 48)


@contextmanager
def busy_loops() -> Iterator[None]:
    """Keep two processes busy for each processor during a block."""
    command = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(command) for _ in range(2 * len(os.sched_getaffinity(0)))]
    try:
        time.sleep(0.5)
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def write_files(folder: Path) -> dict[str, Artifact]:
    """Return a ResNet-20 in ONNX, in floats and in int8, and a wider one on larger images."""
    torch.manual_seed(0)
    made: dict[str, Artifact] = {}
    for name, width, x in (("small", 32, SMALL), ("large", 64, LARGE)):
        model, samples = resnet20(width=width).eval(), torch.randn(32, *x.shape[1:])
        given = {"progress": False, "out": folder / name}
        made[name] = compress.export_onnx(model, example_inputs=samples[:2], **given)
        given["out"] = folder / f"{name} graph"
        quantized = compress.quantize_static(model, calibration=samples, **given)
        given["out"] = folder / f"{name} int8"
        made[f"{name} int8"] = compress.export_onnx(quantized, **given)
    return made


def stress(files: dict[str, Artifact], runs: int, threads: int) -> None:
    """Print speedups, quiet and beside busy loops, of several runs."""
    eager = {n: resnet20(width=w).eval() for n, w in (("small", 32), ("large", 64))}

    def opener(kind: str, x: torch.Tensor) -> Callable:
        name = kind.removesuffix(" eager")
        is_eager = kind.endswith("eager")
        opened = (
            partial(torch_predictor, eager[name], "cpu", threads)
            if is_eager
            else partial(files[kind].open_anew, "cpu", threads)
        )

        @contextmanager
        def on_own_input() -> Iterator[Callable]:
            with opened() as predict:
                yield lambda _: predict(x)

        return on_own_input

    pairs = (
        ("eager ResNet-20 / its ONNX file", ("small eager", SMALL), ("small", SMALL)),
        ("float ONNX / int8 ONNX", ("small", SMALL), ("small int8", SMALL)),
        ("eager of 15 to 30 ms / ONNX of 0.1 ms", ("large eager", LARGE), ("small", SMALL)),
        ("eager of 15 to 30 ms / its ONNX file", ("large eager", LARGE), ("large", LARGE)),
    )
    print(f"{'':40}{'quiet':>32}{'busy':>32}{'furthest':>10}")
    for title, *models in pairs:
        openers = [opener(*model) for model in models]
        quiet = _speedups(openers, runs, threads)
        with busy_loops():
            busy = _speedups(openers, runs, threads)
        known, usual = [s for s in busy if s], statistics.median([s for s in quiet if s] or [0])
        furthest = max((abs(s / usual - 1) for s in known), default=0.0) if usual else 0.0
        shown = f"{100 * furthest:.0f} %" if known else "–"
        print(f"{title:40}{_spread(quiet):>32}{_spread(busy):>32}{shown:>10}", flush=True)


def _speedups(openers: Sequence[Callable], runs: int, threads: int) -> list[float | None]:
    found = (
        compare_latencies(openers, [(SMALL,)], threads=threads).comparison(0, 1)
        for _ in range(runs)
    )
    return [None if one.speedup_doubt else one.speedup for one in found]


def _spread(speedups: Sequence[float | None]) -> str:
    known = [s for s in speedups if s]
    unknown = f", n/m {len(speedups) - len(known)}" if len(known) < len(speedups) else ""
    if not known:
        return f"n/m {len(speedups)}"
    least, middle, most = min(known), statistics.median(known), max(known)
    return f"{middle:.3g} ({least:.3g} to {most:.3g}){unknown}"


def copies(files: dict[str, Artifact], runs: int) -> None:
    """Print how many comparisons of a file with itself exclude 1."""
    for name in ("small int8", "small"):
        excluding, opener = 0, partial(files[name].open_anew, "cpu", 1)
        ratios, widths = [], []
        for _ in range(runs):
            found = compare_latencies([opener, opener], [(SMALL,)], threads=1).comparison(0, 1)
            low, high = found.interval
            excluding += not low <= 1 <= high
            ratios.append(found.speedup)
            widths.append(high / low)
        print(
            f"{name}: {excluding} of {runs} exclude 1; ratios {min(ratios):.3f} to "
            f"{max(ratios):.3f}, intervals {100 * (statistics.median(widths) - 1):.1f} % wide",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("stress", "copies"))
    parser.add_argument("--runs", type=int)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(Path(folder))
        if options.what == "stress":
            stress(files, options.runs or 10, options.threads)
        else:
            copies(files, options.runs or 100)


if __name__ == "__main__":
    main()
