"""`compress check` refuses what a run, or a stage called from Python, would refuse later."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import compress
from compress import EagerModel
from compress.common import requirements
from compress.common.errors import CompressError, PipelineInvalid, Unavailable
from compress.core.gates import MaxDrop
from compress.export.compressed_tensors.stage import CompressedTensorsModel
from compress.export.executorch.stage import ExecuTorchModel
from compress.export.gguf.stage import GgufModel
from compress.export.openvino.stage import OpenVINOModel
from compress.pipelines import Pipeline
from compress.pipelines.commands.check import check_pipeline

NETS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 3))

def data(splits=("train", "val"), count=40, bytes_last=False):
    x = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    if bytes_last:
        x = (255 * x.permute(0, 2, 3, 1)).to(torch.uint8)
    return {name: TensorDataset(x, torch.arange(count) % 3) for name in splits}
"""
NO_VAL = "{splits: [train]}"
CASES = {
    "quantize_dynamic, gates: [{gate: max_drop, points: 1}]": (
        NO_VAL,
        r":5: stages\[0\]\.gates\[0\] \(max_drop\): measures on split 'val', and the data has",
    ),
    "quantize_dynamic, gates: [{gate: min_metric, at: 0.5}]": (NO_VAL, "measures on split 'val'"),
    "quantize_static, calibration_samples: 64": (
        "{}",
        r":5: stages\[0\]\.calibration_samples \(quantize_static\): 64 samples asked for and split "
        "'train' has 40; lower calibration_samples",
    ),
    "train, epochs: 1, device: cuda": (
        "{}",
        r":5: stages\[0\] \(train\)\.device: unknown key; .* once for all stages, by `device:`",
    ),
    "train, epochs: 1, metric: {factory: here}": (
        "{}",
        r"\.metric: unknown key; it is set once for",
    ),
    "train, epochs: 1, loss: nets.net": (
        "{}",
        "unknown key; it is set once for all stages, by `loss",
    ),
    "prune_weights, <<: {amount: 0.1, amount: 0.2}": (
        "{}",
        r":5: key 'amount' stands twice; first on line 5$",
    ),
    "quantize_static": ("{splits: [val]}", "draws samples from split 'train', and the data has"),
    "train, epochs: 1": (NO_VAL, r":5: stages\[0\]\.keep \(train\): best needs a split 'val'"),
    "train, epochs: 1, keep: last": ("{splits: [val]}", "trains on split 'train', and the data"),
    "train, epochs: 1, steps_per_epoch: 2": ("{}", r"stages\[0\]\.steps_per_epoch \(train\): is f"),
    "prune_channels, ratio: 0.3, finetune: {epochs: 1, early_stopping: 2, keep: last}": (
        NO_VAL,
        r":5: stages\[0\]\.finetune\.early_stopping \(prune_channels\): needs a split 'val'",
    ),
    "train, epochs: 1, precision: fp16": (
        "{}",
        r":5: stages\[0\]\.precision \(train\): fp16 needs a CUDA device and this is cpu; use bf16",
    ),
    "train, epochs: 1, keep: best": (
        "{bytes_last: true}",
        r":2: model\.inputs: .* \[2, 8, 8, 3\] uint8: .*x\.permute\(2, 0, 1\)\.float\(\) / 255",
    ),
}


@pytest.fixture
def pipeline(tmp_path: Path):
    (tmp_path / "nets.py").write_text(NETS)

    def write(stage: str, arguments: str = "{}") -> Path:
        file = tmp_path / "p.yaml"
        file.write_text(
            "version: 1\nmodel: {factory: nets:net}\n"
            f"data: {{factory: nets:data, arguments: {arguments}}}\n"
            f"stages:\n  - {{stage: {stage}}}\n"
        )
        return file

    return write


