"""The examples, run as a user would: the script in a process of its own, the others in this one."""

import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from compress import cli
from compress.artifacts.artifact import Artifact
from compress.pipelines.results.schema import Report
from tests.pipelines.conftest import measured_briefly

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Return what runs a pipeline by the command, in the test's folder, and gives what it said."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str | Path) -> str:
        with measured_briefly(), pytest.raises(SystemExit) as end:
            cli.app(["run", *map(str, arguments)])
        said = capfd.readouterr().err
        assert not end.value.code, said
        return said

    return call


@pytest.mark.soak
def test_a_users_own_folder(tmp_path: Path, run: Callable[..., str]) -> None:
    shutil.copytree(EXAMPLES / "custom", tmp_path / "mine")
    run("mine/pipeline.yaml", "--out", "results")
    report = Report.read(tmp_path / "results")
    first, last = report.stages[0].measurements, report.stages[-1].measurements
    assert first.metric.value > 0.9
    assert last.bytes < first.bytes / 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "metric", "best", "worst"),
    [
        ("regression", "mse", 0.0, 0.4),  # the mean of the targets has an mse of 0.54
        # test_detector.py and test_metrics.py judge such models too.
        pytest.param("segmentation", "miou", 1.0, 0.6, marks=pytest.mark.soak),
        pytest.param("detection", "map", 1.0, 0.3, marks=pytest.mark.soak),
    ],
)
def test_a_task_other_than_classification(
    example: str, metric: str, best: float, worst: float, tmp_path: Path, run: Callable[..., str]
) -> None:
    if example == "detection":
        pytest.importorskip("pycocotools")
    shutil.copytree(EXAMPLES / example, tmp_path / example)
    run(f"{example}/pipeline.yaml", "--out", "results")
    report = Report.read(tmp_path / "results")
    first, last = report.stages[0].measurements, report.stages[-1].measurements
    assert {first.metric.name, last.metric.name} == {metric}
    assert abs(last.metric.value - best) < abs(worst - best)
    assert last.bytes < first.bytes / 2


@pytest.mark.soak
def test_texts_of_any_length_in_buckets_through_a_cache(
    tmp_path: Path, run: Callable[..., str]
) -> None:
    shutil.copytree(EXAMPLES / "text", tmp_path / "mine")
    assert "tokens/s" in run("mine/pipeline.yaml")
    (results,) = (tmp_path / "runs").iterdir()
    trained = Report.read(results).stages[0]
    assert trained.measurements.metric.value > 0.7
    assert [table.task for table in trained.operators] == ["train"]
    assert (results / "profiles" / "train" / "trace-rank0.json").is_file()
    kept = {file.parent.name.partition("-")[0] for file in (tmp_path / "mine").rglob("*.samples")}
    assert kept == {"train", "val"}


@pytest.mark.soak  # test_decoder.py quantizes and exports one
@pytest.mark.slow
def test_a_language_model(tmp_path: Path, run: Callable[..., str]) -> None:
    run(EXAMPLES / "language_model" / "pipeline.yaml", "--out", "out")
    train, _, onnx = (stage.measurements for stage in Report.read(tmp_path / "out").stages)
    assert train.metric.value < 20, "256 for a model that has learned nothing"
    assert onnx.bytes < train.bytes / 2
    model = Artifact.from_directory(tmp_path / "out" / "artifacts" / "export_onnx")
    manual = runpy.run_path(str(EXAMPLES / "language_model" / "manual.py"))
    ids = manual["splits"]()["val"].samples
    with model.open(threads=1) as predict:
        scores = torch.cat([predict(sample[None])[0] for sample in ids])
    surprise = functional.cross_entropy(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert onnx.metric.value == pytest.approx(surprise.exp().item(), rel=1e-3)


@pytest.mark.soak  # test_decoder.py quantizes and exports one
@pytest.mark.slow
def test_a_language_model_that_generates(tmp_path: Path, run: Callable[..., str]) -> None:
    shutil.copytree(EXAMPLES / "language_model", tmp_path / "mine")
    done = subprocess.run(
        [sys.executable, "llama.py", "my-llama", "--width", "64", "--layers", "1"],
        cwd=tmp_path / "mine",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    file = tmp_path / "mine" / "generate.yaml"
    fewer = '"llama:splits", arguments: {train: 640, val: 8}'
    file.write_text(file.read_text().replace('"llama:splits"', fewer))
    run("mine/generate.yaml", "--out", "out")
    train, _, genai = (stage.measurements for stage in Report.read(tmp_path / "out").stages)
    assert train.metric.value < 700, "1024 for a model that has learned nothing"
    assert genai.bytes < train.bytes
    made = Artifact.from_directory(tmp_path / "out" / "artifacts" / "export_genai")
    assert "tokenizer.json" in made.carried_files()
    facts = made.manifest.facts
    # One for queries, keys and values; the 168 inputs of down_proj are no multiple of 32.
    assert facts["operators"]["MatMulNBits"] == 5
    assert facts["equal_tokens"] == facts["greedy_tokens"] or "near_tie" in facts


@pytest.mark.slow
def test_the_road_from_python(tmp_path: Path, fresh_torch: Callable[[str], str]) -> None:
    script, out = str(EXAMPLES / "programmatic.py"), str(tmp_path / "out")
    printed = fresh_torch(
        f"import runpy, sys; sys.argv = [{script!r}, {out!r}]\n"
        f"sys.path.insert(0, {str(EXAMPLES)!r})\n"
        f"runpy.run_path({script!r}, run_name='__main__')"
    )
    assert "accuracy 0.9" in printed
    Artifact.from_directory(tmp_path / "out" / "onnx").verify()


@pytest.mark.soak  # test_stage_functions.py takes such a class
@pytest.mark.slow
def test_a_class_of_a_script(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "notebook.py", tmp_path],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("accuracy 0.9") == 3
    assert (tmp_path / "model.onnx").stat().st_size < 10_000


@pytest.mark.soak  # test_teachers.py distills from another teacher in a pipeline
@pytest.mark.slow
def test_few_labels_and_a_larger_teacher(tmp_path: Path, run: Callable[..., str]) -> None:
    run(EXAMPLES / "digits" / "few_labels.yaml", "--out", "out")
    train, distill, _ = Report.read(tmp_path / "out").stages
    assert distill.measurements.parameters < 0.07 * train.measurements.parameters
    assert distill.measurements.metric.value > 0.88
