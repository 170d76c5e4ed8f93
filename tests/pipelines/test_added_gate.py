"""A gate of another package: a plan, a run and its report learn all of it from its class."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from compress.common.errors import GateRefused, PipelineInvalid, Unavailable
from compress.core.gates import AnyGate, gate
from compress.pipelines.api import Pipeline
from compress.pipelines.planning.plan import advice
from compress.pipelines.planning.planner import build_plan
from compress.pipelines.reporting.terminal_table import gate_lines
from compress.pipelines.results.schema import Report
from tests.pipelines.conftest import NETS

GATE = '''
from typing import ClassVar, Literal

from compress.core.gates.gate import Gate


class MaxScore(Gate):
    """The metric on `val` stays under a bound, so that nothing of `val` was learned."""

    gate: Literal["max_score"] = "max_score"
    score: float
    """Largest value."""

    limit_field: ClassVar[str] = "score"
    rule_template: ClassVar[str] = "score <= {score:g}"
    report_template: ClassVar[str] = "{metric} stays under {percent:g} %"
    allows_runtime: ClassVar[bool] = True
    needs_data: ClassVar[bool] = True
    depends_on_batch: ClassVar[bool] = True
    may_vary: ClassVar[bool] = True
    judges_quality: ClassVar[bool] = True

    def measure(self, before, after, context):
        return context.score(after)

    def unsuitable_artifact(self, written):
        return f"means nothing of {written.kind}" if written.kind == "onnx" else ""

    def unsuitable_metric(self, metric):
        return f"score: {self.score:g} is no loss" if metric == "loss" and self.score < 0 else ""
'''
ENTRY = "max_score = max_score_gate:MaxScore"
FILE = """\
version: 1
model:
  factory: nets:mlp
  inputs: [{name: x, shape: [batch, 4]}]
data: {factory: "nets:data"}
stages:
  - stage: train
    epochs: 1
    gates: [{gate: max_score, score: 1}]
"""


def _install(folder: Path, monkeypatch: pytest.MonkeyPatch, entry: str, code: str = GATE) -> None:
    """Leave a package as pip would, and look for entry points anew."""
    name = entry.partition(" ")[0]
    (folder / f"{name}_gate.py").write_text(code)
    (installed := folder / f"{name}-1.0.dist-info").mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(f"[compress.gates]\n{entry}\n")
    monkeypatch.syspath_prepend(folder)
    _look_again()


def _look_again() -> None:
    gate.gate_classes.cache_clear()
    gate._every_gate.cache_clear()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a model, whose installed package adds the gate."""
    (tmp_path / "nets.py").write_text(NETS)
    _install(tmp_path, monkeypatch, ENTRY)
    yield tmp_path
    monkeypatch.undo()
    _look_again()


def _plan(folder: Path, *edits: tuple[str, str]):
    text = FILE
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    (folder / "p.yaml").write_text(text)
    return build_plan(Pipeline.from_yaml(folder / "p.yaml"))


def test_a_pipeline_runs_it_and_the_report_has_its_rule(installed: Path) -> None:
    plan = _plan(installed)
    assert advice(plan) == ()
    report = Pipeline.from_yaml(installed / "p.yaml").run(installed / "out")
    (verdict,) = report.stages[0].verdicts
    assert verdict.passed
    assert verdict.rule == "score <= 1"
    assert "accuracy stays under 100 %" in (installed / "out" / "report.html").read_text()
    (line,) = gate_lines(Report.read(installed / "out"))
    assert "accuracy stays under 100 %" in str(line)
    (own,) = plan.stages[0].stage.gates
    assert own.reproducible(verdict).value is None


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ((('data: {factory: "nets:data"}\n', ""), ("train\n    epochs: 1", "export_program")),
         r"gates\[0\] \(max_score\): needs data"),
        ((("train\n    epochs: 1", "export_onnx"),), r"\(max_score\): means nothing of onnx"),
        ((("score: 1", "score: -1"), ("version: 1", "version: 1\nmetric: loss")),
         r"\(max_score\): score: -1 is no loss"),
        ((("score: 1", "scor: 1"),), r"gates\[0\] .*scor: unknown key; did you mean 'score'\?"),
        ((("max_score", "max_scor"),), r"unknown gate 'max_scor'; did you mean 'max_score'\?"),
        ((("score: 1", "score: 1, against: onxruntime"),), r"did you mean 'onnxruntime'\?"),
    ],
    ids=["data", "artifact", "metric", "setting", "key", "runtime"],
)  # fmt: skip
def test_a_plan_checks_what_it_declares(installed: Path, edits, message: str) -> None:
    with pytest.raises(PipelineInvalid, match=message):
        _plan(installed, *edits)


def test_a_runtime_may_be_its_baseline(installed: Path) -> None:
    _plan(installed, ("score: 1", "score: 1, against: onnxruntime"))


def test_the_schema_describes_it_for_editors(installed: Path) -> None:
    schema = TypeAdapter(AnyGate).json_schema()
    assert schema["discriminator"]["mapping"]["max_score"] == "#/$defs/MaxScore"
    assert "Largest value." in json.dumps(schema["$defs"]["MaxScore"])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("nowhere:Gate", r"gate 'max_score' of nowhere:Gate: ModuleNotFoundError"),
        ("compress.core.gates:Parity", r"compress.core.gates:Parity: the name is taken"),
    ],
)
def test_a_package_whose_gate_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str, message: str
) -> None:
    with monkeypatch.context() as patch:
        _install(tmp_path, patch, f"max_score = {entry}")
        with pytest.raises(Unavailable, match=message):
            gate.gate_classes()
    _look_again()


def test_the_gate_of_the_page_refuses(
    installed: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "add-a-gate.md").read_text()
    (code,) = re.findall(r'```python title="min_sparsity.py"\n(.*?)```', page, re.DOTALL)
    (entry,) = re.findall(r'"compress.gates"\]\n(.*?)\n', page)
    assert entry == 'min_sparsity = "min_sparsity:MinSparsity"'
    entry = "min_sparsity = min_sparsity_gate:MinSparsity"
    _install(tmp_path_factory.mktemp("page"), monkeypatch, entry, code)
    _plan(installed, ("gate: max_score, score: 1", "gate: min_sparsity, fraction: 0.5"))
    with pytest.raises(GateRefused, match=r"min_sparsity: sparsity >= 0\.5, found 0") as refused:
        Pipeline.from_yaml(installed / "p.yaml").run(installed / "out")
    assert "compress explain" not in str(refused.value), "it knows no causes of such a refusal"
    assert "at least 50 % of the weights are zero" in (installed / "out/report.html").read_text()
