"""What the pages show is true: their pipelines are valid, their errors are the real ones."""

import re
from pathlib import Path

import pytest
import yaml

from compress.core.gates import MaxSize
from compress.core.gates.gate import gate_classes
from compress.core.verdict import explain
from compress.pipelines import Pipeline
from compress.pipelines.planning.planner import build_plan

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["index.md", "tutorial.md", "gates.md"])
def test_the_pipelines_in_a_page_are_valid(page: str, tmp_path: Path) -> None:
    found = re.findall(
        r"^```yaml.*?\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE
    )
    assert found
    stages = [{"stage": "export_onnx"}]
    usual = {"version": 1, "model": {"factory": "a:b"}, "data": {"factory": "a:c"}}
    for text in found:
        content = {**usual, "stages": stages, **yaml.safe_load(text)}
        (tmp_path / "pipeline.yaml").write_text(yaml.safe_dump(content))
        assert build_plan(Pipeline.from_yaml(tmp_path / "pipeline.yaml")).stages


def test_the_refusal_on_the_page_is_the_one_that_is_printed() -> None:
    verdict = MaxSize(ratio=0.05, against="source").verdict(0.091032)
    assert (
        f"error: export_onnx: {explain(verdict)} (artifact kept in"
        in (DOCS / "gates.md").read_text()
    )


def test_the_gates_page_names_every_gate() -> None:
    page = (DOCS / "gates.md").read_text()
    for gate in gate_classes().values():
        assert f"| `{gate.model_fields['gate'].default}` |" in page


@pytest.mark.parametrize("example", ["regression", "segmentation", "detection"])
def test_the_page_of_an_example_shows_its_pipeline(example: str) -> None:
    page = (DOCS / f"example-{example}.md").read_text()
    assert (DOCS.parent / "examples" / example / "pipeline.yaml").read_text() in page
    assert len(page.splitlines()) <= 80
