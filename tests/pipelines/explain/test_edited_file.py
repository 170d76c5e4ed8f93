"""Settings that are changed in the text of a pipeline file."""

import pytest
import yaml

from compress.pipelines.explain.repair import changed_content, changed_text

TEXT = """\
# my pipeline
version: 1
stages:
  - {stage: train, epochs: 3}          # short
  - name: int8
    stage: quantize_static             # all of it
    observer: minmax                   # extremes
    gates: [{gate: max_drop, points: 0.5}]
  - {stage: export_onnx}
"""
CHANGES = [
    (1, {"equalize": True}),
    (1, {"observer": "mse"}),
    (1, {"observer": "percentile", "percentile": 99.9}),
    (1, {"exclude": ["a.b", "c"]}),
    (1, {"observer": None, "equalize": True}),
    (0, {"epochs": None}),
    (0, {"epochs": 5, "batch_size": 8}),
    (2, {"name": "onnx"}),
    (1, {"stage": "quantize_mixed", "max_drop_points": 0.5}),
]


@pytest.mark.parametrize(("index", "settings"), CHANGES)
def test_the_text_has_the_changed_content(index: int, settings: dict) -> None:
    edited = yaml.safe_load(changed_text(TEXT, index, settings))
    assert edited == changed_content(yaml.safe_load(TEXT), index, settings)
    for name, value in settings.items():
        assert edited["stages"][index].get(name) == value


def test_other_lines_and_comments_stay() -> None:
    edited = changed_text(TEXT, 1, {"equalize": True})
    before, after = TEXT.splitlines(), edited.splitlines()
    assert [line for line in after if line not in before] == ["    equalize: true"]
    assert [line for line in before if line not in after] == []
    replaced = changed_text(TEXT, 1, {"observer": "mse"})
    assert "    observer: mse                   # extremes" in replaced.splitlines()


def test_a_setting_is_removed_with_its_line() -> None:
    edited = changed_text(TEXT, 1, {"observer": None})
    assert edited == TEXT.replace("    observer: minmax                   # extremes\n", "")
    edited = changed_text(TEXT, 0, {"epochs": None})
    assert edited == TEXT.replace(", epochs: 3", "")


def test_the_last_line_of_a_file_may_have_no_end() -> None:
    text = "# my pipeline\nstages:\n  - stage: quantize_static\n    observer: minmax"
    assert changed_text(text, 0, {"observer": None}) == text.rpartition("\n")[0]
    assert changed_text(text, 0, {"observer": "mse"}) == text.replace("minmax", "mse")


def test_another_stage_keeps_name_and_gates() -> None:
    settings = {"stage": "quantize_mixed", "max_drop_points": 0.5}
    stage = changed_content(yaml.safe_load(TEXT), 1, settings)["stages"][1]
    assert stage == {
        "name": "int8",
        "gates": [{"gate": "max_drop", "points": 0.5}],
        **settings,
    }


def test_a_stage_that_merges_another_one_keeps_its_comments() -> None:
    text = (
        "stages:\n- &base\n  stage: prune\n  ratio: 0.5\n"
        "- <<: *base\n  name: second\n  ratio: 0.3  # little\n"
    )
    assert changed_text(text, 1, {"ratio": 0.2}) == text.replace("0.3", "0.2")
