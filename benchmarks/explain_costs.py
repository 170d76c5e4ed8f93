"""Injected faults of what files cost: does `explain` name them, and does a repair mend them?

    python benchmarks/explain_costs.py            # all faults, and twelve clean controls
    python benchmarks/explain_costs.py island width   # those whose name begins so
    python benchmarks/explain_costs.py --gate min_speedup --minutes 4   # wants a quiet machine
    python benchmarks/explain_costs.py --repair   # also tries repairs
    python benchmarks/explain_costs.py --json costs.jsonl --minutes 4   # in parts

Each fault is put into a network or into the settings of its stages. What the pipeline reaches with
other settings, a little weakened, is the limit of the gate that then refuses; where the network has
the fault, a little more is asked than it gives. Every other fault of a kind is one that thresholds
were set on, the others judge them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
sys.path.append(str(HERE))

import torch  # noqa: E402
import yaml  # noqa: E402
from explainer.cost_faults import CostFault, clean_controls, cost_faults, net  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from compress.common.errors import GateRefused  # noqa: E402
from compress.core.progress import silent  # noqa: E402
from compress.pipelines import Pipeline  # noqa: E402
from compress.pipelines.config.run_options import RunOptions  # noqa: E402
from compress.pipelines.explain.explain import explain_run  # noqa: E402
from compress.pipelines.explain.finished_run import FinishedRun  # noqa: E402
from compress.pipelines.explain.repair import RepairSearch  # noqa: E402
from compress.profiling import benchmark, peak_memory, quantiles  # noqa: E402

LIMIT = {
    "min_speedup": "ratio",
    "max_size": "ratio",
    "max_parameters": "ratio",
    "max_memory": "mebibytes",
    "min_integer_macs": "share",
}
UNREACHED = {
    "min_speedup": 1e-6,
    "max_size": 4.9,
    "max_parameters": 4.9,
    "max_memory": 1e6,
    "min_integer_macs": 1e-6,
}
"""Limits that everything passes, to measure what is reached without a fault."""
SECONDS = 0.3
"""For which each model is measured."""
REPAIR_SECONDS = 90.0
known_values: dict[str, float] = {}
"""Pipeline without a fault → what its gate finds."""


@dataclass
class Outcome:
    """What was found of one fault."""

    fault: CostFault
    number: int
    is_judging: bool = False
    """Whether it was left out when thresholds were set."""
    refused: bool = False
    stage: str | None = None
    causes: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    """Those that the first cause names."""
    notice: str = ""
    repaired: bool | None = None
    repaired_by: str = ""
    seconds: float = 0.0

    @classmethod
    def read(cls, line: str, faults: list[CostFault]) -> Outcome:
        """Read what :func:`main` has written of one of the faults."""
        content = json.loads(line)
        lists = {name: tuple(content[name]) for name in ("causes", "layers")}
        return cls(**{**content, **lists, "fault": faults[content["number"]]})

    def line(self) -> str:
        fault = self.fault
        found = f"{self.stage} {self.causes} {self.layers[:2]} {self.notice}"
        return (
            f"{self.number:3} {fault.family:9} {fault.name:18} {fault.cause:16} "
            f"{found if self.refused else 'passed'} {self.repaired_by} {self.seconds:.0f} s"
        )


def main() -> None:
    parser = argparse.ArgumentParser("explain_costs.py", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name")
    parser.add_argument("--gate", choices=[*LIMIT], help="faults that this gate refuses alone")
    parser.add_argument("--minutes", type=float, default=60, help="after which none is begun")
    parser.add_argument("--repair", action="store_true", help="run repairs too")
    parser.add_argument("--json", type=Path, help="file of outcomes: known ones are not made anew")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    benchmark.compare_latency.__defaults__ = (SECONDS,)
    quantiles.WIDEST = math.inf
    real_peak = peak_memory.peak_memory
    faults = [*cost_faults(), *clean_controls()]
    outcomes: list[Outcome] = []
    if options.json and options.json.exists():
        outcomes = [Outcome.read(line, faults) for line in options.json.read_text().splitlines()]
    known = {outcome.number for outcome in outcomes}
    kinds: Counter[str] = Counter()
    chosen = []
    for number, fault in enumerate(faults):
        is_named = any(fault.name.startswith(name) for name in options.names)
        is_asked = options.gate in (None, fault.gate) and (is_named or not options.names)
        if is_asked and number not in known:
            chosen.append((kinds[fault.cause], number, fault))
        kinds[fault.cause] += 1
    deadline = time.monotonic() + 60 * options.minutes
    # Each cause's first ones first, so that fewer minutes leave none out.
    for place, number, fault in sorted(chosen, key=lambda one: one[:2]):
        if time.monotonic() > deadline:
            break
        is_memory = fault.gate == "max_memory"
        peak_memory.peak_memory = real_peak if is_memory else lambda *_: 0.0
        with tempfile.TemporaryDirectory() as folder:
            outcome = explain(fault, number, Path(folder), repairs=options.repair)
        outcome.is_judging = place % 2 == 1
        outcomes.append(outcome)
        print(outcome.line(), flush=True)
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps({**vars(outcome), "fault": fault.name}) + "\n")
    print_goals(outcomes)


def explain(fault: CostFault, number: int, folder: Path, *, repairs: bool) -> Outcome:
    """Run a pipeline without and with a fault, and explain what is refused."""
    outcome = Outcome(fault, number)
    limit = fault.times * usual_value(fault, folder / "usual")
    out = run(fault, folder / "faulty", limit, fault.stages)
    outcome.refused = json.loads((out / "report.json").read_text())["status"] == "refused"
    if not outcome.refused:
        return outcome
    began = time.monotonic()
    finished = FinishedRun.open(out, silent)
    (explained,) = explain_run(finished, None, None, began + 180)
    outcome.seconds = time.monotonic() - began
    found = explained.explanation
    outcome.stage, outcome.notice = found.culprit, found.notice
    outcome.causes = tuple(cause.cause for cause in found.causes)
    outcome.layers = tuple(found.causes[0].layers) if found.causes else ()
    if repairs and explained.repairs:
        deadline = time.monotonic() + REPAIR_SECONDS
        search = RepairSearch(finished, deadline, lambda line: None)
        search.search(finished, [explained], {}, None)
        outcome.repaired = search.found is not None
        outcome.repaired_by = search.found.name if search.found else "-"
    return outcome


def usual_value(fault: CostFault, folder: Path) -> float:
    """Return what the gate finds without the fault, or with it where the network is another one.

    Measured once for each pipeline.
    """
    stages = fault.stages if fault.usual_stages is None else fault.usual_stages
    key = repr((fault.family, fault.gate, fault.arguments, stages))
    if key not in known_values:
        out = run(fault, folder, UNREACHED[fault.gate], stages)
        verdict = json.loads((out / "report.json").read_text())["stages"][-1]["verdicts"][0]
        known_values[key] = verdict["value"]
    return known_values[key]


def run(fault: CostFault, folder: Path, limit: float, stages: tuple[dict[str, Any], ...]) -> Path:
    """Run a network through some stages and the export; return the folder of the results."""
    folder.mkdir()
    arguments = dict(fault.arguments)
    module = net(fault.family, **arguments)
    save_file(dict(module.state_dict()), folder / "net.safetensors")
    tokens = fault.family == "tokens"
    shape: list[Any] = ["batch", 16] if tokens else ["batch", 3, 24, 24]
    inputs: dict[str, Any] = {"name": "x", "shape": shape}
    if tokens:
        inputs["dtype"] = "int64"
    gate = {"gate": fault.gate, LIMIT[fault.gate]: limit}
    if LIMIT[fault.gate] == "ratio":
        gate["against"] = "source"
    content = {
        "version": 1,
        "name": "net",
        "code": str(HERE),
        "model": {
            "factory": "explainer.cost_faults:net",
            "arguments": {"family": fault.family, **arguments},
            "checkpoint": "net.safetensors",
            "inputs": [inputs],
        },
        "data": {"factory": "explainer.cost_faults:data", "arguments": {"tokens": tokens}},
        "stages": [
            *stages,
            {"name": "onnx", "stage": "export_onnx", "gates": [gate]},
        ],
    }
    (folder / "net.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    out = folder / "out"
    with contextlib.suppress(GateRefused):
        Pipeline.from_yaml(folder / "net.yaml").run(out, RunOptions(test=False))
    return out


def print_goals(outcomes: list[Outcome]) -> None:
    """Print the goals' table, over the faults that thresholds were set on and the others."""
    print(f"\n{'':38}{'goal':>10}{'set on':>9}{'judging':>9}   all")
    rows = {
        "faults that a gate refused": ("", lambda o: o.fault.cause, lambda o: o.refused),
        "right stage": ("100 %", _faulty, lambda o: o.stage == o.fault.stage),
        "right cause first": (
            ">= 80 %",
            _faulty,
            lambda o: o.causes[:1] == (o.fault.cause,),
        ),
        "right cause among three": (
            ">= 95 %",
            _faulty,
            lambda o: o.fault.cause in o.causes[:3],
        ),
        "guilty layer first": (
            ">= 90 %",
            lambda o: _faulty(o) and o.fault.layer,
            lambda o: o.layers[:1] == (o.fault.layer,),
        ),
        "clean controls explained as faults": (
            "0",
            lambda o: not o.fault.cause and o.refused,
            lambda o: bool(o.causes),
        ),
        "a repair passes, where there is one": (
            ">= 70 %",
            lambda o: o.repaired is not None,
            lambda o: o.repaired,
        ),
    }
    for name, (goal, counts, holds) in rows.items():
        shares = []
        for some in (
            [o for o in outcomes if not o.is_judging],
            [o for o in outcomes if o.is_judging],
            outcomes,
        ):
            chosen = [o for o in some if counts(o)]
            held = sum(1 for o in chosen if holds(o))
            shares.append(f"{held}/{len(chosen)}" if chosen else "-")
        print(f"{name:38}{goal:>10}{shares[0]:>9}{shares[1]:>9}   {shares[2]}")


def _faulty(outcome: Outcome) -> bool:
    return bool(outcome.fault.cause) and outcome.refused


if __name__ == "__main__":
    main()
