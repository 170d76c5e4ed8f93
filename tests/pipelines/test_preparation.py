"""A run compares an artifact's preparation of images with `val`; servers go by its report."""

import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from compress.artifacts.artifact import Artifact
from compress.common.errors import StageFailed
from compress.pipelines.api import Pipeline
from compress.serve.http.loaded_model import open_model
from compress.serve.image import container_image
from compress.serve.image.container_image import write_build_folder

DATA = """
import numpy as np
import torch
from PIL import Image


class Images:
    def __init__(self, mean):
        generator = np.random.default_rng(0)
        self.data, self.mean = generator.integers(0, 256, (40, 24, 20, 3), np.uint8), mean

    def __len__(self):
        return 40

    def __getitem__(self, index):
        image = Image.fromarray(self.data[index]).resize((16, 16), Image.Resampling.BILINEAR)
        x = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1) / 255
        return {"pixel_values": (x - self.mean) / 0.5, "labels": index % 3}


def data(mean):
    return {"val": Images(mean)}
"""
PIPELINE = """version: 1
model: {huggingface: vit, task: image-classification,
        inputs: [{name: pixel_values, shape: [batch, 3, 16, 16]}]}
data: {factory: "images:data", arguments: {mean: %s}}
stages: [{stage: export_onnx}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny image classifier of Hugging Face's, and data for it."""
    transformers = pytest.importorskip("transformers")
    place = tmp_path_factory.mktemp("vit")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 3}
    config = transformers.ViTConfig(intermediate_size=24, image_size=16, patch_size=8, **sizes)
    transformers.ViTForImageClassification(config).save_pretrained(place / "vit")
    steps = {"do_resize": True, "size": {"height": 16, "width": 16}, "resample": 2}
    scaled = {"do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    processor = {"image_processor_type": "ViTImageProcessor", **steps, **scaled}
    (place / "vit/preprocessor_config.json").write_text(json.dumps(processor))
    (place / "images.py").write_text(DATA)
    return place


@pytest.mark.slow
@pytest.mark.parametrize("mean", [0.5, pytest.param(0.9, marks=pytest.mark.soak)])
def test_servers_take_images_that_become_what_val_holds(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mean: float
) -> None:
    (folder / "p.yaml").write_text(PIPELINE % mean)
    report = Pipeline.from_yaml(folder / "p.yaml").run(tmp_path / "run")
    (found,) = report.stages[0].measurements.preparation
    assert (found.form, found.column, found.samples) == ("image", "data", 16)
    words = "export_onnx: image: 16 of 16 images of `val` (data), sent by a client, become other"
    warned = [line for line in report.warnings if line.startswith(words)]
    assert bool(warned) == found.is_wrong == (mean == 0.9)
    assert all(line.endswith("servers do not take them") for line in warned)

    artifact = Artifact.from_directory(tmp_path / "run/artifacts/export_onnx")
    with open_model(artifact, "model", threads=1) as served:
        assert ("image" in served.forms) == (mean == 0.5)
        assert [note for note in served.notes if "images are not taken" in note] == [
            f"images are not taken: {found.difference}" for _ in warned
        ]
    pinned: list[str] = []

    def refuse(*arguments: str) -> str:
        pinned.extend(arguments)
        raise StageFailed("no index here")

    monkeypatch.setattr(container_image, "run_pip", refuse)
    with suppress(StageFailed):
        write_build_folder(artifact.path, tmp_path / "image", lambda file: file.write_text("{}"))
    assert any(pin.startswith("pillow==") for pin in pinned) == (mean == 0.5)

    # The same file where no report lies: it is served, and this is said.
    copied = shutil.copytree(artifact.path, tmp_path / "alone/artifacts/export_onnx")
    with open_model(Artifact.from_directory(copied), "model", threads=1) as served:
        assert "image" in served.forms
        assert "no run's report shows that images become inputs like those of `val`" in served.notes
