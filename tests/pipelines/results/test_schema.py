import io
import re
import shlex

import pytest
from rich.console import Console

from compress.common.errors import StageFailed
from compress.core.gates import MaxDrop, MinMetric, rule_in_words, value_in_words
from compress.core.gates.gate import gate_classes
from compress.core.verdict import Uncertainty, explain
from compress.pipelines.reporting.html import render
from compress.pipelines.reporting.terminal_table import (
    COLUMNS,
    OPTIONAL_COLUMNS,
    gate_lines,
    stage_table,
)
from compress.pipelines.results.schema import Report
from compress.pipelines.system.templates import breakable, readable_bytes, readable_count


def test_the_page_is_self_contained_and_shows_every_figure(finished_run) -> None:
    page = (finished_run.out / "report.html").read_text()
    assert not re.search(r'(src|href)="(https?:)?//', page)
    report = Report.read(finished_run.out)
    for stage in report.stages:
        assert f"</span>{breakable(stage.name)}</th>" in page
        assert stage.artifact.sha256 in page
        assert f"{stage.measurements.speedup:.2f}×" in page
        for verdict in stage.verdicts:
            assert rule_in_words(verdict, "accuracy") in page
    assert "✓ Passed" in page


def test_what_the_user_wrote_is_escaped(finished_run) -> None:
    report = Report.read(finished_run.out)
    nasty = report.model_copy(update={"status": "failed", "error": "<script>alert(1)</script>"})
    page = render(nasty)
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_figures_for_people() -> None:
    assert [readable_bytes(n) for n in (12, 45_600, 4_336_000)] == ["12 B", "46 kB", "4.34 MB"]
    assert [readable_count(n) for n in (None, 7, 1_084_010)] == ["–", "7", "1.08 M"]


def test_rules_are_in_plain_words() -> None:
    at = MinMetric(at=0.975).verdict(0.98)
    assert rule_in_words(at, "accuracy") == "accuracy >= 0.975"
    drop = MaxDrop(points=1).verdict(0.5)
    assert rule_in_words(drop, "accuracy") == "loses at most 1 point of accuracy"
    assert rule_in_words(drop, "loss") == "loss rises by at most 0.01"


def test_what_a_gate_found_has_the_unit_of_its_rule() -> None:
    drop = MaxDrop(points=1).verdict(0.5)
    assert value_in_words(drop, "accuracy") == "0.5 points"
    assert value_in_words(drop, "loss") == "0.005"
    assert value_in_words(MaxDrop(points=1).verdict(None, "no data"), "loss") == "no data"
    for name, gate in gate_classes().items():
        limits = {gate.limit_field: 1 if name == "min_equal_tokens" else 0.45, "atol": 0.45}
        made = gate.model_validate({k: v for k, v in limits.items() if k in gate.model_fields})
        at_limit = made.verdict(made.limit)
        rule = rule_in_words(at_limit, "accuracy")
        assert re.search(rf"\b{value_in_words(at_limit, 'accuracy')}( |$)", rule), name


def test_what_a_gate_found_says_on_how_many_samples_and_how_sure_it_is() -> None:
    doubt = Uncertainty(samples=360, interval=(-0.781, 1.556), lost=1, gained=0)
    drop = MaxDrop(points=1).verdict(1 / 3.6, uncertainty=doubt)
    found = "0.27778 points (1 of 360 samples; 95 %: -0.78 to 1.6)"
    assert value_in_words(drop, "accuracy") == found
    assert explain(drop).endswith("found 0.2778 (1 of 360 samples; 95 %: -0.78 to 1.6)")
    assert MaxDrop(points=0.1).stored_verdict(drop.measured).uncertainty == doubt
    both = doubt.model_copy(update={"lost": 3, "gained": 2})
    assert both.in_words().startswith("3 lost and 2 gained of 360 samples")


def test_the_page_gives_the_command_that_makes_it_again(finished_run) -> None:
    command = shlex.join(
        ["compress", "run", str(finished_run.file), "--out", str(finished_run.out)]
    )
    assert command in (finished_run.out / "report.html").read_text()


def test_the_page_says_what_a_simulated_and_a_served_latency_mean(finished_run) -> None:
    report = Report.read(finished_run.out)
    assert "HTTP" not in render(report)
    for kind, words in (("torchserve", "includes HTTP"), ("graph", "simulated in PyTorch")):
        last = report.stages[-1]
        other = last.artifact.model_copy(update={"kind": kind})
        stages = (*report.stages[:-1], last.model_copy(update={"artifact": other}))
        assert words in render(report.model_copy(update={"stages": stages}))


def _printed(report: Report, width: int) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(stage_table(report, console))
    return console.file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_is_never_truncated(finished_run, width: int) -> None:
    report = Report.read(finished_run.out)
    served = report.stages[-1].model_copy(update={"name": "package_torchserve"})
    report = report.model_copy(update={"stages": (*report.stages, served)})
    text = _printed(report, width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    header = "\n".join(text.splitlines()[1:5])
    expected = {"size", "smaller", "faster", "gates"}
    if width == 120:
        expected = {*COLUMNS} - {"metric", *OPTIONAL_COLUMNS[:4]}
    assert all(column in header for column in expected), text
    for stage in report.stages:
        assert re.search(rf"\b{stage.name}\b", text)
        assert f"{stage.measurements.same_runtime.speedup:.2f}×" in text
        assert f"{stage.measurements.metric.value:.4f}" in text


def test_a_wide_table_has_every_column(finished_run) -> None:
    text = _printed(Report.read(finished_run.out), 160)
    assert all(column in text for column in COLUMNS if column != "metric")


def test_a_failed_stage_has_its_row(project) -> None:
    project.edit("ratio: 0.4", "ratio: 0.4\n    finetune: {epochs: 1, learning_rate: 1.0e+30}")
    seen: list[Report] = []
    with pytest.raises(StageFailed) as error:
        project.run(finished=seen.append)
    report = Report.read(project.out)
    assert [s.name for s in report.stages] == ["train"]
    assert report.failed_stage.name == "prune_channels"
    assert report.failed_stage.error == str(error.value)
    assert "✗ failed" in _printed(seen[0], 120)
    assert str(error.value) in str(list(gate_lines(report))[-1])
    assert "✗ prune_channels: " in (project.out / "report.html").read_text()


def test_evaluation_seconds_are_reported_separately(finished_run, project) -> None:
    fresh = Report.read(finished_run.out).stages[-1]
    assert fresh.judged_seconds > 0
    assert any(": ran in" in line and ", evaluated in" in line for line in finished_run.said)
    again = project.run().stages[-1]
    assert again.judged_seconds == 0
    assert not any("judged" in line for line in project.said)
