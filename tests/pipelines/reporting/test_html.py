"""The page of a run: plots, layers, the proof chain, and rows of stages that did not pass."""

import io
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

import compress
from compress.artifacts.artifact import Artifact
from compress.pipelines.reporting.html import proof_chain, render, source_hashes, trainings_of
from compress.pipelines.reporting.stage_rows import (
    Headline,
    build_rows,
    deployable_rows,
    failure_reasons,
    headline,
    higher_is_better,
    pareto_fronts,
)
from compress.pipelines.reporting.terminal_table import closing_lines, stage_table
from compress.pipelines.results.measurements import Measurements, SameRuntimeReport
from compress.pipelines.results.schema import FailureReport, Report, SkippedReport, StageReport
from compress.pipelines.system.templates import breakable
from compress.profiling.operator_table import OperatorCost, OperatorTable


def many(report: Report, branches: int = 40, named: str = "branch") -> Report:
    """Return a report with so many branches of the last stage, all alike but for their figures."""
    last = report.stages[-1]
    others = []
    for i in range(branches):
        m = last.measurements
        metric = m.metric.model_copy(update={"value": 1 + i / 100 - 0.05 * (i % 3 == 0)})
        update = {"metric": metric, "bytes": 1000 + 50 * i * i, "speedup": 4 - i / 20}
        measured = m.model_copy(update=update)
        changed = {"name": f"{named}-ratio-0.{i:02d}", "measurements": measured}
        others.append(last.model_copy(update=changed))
    return report.model_copy(update={"stages": (*report.stages, *others)})


def broken(report: Report) -> Report:
    """Return a report of which one stage was refused, one failed, and two were skipped."""
    last = report.stages[-1]
    refusal = last.verdicts[0].model_copy(update={"passed": False})
    content = last.model_dump(exclude={"name", "verdicts", "status"})
    refused = StageReport(name="worse", verdicts=(refusal,), **content)
    failure = FailureReport(name="int8", stage="quantize_static", error="int8: no <samples> left")
    skipped = [
        SkippedReport(name=name, stage="export_onnx", branch=("source", "int8"), because="int8")
        for name in ("int8_onnx", "mar")
    ]
    return report.model_copy(
        update={
            "status": "failed",
            "error": failure.error,
            "failed_stage": failure,
            "failures": (failure,),
            "skipped": tuple(skipped),
            "stages": (*report.stages, refused),
        }
    )


