"""Causes and diagnoses are found by entry points: this toolkit's, and those of packages."""

import re
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest

from compress import Train, cli
from compress.common.errors import GateRefused, Unavailable
from compress.common.requirements import is_foreign
from compress.core.diagnosis.cause import RefusedStage
from compress.pipelines.config.registry import stages
from compress.pipelines.explain import explain as explaining
from compress.pipelines.explain.explain import _explain_causes
from compress.pipelines.results.explanation import Explanations
from compress.pipelines.results.schema import Report

ROOT = Path(__file__).parents[3]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Install a cause as pip would, with other values of its attributes."""

    def install(**values: str) -> None:
        text = (ROOT / "docs" / "explain.md").read_text()
        (code,) = re.findall(r'```python title="halved_input.py"\n(.*?)```', text, re.DOTALL)
        (entry,) = re.findall(r'title="pyproject.toml"\n\[.*?\]\n(.*?)```', text, re.DOTALL)
        for name, value in values.items():
            code, found = re.subn(rf"    {name}=.*", f"    {name}={value},", code)
            assert found == 1
        code = code.replace("refused.stage.scale", "2")
        (tmp_path / "halved_input.py").write_text(code)
        (installed := tmp_path / "halved-1.0.dist-info").mkdir()
        (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: halved\nVersion: 1.0\n")
        entry = entry.replace('"', "")
        (installed / "entry_points.txt").write_text(f"[compress.causes]\n{entry}")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "halved_input", raising=False)
        explaining.announced_causes.cache_clear()

    yield install
    explaining.announced_causes.cache_clear()


def test_what_this_toolkit_announces_is_installed_and_comes_first(install) -> None:
    announced = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    for group, entries in announced.items():
        installed = {e.name: e.value for e in entry_points(group=group) if not is_foreign(e)}
        assert installed == entries, "pip install -e . again"
    install()
    known = explaining.announced_causes()
    assert len(known) == 45 + 1
    assert [key for key, (_, is_added) in known.items() if is_added] == ["halved_input"]
    assert [*known][-1] == "halved_input"


@pytest.mark.parametrize("kind", sorted(stages()))
def test_a_kind_of_stage_has_the_diagnosis_that_is_announced_for_it(kind: str) -> None:
    stage = SimpleNamespace(stage=kind)
    found = explaining.diagnose(stage, None, None, None, 0.0)
    diagnosed = {entry.name for entry in entry_points(group="compress.diagnoses")}
    assert (found is not None) == (kind in diagnosed)
    assert found is None or found.stage is stage


@pytest.mark.slow
def test_a_cause_of_a_package_explains_its_stage(project, install) -> None:
    install(stages='("prune_channels",)')
    # Of this little to learn, only the loss is worse.
    project.edit("stages:", "metric: loss\nstages:")
    project.edit("ratio: 0.4", "ratio: 0.9")
    project.edit("points: 50", "points: 0.001")
    with pytest.raises(GateRefused):
        project.run()
    with pytest.raises(SystemExit) as end:
        cli.app(["explain", str(project.out)])
    found = Explanations.read(project.out, Report.read(project.out))
    assert not end.value.code
    (explanation,) = found.explanations
    assert explanation.culprit == "prune_channels"
    (halved,) = [cause for cause in explanation.causes if cause.cause == "halved_input"]
    assert halved.text == "images are read at 1/2 of their size (limit 1.5)"
    assert {"scale": 1} in explanation.repairs


def test_a_cause_of_some_gates_is_tested_for_these_alone(install) -> None:
    install(stages='("train",)', text='"found",\n    gates=("min_metric",)')
    model = SimpleNamespace(manifest=SimpleNamespace(facts={}))
    refused = RefusedStage(Train(epochs=1), model, model, None, (), None, 0.0)
    found, _ = _explain_causes(refused, "min_metric")
    assert [cause.cause for cause in found["causes"]] == ["halved_input"]
    assert _explain_causes(refused, "max_drop") == (
        {"causes": (), "repairs": (), "notice": "no test of a cause is above its threshold"},
        [],
    )


def test_a_name_that_is_taken_is_refused(install) -> None:
    install(key='"outliers"')
    with pytest.raises(Unavailable, match="the name is taken"):
        explaining.announced_causes()
