import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from compress.artifacts.artifact import Artifact
from compress.artifacts.eager_model import EagerModel
from compress.common.errors import ArtifactInvalid, GateRefused, StageFailed
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.core.context import Context
from compress.core.gates import Parity
from compress.data.splits import Splits
from compress.export.parity.compare import check_axis_sizes
from compress.export.torchscript.file_io import load, quiet
from compress.export.torchscript.stage import ExportTorchScript, TorchScriptModel
from tests.export.builders import DIGITS, HERE, IMAGE, ROWS, network
from tests.forging import forge

METHODS = ["trace", "script"]


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> EagerModel:
    path = tmp_path_factory.mktemp("resnet") / "source"
    model = network(path, "models:resnet20", IMAGE, DIGITS, width=8)
    module = model.load()
    for layer in module.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(layer.bias, -0.5, 0.5)
    return model.derive(path.with_name("shifted"), module.state_dict())


@pytest.mark.parametrize("method", METHODS)
def test_answers_and_counts_are_the_sources(
    resnet: EagerModel, tmp_path: Path, method: str
) -> None:
    stage = ExportTorchScript.model_validate(
        {"method": method, "gates": [{"gate": "parity", "atol": 1e-5}]}
    )
    artifact = stage(resnet, Context(root=tmp_path / "ts"))
    assert artifact.macs() == resnet.macs()
    normalised = sum(
        m.num_features for m in resnet.load().modules() if isinstance(m, torch.nn.BatchNorm2d)
    )
    assert artifact.parameters() == resnet.parameters() - normalised  # folded into biases
    with artifact.open() as predict:
        for batch in (1, 3, 8):
            assert predict(*IMAGE.example(batch))[0].shape == (batch, 10)


def test_products_that_could_not_be_counted_are_none(tmp_path: Path) -> None:
    path = tmp_path / "ts"
    with TorchScriptModel.atomic_write(path, IMAGE, facts={"parameters": 3, "macs": None}) as made:
        (made / TorchScriptModel.payload).write_bytes(b"")
    artifact = TorchScriptModel.from_directory(path)
    assert (artifact.parameters(), artifact.macs()) == (3, None)


@pytest.mark.parametrize("method", METHODS)
def test_equal_runs_give_equal_bytes(resnet: EagerModel, tmp_path: Path, method: str) -> None:
    stage = ExportTorchScript.model_validate({"method": method})
    first = stage(resnet, Context(root=tmp_path / "first"))
    second = stage(resnet, Context(root=tmp_path / "second"))
    assert first.digest == second.digest
    assert b"models.py" not in first.payload_path.read_bytes()


@pytest.mark.slow
def test_a_fresh_process_answers_alike(
    resnet: EagerModel, tmp_path: Path, fresh_torch: Callable[[str], str]
) -> None:
    artifact = ExportTorchScript()(resnet, Context(root=tmp_path / "ts"))
    (image,) = IMAGE.example(3)
    with artifact.open() as predict:
        torch.save({"image": image, "expected": predict(image)[0]}, tmp_path / "answer.pt")
    assert (
        fresh_torch(f"""
import torch
from compress.export import TorchScriptModel
saved = torch.load({str(tmp_path / "answer.pt")!r})
with TorchScriptModel.from_directory({str(artifact.path)!r}).open() as predict:
    print(torch.equal(predict(saved["image"])[0], saved["expected"]))
""")
        == "True"
    )


def test_two_inputs_and_dict_outputs(tmp_path: Path) -> None:
    signature = Signature(
        inputs=(
            TensorSpec(name="image", shape=("batch", 1, 8, 8)),
            TensorSpec(name="context", shape=("batch", 4)),
        ),
        outputs=(OutputSpec(name="logits"), OutputSpec(name="features")),
    )
    model = network(tmp_path / "source", "networks:two_inputs", signature)
    stage = ExportTorchScript(gates=(Parity(atol=1e-5),))
    with stage(model, Context(root=tmp_path / "ts")).open() as predict:
        assert [t.shape for t in predict(*signature.example(3))] == [(3, 3), (3, 8)]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_baked_in_batch_is_refused_and_scripting_mends_it(tmp_path: Path) -> None:
    model = network(tmp_path / "source", "networks:baked_rows", ROWS)
    with pytest.raises(StageFailed, match=r"axis 'batch' at size 1: .* baked in"):
        ExportTorchScript()(model, Context(root=tmp_path / "ts"))
    assert not (tmp_path / "ts").exists()
    ExportTorchScript(method="script")(model, Context(root=tmp_path / "ts"))


@pytest.mark.parametrize("method", METHODS)
def test_operators_keep_their_meaning(tmp_path: Path, method: str) -> None:
    model = network(tmp_path / "source", "networks:halves", ROWS)
    stage = ExportTorchScript.model_validate({"method": method})
    with stage(model, Context(root=tmp_path / "ts")).open() as predict:
        assert predict(torch.arange(4.0)[None])[0].tolist() == [[0, 0.5, 1, 1.5]]


