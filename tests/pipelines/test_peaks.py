"""Peak memory in a run: measured once for each artifact, shown everywhere, checked by a gate."""

import shutil

import pytest

from compress.common.errors import GateRefused
from compress.common.sealed_json import dump_sealed, load_sealed
from compress.pipelines.reporting.html import render
from compress.pipelines.reporting.terminal_table import stage_table, wide_console
from compress.pipelines.results.comparison import compare
from compress.pipelines.results.schema import Report
from compress.pipelines.runner.trackers import stage_figures
from compress.pipelines.store.entry import ANSWERS
from compress.profiling import peak_memory
from compress.profiling.rss import PROCESS
from tests.forging import forge_report

pytestmark = pytest.mark.skipif(
    not (PROCESS / "clear_refs").exists(), reason="the kernel reports no peaks here"
)


@pytest.fixture
def project(project):
    project.memory = True
    return project


def _peaks(report: Report) -> dict[str, float | None]:
    return {stage.name: stage.measurements.peak_mebibytes for stage in report.stages}


def _forget_answers(project) -> None:
    """Leave the store as an older version wrote it, which did not ask for memory."""
    for file in (project.out / ".store").glob(f"*/{ANSWERS}"):
        kept = load_sealed(file.read_bytes())
        answers = {q: a for q, a in kept["answers"].items() if "peak memory" not in q}
        file.write_bytes(dump_sealed({**kept, "answers": answers}))


def _never(*_: object) -> None:
    raise AssertionError("memory was measured again")


def test_every_stage_has_a_peak_and_a_second_run_starts_no_process(project, monkeypatch) -> None:
    peaks = _peaks(Report.read(project.out))
    assert [*peaks] == ["train", "prune_channels", "export_onnx"]
    assert all(0 < peak < 15 for peak in peaks.values())
    monkeypatch.setattr(peak_memory, "_send", _never)
    assert _peaks(project.run()) == peaks


def test_a_store_of_an_older_version_is_asked_for_memory_alone(project, monkeypatch) -> None:
    before = Report.read(project.out)
    _forget_answers(project)
    after = project.run()
    assert [s.measurements.latency_ms for s in after.stages] == [
        s.measurements.latency_ms for s in before.stages
    ]
    assert all(_peaks(after).values())


def test_a_peak_that_cannot_be_measured_is_a_dash_with_the_reason(project, monkeypatch) -> None:
    def dying(*_: object) -> dict[str, str]:
        return {"error": "the process that opened it was ended by SIGKILL"}

    _forget_answers(project)
    with monkeypatch.context() as patch:
        patch.setattr(peak_memory, "_send", dying)
        report = project.run()
    assert report.status == "passed"
    assert set(_peaks(report).values()) == {None}
    page = render(report)
    why = "peak memory cannot be measured: the process that opened it was ended by SIGKILL"
    assert f"<p>train: {why}.</p>" in page
    assert stage_figures(report.stages[0].model_dump(mode="json")).keys() >= {"bytes", "p50_ms"}
    assert all(_peaks(project.run()).values()), "a failure was kept"


def test_it_is_shown_wherever_figures_are(project, capsys) -> None:
    report = Report.read(project.out)
    measured = report.stages[-1].measurements
    shown_peak = f"{measured.peak_mebibytes:.1f}"
    page = render(report)
    assert '<th scope="col">Peak MiB</th>' in page
    assert f"<td>{shown_peak}</td>" in page
    wide_console().print(stage_table(report, wide_console()))
    shown = capsys.readouterr().out
    assert "peak MiB" in shown
    assert shown_peak in shown
    figures = stage_figures(report.stages[-1].model_dump(mode="json"))
    assert figures["peak_mebibytes"] == measured.peak_mebibytes
    lighter = shutil.copytree(project.out, project.folder / "lighter")

    def lighten(report, lock) -> None:
        report["stages"][-1]["measurements"]["peak_mebibytes"] = 0.5

    forge_report(lighter, lighten)
    found = {d.what: (d.before, d.after) for d in compare(project.out, lighter).found}
    assert found == {"export_onnx.peak_mebibytes": (measured.peak_mebibytes, 0.5)}


def test_a_report_of_an_older_version_is_read_and_shown_with_dashes(project) -> None:
    def without_peaks(report, lock) -> None:
        for measured in (report["baseline"], *(s["measurements"] for s in report["stages"])):
            del measured["peak_mebibytes"], measured["peak_reason"]

    forge_report(project.out, without_peaks)
    old = Report.read(project.out)
    assert set(_peaks(old).values()) == {None}
    assert "cannot be measured" not in render(old)


def test_a_gate_refuses_and_another_limit_measures_nothing_again(project, monkeypatch) -> None:
    project.edit("{gate: parity, atol: 1e-4}", "{gate: max_memory, mebibytes: 0.001}")
    with pytest.raises(GateRefused, match=r"export_onnx: max_memory: .* <= 0.001 MiB, found"):
        project.run()
    monkeypatch.setattr(peak_memory, "_send", _never)
    project.edit("0.001", "20")
    assert project.run().status == "passed"
    project.edit("20}", "20, batch: 2}")
    with pytest.raises(GateRefused, match="measured again"):
        project.run()
