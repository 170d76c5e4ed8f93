"""Faults of pruning, distillation and training: does `explain` name them, and `repair` mend them?

    python benchmarks/explain_stages.py                 # all families
    python benchmarks/explain_stages.py chain residual  # some alone
    python benchmarks/explain_stages.py --no-repair

Thresholds were set on three families; the networks of the others judge them.
"""

import argparse
import dataclasses
import json
import logging
import math
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
sys.path.append(str(HERE))

import torch  # noqa: E402
from explainer.families import FAMILIES, net, trained  # noqa: E402
from explainer.pipeline_file import write_pipeline  # noqa: E402
from explainer.stage_faults import StageFault, stage_faults  # noqa: E402

from compress.common.errors import CompressError, GateRefused  # noqa: E402
from compress.core.progress import silent  # noqa: E402
from compress.pipelines import Pipeline  # noqa: E402
from compress.pipelines.config.run_options import RunOptions  # noqa: E402
from compress.pipelines.explain.explain import explain_run  # noqa: E402
from compress.pipelines.explain.finished_run import FinishedRun  # noqa: E402
from compress.pipelines.explain.repair import RepairSearch  # noqa: E402
from compress.profiling import benchmark, peak_memory, quantiles  # noqa: E402

SET_ON = ("chain", "depthwise", "perceptron")
"""Families that thresholds were set on; those of the others judge."""
SECONDS = 180.0


@dataclass
class Outcome:
    """What was found of one fault."""

    family: str
    name: str
    cause: str
    culprit: str
    part: str
    refused: bool = False
    lost: float = 0.0
    stage: str | None = None
    parts: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    repaired_by: str | None = None
    is_tried: bool = False
    judgings: int = 0
    seconds: float = 0.0
    repair_seconds: float = 0.0
    error: str = ""

    @property
    def is_fault(self) -> bool:
        return bool(self.cause) and self.refused and not self.error

    def line(self) -> str:
        return (
            f"{self.family:10} {self.name:20} {self.cause or '-':24} lost {self.lost:6.1f} "
            f"{'refused' if self.refused else 'passed':8}{self.stage} {self.parts[:2]} "
            f"{self.values[:3]} {self.repaired_by or '-'} "
            f"{self.seconds:.1f} + {self.repair_seconds:.1f} s {self.error}"
        )


def main() -> None:
    parser = argparse.ArgumentParser("explain_stages.py", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="family")
    parser.add_argument("--only", default="", help="faults whose name contains this")
    parser.add_argument("--no-repair", action="store_true", help="explain alone")
    parser.add_argument("--json", type=Path, help="file of outcomes: known ones are not made anew")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no fault begins later")
    parser.add_argument("--read", type=Path, nargs="*", help="print the goals of such files")
    options = parser.parse_args()
    if options.read:
        lines = [line for file in options.read for line in file.read_text().splitlines()]
        print_goals([Outcome(**json.loads(line)) for line in lines])
        return
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))  # user code would be blamed for an exit
    benchmark.compare_latency.__defaults__ = (0.001,)
    quantiles.WIDEST = math.inf
    peak_memory.peak_memory = lambda *_: 0.0
    outcomes, began = [], time.monotonic()
    if options.json and options.json.exists():
        outcomes = [Outcome(**json.loads(line)) for line in options.json.read_text().splitlines()]
    known = {(o.family, o.name, o.cause) for o in outcomes}
    try:
        for family in options.families or FAMILIES:
            module = None
            for fault in stage_faults(family):
                is_known = (family, fault.name, fault.cause) in known
                if options.only not in fault.name or is_known:
                    continue
                if time.monotonic() - began > options.seconds:
                    return
                module = module or trained(family, 0)
                outcome = judge(family, fault, module, repairs=not options.no_repair)
                outcomes.append(outcome)
                print(outcome.line(), flush=True)
                if options.json:
                    with options.json.open("a") as file:
                        file.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
    finally:
        print_goals(outcomes)


