"""The stage of another package, as the page shows it: installed, found, run and cached."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = """
from torch import nn

def classifier():
    return nn.Linear(64, 10)
"""


def _titled(page: str) -> dict[str, str]:
    text = (ROOT / "docs" / page).read_text()
    found = re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', text, re.DOTALL | re.MULTILINE)
    return dict(found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's files, its package as pip would leave it, and a model."""
    folder = tmp_path_factory.mktemp("mine")
    for name, text in {**_titled("add-a-stage.md"), "my_model.py": MODEL}.items():
        (folder / name).write_text(text)
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    (installed := folder / f"{project['name']}-{project['version']}.dist-info").mkdir()
    (installed / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    ((group, entries),) = project["entry-points"].items()
    lines = "".join(f"{name} = {where}\n" for name, where in entries.items())
    (installed / "entry_points.txt").write_text(f"[{group}]\n{lines}")
    (installed / "RECORD").write_text("mantissas.py,,\n")
    return folder


def _compress(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "import cli; cli.main()", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_it_runs_in_a_pipeline(folder: Path) -> None:
    done = _compress(folder, "run", "pipeline.yaml", "--until", "round_mantissas", "--json")
    assert done.returncode == 0, done.stderr
    (stage,) = json.loads(done.stdout)["stages"]
    assert (stage["name"], stage["cached"]) == ("round_mantissas", False)
    assert [verdict["passed"] for verdict in stage["verdicts"]] == [True]
    assert stage["verdicts"][0]["value"] > 0


def test_its_settings_are_checked(folder: Path) -> None:
    text = (folder / "pipeline.yaml").read_text()
    (folder / "bad.yaml").write_text(text.replace("bits: 12", "bits: 30"))
    done = _compress(folder, "check", "bad.yaml")
    assert done.returncode == 2
    assert "bad.yaml:6" in done.stderr
    assert "23" in done.stderr