def test_an_interpreters_error_is_reported_by_its_last_line() -> None:
    class OfTwo(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(2, 4)

    def source_answers(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x,)

    with quiet():
        traced = torch.jit.trace(OfTwo(), torch.ones(2, 4))
    with pytest.raises(StageFailed, match=r"\(RuntimeError: shape .* is invalid .*baked in"):
        check_axis_sizes(source_answers, lambda x: (traced(x),), ROWS)


def test_what_cannot_be_scripted_is_refused(tmp_path: Path) -> None:
    model = network(tmp_path / "source", "networks:unscriptable", ROWS)
    with pytest.raises(StageFailed, match=r"torch\.jit\.script cannot express .*method: trace"):
        ExportTorchScript(method="script")(model, Context(root=tmp_path / "ts"))


def test_a_refusing_gate_keeps_the_artifact(resnet: EagerModel, tmp_path: Path) -> None:
    stage = ExportTorchScript(gates=(Parity(atol=0),))
    with pytest.raises(GateRefused, match=r"max \|difference\| <= 0"):
        stage(resnet, Context(root=tmp_path / "kept"))
    Artifact.from_directory(tmp_path / "kept").verify()


def test_a_truncated_file_is_refused(resnet: EagerModel, tmp_path: Path) -> None:
    artifact = ExportTorchScript()(resnet, Context(root=tmp_path / "ts"))
    forge(artifact.path, "model.ts", artifact.payload_path.read_bytes()[:5000])
    with (
        pytest.raises(ArtifactInvalid, match=r"model\.ts is not the file that was sealed"),
        artifact.open(),
    ):
        pass
    with (
        pytest.raises(ArtifactInvalid, match=r"model\.ts: not TorchScript, or truncated"),
        TorchScriptModel.from_directory(artifact.path).open(),
    ):
        pass


def untraceable(path: Path) -> EagerModel:
    return network(path, "branching_nets:untraceable", ROWS, HERE)


def test_mixed_scripts_the_part_that_loops_by_the_data_and_traces_the_rest(
    tmp_path: Path,
) -> None:
    model = untraceable(tmp_path / "source")
    with pytest.raises(StageFailed, match=r"torch\.jit\.script cannot express the model"):
        ExportTorchScript(method="script")(model, Context(root=tmp_path / "ts"))
    mixed = ExportTorchScript(method="mixed")
    artifact = mixed(model, Context(root=tmp_path / "ts"))
    named = ExportTorchScript(method="mixed", scripted=("halv*",))
    assert named(model, Context(root=tmp_path / "named")).payload_bytes == artifact.payload_bytes
    assert mixed(model, Context(root=tmp_path / "again")).digest == artifact.digest
    with artifact.open() as got, model.open() as expected:
        for size in (0.01, 1, 1000):  # none, a few and many turns of the loop
            x = size * torch.randn(3, 4)
            assert torch.allclose(got(x)[0], expected(x)[0], atol=1e-6)
    with pytest.raises(StageFailed, match="scripted: no submodule is named 'nothing'"):
        nothing = ExportTorchScript(method="mixed", scripted=("nothing",))
        nothing(model, Context(root=tmp_path / "nothing"))


def test_what_a_trace_guesses_is_reported_by_name_and_kept_from_passing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = untraceable(tmp_path / "source")
    samples = [(size * torch.ones(4), torch.tensor(0)) for size in (0.01, 1.0, 1000.0)]
    context = Context(root=tmp_path / "ts", data=Splits({"val": samples}))
    with pytest.raises(StageFailed, match="answers differ"):
        ExportTorchScript()(model, context)
    assert "in halving; `method: mixed` scripts such parts" in caplog.text
    whole = network(tmp_path / "whole", "branching_nets:guessing", ROWS, HERE)
    with pytest.raises(StageFailed, match=r"own forward branches .* use `method: script`"):
        ExportTorchScript(method="mixed")(whole, context)


def test_names_of_parts_are_for_mixed_alone() -> None:
    with pytest.raises(ValidationError, match="for `method: mixed` alone"):
        ExportTorchScript(scripted=("body",))


def test_weights_stay_parameters_where_nothing_is_frozen(tmp_path: Path) -> None:
    model = network(tmp_path / "source", "branching_nets:convolutions", IMAGE, HERE)
    artifact = ExportTorchScript(freeze=False)(model, Context(root=tmp_path / "ts"))
    assert artifact.parameters() == model.parameters()
    with quiet():
        names = dict(torch.jit.load(artifact.payload_path).named_parameters())
    assert "body.0.weight" in names


def test_layouts_of_this_processor_are_chosen_when_it_is_opened(tmp_path: Path) -> None:
    model = network(tmp_path / "source", "branching_nets:convolutions", IMAGE, HERE)
    stage = ExportTorchScript(optimize_for_inference=True, gates=(Parity(atol=1e-5),))
    artifact = stage(model, Context(root=tmp_path / "ts"))
    assert "mkldnn_convolution" in str(load(artifact.payload_path, optimized=True).graph)
    plain = ExportTorchScript()(model, Context(root=tmp_path / "plain"))
    assert artifact.payload_path.read_bytes() == plain.payload_path.read_bytes()
    assert artifact.parameters() == plain.parameters()


def test_the_deprecation_is_reported_by_the_report_and_not_by_python(tmp_path: Path) -> None:
    model = network(tmp_path / "source", "branching_nets:convolutions", IMAGE, HERE)
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        artifact = ExportTorchScript()(model, Context(root=tmp_path / "ts"))
    assert raised == []
    (warning,) = artifact.manifest.facts["warnings"]
    assert "TorchScript deprecated" in warning


def test_functions_with_their_own_gradient_are_traced_as_what_they_compute(
    tmp_path: Path,
) -> None:
    model = network(tmp_path / "source", "own_gradient_nets:OwnGradients", ROWS, HERE)
    script = ExportTorchScript(gates=(Parity(atol=1e-6),))(model, Context(root=tmp_path / "ts"))
    assert "Function" not in str(load(script.payload_path).graph)
    x = torch.ones(1, 4, requires_grad=True)
    model.load()(x).sum().backward()  # and have their gradient again
