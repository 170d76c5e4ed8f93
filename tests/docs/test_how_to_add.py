"""Each guide "how to add …": its code is installed as it stands there, and what it adds works.

The gate's is in tests/pipelines/test_added_gate.py.
"""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from compress import (
    Context,
    EagerModel,
    Loss,
    MaxDrop,
    Metric,
    Parity,
    PruneChannels,
    QuantizeStatic,
    Splits,
    StageFailed,
)
from compress.artifacts.artifact import Artifact
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.kinds import LOADED
from compress.artifacts.recipe import Recipe
from compress.common.errors import PipelineInvalid, Unavailable
from compress.common.requirements import announcing_package
from compress.common.signature import Signature, TensorSpec
from compress.core.gates.runtime import BASELINES
from compress.core.metrics import metric as metric_module
from compress.core.objectives.loss import LossName, loss_kinds
from compress.export.exporter import EXPORTERS
from compress.pruning.dependency.channel_groups import trace
from compress.pruning.dependency.rules.registry import RULES
from compress.quantization.config.dtype_scheme import added_observers
from compress.quantization.pt2e.observers import observer_class
from tests.forking import Forks
from tests.pipelines.conftest import BRIEFLY

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs").glob("add-a*.md"))
LINEAR = """
from torch import nn

def classifier():
    return nn.Linear(64, 10)

def convolution():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
"""


NPZ_PIPELINE = """
version: 1
model: {factory: "my_model:classifier", inputs: [{name: pixels, shape: [batch, 64]}]}
stages:
  - stage: export_npz
    gates: [{gate: parity, atol: 0.00001}, {gate: min_speedup, ratio: 0.000001, against: numpy}]
"""


