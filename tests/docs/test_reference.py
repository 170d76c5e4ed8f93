"""docs/reference: complete, current, and true of the classes that it describes."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from compress.common.config import descriptions
from compress.core.gates.gate import gate_classes
from compress.core.stage import Stage
from compress.pipelines.config.registry import stages
from compress.training.config.training import Training

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generator() -> Any:
    sys.path.insert(0, str(ROOT / "docs" / "generator"))
    try:
        import reference
        import setting_text
    finally:
        sys.path.pop(0)
    return reference, setting_text


@pytest.fixture(scope="module")
def pages(generator: Any) -> dict[str, str]:
    return generator[0].reference()


@pytest.fixture(scope="module")
def kind(generator: Any) -> Callable[..., str]:
    return lambda schema, required=False: generator[1].kind(schema, required, " or ".join)


def test_the_pages_in_the_repository_are_current(pages: dict[str, str]) -> None:
    folder = ROOT / "docs" / "reference"
    assert {file.stem for file in folder.glob("*.md")} == pages.keys()
    stale = [
        name for name, text in pages.items() if (folder / f"{name}.md").read_text() != f"{text}\n"
    ]
    assert stale == [], "run make reference"


def _section(pages: dict[str, str], stage: str) -> str:
    (found,) = [
        section
        for page in pages.values()
        for section in re.split(r"^## ", page, flags=re.MULTILINE)
        if section.startswith(f"{stage}\n")
    ]
    return found


@pytest.mark.parametrize("name", stages())
def test_a_stage_has_all_its_settings(pages: dict[str, str], name: str) -> None:
    stage = stages()[name]
    section = _section(pages, name)
    settings = stage.model_fields.keys() - Stage.model_fields.keys()
    if issubclass(stage, Training) and name != "train":
        assert "every other setting of [`train`]" in section
        settings -= Training.model_fields.keys()
    shown = re.findall(rf'<a id="{name}-(\w+)">', section)
    assert settings <= set(shown)
    for setting in settings:
        first = " ".join(descriptions(stage).get(setting, "").split())[:15]
        assert first.split("<")[0] in section.replace("\\", ""), setting


@pytest.mark.parametrize("name", stages())
def test_a_stages_example_is_valid_and_its_kinds_are_named(
    pages: dict[str, str], name: str
) -> None:
    stage = stages()[name]
    section = _section(pages, name)
    *_, snippet = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    *_, example = yaml.safe_load(snippet)  # after what it needs
    assert type(stages()[example["stage"]].model_validate(example)) is stage
    read, written = (get_args(kinds) or (kinds,) for kinds in (stage.reads(), stage.writes()))
    kinds = " → ".join(", ".join(kind.kind for kind in kinds) for kinds in (read, written))
    assert f"[{kinds}]" in section
    assert f'`]({_page(pages, name)}.md#{name}) <span class="kind">{kinds}' in (pages["stages"])


def _page(pages: dict[str, str], stage: str) -> str:
    (found,) = [name for name, page in pages.items() if f"\n## {stage}\n" in page]
    return found


def test_every_gate_has_an_example_that_is_valid(pages: dict[str, str]) -> None:
    gates = gate_classes()
    shown = {
        example["gate"]: gates[example["gate"]].model_validate(example)
        for snippet in re.findall(r"```yaml\ngates:\n(.*?)```", pages["gates"], re.DOTALL)
        for example in yaml.safe_load(snippet)
    }
    assert shown.keys() == gates.keys()


def test_every_exit_code_and_command_is_there(pages: dict[str, str]) -> None:
    codes = re.findall(r"^\| (\d+) \|", pages["exit-codes"], re.MULTILINE)
    assert {int(code) for code in codes} == {0, 1, 2, 3, 4, 129, 130, 143}
    readme = re.findall(r"^\| `compress (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    shown = re.findall(r"^## compress (\w+)", pages["commands"], re.MULTILINE)
    assert set(shown) >= set(readme)
    assert "`--max-rows …` <span" in pages["commands"]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (
            {"type": "integer", "exclusiveMinimum": 0, "default": 3},
            "whole number from 1, by default `3`",
        ),
        (
            {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
            "number above 0 and below 1, optional",
        ),
        (
            {"type": "integer", "minimum": 18, "maximum": 24, "default": None},
            "whole number from 18 to 24, optional",
        ),
        ({"type": "boolean", "default": False}, "`true` or `false`, by default `false`"),
        ({"enum": ["a", "b"], "type": "string", "default": "a"}, "`a` or `b`, by default `a`"),
        (
            {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Kl"}, {"type": "null"}]},
            "text or Kl, optional",
        ),
        (
            {"type": "array", "items": {"type": "number"}, "minItems": 1},
            "non-empty list of numbers, optional",
        ),
    ],
)
def test_bounds_are_described(kind: Callable[..., str], schema: dict[str, Any], words: str) -> None:
    assert kind(schema) == words


def test_what_is_required_is_said(kind: Callable[..., str]) -> None:
    assert kind({"type": "string"}, True) == "text, **required**"
