"""Numbers by YAML 1.2's core schema, merged mappings, and their lines in messages."""

import textwrap
from pathlib import Path

import pytest

from compress.common.errors import PipelineInvalid
from compress.core.gates import MaxDrop
from compress.pipelines.commands.init import parse_arguments
from compress.pipelines.config import yaml_source
from compress.pipelines.config.pipeline import PipelineConfig
from compress.pipelines.explain.repair import changed_text
from compress.pipelines.system import yaml_core
from compress.training.config.parallel import Parallel
from compress.training.config.training import Training

HEAD = "version: 1\nmodel: {factory: net:Net}\ndata: {factory: net:data}\n"


def read(folder: Path, stages: str) -> PipelineConfig:
    file = folder / "p.yaml"
    file.write_text(HEAD + textwrap.dedent(stages))
    return PipelineConfig.from_yaml(file)


def refusal(folder: Path, stages: str) -> str:
    with pytest.raises(PipelineInvalid) as raised:
        read(folder, stages)
    return str(raised.value).removeprefix(str(folder))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("1e-6", 1e-6), ("1E+3", 1000.0), (".5", 0.5), ("5.", 5.0), ("-.5e1", -5.0)],
        *[("010", 10), ("0o10", 8), ("0x1F", 31), ("+7", 7), ("-0", 0), ("08", 8)],
        *[("1:30", "1:30"), ("1_000", "1_000"), ("0b1", "0b1"), ("-0x1", "-0x1"), ("1e", "1e")],
        *[("true", True), ("FALSE", False), ("yes", "yes"), ("no", "no"), ("on", "on")],
        *[("off", "off"), ("tRue", "tRue"), ("~", None), ("Null", None), ("nULL", "nULL")],
        *[("2026-01-02", "2026-01-02"), ("'1e-6'", "1e-6"), ('"true"', "true"), ("=", "=")],
    ],
)
def test_a_plain_word_is_what_yaml_1_2_says(tmp_path, text, value) -> None:
    (tmp_path / "p.yaml").write_text(f"x: {text}\n")
    for found in (yaml_source.read(tmp_path / "p.yaml").content["x"], yaml_core.load(text)):
        assert (type(found), found) == (type(value), value)
    assert parse_arguments([f"x={text}"]) == {"x": value}
    # What is written is read as the same again, in a text that is changed as well.
    assert yaml_core.load(yaml_core.dump(value)) == value
    assert yaml_core.load(yaml_core.dump_on_one_line({"x": [value]})) == {"x": [value]}
    stages = "stages:\n- stage: train\n  epochs: 1\n"
    changed = yaml_core.load(changed_text(stages, 0, {"x": value}))["stages"][0]
    assert changed == {"stage": "train", "epochs": 1} | ({} if value is None else {"x": value})


def test_settings_get_the_numbers_that_were_written(tmp_path) -> None:
    stage = read(
        tmp_path,
        """\
        stages:
          - {stage: train, epochs: 010, learning_rate: 1e-3, optimizer_arguments: {eps: 1e-6}}
        """,
    ).stages[0]
    assert (stage.epochs, stage.learning_rate) == (10, 1e-3)
    assert stage.optimizer_arguments == {"eps": 1e-6}


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        ("epochs: true", "epochs: expected a number, found True"),
        ("epochs: 1:30", "epochs: expected a valid integer, found '1:30'"),
        ("epochs: 1, learning_rate: false", "learning_rate: expected a number, found False"),
        ("epochs: 1, ema_decay: true", "ema_decay: expected a number, found True"),
        ("epochs: 1, parallel: {static_graph: 1}", "expected a valid boolean, found 1"),
        ("epochs: 1, parallel: {cpu_offload: no}", "expected a valid boolean, found 'no'"),
    ],
)
def test_a_boolean_is_no_number_and_a_word_no_boolean(tmp_path, setting, found) -> None:
    message = refusal(tmp_path, f"stages:\n  - {{stage: train, {setting}}}\n")
    assert message.startswith("/p.yaml:5: stages[0] (train).")
    assert found in message


