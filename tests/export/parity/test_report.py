"""Where an export that answers otherwise went wrong, on faults planted in a translation."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from onnxscript import opset18 as op

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import program_of
from compress.common.errors import ArtifactInvalid, StageFailed
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.core.context import Context
from compress.data.splits import Splits
from compress.export.aotinductor.stage import ExportAot
from compress.export.onnx.lowering import TRANSLATIONS
from compress.export.onnx.stage import ExportOnnx
from compress.export.parity import report
from compress.export.parity.bisect import LayerSearch, values_before
from compress.export.parity.report import REFUSED, RefusedFile
from compress.export.torchscript.stage import ExportTorchScript
from tests.export.builders import network_of

SOURCE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.erf(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.side, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        y = torch.tanh(self.side(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x) + y.sum(-1, keepdim=True)

def net():
    return Net()
"""
TRACED_OTHERWISE = """
import torch
from torch import nn

class Net(nn.Module):
    def forward(self, x):
        return 1.5 * x if torch.jit.is_tracing() else 1 * x
"""
ERROR_FUNCTION = """
import torch
from torch import nn

class Error(nn.Module):
    def forward(self, x):
        return torch.erf(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.error = Error()

    def forward(self, x):
        return self.error(x)
"""
SCRIPT_ALONE = """
import runpy, sys
sys.modules["compress"] = None
try:
    runpy.run_path({script!r}, run_name="__main__")
except SystemExit as ended:
    print("exit code", ended.code)
"""
ROWS = Signature(
    inputs=(TensorSpec(name="x", shape=("batch", 8)),), outputs=(OutputSpec(name="logits"),)
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> EagerModel:
    folder = tmp_path_factory.mktemp("net")
    return network_of(folder, SOURCE, "blocky:net", ROWS)


@pytest.fixture
def wrong_erf(monkeypatch: pytest.MonkeyPatch) -> None:
    def translate(x: Any) -> Any:
        return op.Mul(op.Erf(x), op.Constant(value_float=1.5))

    monkeypatch.setitem(TRANSLATIONS, torch.ops.aten.erf.default, translate)


@pytest.fixture(autouse=True)
def time_for_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the layer be searched for at once on a busy machine too."""
    monkeypatch.setattr(report, "LEAST_SECONDS", 300.0)


def samples(count: int = 32) -> Splits:
    generator = torch.Generator().manual_seed(1)
    rows = [(torch.randn(8, generator=generator), torch.tensor(i % 3)) for i in range(count)]
    return Splits({"train": rows, "val": rows}, batch_size=16)


@pytest.fixture
def run_script(fresh_torch: Callable[[str], str]) -> Callable[[Path], str]:
    """Return a function that runs a folder's script where nothing of ours can be imported."""
    return lambda folder: fresh_torch(SCRIPT_ALONE.format(script=str(folder / "reproduce.py")))


@pytest.mark.slow
@pytest.mark.usefixtures("wrong_erf")
def test_the_first_wrong_layer_is_named_and_shown_in_a_fresh_process(
    model: EagerModel, tmp_path: Path, run_script: Callable[[Path], str]
) -> None:
    context = Context(root=tmp_path / "onnx", data=samples())
    with pytest.raises(StageFailed) as refused:
        ExportOnnx()(model, context)
    folder = tmp_path / "parity" / "export_onnx"
    message = str(refused.value)
    assert "the first layer out of tolerance is blocks.0 (aten.erf.default); see " in message
    assert message.endswith(str(folder / "parity.json"))
    assert "\n" not in message
    content = json.loads((folder / "parity.json").read_text())
    first = content["first_layer"]
    assert (first["module"], first["operator"]) == ("blocks.0", "aten.erf.default")
    assert first["verified"]
    assert first["error"] == pytest.approx(0.5, rel=1e-4)
    nodes = len(model.load().state_dict()) + 20
    assert content["exports"] < nodes / 2
    kinds = {row["kind"]: row for row in content["kinds"]}
    assert {"batch of 1", "batch of 8", "val, batch 0", "zeros"} <= kinds.keys()
    assert kinds["val, batch 0"].keys() >= {"absolute", "relative", "equal_labels"}
    assert content["metric"].keys() == {"name", "source", "exported"}
    assert not context.root.exists()
    output = run_script(folder)
    assert "exit code 1" in output
    assert "differ by 0.5 of the norm" in output
    assert (folder / "model.onnx").stat().st_size < 1000, "the operator alone"


@pytest.mark.slow
def test_nan_outputs_are_reported_as_any_other_error(
    model: EagerModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def translate(x: Any) -> Any:
        nothing = op.Sub(x, x)
        return op.Div(nothing, nothing)

    monkeypatch.setitem(TRANSLATIONS, torch.ops.aten.erf.default, translate)
    context = Context(root=tmp_path / "onnx", data=samples())
    with pytest.raises(StageFailed, match=r"first layer .* is blocks\.0 \(aten\.erf\.default\)"):
        ExportOnnx()(model, context)
    content = json.loads((tmp_path / "parity" / "export_onnx" / "parity.json").read_text())
    row = {row["kind"]: row for row in content["kinds"]}["val, batch 0"]
    assert row["relative"] == row["absolute"] == "not finite"
    assert row["note"] == "no labels: the model's outputs are not all finite: some are NaN"


@pytest.mark.soak  # the test of a dear search searches TorchScript, too
def test_torchscript_is_searched_and_its_folder_is_of_the_run(
    model: EagerModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrongly_frozen(monkeypatch)
    context = Context(root=tmp_path / "script", results=tmp_path / "results")
    with pytest.raises(StageFailed, match=r"first layer .* is blocks\.0 \(aten\.erf\.default\)"):
        ExportTorchScript(name="script")(model, context)
    content = json.loads((tmp_path / "results" / "parity" / "script" / "parity.json").read_text())
    assert content["metric"] is None
    assert content["reproduce"]["error"] > 0.1


def wrongly_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let TorchScript compute cos instead of erf."""
    freeze = torch.jit.freeze

    def wrongly(module: Any) -> Any:
        frozen = freeze(module)
        rewrite = torch._C._jit_pass_custom_pattern_based_rewrite_graph
        graph = "graph(%x):\n  %y = aten::{}(%x)\n  return (%y)"
        rewrite(graph.format("erf"), graph.format("cos"), frozen.graph)
        return frozen

    monkeypatch.setattr(torch.jit, "freeze", wrongly)


def test_a_dear_search_is_left_to_explain_and_the_refused_file_is_kept(
    model: EagerModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrongly_frozen(monkeypatch)
    monkeypatch.setattr(report, "LEAST_SECONDS", 0.0)
    context = Context(root=tmp_path / "script", results=tmp_path / "a run", data=samples())
    stage = ExportTorchScript(name="script")
    with pytest.raises(StageFailed, match=r"; which layer: compress explain '.*a run'; see ") as no:
        stage(model, context)
    folder = tmp_path / "a run" / "parity" / "script"
    content = json.loads((folder / "parity.json").read_text())
    assert (content["exports"], content["out_of_time"], content["first_layer"]) == (0, True, None)
    assert content["source"] == model.digest
    assert str(folder) in str(no.value)

    def write(*_: object) -> None:
        raise AssertionError("the stage runs again")

    monkeypatch.setattr(ExportTorchScript, "write", write)
    kept = RefusedFile.read(folder, model)
    found = stage.search_refused(model, kept, context, math.inf)
    assert str(found) == "blocks.0 (aten.erf.default)"
    content = json.loads((folder / "parity.json").read_text())
    assert content["first_layer"]["module"] == "blocks.0"
    assert (folder / "reproduce.py").exists()
    kept.file.write_bytes(kept.file.read_bytes() + b"x")
    with pytest.raises(ArtifactInvalid, match="is not what was refused"):
        RefusedFile.read(folder, model)
    assert kept.file.parent.name == REFUSED


def test_what_tracing_alone_gets_wrong_is_shown_by_the_whole_file(
    tmp_path: Path, run_script: Callable[[Path], str]
) -> None:
    model = network_of(tmp_path, TRACED_OTHERWISE, "tracers:Net", ROWS)
    with pytest.raises(StageFailed, match="no part of the graph that is exported alone differs"):
        ExportTorchScript()(model, Context(root=tmp_path / "script"))
    folder = tmp_path / "parity" / "export_torchscript"
    assert json.loads((folder / "parity.json").read_text())["first_layer"] is None
    output = run_script(folder)
    assert "exit code 1" in output
    assert "differ by 0.5 of the norm" in output


def test_what_an_earlier_attempt_left_goes_when_an_export_is_equal(
    model: EagerModel, tmp_path: Path
) -> None:
    folder = tmp_path / "parity" / "export_torchscript"
    folder.mkdir(parents=True)
    (folder / "parity.json").write_text("{}")
    (folder.parent / ".export_torchscript.partial-1").mkdir()
    (folder.parent / ".another.partial-1").mkdir()
    ExportTorchScript()(model, Context(root=tmp_path / "script"))
    assert [left.name for left in folder.parent.iterdir()] == [".another.partial-1"]


def test_a_search_tells_the_certain_from_the_unsure(model: EagerModel, tmp_path: Path) -> None:
    def exporting(program: Any, signature: Signature, file: Path, inputs: Any) -> Any:
        return tuple(2 * t for t in program.module(check_guards=False)(*inputs))

    inputs = model.signature.example()
    program = program_of(model)
    search = LayerSearch(program, model.signature, inputs, exporting, tmp_path / "x", 1e-3)
    first = search.run()
    assert first is not None
    assert first.verified
    assert not values_before(search.node)  # type: ignore[arg-type]  # found

    def refusing(*given: Any) -> Any:
        raise StageFailed("no such operator")

    nothing = LayerSearch(program, model.signature, inputs, refusing, tmp_path / "x", 1e-3)
    assert nothing.run() is None
    assert nothing.refused
    hurried = LayerSearch(program, model.signature, inputs, exporting, tmp_path / "x", 1e-3)
    export_one = hurried.reexport

    def slowly(*given: Any) -> Any:
        hurried.out_of_time = True
        return export_one(*given)

    hurried.reexport = slowly
    unsure = hurried.run()
    assert unsure is not None
    assert not unsure.verified


@pytest.mark.soak
@pytest.mark.slow
def test_aot_inductor_is_searched_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_script: Callable[[Path], str]
) -> None:
    from torch._inductor.lowering import lowerings

    aten = torch.ops.aten
    monkeypatch.setitem(lowerings, aten.erf.default, lowerings[aten.cos.default])
    model = network_of(tmp_path, ERROR_FUNCTION, "errors:Net", ROWS)
    with pytest.raises(StageFailed, match=r"is error \(aten\.erf\.default\)"):
        ExportAot()(model, Context(root=tmp_path / "aot"))
    assert "exit code 1" in run_script(tmp_path / "parity" / "export_aot")
