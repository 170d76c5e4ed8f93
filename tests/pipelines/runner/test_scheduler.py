"""Failures of a branch: the others go on, and report, log and announcements name it."""

import io
import json

import pytest
from rich.console import Console

from compress.common.errors import GateRefused, StageFailed, cause_lines
from compress.pipelines import Pipeline
from compress.pipelines.commands.cache_miss import why
from compress.pipelines.planning.planner import build_plan
from compress.pipelines.reporting.stage_rows import build_rows
from compress.pipelines.reporting.terminal_table import closing_lines, stage_table
from compress.pipelines.results.comparison import compare
from compress.pipelines.results.schema import Report
from compress.pipelines.runner.run_state import RunOutcome
from compress.pipelines.system.jsonl_log import LOG
from tests.pipelines.conftest import measured_briefly

NETS = """
from torch import nn

def mlp(hidden=16):
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3))
"""

FILE = """\
version: 1
model:
  factory: nets:mlp
  inputs: [{name: x, shape: [batch, 4]}]
stages:
  - {name: half, stage: prune_weights, input: source, amount: 0.5}
  - {name: script, stage: export_torchscript}
  - {name: bare, stage: prune_channels, input: source, ratio: 0.5, exclude: ["*"]}
  - {name: lost, stage: export_torchscript}
  - name: compared
    stage: export_torchscript
    input: half
    gates: [{gate: parity, atol: 1, against: lost}]
  - name: big
    stage: prune_weights
    input: source
    amount: 0.25
    gates: [{gate: max_size, ratio: 0.01}]
  - {name: bigger, stage: export_torchscript}
  - {name: last, stage: export_torchscript, input: source}
"""


class Branches:
    """A folder whose pipeline has branches that do not pass."""

    def __init__(self, folder) -> None:
        self.folder, self.file, self.out = folder, folder / "fan.yaml", folder / "out"
        (folder / "nets.py").write_text(NETS)
        self.file.write_text(FILE)

    def run(self, **options) -> list[str]:
        self.said: list[str] = []
        self.seen: list[Report] = []
        with measured_briefly(), pytest.raises(StageFailed) as caught:
            Pipeline.from_yaml(self.file).run(
                self.out, announce=self.said.append, finished=self.seen.append, **options
            )
        return cause_lines(caught.value)


@pytest.fixture(scope="module")
def branches(tmp_path_factory) -> Branches:
    found = Branches(tmp_path_factory.mktemp("branches"))
    found.errors = found.run()
    return found


def test_branches_that_do_not_depend_on_a_failure_go_on(branches) -> None:
    report = Report.read(branches.out)
    assert report == branches.seen[0].model_copy(update={"lock": report.lock})
    assert {s.name: s.status for s in report.stages} == {
        "half": "passed",
        "script": "passed",
        "big": "refused",
        "last": "passed",
    }
    assert report.status == "failed", "a failure weighs more than a refusal"
    assert [f.name for f in report.failures] == ["bare"]
    assert report.failed_stage == report.failures[0]
    assert {s.name: s.because for s in report.skipped} == {
        "lost": "bare",
        "compared": "bare",
        "bigger": "big",
    }
    assert report.test is None


def test_every_error_is_announced_and_a_failure_decides(branches) -> None:
    failed, refused = branches.errors
    assert failed.startswith("bare: ")
    assert refused.startswith("big: max_size")
    announced = [line for line in branches.said if ": failed" in line or ": skipped" in line]
    assert announced == [
        f"bare: failed: {failed.removeprefix('bare: ')}",
        "lost: skipped, as bare did not pass",
        "compared: skipped, as bare did not pass",
        "bigger: skipped, as big did not pass",
    ]


def test_the_log_has_each_end_when_it_came(branches) -> None:
    lines = [json.loads(line) for line in (branches.out / LOG).read_text().splitlines()]
    ends = ("stage_failed", "stage_skipped", "stage_finished")
    first = [line for line in lines if line["run"] == lines[0]["run"]]
    announced = [(line["event"], line["stage"]) for line in first if line["event"] in ends]
    assert announced == [
        ("stage_finished", "source"),
        ("stage_finished", "half"),
        ("stage_finished", "script"),
        ("stage_failed", "bare"),
        ("stage_skipped", "lost"),
        ("stage_skipped", "compared"),
        ("stage_finished", "big"),
        ("stage_skipped", "bigger"),
        ("stage_finished", "last"),
    ]
    assert first[-1]["event"] == "run_finished"


def test_the_report_names_the_road_to_each_stage(branches) -> None:
    report = Report.read(branches.out)
    roads = {row.name: row.branch for row in (*report.stages, *report.failures, *report.skipped)}
    assert roads["script"] == ("source", "half")
    assert roads["lost"] == ("source", "bare")
    assert roads["last"] == ("source",)


