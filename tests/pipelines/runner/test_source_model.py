"""What defines the model is imported ahead of its use; what is wrong with it is said later."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from compress import cli
from compress.artifacts import hf_folder
from compress.common.errors import ArtifactInvalid, PipelineInvalid
from compress.common.factories import resolve
from compress.pipelines.config.pipeline import PipelineConfig
from compress.pipelines.runner.source_model import import_model_code

SPLINTER = "transformers.models.splinter.modeling_splinter"  # which no other test imports
NET = "import torch\ndef net():\n    return torch.nn.Linear(4, 2)\n"
BROKEN = {
    "raises": "raise ValueError('no licence')\n",
    "exits": "import sys\nsys.exit(5)\n",
    "interrupts": "raise KeyboardInterrupt\n",
    "lacks": "import no_such_package\n",
    "spells": "def nett(): ...\n",
}
SAID = {
    "raises": "ValueError: no licence",
    "exits": "SystemExit: 5",
    "interrupts": "user code raised KeyboardInterrupt in broken_interrupts.py, line 1",
    "lacks": "No module named 'no_such_package'",
    "spells": "has no callable 'net'; it has nett",
    "absent": "No module named 'broken_absent'",
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "imported_net.py").write_text(NET)
    for name, text in BROKEN.items():
        (tmp_path / f"broken_{name}.py").write_text(text)
    return tmp_path / "net.yaml"


def pipeline_of(file: Path, **model: Any) -> PipelineConfig:
    model["inputs"] = [{"name": "x", "shape": ["batch", 4]}]
    content = {"version": 1, "name": "net", "model": model, "stages": [{"stage": "export_onnx"}]}
    file.write_text(yaml.safe_dump(content))
    return PipelineConfig.from_yaml(file)


def test_the_module_of_a_factory_is_imported(file: Path) -> None:
    pipeline = pipeline_of(file, factory="imported_net:net")
    assert not any("imported_net" in name for name in sys.modules)
    import_model_code(pipeline)
    assert any("imported_net" in name for name in sys.modules)


@pytest.mark.parametrize("name", SAID)
def test_code_that_cannot_be_imported_is_reported_where_the_model_is_built(
    name: str, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = pipeline_of(file, factory=f"broken_{name}:net")
    # As the command listens to signals, an interruption without one is the code's own.
    from compress.pipelines.system import signals

    monkeypatch.setattr(signal, "getsignal", lambda number: signals._stop)
    import_model_code(pipeline)
    with pytest.raises(SystemExit) as end:
        cli.app(["run", str(file), "--out", str(file.parent / "out")])
    assert end.value.code in (1, 2)
    assert SAID[name] in capsys.readouterr().err


def folder_of(root: Path, **config: Any) -> Path:
    folder = root / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", **config}))
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
    return folder


def test_the_class_of_a_folder_is_imported(file: Path) -> None:
    pytest.importorskip("transformers")
    folder = folder_of(file.parent, architectures=["SplinterForNothing", "SplinterModel"])
    assert SPLINTER not in sys.modules
    import_model_code(pipeline_of(file, huggingface=folder.name))
    assert SPLINTER in sys.modules


def test_a_folder_whose_classes_cannot_be_imported_is_named(file: Path) -> None:
    pytest.importorskip("transformers")
    folder = folder_of(file.parent, architectures=3)
    with pytest.raises(ArtifactInvalid, match=f"{folder.name}: transformers cannot read it"):
        hf_folder.import_classes(folder)
    import_model_code(pipeline_of(file, huggingface=folder.name))
    with pytest.raises(ArtifactInvalid, match="no such folder; models are never downloaded"):
        hf_folder.import_classes(folder / "absent")
    import_model_code(pipeline_of(file, huggingface="absent"))
    with pytest.raises(PipelineInvalid, match="cannot import 'absent'"):
        resolve("absent:net", file.parent)
