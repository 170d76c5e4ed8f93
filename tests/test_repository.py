"""The repository's own rules, and that what the documents show is true."""

import re
import runpy
import subprocess
import sys
from collections import Counter
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest
import torch
import yaml
from pydantic import TypeAdapter
from torch.utils.data import DataLoader, TensorDataset

import compress
from compress import Train, Training, export, serve
from compress.common.config import descriptions
from compress.core.stage import Stage
from compress.distillation.terms import AnyTerm
from compress.pipelines import Pipeline
from compress.pipelines.config.model_spec import MODEL_CLASSES, ModelSpec
from compress.pipelines.config.registry import stages
from compress.pipelines.planning.planner import build_plan
from compress.pipelines.system.yaml_core import Loader
from compress.quantization.config.dtype_scheme import BuiltInObserver
from compress.quantization.config.dtype_scheme import Target as Runtime

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SHIPPED = [
    ROOT / "cli.py",
    *(
        file
        for folder in ("compress", "export", "serve", "pipelines")
        for file in (ROOT / folder).rglob("*.py")
        if not file.is_symlink()
    ),
]


PUBLIC = {
    compress: "Artifact ArtifactInvalid CompressError Context ConvertPrecision Distill EagerModel "
    "Finetune GateRefused GraphModel LabelAgreement Loss MaxDisagreement MaxDivergence MaxDrop "
    "MaxFileSize MaxFirstToken MaxLatency MaxMemory MaxParameters MaxRelativeDrop MaxSize Metric "
    "MinCosine MinDelegated MinEqualTokens MinIntegerMacs MinMetric MinSpeedup "
    "MinTokensPerSecond Parallel Parity PipelineInvalid Predictor PruneChannels PruneLayers "
    "PruneWeights QuantizeAwareTraining QuantizeDynamic QuantizeMixed QuantizeStatic "
    "QuantizeWeights RotateWeights Signature Splits Stage StageFailed Target TensorSpec "
    "Train Training Unavailable Verdict cascade certify consolidate convert_precision "
    "distill prune_channels prune_layers prune_weights quantize_aware_training quantize_dynamic "
    "quantize_mixed quantize_static quantize_weights rotate_weights train export_aot "
    "export_compressed_tensors "
    "export_executorch export_fastest export_genai export_gguf export_onnx "
    "export_openvino export_program export_tensorrt export_torchscript package_kserve "
    "package_torchserve package_triton auto load_data optimize bench html_of",
    export: "AotModel Cascade CompressedTensorsModel ExecuTorchModel ExportAot "
    "ExportCompressedTensors ExportExecuTorch ExportFastest ExportGenai ExportGguf ExportOnnx "
    "ExportOpenVINO ExportProgram ExportTensorRT ExportTorchScript ExportedModel Exporter "
    "GenaiModel GgufModel OnnxModel OpenVINOModel Runtime TensorRTEngine TorchScriptModel",
    serve: "Client KServeService PackageKServe PackageTorchServe PackageTriton TorchServe "
    "TorchServeArchive TritonRepository",
}


@pytest.mark.parametrize("package", PUBLIC, ids=lambda p: p.__name__)
def test_public_names_are_pinned(package: ModuleType) -> None:
    pinned = sorted(PUBLIC[package].split())
    assert sorted(package.__all__) == pinned, "a change here is a change for users"
    assert all(getattr(package, name).__name__ == name for name in package.__all__)


def test_every_stage_is_public() -> None:
    names = " ".join(PUBLIC.values()).split()
    assert {stage.__name__ for stage in stages().values()} <= set(names)


