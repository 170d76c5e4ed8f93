"""A pipeline of a language model, from a Hugging Face folder to folders of other runtimes."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from compress.artifacts.artifact import Artifact
from compress.common.errors import PipelineInvalid
from compress.export.compressed_tensors.stage import COMPRESSED_TENSORS
from compress.pipelines import Pipeline
from compress.pipelines.runner.inputs import resolve_inputs
from tests.export.tiny_decoder import LONGEST, decoder

pytest.importorskip("transformers")

CORPUS = """
import torch
from pydoc_data.topics import topics


def splits():
    text = "\\n".join(topics.values()).encode()[: 40 * 64]
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(40, 64)
    samples = [{"input_ids": row, "labels": row} for row in rows]
    return {"train": samples[:30], "val": samples[30:]}
"""


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    decoder(tmp_path)
    (tmp_path / "corpus.py").write_text(CORPUS)
    drop = {"gate": "max_relative_drop", "percent": 20, "against": "source"}
    alike = [{"gate": "max_divergence", "nats": 0.5}, {"gate": "min_equal_tokens", "at": 0.01}]
    content: dict[str, Any] = {
        "version": 1,
        "model": {"huggingface": "hf"},
        "data": {"factory": "corpus:splits", "batch_size": 10},
        "metric": {"name": "perplexity", "arguments": {"context": 32, "stride": 16}},
        "stages": [
            {"stage": "quantize_weights", "method": "gptq", "calibration_samples": 20},
            {"stage": "export_genai", "gates": [drop, *alike]},
        ],
    }
    if not COMPRESSED_TENSORS.missing():
        stage = {"stage": "export_compressed_tensors", "input": "quantize_weights"}
        content["stages"].append(stage)
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(content))
    return Pipeline.from_yaml(tmp_path / "p.yaml")


def test_samples_of_one_length_do_not_fix_it(pipeline) -> None:
    found, data, line = resolve_inputs(pipeline)
    assert data is not None
    assert line == ("model.inputs, from the samples of the data: input_ids [batch, length] int64")
    assert found.model.axes["length"].max == LONGEST


def streamed(folder: Path, *stages: dict[str, Any]) -> Pipeline:
    content = yaml.safe_load((folder / "p.yaml").read_text())
    content["model"]["stream"] = True
    content["stages"] = [*stages]
    (folder / "streamed.yaml").write_text(yaml.safe_dump(content))
    return Pipeline.from_yaml(folder / "streamed.yaml")


def test_a_stage_that_holds_all_weights_is_refused_at_once(pipeline, tmp_path) -> None:
    stages = ({"stage": "quantize_weights"}, {"stage": "export_onnx"})
    refusal = r"streamed\.yaml:\d+: stages\[1\] \(export_onnx\): holds all weights in memory"
    with pytest.raises(PipelineInvalid, match=refusal):
        streamed(tmp_path, *stages).run(tmp_path / "out")


@pytest.mark.soak
def test_weights_that_stay_on_disk_are_measured_and_exported(pipeline, tmp_path) -> None:
    stages: list[dict[str, Any]] = [{"stage": "quantize_weights"}]
    if not COMPRESSED_TENSORS.missing():
        stages.append({"stage": "export_compressed_tensors"})
    drop = {"gate": "max_relative_drop", "percent": 50, "against": "source"}
    alike = [{"gate": "max_divergence", "nats": 0.5}]
    for stage in stages:
        stage |= {"gates": [drop, *alike]}
    report = streamed(tmp_path, *stages).run(tmp_path / "out")
    assert report.status == "passed", report
    for stage in report.stages:
        measured = stage.measurements
        assert measured is not None
        assert measured.metric is not None
        assert measured.latency_ms.reason == "its weights are read from disk in each call"
    again = streamed(tmp_path, *stages).run(tmp_path / "out")
    assert {stage.judged_seconds for stage in again.stages} == {0.0}


@pytest.mark.soak
def test_a_language_model_becomes_folders_of_other_runtimes(pipeline, tmp_path) -> None:
    report = pipeline.run(tmp_path / "out")
    assert report.status == "passed", report
    files = {"export_genai": "genai_config.json", "export_compressed_tensors": "model.safetensors"}
    for stage, file in [(stage.name, files.get(stage.name)) for stage in report.stages]:
        if file is None:
            continue
        made = Artifact.from_directory(tmp_path / "out" / "artifacts" / stage)
        made.verify()
        assert (made.path / file).is_file()
        assert (made.path / "tokenizer.json").is_file()
