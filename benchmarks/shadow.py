"""How fast `compress serve --shadow` alarms, how often wrongly, and what it costs a server.

    python benchmarks/shadow.py runs/quickstart/artifacts/onnx [--docs docs/certificate.md]
    python benchmarks/shadow.py runs/quickstart/artifacts/onnx --cost --float float.onnx

Streams are simulated: each compared request is answered otherwise with a fixed probability, or has
the margin of one of scikit-learn's digits. Cost is measured on two servers of the same artifact,
with and without `--shadow 1%`, loaded in turn; the client, `wrk`, runs on the same cores. Without
an artifact margins and cost are left out; `--cost` measures cost alone, in under three minutes.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import torch
from scipy.stats import binom
from sklearn.datasets import load_digits

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.page import write_part  # noqa: E402
from benchmarks.server.contenders import TOKEN, Case, Server, served  # noqa: E402
from compress import Artifact  # noqa: E402
from compress.core.anytime_bounds import (  # noqa: E402
    first_bets,
    first_rank_bets,
    held_back,
    next_bets,
    next_rank_bets,
)
from compress.serve.shadow.drift import BINS  # noqa: E402

STREAMS, REQUESTS, SHARE, CONFIDENCE = 1000, 100_000, 0.01, 0.95
LIMITS = (0.002, 0.01, 0.05)
REST = 0.5  # seconds in which what a server has collected is answered, so that it slows no other
FIGURES = ("per_second", "p50_ms", "p99_ms", "cpu")
CASES = {"8 connections, as fast as they can": None, "8 connections, 4 ms pauses": 4.0}


ABOUT_ALARMS = """\
`python benchmarks/shadow.py runs/quickstart/artifacts/onnx --docs docs/certificate.md` simulates
1,000 streams of requests for each figure of the first table, one in a hundred of which is
compared (`--shadow 1%`). A request is answered otherwise with a fixed probability: the limit
itself in the two columns of alarms, which are then false (100,000 requests, of which 1,000 or
all are compared), and twice the limit in those behind them.

- **fixed number**: requests until the best test that looks once has enough samples to show twice
  the limit: the exact binomial test against that alternative at the level 5 %, of which half
  succeed (power 50 %).
- **until alarm**: the median, which half of the streams need, and those that a tenth and nine
  tenths need; from the start, and after 100,000 requests at the limit (streams that alarmed
  there are left out).