def test_python_refuses_them_too_and_takes_numbers_of_numpy() -> None:
    import numpy as np

    for make in (
        lambda: Training(epochs=True),
        lambda: Training(epochs=1, parallel={"nodes": True}),
        lambda: Parallel(wrap=True, strategy="fsdp"),
        lambda: MaxDrop(points=True),
    ):
        with pytest.raises(ValueError, match="Input should be a number"):
            make()
    assert Training(epochs=np.int64(3)).epochs == 3
    assert MaxDrop(points=np.float32(0.5)).points == 0.5


MERGED = """\
stages:
  - &usual
    stage: train
    epochs: 2
    learning_rate: 1e-3
    gates: [{gate: max_drop, points: 1}]
  - <<: *usual
    name: more
    epochs: 3
"""


def test_a_merge_adds_the_keys_that_are_not_there(tmp_path) -> None:
    first, second = read(tmp_path, MERGED).stages
    assert (first.epochs, second.epochs, second.title) == (2, 3, "more")
    assert second.learning_rate == first.learning_rate == 1e-3
    assert second.gates == first.gates


def test_the_first_of_several_merged_mappings_goes_before_the_others(tmp_path) -> None:
    (tmp_path / "p.yaml").write_text(
        "a: &a {x: 1, y: 1}\nb: &b {y: 2, z: 2, <<: *a}\nc: {<<: [*a, *b], z: 3}\nd: {<<: *b}\n"
    )
    content = yaml_source.read(tmp_path / "p.yaml").content
    assert content["b"] == {"x": 1, "y": 2, "z": 2}
    assert content["c"] == {"x": 1, "y": 1, "z": 3}
    assert content["d"] == content["b"]


def test_an_error_names_the_line_where_a_merged_key_stands(tmp_path) -> None:
    message = refusal(tmp_path, MERGED.replace("learning_rate: 1e-3", "learning_rat: 1e-3"))
    lines = message.splitlines()
    assert lines[0].startswith("/p.yaml:8: stages[0] (train).learning_rat: unknown key")
    assert f"{tmp_path}/p.yaml:8: stages[1] (train).learning_rat: unknown key" in lines[1]
    message = refusal(tmp_path, MERGED.replace("epochs: 3", "epochs: -3"))
    assert message.startswith("/p.yaml:12: stages[1] (train).epochs: ")


@pytest.mark.parametrize(
    ("merge", "found"),
    [
        ("<<: 3", ":9: '<<' adds the keys of other mappings, found 3; write an alias, `<<: *name`"),
        ("<<: [*usual, text]", ":9: '<<' adds the keys of other mappings, found text"),
        ("<<: *usual\n    <<: *usual", ":10: key '<<' stands twice; first on line 9; write one"),
        ("'<<': *usual\n    stage: train", ":9: stages[1] (train).<<: unknown key"),
    ],
)
def test_a_merge_of_anything_else_is_refused_with_a_mend(tmp_path, merge, found) -> None:
    text = f"stages:\n  - &usual\n    stage: train\n    epochs: 2\n  - name: b\n    {merge}\n"
    assert found in refusal(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        # One mapping again and again, many that merge it, and each level nine times the one before.
        f"a: &a {{{', '.join(f'k{i}: 1' for i in range(1000))}}}\nb: {{<<: [{'*a, ' * 999}*a]}}\n",
        "a: &a {{{}}}\n{}".format(
            ", ".join(f"k{i}: 1" for i in range(1000)),
            "".join(f"s{i}: {{<<: *a, y: 1}}\n" for i in range(200)),
        ),
    ],
)
def test_merges_cannot_grow_without_end(tmp_path, text) -> None:
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(PipelineInvalid, match="more than 100000 values"):
        yaml_source.read(tmp_path / "p.yaml")


def test_merges_of_merges_end(tmp_path) -> None:
    levels = "".join(f"m{i}: &m{i} {{<<: [{f'*m{i - 1}, ' * 8}*m{i - 1}]}}\n" for i in range(1, 30))
    (tmp_path / "p.yaml").write_text(f"a: &a {{<<: *a, x: 1}}\nm0: &m0 {{x: 1}}\n{levels}")
    content = yaml_source.read(tmp_path / "p.yaml").content
    assert content["a"] == content["m29"] == {"x": 1}