def install(page: str, folder: Path) -> None:
    """Write a page's files to a folder, and its package's metadata as pip would."""
    text = (ROOT / "docs" / page).read_text()
    files = dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', text, re.DOTALL | re.MULTILINE))
    for name, content in {**files, "my_model.py": LINEAR}.items():
        (folder / name).write_text(content)
    if "pyproject.toml" not in files:
        return
    project = tomllib.loads(files["pyproject.toml"])["project"]
    name = project["name"].replace("-", "_")  # as pip does, or it is not found by its name
    (installed := folder / f"{name}-{project['version']}.dist-info").mkdir()
    (installed / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = "".join(
        f"[{group}]\n" + "".join(f"{name} = {where}\n" for name, where in entries.items())
        for group, entries in project["entry-points"].items()
    )
    (installed / "entry_points.txt").write_text(lines)
    (installed / "RECORD").write_text("".join(f"{name},,\n" for name in files))


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for a page's files, from which they can be imported."""
    loaded = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - loaded:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def source(folder: Path, factory: str, shape: tuple[int, ...]) -> EagerModel:
    """Create the artifact of a model of a folder's module."""
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", *shape)),))
    recipe = Recipe(factory=factory)
    return import_checkpoint(folder / "source", recipe, signature, checkpoint=None, folder=folder)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_guide_is_short(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= 60


@pytest.fixture(scope="module")
def stage_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stage")
    install("add-a-stage.md", folder)
    return folder


CALL = """
import sys
sys.path.insert(1, {folder!r})
sys.argv = ["compress", *{arguments!r}]
{briefly}
from compress import cli
try:
    cli.main()
except SystemExit as end:
    open("code", "w").write(str(end.code or 0))
"""


@pytest.fixture
def call(_forks: Forks) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return what runs a command where a folder's packages are installed before our first import.

    Of which kinds of stages there are is found then; torch has been imported.
    """

    def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        code = CALL.format(folder=str(folder), arguments=arguments, briefly=BRIEFLY)
        output = _forks.run(code, folder)
        code, errors = ((folder / name).read_text() for name in ("code", "forked.err"))
        return subprocess.CompletedProcess(arguments, int(code), output, errors)

    return call


@pytest.mark.slow
def test_an_added_stage_runs_in_a_pipeline(stage_folder: Path, call: Callable) -> None:
    done = call(stage_folder, "run", "pipeline.yaml", "--json")
    assert done.returncode == 0, done.stderr
    (stage,) = json.loads(done.stdout)["stages"]
    assert (stage["name"], stage["cached"]) == ("round_mantissas", False)
    assert [verdict["passed"] for verdict in stage["verdicts"]] == [True]
    assert stage["verdicts"][0]["value"] > 0


def test_settings_of_an_added_stage_are_checked(stage_folder: Path, call: Callable) -> None:
    text = (stage_folder / "pipeline.yaml").read_text()
    (stage_folder / "bad.yaml").write_text(text.replace("bits: 12", "bits: 30"))
    done = call(stage_folder, "check", "bad.yaml")
    assert done.returncode == 2
    assert "bad.yaml:4" in done.stderr
    assert "23" in done.stderr


@pytest.fixture
def exporter_folder(on_path: Path) -> Iterator[Path]:
    """A folder with the exporter's package; what defining it registers is taken back."""
    registries: tuple[dict[str, Any], ...] = (LOADED, BASELINES, EXPORTERS)
    before = [dict(registry) for registry in registries]
    install("add-an-exporter.md", on_path)
    yield on_path
    for registry, content in zip(registries, before, strict=True):
        registry.clear()
        registry.update(content)


def test_a_guide_to_exporters_fits_on_a_page() -> None:
    assert len((ROOT / "docs" / "add-an-exporter.md").read_text().splitlines()) <= 45


def test_an_added_exporter_writes_an_artifact_that_gates_measure(exporter_folder: Path) -> None:
    on_path, page = exporter_folder, import_module("linear_npz")
    stage = page.ExportNpz(gates=(Parity(atol=1e-5),))
    context = Context(on_path / "npz")
    exported = stage(source(on_path, "my_model:classifier", (64,)), context)
    assert type(Artifact.from_directory(exported.path)) is page.NpzModel
    assert exported.manifest.lineage[-1].stage == "export_npz"
    assert BASELINES["numpy"].title == "NumPy"
    with pytest.raises(StageFailed, match="expected one linear layer"):
        stage(source(on_path, "my_model:convolution", (3, 8, 8)), context)


def test_an_added_exporters_wrong_file_is_no_artifact(
    exporter_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = import_module("linear_npz")

    @contextmanager
    def open_wrong(*_: object) -> Iterator[object]:
        yield lambda x: (x[:, :10],)

    monkeypatch.setattr(page.NpzModel, "open_file", open_wrong)
    context = Context(exporter_folder / "wrong")
    with pytest.raises(StageFailed, match="answers differ from the source's"):
        page.ExportNpz()(source(exporter_folder, "my_model:classifier", (64,)), context)
    assert not context.root.exists()


def test_an_added_runtime_needs_a_name_of_its_own(exporter_folder: Path) -> None:
    file = exporter_folder / "linear_npz.py"
    file.write_text(file.read_text().replace('name="numpy"', 'name="onnxruntime"'))
    with pytest.raises(ValueError, match="runtime 'onnxruntime' is taken, by ONNX Runtime"):
        import_module("linear_npz")
    assert "linear_npz" not in EXPORTERS


@pytest.mark.slow
def test_an_added_exporters_runtime_is_known_to_a_pipeline(tmp_path: Path, call: Callable) -> None:
    install("add-an-exporter.md", tmp_path)
    (tmp_path / "pipeline.yaml").write_text(NPZ_PIPELINE)
    done = call(tmp_path, "run", "pipeline.yaml", "--json")
    (stage,) = json.loads(done.stdout)["stages"]
    parity, speedup = stage["verdicts"]
    assert parity["passed"] and speedup["passed"], done.stderr
    assert speedup["against"] == "numpy", speedup


def test_an_added_rule_lets_channels_be_pruned(
    on_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("add-a-pruning-rule.md", on_path)
    model = source(on_path, "nets:net", (3, 8, 8))
    with monkeypatch.context() as patch:
        patch.delitem(RULES, "mylib::scale_channels")
        unknown = trace(model.load(), model.signature.example())
    assert "'mylib::scale_channels' is not known" in unknown.pinned["0"]
    pruned = PruneChannels(ratio=0.5, round_to=1)(model, Context(on_path / "pruned"))
    convolution, scale, *_ = pruned.load()
    assert isinstance(convolution, nn.Conv2d)
    assert convolution.out_channels == len(scale.scale) == 8


@pytest.fixture
def ranked(on_path: Path) -> Iterator[Path]:
    """A folder in which the package of a metric and a loss is installed."""
    caches = (metric_module._announced, loss_kinds, announcing_package)
    install("add-a-metric.md", on_path)
    for each in caches:
        each.cache_clear()
    yield on_path
    for each in caches:
        each.cache_clear()


def test_an_added_metric_is_measured_judged_and_part_of_cache_keys(ranked: Path) -> None:
    metric = Metric("top5")
    metric.check()
    outputs, targets = torch.arange(8.0).expand(8, 8), torch.arange(8)
    assert metric.score(outputs, targets) == 5 / 8
    assert metric.score(outputs, targets.where(targets > 3, -100)) == 4 / 4
    assert metric.identity()[3] == "ranking 1.0"
    assert Metric("accuracy").identity()[3] == ""
    assert "less than a hundredth" in MaxDrop(points=0.001).unsuitable_metric("top5")
    with pytest.raises(PipelineInvalid, match=r"metric 'top6' is unknown; .* top5"):
        Metric("top6").check()


def test_the_package_of_a_metric_with_many_names_is_part_of_cache_keys(
    ranked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_module.metric_class("top5"), "pattern", "^top[0-9]$")
    assert Metric("top3").identity()[3] == "ranking 1.0"


def test_an_added_loss_is_computed_and_tells_the_task(ranked: Path) -> None:
    loss = Loss(TypeAdapter(LossName).validate_python("huber"))
    outputs, targets = torch.tensor([[0.0], [3.0]]), torch.tensor([0.5, 0.0])
    assert float(loss.function()(outputs, targets)) == pytest.approx((0.125 + 2.5) / 2)
    assert loss.is_regression
    assert loss.identity()["code"] == "ranking 1.0"
    with pytest.raises(StageFailed, match="huber takes targets that are numbers"):
        loss.function()(outputs, targets.long())


@pytest.fixture
def added(on_path: Path) -> Iterator[Path]:
    """A folder in which the observer's package is installed."""
    install("add-an-observer.md", on_path)
    added_observers.cache_clear()
    yield on_path
    added_observers.cache_clear()


def test_an_added_observer_chooses_ranges(added: Path) -> None:
    x = torch.randn(64, 3, 8, 8)
    x[0] *= 50  # outliers, which the added observer clips
    samples = torch.utils.data.TensorDataset(x, torch.zeros(64, dtype=torch.int64))
    data = Splits({"train": samples, "val": samples}, batch_size=32)
    model = source(added, "my_model:convolution", (3, 8, 8))
    scales = {}
    for observer in ("minmax", "fences"):
        stage = QuantizeStatic.model_validate({"observer": observer, "calibration_samples": 64})
        assert stage.own_settings()["observer"] == observer
        context = Context(added / observer, data=data)
        graph = stage(model, context).program().graph
        quantize = next(n for n in graph.nodes if "quantize_per_tensor" in str(n.target))
        scales[observer] = quantize.args[1]
    assert 0 < scales["fences"] < scales["minmax"] / 4
    assert QuantizeStatic.model_validate({"observer": "fences"}).machine_parts == {
        "observer": "fences 1.0"
    }
    assert QuantizeStatic().machine_parts == {}


@pytest.mark.parametrize("observer", ["fence", ["fences"]])
def test_an_unknown_observer_is_refused(added: Path, observer: object) -> None:
    with pytest.raises(ValidationError, match="'minmax', 'moving_average'"):
        QuantizeStatic.model_validate({"observer": observer})


def test_an_observer_that_cannot_be_imported_is_named(added: Path) -> None:
    (added / "fences.py").write_text("raise OSError('no such device')")
    with pytest.raises(Unavailable, match="observer 'fences' of fences:FencesObserver: OSError"):
        observer_class("fences")
