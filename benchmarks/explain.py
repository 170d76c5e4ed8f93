"""Injected faults of known place and cause: does `explain` name them, and `repair` mend them?

    python benchmarks/explain.py              # sixty faults on six families, ten clean controls
    python benchmarks/explain.py chain residual   # some families alone
    python benchmarks/explain.py --no-repair

Faults with an even number are those that thresholds were set on, the others judge them. How long
models take is not measured: the limit on what repairs may cost is the gate `min_integer_macs`, nine
tenths of the refused model's share.
"""

import argparse
import json
import logging
import math
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
sys.path.append(str(HERE))

import torch  # noqa: E402
from explainer.families import FAMILIES, net, trained  # noqa: E402
from explainer.faults import Fault, faults_of, inject  # noqa: E402
from explainer.pipeline_file import write_pipeline  # noqa: E402

from compress.common.errors import GateRefused  # noqa: E402
from compress.core.diagnosis.layer_diagnosis import max_evaluations  # noqa: E402
from compress.core.progress import silent  # noqa: E402
from compress.pipelines import Pipeline  # noqa: E402
from compress.pipelines.config.run_options import RunOptions  # noqa: E402
from compress.pipelines.explain.explain import Explained, explain_run  # noqa: E402
from compress.pipelines.explain.finished_run import FinishedRun  # noqa: E402
from compress.pipelines.explain.repair import RepairSearch  # noqa: E402
from compress.profiling import benchmark, peak_memory, quantiles  # noqa: E402

POINTS = 1.0
CONTROLS = dict.fromkeys(FAMILIES, 2) | {"depthwise": 1, "perceptron": 1}
"""Clean networks of each family: ten."""
KEPT_SHARE = 0.9
"""Share of the integer kernels' multiply-accumulates that a repair must keep."""
SECONDS = 600.0


@dataclass
class Outcome:
    """What was found of one fault."""

    family: str
    number: int
    """Within the family; those with odd ones were left out when thresholds were set."""
    fault: Fault
    run: FinishedRun | None = None
    explained: Explained | None = None
    lost: float = 0.0
    stage: str | None = None
    layers: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    repaired_by: str | None = None
    float_passes: bool = False
    """Whether the guilty layers in float pass all gates."""
    judgings: int = 0
    most_judgings: int = 0
    seconds: float = 0.0
    is_tried: bool = False
    """Whether repairs were tried."""
    repair_seconds: float = 0.0
    refused: bool = True

    def names_cause(self, first: int) -> bool:
        """Whether the cause is among the first ones that were named."""
        return any(cause.startswith(self.fault.cause) for cause in self.causes[:first])

    def line(self) -> str:
        fault = self.fault
        found = f"{self.layers[:2]} {self.causes[:3]}" if self.refused else "passed: no fault"
        return (
            f"{self.family:11} {fault.name:13} {fault.layer:15} lost {self.lost:5.1f}  {found}  "
            f"{self.repaired_by or '-':30} {self.judgings}/{self.most_judgings} judged "
            f"{self.seconds:.1f} + {self.repair_seconds:.1f} s"
        )