- **ratio**: the median by the fixed number; in parentheses by the number for a power of 80 %.
  That test is told when the share doubles, and the server is not: a change late in a stream
  takes more evidence, as it could have been anywhere."""
NOISES = (0.3, 0.6, 0.9)
REFERENCE = (200, 1000)
ABOUT_DRIFT = """\
Without an uncompressed model (`--shadow-reference`): margins of the quickstart's int8 model for
scikit-learn's digits, of which each of 1,000 streams draws the reference rows and the requests,
with replacement. In the columns of alarms both are alike, so that alarms are false; in those behind
them the requests' digits have noise of this standard deviation (a digit's values are from -1 to 1),
from the first request on. Requests until the alarm, at 1 %: the median, and those that a tenth and
nine tenths need."""
ABOUT_COST = """\
What `--shadow 1%` costs a server of the quickstart's int8 model: ratios to the same server
without it, loaded in turn in one run by eight connections of `wrk` on the same two cores. In
parentheses is the middle half of the rounds. CPU of the shadow is in parts of one core's time
while its server was loaded, with what it does in the half second of rest behind that. The
uncompressed model is the eager PyTorch one of the run, which the server exports to ONNX at its
start, or an ONNX file by `--shadow-model`."""


def alarms(shares: np.ndarray, limit: float) -> np.ndarray:
    """Return after how many compared requests each stream alarms, 0 for never.

    `shares` is the probability of another answer at each compared request.
    """
    rng, bets = np.random.default_rng(0), first_bets()
    found, alive = np.zeros(STREAMS, int), np.arange(STREAMS)
    for number, share in enumerate(shares):
        differs = (rng.random(len(alive)) < share).astype(float)
        bets = next_bets(bets, number, differs, limit)
        reached = sum(bets) + held_back(number + 1, limit) >= 1 / (1 - CONFIDENCE)
        found[alive[reached]] = number + 1
        alive, bets = alive[~reached], [bet[~reached] for bet in bets]
        if not len(alive):
            break
    return found


def optimum(limit: float, power: float) -> int:
    """Return how many samples the best test of a fixed number takes to show twice the limit.

    It is the exact binomial test against that one alternative, at the level 1 - CONFIDENCE.
    """
    numbers = np.arange(10, round(20 / limit))
    refused = binom.isf(1 - CONFIDENCE, numbers, limit)  # more than these are refused
    return int(numbers[binom.sf(refused, numbers, 2 * limit) >= power][0])


def row(limit: float) -> str:
    """Return a row of the table of alarms."""
    same = [alarms(np.full(n, limit), limit) for n in (round(SHARE * REQUESTS), REQUESTS)]
    best, stronger = optimum(limit, 0.5), optimum(limit, 0.8)
    cells = [f"{100 * limit:g} %", *(f"{100 * (found > 0).mean():.1f} %" for found in same)]
    cells.append(f"{best / SHARE:,.0f}")
    for before in (0, round(SHARE * REQUESTS)):
        shares = np.concatenate([np.full(before, limit), np.full(40 * best, 2 * limit)])
        found = alarms(shares, limit)
        late = found[(found == 0) | (found > before)] - before
        low, middle, high = np.quantile(np.where(late < 0, 10**9, late), (0.1, 0.5, 0.9))
        cells.append(f"{middle / SHARE:,.0f} ({low / SHARE:,.0f} to {high / SHARE:,.0f})")
        cells.append(f"{middle / best:.2f} ({middle / stronger:.2f})")
    return f"| {' | '.join(cells)} |"


def drifts(reference: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Return after how many requests each stream alarms, 0 for never.

    `reference` are scores of each stream's reference rows, `(streams, rows)`, `asked` of requests.
    """
    rng, streams, bets = np.random.default_rng(0), np.arange(len(reference)), first_rank_bets()
    found, places = np.zeros(len(reference), int), np.empty(asked.shape, int)
    counts = np.zeros((len(reference), BINS + 1))
    for i in streams:
        edges = np.unique(np.quantile(reference[i, ::2], np.linspace(0, 1, BINS + 1)[1:-1]))
        own = np.searchsorted(edges, reference[i, 1::2], "right")
        counts[i] = np.bincount(own, minlength=BINS + 1)
        places[i] = np.searchsorted(edges, asked[i], "right")
    for number, place in enumerate(places.T):
        above = (counts * (np.arange(BINS + 1) > place[:, None])).sum(1)
        ties, total = counts[streams, place] + 1, counts.sum(1) + 1
        bets = next_rank_bets(bets, number, (above + rng.random(len(reference)) * ties) / total)
        counts[streams, place] += 1
        reached = sum(bets) + held_back(number + 1, 1) >= 1 / (1 - CONFIDENCE)
        found[reached & (found == 0)] = number + 1
    return found


def drift_rows(artifact: Artifact) -> list[str]:
    """Return rows of the table of inputs that differ."""
    images, rng = (
        (load_digits().images / 8 - 1).astype(np.float32)[:, None],
        np.random.default_rng(0),
    )
    pools = {}
    with artifact.open("cpu", 1) as predict:
        for noise in (0.0, *NOISES):
            noisy = np.repeat(images, 4, 0) if noise else images
            noisy = noisy + noise * rng.standard_normal(noisy.shape).astype(np.float32)
            (scores,) = predict(torch.from_numpy(noisy))
            first, second = scores.topk(2, 1).values.unbind(1)
            pools[noise] = (second - first).numpy()
    lines = []
    for count in REFERENCE:
        reference = rng.choice(pools[0.0], (STREAMS, count))
        cells = [f"{count:,}"]
        for rows in (round(SHARE * REQUESTS), round(10 * SHARE * REQUESTS)):
            found = drifts(reference, rng.choice(pools[0.0], (STREAMS, rows)))
            cells.append(f"{100 * (found > 0).mean():.1f} %")
        for noise in NOISES:
            found = drifts(reference, rng.choice(pools[noise], (STREAMS, 1000)))
            ends = np.quantile(np.where(found, found, 10**9), (0.5, 0.1, 0.9)) / SHARE
            middle, low, high = (f"{e:,.0f}" if e < 10**9 else "never" for e in ends)
            cells.append(f"{middle} ({low} to {high})")
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return lines


