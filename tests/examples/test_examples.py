"""The examples, run as a user would."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from compress.core.artifact import Artifact
from pipelines.report import Report

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_a_users_own_folder(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "custom", tmp_path / "mine")
    code = "import cli; cli.main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "run", "mine/pipeline.yaml", "--out", "results"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    report = Report.read(tmp_path / "results")
    first, last = report.stages[0].measurements, report.stages[-1].measurements
    assert first.metric.value > 0.9
    assert last.bytes < first.bytes / 4


@pytest.mark.slow
def test_texts_of_any_length_in_buckets_through_a_cache(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "text", tmp_path / "mine")
    done = subprocess.run(
        [sys.executable, "-c", "import cli; cli.main()", "run", "mine/pipeline.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stderr
    (results,) = (tmp_path / "runs").iterdir()
    assert Report.read(results).stages[0].measurements.metric.value > 0.7
    assert (results / "profiles" / "train" / "trace-rank0.json").is_file()
    kept = {file.parent.name.partition("-")[0] for file in (tmp_path / "mine").rglob("*.samples")}
    assert kept == {"train", "val"}


@pytest.mark.slow
def test_the_road_from_python(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "programmatic.py", tmp_path / "out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "accuracy 0.9" in done.stdout
    Artifact.at(tmp_path / "out" / "onnx").verify()


@pytest.mark.slow
def test_few_labels_and_a_larger_teacher(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-c", "import cli; cli.main()", "run"),
            *(EXAMPLES / "digits" / "few_labels.yaml", "--out", tmp_path / "out"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    train, distill, _ = Report.read(tmp_path / "out").stages
    assert distill.measurements.parameters < 0.07 * train.measurements.parameters
    assert distill.measurements.metric.value > 0.88