def test_table_and_page_show_what_failed_and_what_was_skipped(branches) -> None:
    report = Report.read(branches.out)
    console = Console(width=120, file=io.StringIO())
    console.print(stage_table(report, console))
    rows = {line.split()[1]: line for line in console.file.getvalue().splitlines() if "│" in line}
    assert "✗ failed" in rows["bare"]
    assert "skipped" in rows["lost"]
    order = ["source", "half", "script", "bare", "lost", "compared", "big", "bigger", "last"]
    assert list(rows) == order
    assert [row.name for row in build_rows(report)] == order
    assert [row.number for row in build_rows(report)] == list(range(9))
    below = [str(line) for line in closing_lines(report, branches.out)]
    assert "– bigger: skipped, as big did not pass" in below
    assert any(line.startswith("✗ bare: ") for line in below)
    page = (branches.out / "report.html").read_text()
    assert "skipped, as bare did not pass" in page
    assert "✗ bare: " in page


def test_the_next_run_takes_what_passed_from_the_store(branches, tmp_path) -> None:
    before = Report.read(branches.out)
    assert branches.run() == branches.errors
    ran = [line.partition(":")[0] for line in branches.said if ": running (" in line]
    assert ran == ["bare"]
    assert [s.artifact for s in Report.read(branches.out).stages] == [
        s.artifact for s in before.stages
    ]
    pipeline = Pipeline.from_yaml(branches.file)
    assert why(pipeline, branches.out, "lost").does == "runs (after bare)"


@pytest.mark.slow
def test_two_runs_differ_in_what_failed(branches, tmp_path) -> None:
    mended = Branches(tmp_path)
    mended.file.write_text(FILE.replace(', exclude: ["*"]', ""))
    with pytest.raises(GateRefused, match="big: max_size"):
        Pipeline.from_yaml(mended.file).run(mended.out)
    report = Report.read(mended.out)
    assert (report.status, report.failed_stage) == ("refused", None)
    assert [s.name for s in report.skipped] == ["bigger"]
    found = {d.what: (d.before, d.after) for d in compare(branches.out, mended.out).found}
    assert found["status"] == ("failed", "refused")
    assert found["skipped.compared"] == ("as bare", None)
    assert found["failed.bare"][1] is None


def _interrupted(branches: Branches, at: str) -> Report:
    def announce(line: str) -> None:
        if line.startswith(at):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Pipeline.from_yaml(branches.file).run(branches.out, announce=announce)
    report = Report.read(branches.out)
    assert report.status == "interrupted"
    return report


def test_an_interruption_stops_every_branch_at_once(tmp_path) -> None:
    report = _interrupted(Branches(tmp_path), at="half: ran")
    assert not report.skipped


@pytest.mark.slow
def test_a_failure_before_an_interruption_stays_a_failure(
    tmp_path,
) -> None:
    branches = Branches(tmp_path)
    report = _interrupted(branches, at="last: running")
    assert {f.name: f.status for f in report.failures} == {"bare": "failed", "last": "interrupted"}
    shown = {row.name: row.status for row in build_rows(report)}
    assert (shown["bare"], shown["last"]) == ("failed", "interrupted")
    console = Console(width=120, file=io.StringIO())
    console.print(stage_table(report, console))
    rows = {line.split()[1]: line for line in console.file.getvalue().splitlines() if "│" in line}
    assert "✗ failed" in rows["bare"] and "✗ interrupted" in rows["last"]
    log = (branches.out / LOG).read_text()
    assert '"message":"bare: failed: no channel' in log
    assert '"message":"last: interrupted"' in log
    assert '"status":"interrupted","error":"interrupted at last"' in log


def test_a_skipped_stage_names_the_first_stage_that_failed(tmp_path) -> None:
    meeting = Branches(tmp_path)
    stages = [f"  - {{name: s{n}, stage: prune_weights, amount: 0.1}}\n" for n in range(20)]
    for n in range(2, 20):
        gate = f"gates: [{{gate: max_size, ratio: 2, against: s{n - 2}}}]}}"
        stages[n] = stages[n].replace("}", f", {gate}", 1)
    meeting.file.write_text(FILE.partition("  - ")[0] + "".join(stages))
    plan = build_plan(Pipeline.from_yaml(meeting.file))
    announced = []

    def emit(event: str, stage: str | None, *rest: object, **named: object) -> None:
        announced.append((event, stage))

    outcome = RunOutcome(plan, emit)
    assert not any(outcome.should_skip(planned) for planned in plan.stages)
    with outcome.record_failures("s0"):
        raise StageFailed("s0: no")
    assert all(outcome.should_skip(planned) for planned in plan.stages[1:])
    assert announced[:2] == [("stage_failed", "s0"), ("stage_skipped", "s1")]
    assert {left_out.because for left_out in outcome.skipped.values()} == {"s0"}


def test_without_a_baseline_nothing_is_measured(tmp_path) -> None:
    """The model compared with is the one that a leading `train` leaves."""
    failing = Branches(tmp_path)
    (tmp_path / "data.py").write_text(
        "import torch\nfrom torch.utils.data import TensorDataset\n"
        "def data():\n    d = TensorDataset(torch.ones(8, 4), torch.zeros(8).long())\n"
        "    return {'train': d, 'val': d}\n"
    )
    train = "  - {stage: train, epochs: 1, learning_rate: 1.0e+38}\n"
    start = f'data: {{factory: "data:data"}}\nstages:\n{train}'
    failing.file.write_text(FILE.replace("stages:\n", start))
    (error,) = failing.run()
    assert error.startswith("train: ")
    assert {s.because for s in Report.read(failing.out).skipped} == {"train"}