@pytest.mark.parametrize("stage", CASES)
def test_check_and_run_refuse_alike_before_anything_runs(pipeline, stage, tmp_path) -> None:
    arguments, expected = CASES[stage]
    file = pipeline(stage, arguments)
    with pytest.raises(CompressError, match=expected) as checked:
        check_pipeline(file, models=True)
    if "bytes_last" in arguments:
        return  # a run imports the model first
    with pytest.raises(type(checked.value)) as ran:
        Pipeline.from_yaml(file).run(tmp_path / "out")
    assert str(ran.value) == str(checked.value)
    assert not (tmp_path / "out").exists()
    assert checked.value.exit_code == (4 if "fp16" in stage else 2)


def test_several_machines_are_refused_by_check_as_by_a_run(pipeline, tmp_path) -> None:
    file = pipeline("train, epochs: 1, parallel: {nodes: 2}")
    words = r":5: stages\[0\]\.parallel \(train\): .*started alone; run on every"
    with pytest.raises(PipelineInvalid, match=words) as checked:
        check_pipeline(file, models=False)
    with pytest.raises(PipelineInvalid, match=re.escape(str(checked.value))):
        Pipeline.from_yaml(file).run(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_stage_from_python_refuses_before_it_works() -> None:
    module, x = torch.nn.Linear(4, 3), torch.randn(40, 4)
    data = TensorDataset(x, torch.arange(40) % 3)
    with pytest.raises(PipelineInvalid, match=r"^quantize_dynamic: max_drop: measures on split"):
        compress.quantize_dynamic(module, data=data, gates=[MaxDrop(points=1)])
    with pytest.raises(Unavailable, match=r"^train: precision: fp16 needs a CUDA device"):
        compress.train(module, data=data, epochs=1, precision="fp16", keep="last")


@pytest.mark.parametrize("stage", ["export_openvino", "export_gguf", "export_executorch"])
def test_a_stage_without_its_library_is_one_line(stage, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(requirements.Requirement, "missing", lambda self: True)
    expected = rf"^{stage}: needs \w+, which is not installed; pip install "
    with pytest.raises(Unavailable, match=expected):
        getattr(compress, stage)(torch.nn.Linear(4, 3), example_inputs=torch.randn(2, 4))


@pytest.mark.parametrize(
    "kind", [CompressedTensorsModel, ExecuTorchModel, GgufModel, OpenVINOModel]
)
def test_an_artifact_without_its_library_is_one_line(kind, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(requirements.Requirement, "missing", lambda self: True)
    model = EagerModel.from_module(
        torch.nn.Linear(4, 3), root=tmp_path / "model", example_inputs=[torch.randn(2, 4)]
    )
    other = kind(model.path, model.manifest, model.digest)
    expected = r"model: needs \w+, which is not installed; pip install "
    with pytest.raises(Unavailable, match=expected), other.open():
        pass


def test_an_extra_is_installed_as_the_toolkit_was(tmp_path) -> None:
    root = Path(requirements.__file__).parents[2]
    assert f'name = "{requirements.DISTRIBUTION}"' in (root / "pyproject.toml").read_text()
    code = (
        "import sys, compress.common; compress.__path__.insert(0, sys.argv[1]);"
        "compress.common.__path__.insert(0, sys.argv[1] + '/common');"
        "from compress.common.requirements import pip_install; print(pip_install('serve'))"
    )

    def said(package: Path, folder: Path) -> str:
        command = [sys.executable, "-c", code, str(package)]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, env={"PYTHONPATH": str(root)}
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert said(root / "compress", root) == "pip install -e '.[serve]'"
    assert said(root / "compress", tmp_path) == f"pip install -e '{root}[serve]'"
    installed = tmp_path / "compress" / "common"  # as from a wheel: no pyproject.toml above it
    installed.mkdir(parents=True)
    for name in ("__init__", "config", "errors", "printable", "requirements"):
        (installed / f"{name}.py").write_text((root / f"compress/common/{name}.py").read_text())
    assert said(tmp_path / "compress", tmp_path) == "pip install 'compress-pipeline[serve]'"
