"""Any change to a valid pipeline file is taken, or refused in clear lines with the exit code."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from compress.common.errors import CompressError, cause_lines
from compress.common.printable import CONTROL_CHARACTERS
from compress.pipelines import Pipeline
from compress.pipelines.commands.check import check_pipeline
from compress.pipelines.config.registry import stages
from tests.fuzz.mutations import changed_bytes, changed_value

ROOT = Path(__file__).parents[2]
FILES = [
    "pipelines/quickstart.yaml",
    "examples/custom/pipeline.yaml",
    "examples/digits/few_labels.yaml",
    "examples/language_model/pipeline.yaml",
    "examples/text/pipeline.yaml",
]
MORE = """\
version: 1
name: more
seed: 3
threads: 2
code: .
model:
  factory: nets:mlp
  arguments: {hidden: 16, names: [a, b], rate: 1e-3}
  checkpoint: weights.safetensors
  inputs: [{name: x, shape: [batch, words, 4], dtype: float32}, {name: mask, shape: [batch, words]}]
  axes: {words: {min: 2, max: 128}}
  outputs: [{name: logits}]
data: {factory: "nets:data", batch_size: 16, loader: {workers: 2, pad_values: {x: 1.5}}}
metric: {name: "nets:score", higher_is_better: true}
tracker: {kind: tensorboard}
stages:
  - {stage: train, epochs: 2, parallel: {strategy: ddp, processes: 2}}
  - stage: prune_channels
    matrix: {ratio: [0.25, 0.5]}
    gates: [{gate: max_drop, points: 1.0}, {gate: max_parameters, ratio: 0.9}]
  - {stage: distill, teacher: train, epochs: 1}
  - {name: int8, stage: quantize_static, calibration_samples: 32}
  - {name: onnx, stage: export_onnx, gates: [{gate: parity, atol: 1e-4, against: train}]}
  - {stage: package_triton, input: onnx, model_name: it}
  - {stage: package_kserve, storage_uri: "s3://bucket/it"}
  - {stage: export_torchscript, input: distill, method: trace}
"""
TEXTS = [(ROOT / file).read_text() for file in FILES] + [MORE]
CONTENTS = [yaml.safe_load(text) for text in TEXTS]
WORDS = sorted({*stages(), *re.findall(r"[a-z_]{3,}", MORE), "matrix", "gates", "against", "eager"})
ODD = (
    "\n", " ", "  ", "- ", ": ", "? ", "{", "}", "[", "]", ",", "#", "'", '"', "|", ">",
    "&a ", "*a", "<<: *a", "!!set {a}", "!!int x", "!!float x", "!!python/object/apply:os.abort []",
    "!!binary aGk=",
    "%YAML 9.9", "---", "...", "~", ".nan", "-.inf", "1.0e+999", "0x", "0b1", "1:30",
    "9" * 5000, "0x" + "f" * 5000,
    "2001-13-45", "2001-01-01", "9223372036854775808", "-1", "0",
    '"\\0"', '"\\ud800"', '"\\e[2J"', "\t", "\r", "\u2028", "\ufeff", "é", "=",
    "[batch, 4]", "{a: 1}",
)  # fmt: skip
PIECES = tuple(piece.encode() for piece in (*WORDS, *ODD * (len(WORDS) // len(ODD) + 1)))
VALUES = re.compile(rb"(?<=[:\[,] )[^\s,{}\[\]]+")


@st.composite
def replaced_values(draw: st.DrawFn, content: bytes) -> bytes:
    """Return a text in which one or two values are other ones."""
    for _ in range(draw(st.integers(1, 2))):
        spans = [found.span() for found in VALUES.finditer(content)]
        begin, end = draw(st.sampled_from(spans))
        content = content[:begin] + draw(st.sampled_from(ODD)).encode() + content[end:]
    return content


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "nets.py").write_text("def score(outputs, targets):\n    return 0.5\n")
    return folder / "p.yaml"


def hold(file: Path, content: bytes) -> None:
    """Check a pipeline file as the command does, and what is then done with its settings."""
    file.write_bytes(content)
    try:
        check_pipeline(file, models=False)
        pipeline = Pipeline.from_yaml(file)
        settings = pipeline.model_dump(mode="json", by_alias=True, exclude_unset=True)
        json.dumps([settings, *(s.own_settings() for s in pipeline.stages)], allow_nan=False)
    except CompressError as error:
        assert error.exit_code in (2, 4)
        lines = cause_lines(error)
        assert lines and all(line.startswith(f"{file}:") for line in lines), lines
        for line in lines:
            assert len(line) < 3000 and not CONTROL_CHARACTERS.search(line) and "\n" not in line, (
                line
            )


@pytest.mark.parametrize("text", TEXTS, ids=[*FILES, "more"])
def test_the_files_that_are_changed_are_valid(file: Path, text: str) -> None:
    file.write_text(text)
    check_pipeline(file, models=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
@given(data=st.data())
def test_any_text_is_taken_or_refused(file: Path, data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(TEXTS)).encode()
    hold(file, data.draw(changed_bytes(text, PIECES)))


@pytest.mark.slow
@pytest.mark.timeout(600)
@given(data=st.data())
def test_any_odd_value_is_taken_or_refused(file: Path, data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(TEXTS)).encode()
    hold(file, data.draw(replaced_values(text)))


@pytest.mark.slow
@pytest.mark.timeout(600)
@given(data=st.data())
def test_any_values_are_taken_or_refused(file: Path, data: st.DataObject) -> None:
    content: Any = data.draw(st.sampled_from(CONTENTS))
    changed = data.draw(changed_value(content, WORDS))
    hold(file, yaml.dump(changed, allow_unicode=True).encode(errors="surrogatepass"))


@pytest.mark.timeout(600)
@given(content=st.binary(max_size=200))
def test_any_bytes_are_taken_or_refused(file: Path, content: bytes) -> None:
    hold(file, content)
