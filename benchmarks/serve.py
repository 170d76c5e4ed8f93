"""What a server adds to a model, and how much of its speed is left; and a soak.

    python benchmarks/serve.py runs/quickstart/artifacts/onnx
    python benchmarks/serve.py runs/quickstart/artifacts/onnx --soak 30

The first takes about five minutes: rounds in which everything is measured in turn, medians of them.
The second loads the built-in server (or `--server torchserve`) for so many minutes at 70 % of what
it can do, and says what went wrong and how its memory grew after the first minute.
"""

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.server.contenders import (
    Case,
    InProcess,
    Server,
    bare,
    built_in,
    built_in_archive,
    torchserve,
    torchserve_echo,
)
from compress.common.errors import Unavailable
from compress.export.onnx.stage import OnnxModel

CASES = [Case(connections, rows) for rows in (1, 16) for connections in (1, 8, 32)]
ONE, EIGHT, SIXTEEN_ROWS = CASES[0], CASES[1], Case(8, 16)
FIGURES = ("p50_ms", "p99_ms", "rows_per_second")
COSTS = ("server_us", "client_us")
"""Of a request, on one core; the client is on the same cores, and so is a part of every figure."""
SHARE = 0.7
SOAKED = Case(8, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, help="an ONNX artifact with one input")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--processes", type=int, default=1, help="of the built-in server")
    parser.add_argument("--soak", type=float, metavar="MINUTES")
    parser.add_argument("--server", choices=["built-in", "torchserve"], default="built-in")
    given = parser.parse_args()
    model = OnnxModel.from_directory(given.model)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ours = built_in(model, given.processes)
        if given.soak:
            chosen = ours if given.server == "built-in" else torchserve(model, folder)
            soak(stack.enter_context(chosen), given.soak)
            return
        contenders = [InProcess(model), *map(stack.enter_context, (bare(model), ours))]
        try:
            contenders.append(stack.enter_context(torchserve(model, folder / "model")))
            mar = folder / "model" / "archive" / "model.mar"
            contenders.append(stack.enter_context(built_in_archive(model, mar)))
            contenders.append(stack.enter_context(torchserve_echo(model, folder / "echo")))
        except Unavailable as error:
            print(f"without TorchServe: {error}")
        compare(contenders, given.rounds, given.seconds)


def compare(contenders: list[InProcess | Server], rounds: int, seconds: float) -> None:
    """Measure all in turn, round after round, and print the medians."""
    seen: dict[tuple[Case, str, str], list[float]] = defaultdict(list)
    errors: dict[str, int] = defaultdict(int)
    for number in range(rounds + 1):
        for case in CASES:
            for each in contenders:
                found = each.run(case, seconds if number else 1)  # the first round warms up
                errors[each.name] += int(found.get("errors", 0))
                for figure in (*FIGURES, *COSTS) if number else ():
                    seen[case, each.name, figure].append(found.get(figure, 0.0))
    middle = {key: statistics.median(values) for key, values in seen.items()}
    print(f"{'':24}" + "".join(f"{each.name:>34}" for each in contenders))
    print(
        f"{'connections × rows':24}" + f"{'p50 ms   p99 ms   rows/s  share':>34}" * len(contenders)
    )
    for case in CASES:
        cells = ""
        base = middle[case, InProcess.name, "rows_per_second"]
        for each in contenders:
            p50, p99, rows = (middle[case, each.name, figure] for figure in FIGURES)
            cells += f"{p50:>11.3f}{p99:>9.3f}{rows:>9.0f}{rows / base:>5.2f}".rjust(34)
        print(f"{f'{case.connections} × {case.rows}':24}{cells}")
    print(f"errors: {dict(errors)}; {rounds} rounds of {seconds:g} s")
    for case in (EIGHT, SIXTEEN_ROWS):
        print(f"µs of one core for a request of {case.connections} × {case.rows}:")
        for each in contenders:
            server, client = (middle[case, each.name, cost] for cost in COSTS)
            print(f"    {each.name} {server:.0f}, client {client:.0f}")
    goals(middle, {each.name for each in contenders})


def goals(middle: dict[tuple[Case, str, str], float], names: set[str]) -> None:
    """Print what was to be reached, and what was."""
    base = InProcess.name
    added = middle[ONE, "built-in", "p50_ms"] - middle[ONE, base, "p50_ms"]
    tell("built-in: p50 added at concurrency 1, in ms", added, at_most=0.6)
    for name, least in (("built-in", 0.6), ("TorchServe", 0.4)):
        if name in names:
            share = middle[EIGHT, name, "rows_per_second"] / middle[EIGHT, base, "rows_per_second"]
            tell(f"{name}: share of in-process rows/s at concurrency 8", share, at_least=least)
    for case in CASES:
        p50, p99 = (middle[case, "built-in", figure] for figure in ("p50_ms", "p99_ms"))
        tell(f"built-in: p99 over p50 at {case.connections} × {case.rows}", p99 / p50, at_most=3)
    if "TorchServe" in names:
        rows = "rows_per_second"
        share = middle[SIXTEEN_ROWS, "TorchServe", rows] / middle[SIXTEEN_ROWS, base, rows]
        tell("TorchServe: share of in-process rows/s at 8 × 16", share, at_least=0.45)
        model = middle[SIXTEEN_ROWS, base, "client_us"]
        echo = sum(middle[SIXTEEN_ROWS, "TorchServe echo", cost] for cost in COSTS)
        print(
            f"the model's share of its own cost and TorchServe's echo: {model / (model + echo):.2f}"
        )


def tell(
    what: str, found: float, at_most: float | None = None, at_least: float | None = None
) -> None:
    """Print a goal, and whether it was reached."""
    reached = found <= at_most if at_most is not None else found >= (at_least or 0)
    limit = f"at most {at_most}" if at_most is not None else f"at least {at_least}"
    print(f"{'✓' if reached else '✗'} {what}: {found:.3g}, {limit}")


def soak(server: Server, minutes: float) -> None:
    """Load a server at a share of its capacity, and print errors and the growth of its memory."""
    capacity = statistics.median(server.run(SOAKED, 3)["per_second"] for _ in range(3))
    rate = SHARE * capacity
    print(f"{server.name}: {capacity:.0f} requests/s at most")
    print(f"about {rate:.0f} requests/s for {minutes:g} minutes")
    ended = threading.Event()
    sizes: list[tuple[float, float]] = []

    def watch() -> None:
        began = time.monotonic()
        while not ended.wait(5):
            sizes.append((time.monotonic() - began, server.rss_mib()))

    watching = threading.Thread(target=watch)
    watching.start()
    # At capacity a connection's requests follow each other after connections / capacity seconds.
    pause_ms = 1000 * SOAKED.connections * (1 / rate - 1 / capacity)
    found = server.run(SOAKED, minutes * 60, pause_ms)
    ended.set()
    watching.join()
    after = [size for seconds, size in sizes if seconds >= 60] or [size for _, size in sizes]
    growth = 100 * (max(after) / after[0] - 1)
    print(f"{found['requests']} requests, {found['per_second']:.0f}/s, errors {found['errors']}")
    print(f"p50 {found['p50_ms']:.3f} ms, p99 {found['p99_ms']:.3f} ms")
    print(f"memory: {after[0]:.1f} MiB after a minute, at most {max(after):.1f} MiB later")
    tell("errors", found["errors"], at_most=0)
    tell("growth of memory after the first minute, in percent", growth, at_most=5)


if __name__ == "__main__":
    main()