def main() -> None:
    parser = argparse.ArgumentParser("explain.py", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="family")
    parser.add_argument("--no-repair", action="store_true", help="explain alone")
    parser.add_argument("--minutes", type=float, default=60, help="for repairs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    _measure_briefly()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        for family in options.families or FAMILIES:
            for outcome in explain_family(family, Path(folder)):
                outcomes.append(outcome)
                print(outcome.line(), flush=True)
        print_goals(outcomes)
        if options.no_repair:
            return
        deadline = time.monotonic() + 60 * options.minutes
        try:
            # Each family's first ones first, so that fewer minutes leave none out.
            for outcome in sorted(outcomes, key=lambda o: o.number):
                if outcome.refused and outcome.fault.cause and time.monotonic() < deadline:
                    repair(outcome)
                    print(outcome.line(), flush=True)
        finally:
            print_goals(outcomes)


def explain_family(family: str, folder: Path) -> Iterator[Outcome]:
    """Run and explain ten faults of a family, and its clean controls."""
    module = trained(family, 0)
    faults = faults_of(family, [*module.pairs()])
    clean = [Fault("clean", "") for _ in range(CONTROLS[family])]
    share = None
    for number, fault in enumerate([*faults, *clean]):
        if number > len(faults):
            module = trained(family, 1)
        own = folder / f"{family}-{number}"
        own.mkdir()
        outcome = Outcome(family, number, fault)
        share = explain(outcome, own, module, share)
        yield outcome


def explain(
    outcome: Outcome, folder: Path, trained_module: torch.nn.Module, share: float | None
) -> float:
    """Run a pipeline with a fault, and explain what is refused.

    `share` is that of the integer kernels in a model of the family, where it is known; it is
    returned.
    """
    family, fault = outcome.family, outcome.fault
    module = net(family)
    module.load_state_dict(trained_module.state_dict())
    inject(module.eval(), fault)
    out = folder / "out"
    # Once with a limit that all pass, to know the share.
    for limit in [1e-6, None] if share is None else [None]:
        calibration = {"calibration": fault.calibration}
        data = {"factory": "explainer.families:data", "arguments": calibration}
        stages = stages_with(fault, limit or KEPT_SHARE * share)
        file = write_pipeline(folder, family, module, data, stages)
        outcome.refused = False
        try:
            Pipeline.from_yaml(file).run(out, RunOptions(test=False))
        except GateRefused:
            outcome.refused = True
        if share is None:
            report = json.loads((out / "report.json").read_text())
            verdicts = {v["gate"]: v["value"] for v in report["stages"][-1]["verdicts"]}
            share = verdicts["min_integer_macs"]
    outcome.run = FinishedRun.open(out, silent)
    began = time.monotonic()
    named = (None, None) if outcome.refused else ("onnx", "max_drop")
    (outcome.explained, *_) = explain_run(outcome.run, *named, began + SECONDS)
    outcome.seconds = time.monotonic() - began
    found = outcome.explained.explanation
    outcome.lost = float(outcome.explained.judged.verdict.value or 0.0)
    outcome.stage, outcome.judgings = found.culprit, found.judgings
    outcome.layers = tuple(guilty.layer for guilty in found.guilty)
    outcome.causes = tuple(cause.cause for cause in found.causes)
    outcome.most_judgings = max_evaluations(found.layers)
    return share


def repair(outcome: Outcome) -> None:
    """Try repairs, and the guilty layers in float."""
    began = time.monotonic()
    search = RepairSearch(outcome.run, began + SECONDS, lambda line: None)
    search.search(outcome.run, [outcome.explained], {}, None)
    outcome.is_tried = True
    outcome.repair_seconds = time.monotonic() - began
    outcome.repaired_by = search.found.name if search.found else None
    in_float = [r for r in search.allowed(outcome.explained) if "exclude" in r.settings]
    outcome.float_passes = any(
        search.run_repaired(outcome.explained, repair).passed for repair in in_float[:1]
    )


def stages_with(fault: Fault, share: float) -> list[dict[str, object]]:
    """Return the stages of a faulty network, whose gate keeps a share of the integer kernels."""
    gates = [
        {"gate": "max_drop", "points": POINTS, "against": "source"},
        {"gate": "min_integer_macs", "share": share},
    ]
    return [
        {"name": "int8", "stage": "quantize_static", **dict(fault.settings)},
        {"name": "onnx", "stage": "export_onnx", "gates": gates},
    ]


def print_goals(outcomes: list[Outcome]) -> None:
    """Print the goals' table, over the faults that thresholds were set on and the others."""
    print(f"\n{'':44}{'goal':>10}{'set on':>9}{'judging':>9}{'all':>7}")
    rows = {
        "faults that a gate refused": ("", lambda o: bool(o.fault.cause), lambda o: o.refused),
        "right stage": ("100 %", _faulty, lambda o: o.stage == "int8"),
        "guilty layer first": (
            ">= 90 %",
            lambda o: _faulty(o) and o.fault.layer,
            lambda o: o.layers[:1] == (o.fault.layer,),
        ),
        "right cause first": (">= 80 %", _faulty, lambda o: o.names_cause(1)),
        "right cause among three": (">= 95 %", _faulty, lambda o: o.names_cause(3)),
        "clean controls explained as faults": (
            "0",
            lambda o: not o.fault.cause,
            lambda o: bool(o.causes),
        ),
        "a repair passes all gates": (
            ">= 70 %",
            lambda o: o.is_tried,
            lambda o: o.repaired_by is not None,
        ),
        "guilty layers in float pass all gates": (
            "<= 40 %",
            lambda o: o.is_tried,
            lambda o: o.float_passes,
        ),
        "within 3 log2(layers) + 10 judgings": (
            "100 %",
            _faulty,
            lambda o: o.judgings <= o.most_judgings,
        ),
    }
    for name, (goal, counts, holds) in rows.items():
        shares = []
        for some in (
            [o for o in outcomes if o.number % 2 == 0],
            [o for o in outcomes if o.number % 2],
            outcomes,
        ):
            chosen = [o for o in some if counts(o)]
            share = f"{100 * sum(map(holds, chosen)) / len(chosen):.0f} %" if chosen else "–"
            shares.append(f"{share} of {len(chosen)}" if some is outcomes else share)
        print(f"{name:44}{goal:>10}{shares[0]:>9}{shares[1]:>9}  {shares[2]}")
    times = sorted(o.seconds for o in outcomes if _faulty(o))
    if times:
        middle = times[math.floor(len(times) / 2)]
        print(f"seconds to explain: median {middle:.1f}, most {times[-1]:.1f}")


def _faulty(outcome: Outcome) -> bool:
    return bool(outcome.fault.cause) and outcome.refused


def _measure_briefly() -> None:
    benchmark.compare_latency.__defaults__ = (0.001,)
    quantiles.WIDEST = math.inf
    peak_memory.peak_memory = lambda *_: 0.0


if __name__ == "__main__":
    main()