def test_reading_a_pipeline_or_verifying_imports_no_heavy_library() -> None:
    code = (
        "import sys, compress.pipelines.config.pipeline, compress.pipelines.planning.plan\n"
        "compress.pipelines.config.registry.stages()\n"
        "assert 'numpy' not in sys.modules\n"
        # For docstrings of settings, which took more than all else.
        "assert 'linecache' not in sys.modules or not sys.modules['linecache'].cache\n"
        "import compress.pipelines.commands.verify\n"
        "print([m for m in ('torch', 'onnx', 'onnxruntime', 'ts', 'torchao') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_only_cli_knows_typer() -> None:
    for file in SHIPPED[1:]:
        assert not re.search(r"^\s*(import|from) typer\b", file.read_text(), re.MULTILINE), file


def test_what_few_use_and_takes_long_to_import_is_imported_where_it_is_used() -> None:
    for file in SHIPPED:  # a third of a second, for targets of latency alone
        assert not re.search(r"^(import|from) scipy\.optimize", file.read_text(), re.MULTILINE), (
            file
        )


def test_files_and_folders_are_small() -> None:
    long = {str(f): n for f in SHIPPED if (n := len(f.read_text().splitlines())) > 700}
    modules = Counter(str(f.parent.relative_to(ROOT)) for f in SHIPPED if f.name != "__init__.py")
    assert long == {}
    assert {folder: n for folder, n in modules.items() if n > 16} == {}


PACKAGES = [
    folder.parent
    for root in ("compress", "export", "serve", "pipelines")
    for folder in sorted((ROOT / root).glob("*/__init__.py"))
    if not folder.parent.is_symlink()
]


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda f: str(f.relative_to(ROOT)))
def test_each_package_has_a_readme_that_names_what_exists(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    files = re.findall(r"`([\w./]+\.py)`", text)
    assert files
    missing = [f for f in files if not ((folder / f).exists() or (ROOT / f).exists())]
    assert missing == []
    assert len(text.splitlines()) <= 16


def test_the_architecture_page_names_what_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    files = re.findall(r"`((?:compress|export|serve|pipelines|tests)/[\w./]+)`", text)
    assert len(files) >= 8
    assert [f for f in files if not (ROOT / f).exists()] == []


def test_the_import_contracts_have_no_exceptions() -> None:
    assert "ignore_imports" not in (ROOT / "pyproject.toml").read_text()


def _settings_without_text(stage: type[Stage]) -> list[str]:
    return [*stage.model_fields.keys() - descriptions(stage).keys() - {"stage"}]


@pytest.mark.parametrize("stage", stages().values(), ids=lambda s: s.__name__)
def test_every_setting_is_described(stage: type[Stage]) -> None:
    assert stage.__doc__
    assert _settings_without_text(stage) == []


@pytest.mark.parametrize(
    "file",
    [
        "pipelines/quickstart.yaml",
        "examples/custom/pipeline.yaml",
        "examples/digits/auto.yaml",
        "examples/digits/few_labels.yaml",
        "examples/language_model/pipeline.yaml",
        "examples/detection/pipeline.yaml",
        "examples/regression/pipeline.yaml",
        "examples/segmentation/pipeline.yaml",
        "examples/text/pipeline.yaml",
    ],
)
def test_the_shipped_pipelines_are_valid(file: str) -> None:
    build_plan(Pipeline.from_yaml(ROOT / file))


def test_the_readmes_pipeline_is_valid(tmp_path: Path) -> None:
    (snippet,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    (tmp_path / "pipeline.yaml").write_text(snippet)
    build_plan(Pipeline.from_yaml(tmp_path / "pipeline.yaml"))
    assert len(snippet.splitlines()) <= 12


def test_the_settings_in_the_training_page_are_valid() -> None:
    page = (ROOT / "docs" / "training.md").read_text()
    found = re.findall(r"^(?:parallel|profile|checkpoints): .*", page, re.MULTILINE)
    assert len(found) >= 4
    for line in found:
        Training(epochs=1, **yaml.safe_load(line))
    (stages,) = re.findall(r"```yaml\n(stages:\n.*?)```", page, re.DOTALL)
    (train,) = yaml.safe_load(stages)["stages"]
    Train(**train)


@pytest.mark.parametrize("name", ["pruning", "quantization", "export", "serving"])
def test_the_stages_in_a_page_are_valid(name: str) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text()
    found = re.findall(r"```yaml\n(stages:\n.*?)```", page, re.DOTALL)
    assert len(found) >= 2
    for snippet in found:
        for stage in yaml.load(snippet, Loader)["stages"]:
            stages()[stage["stage"]].model_validate(stage)


def test_the_models_in_the_page_are_valid() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    found = [
        TypeAdapter(ModelSpec).validate_python(yaml.safe_load(snippet)["model"])
        for snippet in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
        if "model:" in snippet
    ]
    assert {type(spec) for spec in found} == set(MODEL_CLASSES.values())


def test_the_pruning_page_names_every_loss() -> None:
    page = (ROOT / "docs" / "pruning.md").read_text()
    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| `.*? \|", page, re.MULTILINE))))
    losses = {
        get_args(t.model_fields["loss"].annotation)[0] for t in get_args(get_args(AnyTerm)[0])
    }
    assert losses <= named


def test_the_quantization_page_names_every_observer_target_and_stage() -> None:
    page = (ROOT / "docs" / "quantization.md").read_text()
    quantizing = [name for name in stages() if name.startswith(("quantize", "convert"))]
    for name in (*get_args(BuiltInObserver), *get_args(Runtime), *quantizing):
        assert f"`{name}`" in page, name


def test_the_export_page_names_every_exporter_and_its_settings() -> None:
    page = (ROOT / "docs" / "export.md").read_text()
    for name, stage in stages().items():
        if name.startswith("export"):
            own = stage.model_fields.keys() - Stage.model_fields.keys()
            missing = [setting for setting in own if setting not in page]
            assert f"`{name}`" in page
            assert missing == []


@pytest.mark.slow
def test_the_readmes_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    functions, snippet = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    spec = spec_from_file_location("models", ROOT / "examples" / "digits" / "models.py")
    models = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "models", models)
    spec.loader.exec_module(models)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "snippet.py"
    file.write_text(snippet)
    given = {"model": models.resnet20().eval(), "x": torch.zeros(2, 1, 8, 8), "out": tmp_path}
    linear = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
    loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=32)
    exec(functions, {"compress": compress, "model": linear, "loader": loader})
    assert (tmp_path / "model.onnx").stat().st_size > 64 / 2 * 11
    made = runpy.run_path(str(file), given)
    assert made["slim"].parameters() < 0.45 * 1_084_010
    assert made["onnx"].payload_path.exists()


def test_the_readme_lists_every_stage_and_gate() -> None:
    listed = set(re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE))
    schema = Pipeline.model_json_schema()
    gates = {
        d["properties"]["gate"]["const"]
        for d in schema["$defs"].values()
        if "gate" in d.get("properties", {})
    }
    assert listed == set(stages()) | gates


def test_the_torch_to_install_is_one_that_is_allowed() -> None:
    (limit,) = re.findall(r'"torch>=[\d.]+,(<[\d.]+)"', (ROOT / "pyproject.toml").read_text())
    for file in ("README.md", "pipelines/commands/doctor.py"):
        assert re.findall(r"pip install 'torch(<[\d.]+)'", (ROOT / file).read_text()) == [limit]


def test_the_readmes_commands_are_the_makefiles() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "compress run pipelines/quickstart.yaml" in makefile
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    for command in ("make demo", "make test"):
        assert command in README
        assert f"\n{command.split()[1]}:" in makefile


def test_the_quickstart_has_the_promised_gates() -> None:
    content = yaml.safe_load((ROOT / "pipelines/quickstart.yaml").read_text())
    gates = {s.get("name", s["stage"]): s.get("gates", []) for s in content["stages"]}
    assert {"gate": "max_drop", "points": 1.0, "against": "train"} in gates["onnx"]
    sizes = [g["ratio"] for g in gates["onnx"] if g["gate"] == "max_size"]
    assert sizes
    assert all(ratio <= 1 / 12 + 1e-4 for ratio in sizes)
    speed = {g["batch"]: g["ratio"] for g in gates["onnx"] if g["gate"] == "min_speedup"}
    assert speed == {1: 1.5, 32: 3.0}, "over the float model in ONNX Runtime: no against"
    assert not any("against" in g for g in gates["onnx"] if g["gate"] == "min_speedup")
