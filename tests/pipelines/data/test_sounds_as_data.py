"""Folders of WAV and FLAC files are data, and servers take such files."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import compress
from compress.common.errors import PipelineInvalid
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.pipelines.api import Pipeline
from compress.pipelines.commands.init import InitOptions, draft
from compress.pipelines.config.pipeline import PipelineConfig
from compress.pipelines.data.describe import describe_files
from compress.pipelines.runner.inputs import resolve_inputs
from compress.pipelines.runner.source_model import import_source
from compress.serve.packaging.request_forms import AudioInput, form_settings, forms_of
from compress.serve.packaging.val_preparation import compare_preparation
from compress.serve.torchserve.stage import PackageTorchServe
from compress.serve.worker.wire import audio_reader, create_readers
from tests.serve.served_here import serving

soundfile = pytest.importorskip("soundfile")
pytest.importorskip("soxr")

NET = """
from torch import nn


def net():
    return nn.Sequential(
        nn.Unflatten(1, (1, -1)), nn.Conv1d(1, 4, 32, 8), nn.ReLU(), nn.AdaptiveAvgPool1d(1),
        nn.Flatten(), nn.Linear(4, 2),
    )
"""
RATE, LENGTH = 800, 400
SPEC = {"name": "x", "shape": ["batch", LENGTH], "dtype": "float32"}
WAVE = {"rate": RATE, "samples": LENGTH, "normalize": False, "extractor": {}}


def tone(rate: int, seconds: float, hertz: float = 50.0) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(rate * seconds)) / rate)


def encoded(sound: np.ndarray, rate: int, kind: str = "WAV") -> bytes:
    body = io.BytesIO()
    soundfile.write(body, sound, rate, format=kind)
    return body.getvalue()


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    for split, count in (("train", 4), ("val", 3)):
        for name, hertz in (("low", 40), ("high", 160)):
            for i in range(count):
                file = tmp_path / "clips" / split / name / f"{i}.{'wav' if i % 2 else 'flac'}"
                file.parent.mkdir(parents=True, exist_ok=True)
                soundfile.write(file, tone(RATE, 0.3 + 0.1 * i, hertz), RATE)
    (tmp_path / "net.py").write_text(NET)
    return tmp_path / "clips"


def test_a_file_becomes_the_models_input() -> None:
    read = audio_reader(WAVE, SPEC)
    short = tone(RATE, 0.25)
    (row,) = read(encoded(short, RATE))
    assert row.shape == (1, LENGTH) and row.dtype == np.float32
    assert np.allclose(row[0, :200], short, atol=1e-4) and not row[0, 200:].any()
    # Channels are averaged, another rate is converted, what is too long is cut off.
    stereo = np.stack([tone(4 * RATE, 2), 0 * tone(4 * RATE, 2)], 1)
    (row,) = read(encoded(stereo, 4 * RATE, "FLAC"))
    assert np.allclose(row[0, 20:-20], 0.5 * tone(RATE, 0.5)[20:-20], atol=2e-3)
    for body in (b"", b"RIFF", encoded(short, RATE)[:30], encoded(short, RATE, "OGG")):
        with pytest.raises(ValueError, match="WAV or FLAC"):
            read(body)
    with pytest.raises(ValueError, match="no samples"):
        read(encoded(np.zeros(0), RATE))
    # 200 kB, which converted from 1 Hz would be 640 MB.
    with pytest.raises(ValueError, match="200000 frames of 1 channels at 1 Hz, expected at most"):
        audio_reader(WAVE | {"samples": None}, SPEC)(encoded(np.zeros(200_000), 1))


def test_sounds_are_scaled_and_transformed_as_transformers_does() -> None:
    transformers = pytest.importorskip("transformers")
    sound = np.round(tone(16_000, 0.3) * 2**15).astype(np.float32) / 2**15  # as 16 bits hold it
    own = transformers.Wav2Vec2FeatureExtractor(do_normalize=True)
    expected = own(sound, sampling_rate=16_000, return_tensors="np")["input_values"]
    settings = {**WAVE, "rate": 16_000, "samples": None, "normalize": True}
    (row,) = audio_reader(settings, {**SPEC, "shape": ["batch", "samples"]})(encoded(sound, 16_000))
    assert np.allclose(row, expected, atol=1e-3)
    spectra = transformers.ASTFeatureExtractor(max_length=32, num_mel_bins=16)
    config = json.loads(spectra.to_json_string())
    settings = {**WAVE, "rate": 16_000, "samples": None, "extractor": config}
    spec = {"name": "input_values", "shape": ["batch", 32, 16], "dtype": "float32"}
    (row,) = audio_reader(settings, spec)(encoded(sound, 16_000))
    expected = spectra(sound, sampling_rate=16_000, return_tensors="np")["input_values"]
    assert row.shape == (1, 32, 16) and np.allclose(row, expected, atol=1e-4)


def test_a_run_and_its_server_take_the_same_files(clips: Path, tmp_path: Path) -> None:
    data = {"audio": "clips", "prepare": {"rate": RATE, "seconds": 0.5}}
    content = {"version": 1, "model": {"factory": "net:net"}, "data": data}
    content["stages"] = [{"stage": "export_onnx"}]
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(content))
    report = Pipeline.from_yaml(tmp_path / "p.yaml").run(tmp_path / "out")
    (found,) = report.stages[-1].measurements.preparation
    assert (found.form, found.column, found.difference) == ("audio", "raw", "")
    splits = compress.load_data(**data | {"audio": clips})
    (batch,) = splits.batches("val")
    assert batch.target.tolist() == [0, 0, 0, 1, 1, 1]
    exported = tmp_path / "out/artifacts/export_onnx"
    with compress.Artifact.from_directory(exported).open() as predict:
        (scores,) = predict(*batch.inputs)
    package = PackageTorchServe(gates=())
    mar = package.run(compress.Artifact.from_directory(exported), Context(root=tmp_path / "mar"))
    assert_served(exported, "/v2/models/model/infer", clips, scores)
    assert_served(mar.payload_path, "/predictions/model", clips, scores)


def assert_served(path: Path, place: str, clips: Path, scores: torch.Tensor) -> None:
    """Assert that a server takes the files of `val`, and answers each with its row of scores."""
    with serving(path) as server:
        assert "Content-Type: audio/wav' --data-binary @sound.wav" in server.curl
        for row, file in enumerate(sorted((clips / "val").rglob("*.*"))):
            kind = {"Content-Type": f"audio/{file.suffix[1:]}"}
            status, _, answer = server.ask(file.read_bytes(), kind, place)
            assert status == 200
            content = json.loads(answer)
            assert np.allclose(content["outputs"]["output"], scores[row : row + 1], atol=1e-5)
            expected = ("high", "low")[int(scores[row].argmax())]
            assert content["labels"][0][0]["label"] == expected
        status, _, answer = server.ask(b"no sound", {"Content-Type": "audio/wav"}, place)
        assert status == 400 and b"no WAV or FLAC file" in answer


def test_sounds_of_another_length_are_refused(clips: Path) -> None:
    splits = compress.load_data(audio=clips, prepare={"rate": RATE, "seconds": 0.5})
    described = {"name": "x", "shape": ["batch", "samples"], "dtype": "float32"}
    signature = Signature(inputs=(TensorSpec.model_validate(described),))
    forms = {"audio": AudioInput(rate=RATE, seconds=0.25)}
    (compared,) = compare_preparation(forms, signature, splits)
    assert compared.is_wrong and "rate, length, scale" in compared.difference


def test_a_folder_says_how_sounds_are_prepared(clips: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Wav2Vec2Config(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        conv_dim=(4, 4), conv_stride=(4, 2), conv_kernel=(8, 4), num_feat_extract_layers=2,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, classifier_proj_size=4,
        id2label={0: "low", 1: "high"},
    )  # fmt: skip
    transformers.Wav2Vec2ForSequenceClassification(config).save_pretrained(tmp_path / "w2v")
    own = transformers.Wav2Vec2FeatureExtractor(sampling_rate=RATE)
    own.save_pretrained(tmp_path / "w2v")
    content: dict[str, Any] = {
        "version": 1,
        "model": {"huggingface": "w2v", "task": "audio-classification"},
        "data": {"audio": "clips"},
        "stages": [{"stage": "export_onnx"}],
    }
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(PipelineInvalid, match=r"prepare: .*give `seconds`"):
        resolve_inputs(PipelineConfig.from_yaml(tmp_path / "p.yaml"))
    content["data"]["prepare"] = {"seconds": 0.5}
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(content))
    pipeline, splits, _ = resolve_inputs(PipelineConfig.from_yaml(tmp_path / "p.yaml"))
    assert splits is not None
    source = import_source(pipeline, tmp_path / "source", splits)
    assert source.class_names == ("low", "high")
    forms = forms_of(source)
    (compared,) = compare_preparation(forms, source.signature, splits)
    assert (compared.form, compared.difference, compared.samples) == ("audio", "", 6)
    settings = form_settings(forms, source.signature)
    readers = create_readers(settings, source.signature.input_descriptions(), source.path)
    sound, _ = soundfile.read(clips / "val/low/0.flac", dtype="float32")
    (row,) = readers["audio/flac"]((clips / "val/low/0.flac").read_bytes())
    expected = own(sound, sampling_rate=RATE, return_tensors="np")["input_values"]
    assert row.shape == (1, LENGTH) and np.allclose(row[:, : len(sound)], expected, atol=1e-3)


def test_init_writes_the_section(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = InitOptions("net:net", inputs=("x=batch,400",), data="clips", goal="smaller")
    content = yaml.safe_load(draft(Path("p.yaml"), options).text)
    assert content["data"] == {"audio": "clips", "prepare": {"rate": RATE}}
    with pytest.raises(PipelineInvalid, match="give `seconds`, or the size"):
        draft(Path("p.yaml"), InitOptions("net:net", data="clips"))
    # Recordings beside photos are no data of their own; a damaged file is named.
    Image.new("RGB", (8, 8)).save(clips / "train" / "low" / "spectrum.png")
    assert describe_files(Path("clips")) == {"images": "clips"}
    (clips / "train" / "low" / "spectrum.png").unlink()
    (clips / "train" / "high" / "0.flac").write_bytes(b"no sound")
    with pytest.raises(PipelineInvalid, match=r"0\.flac is no WAV or FLAC file"):
        describe_files(Path("clips"))
