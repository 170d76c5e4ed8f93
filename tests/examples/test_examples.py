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