def judge(
    family: str, fault: StageFault, trained_module: torch.nn.Module, *, repairs: bool
) -> Outcome:
    """Run a pipeline, explain what was refused, and try repairs."""
    outcome = Outcome(family, fault.name, fault.cause, fault.culprit, fault.part)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        module = net(family)
        if fault.starts_trained:
            module.load_state_dict(trained_module.state_dict())
        if fault.inject is not None:
            fault.inject(module.eval())
        data = {"factory": "explainer.stage_faults:data", "arguments": fault.data}
        file = write_pipeline(folder, family, module, data, [*fault.stages])
        try:
            try:
                Pipeline.from_yaml(file).run(folder / "out", RunOptions(test=False))
            except GateRefused:
                outcome.refused = True
            run = FinishedRun.open(folder / "out", silent)
            began = time.monotonic()
            stage = fault.stages[-1]
            named = (None, None) if outcome.refused else (stage["name"], stage["gates"][0]["gate"])
            explained = explain_run(run, *named, began + SECONDS)
            outcome.seconds = time.monotonic() - began
            found = explained[0].explanation
            outcome.lost = sum(share.points for share in found.split)
            outcome.stage, outcome.judgings = found.culprit, found.judgings
            outcome.parts = tuple(guilty.layer for guilty in found.guilty)
            outcome.causes = tuple(cause.cause for cause in found.causes)
            outcome.values = tuple(
                f"{c.cause} {max(c.layers.values()):.3g} returns {c.returned}" for c in found.causes
            )
            if repairs and outcome.is_fault:
                began = time.monotonic()
                search = RepairSearch(run, began + SECONDS, lambda line: None, trains=True)
                search.search(run, explained, {}, None)
                outcome.is_tried = True
                outcome.repair_seconds = time.monotonic() - began
                if search.found is not None:
                    outcome.repaired_by = search.found.name
        except CompressError as error:
            outcome.error = str(error)
        except Exception:  # noqa: BLE001 - the others are still judged
            outcome.error = traceback.format_exc()
    return outcome


def print_goals(outcomes: list[Outcome]) -> None:
    """Print the goals' table, over the families that thresholds were set on and the others."""
    print(f"\n{'':40}{'goal':>9}{'set on':>12}{'judging':>12}{'all':>12}")
    rows = {
        "faults that a gate refused": ("", lambda o: o.cause, lambda o: o.refused),
        "errors": ("0", lambda o: True, lambda o: o.error),
        "right stage": ("100 %", lambda o: o.is_fault, lambda o: o.stage == o.culprit),
        "guilty group first": (
            ">= 90 %",
            lambda o: o.is_fault and o.part,
            lambda o: tuple(o.parts[:1]) == (o.part,),
        ),
        "right cause first": (
            ">= 80 %",
            lambda o: o.is_fault,
            lambda o: list(o.causes[:1]) == [o.cause],
        ),
        "right cause among three": (
            ">= 95 %",
            lambda o: o.is_fault,
            lambda o: o.cause in o.causes[:3],
        ),
        "clean controls explained as faults": (
            "0",
            lambda o: not o.cause,
            lambda o: o.causes,
        ),
        "a repair passes all gates": (
            ">= 70 %",
            lambda o: o.is_tried,
            lambda o: o.repaired_by is not None,
        ),
    }
    for name, (goal, counts, holds) in rows.items():
        shares = []
        for some in (
            [o for o in outcomes if o.family in SET_ON],
            [o for o in outcomes if o.family not in SET_ON],
            outcomes,
        ):
            chosen = [o for o in some if counts(o)]
            number = sum(bool(holds(o)) for o in chosen)
            share = f"{100 * number / len(chosen):.0f} %" if chosen else "–"
            shares.append(f"{share} of {len(chosen)}")
        print(f"{name:40}{goal:>9}{shares[0]:>12}{shares[1]:>12}{shares[2]:>12}")
    times = sorted(o.seconds for o in outcomes if o.is_fault)
    if times:
        middle = times[math.floor(len(times) / 2)]
        print(f"seconds to explain: median {middle:.1f}, most {times[-1]:.1f}")


if __name__ == "__main__":
    main()
