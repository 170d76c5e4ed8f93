"""`compress run --quick`: the metric and a short latency of what is shipped, and marked as such."""

from pathlib import Path

import pytest

from compress.core.progress import silent
from compress.pipelines.explain.finished_run import FinishedRun
from compress.pipelines.reporting.html import render
from compress.pipelines.reporting.terminal_table import closing_lines
from compress.pipelines.results.measurements import JUDGED_QUICKLY
from compress.pipelines.results.schema import Report
from tests.pipelines.conftest import FILE, NETS, Project


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Report]:
    folder = tmp_path_factory.mktemp("judged")
    (folder / "nets.py").write_text(NETS)
    (folder / "small.yaml").write_text(FILE)
    project = Project(folder)
    return project, project.run(judge="quick", profile=True)


def test_a_quick_run_measures_what_is_shipped_alone(judged: tuple[Project, Report]) -> None:
    _, report = judged
    train, pruned, shipped = (stage.measurements for stage in report.stages)
    for left_out in (train, pruned):
        assert left_out.metric is None
        assert left_out.latency_ms.reason == left_out.peak_reason == JUDGED_QUICKLY
    assert shipped.metric and shipped.metric.value > 0.8 and shipped.metric.drop is None
    assert shipped.latency_ms.p50 and shipped.latency_ms.calls
    assert (shipped.speedup, shipped.speedup_reason) == (None, JUDGED_QUICKLY)
    assert report.test is None
    # 60 samples of `val` for the metric, nine rows for batch dependence, 16 for the gate `parity`.
    profile = report.profile.stages["export_onnx"].evaluation  # type: ignore[union-attr]
    assert profile["forwards.onnx.rows"] <= 60 + 9 + 16


def test_a_quick_report_says_so(judged: tuple[Project, Report], tmp_path: Path) -> None:
    project, report = judged
    stored = Report.read(project.out)
    assert stored.judged == "quick"
    assert str(stored.lock["command"]).endswith(" --quick")
    lines = [line.plain for line in closing_lines(report, project.out)]
    assert any(line.startswith("judged quickly: ") for line in lines)
    assert any("judged quickly: deploy" in line for line in lines)
    assert not any("not measurable" in warning for warning in report.warnings)
    # `compress explain` finds the files that were compared quickly.
    opened = FinishedRun.open(project.out, silent)
    assert {stage.name for stage in report.stages} <= {*opened.state.artifacts}
    page = render(report, project.out)
    assert "Judged quickly" in page and "not measurable" not in page


def test_a_full_run_after_a_quick_one_measures_all(judged: tuple[Project, Report]) -> None:
    project, quick = judged
    full = project.run()
    # What trains is taken; files and graphs are compared with their source anew.
    assert {*project.ran()} == {"export_onnx"}
    assert full.judged == "full"
    assert [stage.measurements.latency_ms.p50 is None for stage in full.stages] == [False] * 3
    assert all(stage.measurements.metric for stage in full.stages)
    again = project.run(judge="quick")
    assert not project.ran()
    assert again.stages[-1].measurements.speedup is None
    assert again.stages[-1].measurements.metric == quick.stages[-1].measurements.metric


def test_a_pipeline_file_may_ask_to_be_judged_quickly(project: Project) -> None:
    project.edit("version: 1", "version: 1\njudge: quick")
    assert project.run(until="train").judged == "quick"
    assert project.run(until="train", judge="full").judged == "full"