def cost(artifact: Artifact, model: Path | None, rounds: int, seconds: float) -> list[str]:
    """Return rows of the table of cost: medians of rounds, and the middle half of them.

    Compared is with a model of the user's, or with that of the run.
    """
    lines = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        asked = ("--shadow", "1%", "--shadow-limit", "100%")
        asked += ("--shadow-state", str(folder / "state"))
        asked += ("--shadow-model", str(model)) if model else ()
        plain, shadowed = (
            stack.enter_context(served(artifact, artifact.path, name, *options))
            for name, options in (("without", ()), ("with", asked))
        )
        (shadow,) = psutil.Process(shadowed.pid).children()
        for name, pause in CASES.items():
            ratios, before = defaultdict(list), counted(shadowed)
            used = sum(shadow.cpu_times()[:2])
            for number in range(rounds + 1):
                found = {}
                for server in (plain, shadowed) if number % 2 else (shadowed, plain):
                    found[server.name] = measured(server, seconds if number else 1.0, pause)
                    time.sleep(REST)
                for figure in FIGURES if number else ():
                    ratios[figure].append(found["with"][figure] / found["without"][figure])
            after = counted(shadowed)
            counts = {key: after[key] - before[key] for key in after}
            compared = "ONNX file" if model else "the run's model, exported"
            cells = [compared, name, f"{found['without']['per_second']:,.0f}"]
            for values in ratios.values():
                low, _, high = statistics.quantiles(values, n=4, method="inclusive")
                cells.append(f"{statistics.median(values):.3f} ({low:.3f} to {high:.3f})")
            drawn = counts["requests"] * SHARE
            cells.append(f"{100 * counts['compared'] / drawn:.0f} %")
            used = (sum(shadow.cpu_times()[:2]) - used) / (1 + rounds * seconds)
            cells.append(f"{100 * used:.1f} %")
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    return lines


def measured(server: Server, seconds: float, pause: float | None) -> dict[str, float]:
    """Load a server; return what the client saw, and CPU seconds of the server's own process."""
    process = psutil.Process(server.pid)
    before = sum(process.cpu_times()[:2])
    found = server.run(Case(8, 1), seconds, pause)
    return found | {"cpu": (sum(process.cpu_times()[:2]) - before) / found["requests"]}


def counted(server: Server) -> dict[str, float]:
    """Return the counts in a server's metrics."""
    url = server.url.partition("/v2/")[0] + "/metrics"
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(asked, timeout=30) as response:
        text = response.read().decode()
    found = re.findall(r"^compress_shadow_(requests|compared|dropped){\S+} (\S+)$", text, re.M)
    return {name: float(value) for name, value in found}


def main() -> None:
    """Simulate, measure, print the tables and write them into the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("artifact", type=Path, nargs="?")
    parser.add_argument("--float", type=Path, help="The uncompressed model as an ONNX file.")
    parser.add_argument("--cost", action="store_true", help="Cost alone, of fewer rounds.")
    parser.add_argument("--rounds", type=int, help="20; 4 with --cost")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--docs", type=Path)
    options = parser.parse_args()
    artifact = options.artifact and Artifact.from_directory(options.artifact)
    parts = []
    if not options.cost:
        table = [
            "| limit | alarms, 1,000 compared | alarms, 100,000 compared | fixed number | "
            "until alarm | ratio | until alarm, doubled later | ratio |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for limit in LIMITS:
            table.append(row(limit))
            print(table[-1], flush=True)
        parts += [ABOUT_ALARMS, "\n".join(table)]
    if artifact and not options.cost:
        noised = " | ".join(f"until alarm, noise {noise:g}" for noise in NOISES)
        table = [
            f"| reference rows | alarms, 1,000 scored | alarms, 10,000 scored | {noised} |",
            "|---|---|---|---|---|---|",
        ]
        parts += [ABOUT_DRIFT, "\n".join([*table, *drift_rows(artifact)])]
    if artifact:
        head = (
            "| compared with | load | requests/s without | throughput | p50 | p99 | "
            "server's CPU for a request | of the drawn, compared | shadow's CPU, of a core |",
            "|---|---|---|---|---|---|---|---|---|",
        )
        print(*head, sep="\n", flush=True)
        number = options.rounds or (4 if options.cost else 20)
        models = [None, *([options.float] if options.float else [])]
        rows = [r for m in models for r in cost(artifact, m, number, options.seconds)]
        rounds = f"Medians of {number} rounds of {options.seconds:g} s for each server."
        parts += [f"{ABOUT_COST} {rounds}", "\n".join([*head, *rows])]
    if options.docs:
        write_part("Alarms after shipping", "\n\n".join(parts), options.docs.resolve())


if __name__ == "__main__":
    main()
