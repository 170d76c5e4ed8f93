"""A quantized stage is never silent: how near it stays, and where it is slower, is said."""

import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from compress.pipelines import Pipeline
from compress.pipelines.reporting.html import render
from compress.pipelines.reporting.stage_rows import fidelity_of, headline
from compress.pipelines.reporting.terminal_table import closing_lines
from compress.pipelines.results.measurements import SameRuntimeReport
from compress.pipelines.results.schema import Report, StageReport, slower_than_float
from compress.quantization.numeric_debug.fidelity_report import LabelParity
from tests.pipelines.conftest import measured_briefly


@pytest.fixture(scope="module")
def report(finished_run, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Return the report of a run with a quantized stage, as if that had been exported too."""
    folder = Path(shutil.copytree(finished_run.folder, tmp_path_factory.mktemp("int8") / "user"))
    file = folder / "small.yaml"
    file.write_text(
        file.read_text() + "  - {name: int8, stage: quantize_dynamic, input: prune_channels}\n"
    )
    with measured_briefly():
        Pipeline.from_yaml(file).run(folder / "out")
        # As reading asks again whether the figures are sure.
        found = Report.read(folder / "out")
    exported = next(s for s in found.stages if s.name == "export_onnx")
    again = exported.model_copy(update={"name": "int8_onnx", "input": "int8"})
    return found.model_copy(update={"stages": (*found.stages, again)})


def timed(report: Report, **speedups: float) -> list[StageReport]:
    """Return the stages as if they had been measured so, level with `train` in their runtimes."""
    level = SameRuntimeReport(runtime="a runtime", speedup=1.0, speedup_interval=(0.9, 1.1))
    return [
        stage.model_copy(
            update={
                "measurements": stage.measurements.model_copy(
                    update={"speedup": speedups.get(stage.name, 1.0), "same_runtime": level}
                )
            }
        )
        for stage in report.stages
    ]


def terminal_text(report: Report) -> str:
    console = Console(width=200, file=io.StringIO())
    for line in closing_lines(report, Path()):
        console.print(line, soft_wrap=True)
    return console.file.getvalue()


def test_the_page_and_the_terminal_say_how_near_it_stays(report: Report) -> None:
    stage = next(s for s in report.stages if s.name == "int8")
    found = fidelity_of(stage)
    assert found.split == "val"
    assert found.samples == 60
    assert found.label_agreement is not None
    assert [layer.module for layer in found.worst] == [x.module for x in found.layers]
    page = render(report)
    for layer in found.layers:
        assert f"{layer.module} {layer.own_sqnr_db:.1f} dB" in page
        assert f"{layer.module} {layer.own_sqnr_db:.1f} dB" in terminal_text(report)
    assert f"{found.metric.before:.4f} → {found.metric.after:.4f}" in page
    assert fidelity_of(report.stages[0]) is None


def test_the_page_and_the_terminal_say_which_labels_are_not_as_trained(report: Report) -> None:
    stage = next(s for s in report.stages if s.name == "int8")
    same = LabelParity(labels=60, differing=2, near_ties=1, last_step=0.25, largest_difference=0.5)
    facts = {**stage.artifact.facts, "same_as_trained": same.model_dump(mode="json")}
    artifact = stage.artifact.model_copy(update={"facts": facts})
    trained = stage.model_copy(update={"artifact": artifact})
    shown = report.model_copy(update={"stages": (*report.stages[:-2], trained)})
    line = "int8: 58 of 60 labels as trained; near-ties (margins below the last"
    assert line in render(shown)
    assert line in terminal_text(shown)
    assert "as trained" not in render(report)


def test_slower_than_the_same_export_of_the_float_parent(report: Report) -> None:
    stages = timed(report, prune_channels=1, export_onnx=2.0, int8_onnx=1.6, int8=0.1)
    # int8 is read by the export, and only simulates integers.
    assert list(slower_than_float(stages, "train")) == ["int8_onnx: slower than export_onnx (0.8×)"]


def test_slower_than_the_uncompressed_model_in_the_same_runtime(report: Report) -> None:
    def with_interval(low: float, high: float) -> list[StageReport]:
        stages = [s for s in timed(report, int8_onnx=9.0) if s.name != "export_onnx"]
        own = SameRuntimeReport(runtime="ONNX Runtime", speedup=low, speedup_interval=(low, high))
        measured = stages[-1].measurements.model_copy(update={"same_runtime": own})
        return [*stages[:-1], stages[-1].model_copy(update={"measurements": measured})]

    line = "int8_onnx: slower than train in ONNX Runtime (0.4×)"
    assert list(slower_than_float(with_interval(0.4, 0.45), "train")) == [line]
    assert list(slower_than_float(with_interval(0.4, 1.01), "train")) == []
    shown = report.model_copy(update={"status": "passed", "stages": with_interval(0.4, 0.45)})
    assert headline(shown) is None, "a file slower than the float one is not named to deploy"
    shown = report.model_copy(update={"status": "passed", "stages": with_interval(0.4, 1.01)})
    assert headline(shown).gains.split(", ")[1].startswith("as fast as before in ONNX Runtime")


def test_an_export_of_a_smaller_model_is_no_twin(report: Report) -> None:
    """`export_onnx` is that of a model that was made smaller after the float parent."""
    stages = timed(report, train=2.0, export_onnx=4.0, int8_onnx=2.5)
    beside = [s.model_copy(update={"input": "train"}) if s.name == "int8" else s for s in stages]
    assert list(slower_than_float(beside, "train")) == []


def test_a_graph_that_is_shipped_is_said_to_simulate(report: Report) -> None:
    stages = [s for s in timed(report, int8=0.5) if s.name != "int8_onnx"]
    (line,) = slower_than_float(stages, "train")
    assert line == (
        "int8: slower than prune_channels (0.5×); PyTorch simulates integers: export it"
    )


def test_a_slower_stage_stands_below_the_verdict_and_in_the_terminal(
    report: Report,
) -> None:
    line = "int8_onnx: slower than export_onnx (0.8×)"
    slow = report.model_copy(update={"warnings": (line,)})
    body = render(slow).partition("<main>")[2]
    assert body.index("✓ Passed") < body.index(line) < body.index("<h2")
    assert f"! {line}" in terminal_text(slow).splitlines()
    assert line not in render(report.model_copy(update={"warnings": ()})).partition("<body>")[2]


def test_warnings_are_of_the_measured_figures(report: Report) -> None:
    content = report.model_dump(mode="json", exclude={"warnings"})
    stages = timed(report, export_onnx=4.0, int8_onnx=1.0)
    content["stages"] = [s.model_dump(mode="json") for s in stages]
    again = Report.model_validate({**content, "lock": report.lock})
    depends, slower = again.warnings
    assert depends.startswith("int8: answers depend on what else is in the batch")
    assert slower == "int8_onnx: slower than export_onnx (0.25×)"
    assert Report.model_validate({**again.model_dump(), "lock": {}}).warnings == again.warnings


def test_warnings_of_artifacts_name_the_stage(report: Report) -> None:
    content = report.model_dump(mode="json", exclude={"warnings"})
    content["stages"][0]["artifact"]["facts"]["warnings"] = ["its format is deprecated"]
    again = Report.model_validate({**content, "lock": report.lock})
    warning = f"{report.stages[0].name}: its format is deprecated"
    assert warning in again.warnings
    assert f"! {warning}." in render(again)