class Outline(HTMLParser):
    """What a page consists of, as far as readers without sight depend on it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.headings: list[int] = []
        self.counts: dict[str, int] = {}
        self.ids: list[str] = []
        self.named: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        attribute_values = dict(attributes)
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if "id" in attribute_values:
            self.ids.append(attribute_values["id"])
        if tag == "svg":
            assert (
                attribute_values.get("aria-hidden") == "true"
                or attribute_values.get("role") == "img"
            )
            self.named += (attribute_values.get("aria-labelledby") or "").split()
        self.links += [attribute_values[key] for key in ("href", "src") if key in attribute_values]


def test_trainings_are_those_that_the_stages_wrote_down(finished_run) -> None:
    report = Report.read(finished_run.out)
    (training,) = trainings_of(build_rows(report), "accuracy")
    history = report.stages[0].artifact.facts["history"]
    assert (training.name, training.epochs) == ("train", 3)
    assert training.loss == (history[0]["loss"], history[-1]["loss"])
    assert len(training.plots) == 2
    assert f"{history[-1]['loss']:.4f}" in render(report)


def test_operators_of_traced_trainings_are_listed(finished_run) -> None:
    report = Report.read(finished_run.out)
    assert "Most expensive operators" not in render(report)
    cost = OperatorCost(name="aten::<mm>", calls=6, self_cpu_ms=1.5, cpu_ms=2.25)
    recorded = {"shapes": "[[2, 3]]", "self_mebibytes": 0.5, "self_device_ms": 3.0}
    tables = (
        OperatorTable(task="train", steps=3, total_ms=6.0, operators=(cost,)),
        OperatorTable(
            task="tune", steps=1, total_ms=6.0, operators=(cost.model_copy(update=recorded),)
        ),
    )
    traced = report.stages[0].model_copy(update={"operators": tables})
    page = render(report.model_copy(update={"stages": (traced, *report.stages[1:])}))
    plain, full = page.split("Most expensive operators in training</h2>")[1].split("</table>")[:2]
    assert "train: 3 traced steps" in plain and "tune: 1 traced step<" in full
    assert "&lt;mm&gt;" in plain and "<td>25.0 %</td><td>1.500</td><td>2.250</td></tr>" in plain
    assert '<td class="wrap">[[2, 3]]</td><td>6</td><td>50.0 %</td><td>3.000</td>' in full
    assert "<td>0.50</td>" in full and "Own MiB" not in plain


def test_the_chain_is_held_against_the_sealed_manifests(project) -> None:
    report = Report.read(project.out)
    rows = build_rows(report)
    assert [link.check for link in proof_chain(report, rows, project.out)] == ["agrees"] * 3
    reads = [link.read for link in proof_chain(report, rows, project.out)]
    assert reads[1:] == [stage.artifact.digest for stage in report.stages[:-1]]
    assert source_hashes(report)["artifact, digest"] == reads[0]
    assert source_hashes(report)["code, SHA-256"]
    assert "none" in source_hashes(report)["checkpoint"]

    lied = report.stages[1].artifact.model_copy(update={"sha256": "0" * 64})
    stages = [s.model_copy(update={"artifact": lied}) if s.name == "prune_channels" else s
              for s in report.stages]  # fmt: skip
    changed = report.model_copy(update={"stages": tuple(stages)})
    (project.out / "artifacts/export_onnx/manifest.json").unlink()
    links = proof_chain(changed, build_rows(changed), project.out)
    assert [link.check for link in links] == ["agrees", "differs", "not here"]
    assert "✗ differs" in render(changed, project.out)


def test_the_page_is_written_again_as_it_was(finished_run) -> None:
    assert (
        render(Report.read(finished_run.out), finished_run.out)
        == (finished_run.out / "report.html").read_text()
    )


@pytest.mark.parametrize("change", [lambda r: r, broken, many])
def test_every_table_and_plot_can_be_read_without_sight(finished_run, change) -> None:
    page = render(change(Report.read(finished_run.out)), finished_run.out)
    outline = Outline(page)
    assert outline.headings[0] == 1
    assert outline.headings.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(outline.headings))
    assert outline.counts["table"] == outline.counts["caption"]
    assert len(set(outline.ids)) == len(outline.ids)
    assert outline.named
    assert set(outline.named) <= set(outline.ids)
    assert "script" not in outline.counts
    assert not [link for link in outline.links if re.match(r"(\w+:|//)", link)]
    assert len(page) < 300_000


def test_a_passed_run_says_first_what_to_deploy(finished_run) -> None:
    report = Report.read(finished_run.out)
    assert report.baseline
    before = report.baseline.model_copy(update={"bytes": 4_000_000})
    last = report.stages[-1]
    own = SameRuntimeReport(runtime="ONNX Runtime", speedup=2.5, speedup_interval=(2.4, 2.6))
    update = {"bytes": 250_000, "speedup": 0.5, "same_runtime": own}
    measured = last.measurements.model_copy(update=update)
    slower = last.model_copy(update={"measurements": measured})
    measured = measured.model_copy(update={"speedup": 9.13})
    artifact = last.artifact.model_copy(update={"path": "artifacts/fast"})
    faster = last.model_copy(
        update={"name": "fast", "measurements": measured, "artifact": artifact}
    )
    stages = (*report.stages[:-1], slower, faster)
    report = report.model_copy(update={"baseline": before, "stages": stages})
    found = headline(report)
    metric = before.metric.name, before.metric.value, measured.metric.value
    speed = "2.5× faster by compression (9.1× against eager PyTorch: 3.7× by ONNX Runtime)"
    gained = f"4.00 MB → 250 kB, {speed}, {{}} {{:.4f}} → {{:.4f}}".format(*metric)
    gained += " (loses 0 points, 0 of 60 samples; 95 %: -6 to 6)"
    assert found == Headline(gained, "artifacts/fast", last.artifact.file, is_served=True)
    verdict = render(report).split("<h2")[0]
    assert verdict.index(gained) < verdict.index("Passed")
    assert list(closing_lines(report, Path("out")))[-1].plain == (
        "serve it: compress serve out/artifacts/fast"
    )
    for kind, is_served in {"executorch": False, "packed": False, "genai": True}.items():
        of_kind = faster.model_copy(update={"artifact": artifact.model_copy(update={"kind": kind})})
        other = report.model_copy(update={"stages": (*stages[:-1], of_kind)})
        last_line = list(closing_lines(other, Path("out")))[-1].plain
        assert ("compress serve" in last_line) is is_served, kind
    kept = {"facts": {"fastest": {"verdict": "in onnx (faster than aot)"}}}
    fastest = faster.model_copy(update={"artifact": artifact.model_copy(update=kept)})
    packaged = faster.model_copy(
        update={"artifact": artifact.model_copy(update={"kind": "triton", "path": "packaged"})}
    )
    named = headline(report.model_copy(update={"stages": (*stages[:-1], packaged, fastest)}))
    assert named == replace(found, gains=f"{gained}, in onnx (faster than aot)")
    joins = {"path": "artifacts/joined", "facts": {"cascade": {"fallback": "onnx"}}}
    artifact = last.artifact.model_copy(update=joins)
    joined = slower.model_copy(update={"name": "joined", "input": "fast", "artifact": artifact})
    named = headline(report.model_copy(update={"stages": (*stages[:-2], faster, joined)}))
    assert named and named.artifact == "artifacts/joined", "what it was made to correct is faster"
    alone = headline(report.model_copy(update={"stages": stages[:-1]}))
    assert alone and "2.5× faster by compression (0.5× against eager PyTorch" in alone.gains
    assert headline(broken(report)) is None
    assert headline(report.model_copy(update={"stages": report.stages[:1]})) is None


def test_failures_come_first_on_the_page_and_have_rows(finished_run) -> None:
    report = broken(Report.read(finished_run.out))
    rows = build_rows(report)
    assert [row.number for row in rows] == list(range(1, 8))
    assert [row.status for row in rows[2:]] == ["passed", "refused", "failed", *["skipped"] * 2]
    reasons = dict(failure_reasons(rows))
    assert reasons["int8"] == "no <samples> left"
    assert reasons["int8_onnx, mar"] == "skipped, as int8 did not pass"
    assert "worse" in reasons
    fronts = pareto_fronts(report, rows)
    assert {row.name for row in fronts.absent} == {"int8", "int8_onnx", "mar"}
    assert "worse" not in [row.name for row in (*fronts.by_size, *fronts.by_time)]
    assert "worse" not in [row.name for row in deployable_rows(rows, fronts, report)]
    assert "train" not in [row.name for row in deployable_rows(rows, fronts, report)]
    page = render(report)
    assert "no &lt;samples&gt; left" in page
    before_stages = page.partition('<h2 id="stages">Stages')[0]
    assert "1 refused, 1 failed, 2 skipped" in before_stages
    for name in ("worse", "int8", "int8_onnx, mar"):
        assert f"<b>{name}</b>:" in before_stages
    for row in rows:
        assert f"</span>{breakable(row.name)}</th>" in page


def test_the_members_of_the_fronts_are_named(finished_run) -> None:
    report = many(Report.read(finished_run.out))
    rows = build_rows(report)
    fronts = pareto_fronts(report, rows)
    page = render(report)
    by_size = page.partition("On the front by size")[2].partition("</p>")[0]
    by_time = page.partition("On the front by latency")[2].partition("</p>")[0]
    for paragraph, members in ((by_size, fronts.by_size), (by_time, fronts.by_time)):
        assert re.findall(r"<b>\d+ (.+?)</b>", paragraph) == [row.name for row in members]
        assert len(members) > 1
    for row in rows:
        better = [m for m in fronts.by_size if m.metric >= row.metric]
        beaten = any(m.measured.bytes <= row.measured.bytes for m in better)
        assert beaten, row.name
        assert row in fronts.by_size or "size" not in fronts.names_for(row)


def test_there_is_no_front_without_a_known_metric_direction(finished_run) -> None:
    report = Report.read(finished_run.out)
    assert higher_is_better(report) is True
    for name, declared, expected in (
        ("loss", None, False),
        ("mine:metric", None, None),
        ("mine:metric", False, False),
    ):
        spec = {"name": name, "arguments": {}, "higher_is_better": declared}
        lock = {**report.lock, "settings": {**report.lock["settings"], "metric": spec}}
        other = report.model_copy(update={"lock": lock})
        assert higher_is_better(other) is expected
        if expected is None:
            assert "There is no front" in render(other)


def test_what_an_older_run_did_not_keep_is_said_to_be_missing(finished_run) -> None:
    report = Report.read(finished_run.out)
    for row in build_rows(report):
        assert len(row.measured.latency_ms.ventiles) == 19
        ventiles = row.measured.latency_ms.ventiles
        assert ventiles[0] <= row.measured.latency_ms.p50 <= ventiles[-1]
        low, high = row.measured.speedup_interval
        assert min(row.measured.speedup_blocks) <= low * 1.001
        assert high <= max(row.measured.speedup_blocks) * 1.001
    content = report.model_dump(mode="json")
    for measured in (content["baseline"], *(s["measurements"] for s in content["stages"])):
        del measured["speedup_blocks"], measured["latency_ms"]["ventiles"]
    lock = {k: v for k, v in report.lock.items() if k != "source"}
    old = Report.model_validate({**content, "lock": lock})
    page = render(old, finished_run.out)
    assert "Not available: nothing was measured" in page
    assert "code, SHA-256" not in page
    content["stages"][0] = report.stages[0].model_dump(mode="json")
    assert ">not kept<" in render(
        Report.model_validate({**content, "lock": lock}), finished_run.out
    )


def test_a_metric_that_is_not_finite_is_in_no_plot(finished_run) -> None:
    report = Report.read(finished_run.out)
    m = report.stages[-1].measurements
    nan = m.model_copy(update={"metric": m.metric.model_copy(update={"value": math.nan})})
    last = report.stages[-1].model_copy(update={"measurements": nan})
    changed = report.model_copy(update={"stages": (*report.stages[:-1], last)})
    assert [row.name for row in pareto_fronts(changed, build_rows(changed)).absent] == [last.name]
    assert f"not measured: <b>3 {last.name}</b>" in render(changed)


@pytest.mark.parametrize("value", [-1.11, 0.0, math.nan, math.inf, None])
def test_impossible_figures_of_an_older_run_are_not_shown(finished_run, value) -> None:
    """An older version extrapolated from few calls; JSON has null for NaN."""
    content = Report.read(finished_run.out).model_dump(mode="json")
    for found in (content["baseline"], *(stage["measurements"] for stage in content["stages"])):
        found |= {"speedup": value, "speedup_interval": [value, value]}
        found |= {"speedup_blocks": [value or -1.0, 1.0]}
        found["latency_ms"] |= {"p50": value, "p95": value, "ventiles": [value or -1.0] * 19}
        del found["latency_ms"]["p50_interval"], found["latency_ms"]["p95_interval"]
    lock = Report.read(finished_run.out).lock
    old = Report.model_validate({**content, "lock": lock})
    page = render(old, finished_run.out)
    assert "not measurable" in page
    assert not re.search(r"-1\.11|>nan|>inf", page)
    console = Console(width=160, file=io.StringIO())
    console.print(stage_table(old, console))
    assert console.file.getvalue().count("n/m") == 3 * len(old.stages)
    again = json.loads(old.model_dump_json())
    for stage in again["stages"]:
        measured = stage["measurements"]
        assert measured["speedup"] is None
        assert measured["latency_ms"]["p50"] is measured["latency_ms"]["p95"] is None
        assert "not measurable on this machine now" in measured["speedup_reason"]
    assert render(Report.model_validate({**again, "lock": lock}), finished_run.out) == page


def test_a_source_that_seems_faster_than_itself_has_no_speedup(finished_run) -> None:
    content = Report.read(finished_run.out).baseline.model_dump(mode="json")
    found = Measurements.model_validate(
        {**content, "speedup": 1.19, "speedup_interval": [0.0, 1.86]}
    )
    assert found.speedup is None
    assert "0 to 1.86" in found.speedup_reason
    whole = Measurements.model_validate({**content, "speedup": 1.19, "speedup_interval": [1, 1.86]})
    assert whole.speedup == 1.19


def test_a_run_without_gates_claims_no_verdict(finished_run) -> None:
    report = Report.read(finished_run.out)
    assert "2 gates checked the artifacts below, and each of them passed." in render(report)
    stages = tuple(stage.model_copy(update={"verdicts": ()}) for stage in report.stages)
    page = render(report.model_copy(update={"stages": stages}))
    assert "No gate checked the artifacts below" in page
    assert "each of them passed" not in page


def test_a_run_that_made_nothing_has_a_page(finished_run) -> None:
    report = Report.read(finished_run.out)
    failure = FailureReport(name="source", stage="source", error="source: no such checkpoint")
    update = {"status": "failed", "error": failure.error, "failures": (failure,)}
    empty = report.model_copy(update={**update, "stages": (), "baseline": None, "test": None})
    page = render(empty, finished_run.out)
    assert "✗ source: no such checkpoint" in page
    assert "fewer than two artifacts" in page
    assert "No stage made an artifact" in page


def test_the_contents_lead_to_every_heading_and_a_refusal_stands_before_the_plots(
    finished_run,
) -> None:
    report = broken(Report.read(finished_run.out))
    for status in ("passed", "refused"):
        page = render(report.model_copy(update={"status": status}))
        nav = page.partition("<nav")[2].partition("</nav>")[0]
        assert re.findall('href="#(.+?)"', nav) == re.findall('<h2 id="(.+?)"', page)
        is_first = page.index('<h2 id="gates"') < page.index('<h2 id="artifacts-to-choose-from"')
        assert is_first is (status == "refused")
    assert "What refused" in page and "<details><summary>All " in page


def test_a_notebook_shows_a_verdict_a_table_and_a_plot(finished_run) -> None:
    report = Report.read(finished_run.out)
    shown = report._repr_html_()
    assert len(shown) < 8_000 and "script" not in shown
    assert shown.count("<tr>") == 1 + len(build_rows(report)) and shown.count("<svg") == 1
    assert "3 stages: 2 passed their gates, 1 had no gates" in shown
    ids = re.findall(r'id="(.+?)"', shown + report._repr_html_())
    assert len(set(ids)) == len(ids) > 0
    assert len(repr(report)) < 300 and all(len(repr(stage)) < 400 for stage in report.stages)
    refused = broken(report)._repr_html_()
    assert 'class="head refused"' in refused and "no &lt;samples&gt; left" in refused
    artifact = Artifact.from_directory(finished_run.out / report.stages[-1].artifact.path)
    facts = artifact._repr_html_()
    assert len(facts) < 4_000
    for text in ("train → prune_channels → export_onnx", artifact.payload_name, "x: float32"):
        assert text in facts
    with pytest.raises(TypeError, match="found a list"):
        compress.html_of([])
