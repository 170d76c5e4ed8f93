"""A ResNet that was trained and quantized, as ONNX and TorchScript."""

import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
import torch.nn.functional as F

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.artifacts.recipe import Recipe
from compress.common.errors import ArtifactInvalid
from compress.common.tensor_difference import relative_error
from compress.core.context import Context
from compress.core.gates import LabelAgreement, Parity
from compress.data.splits import Splits
from compress.export.onnx.stage import ExportOnnx, OnnxModel
from compress.export.torchscript.stage import ExportTorchScript
from compress.quantization.stages.static import QuantizeStatic
from tests.export.builders import DIGITS, EXACT_BITS, IMAGE
from tests.forging import forge


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, digits: Splits) -> tuple[EagerModel, Context]:
    """Return a ResNet-8 after two epochs on digits, some 90 % right."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = Recipe(factory="models:ResNet", arguments={"blocks": 1, "width": 16, "classes": 10})
    torch.manual_seed(0)
    module = recipe.build(DIGITS).train()
    optimizer = torch.optim.AdamW(module.parameters(), 5e-3)
    for _ in range(2):
        for batch in digits.batches("train", batch_size=64):
            optimizer.zero_grad()
            F.cross_entropy(module(*batch.inputs), batch.target).backward()
            optimizer.step()
    model = EagerModel.create(folder / "source", recipe, module.state_dict(), IMAGE, folder=DIGITS)
    return model, Context(root=folder / "next", data=digits)


@pytest.fixture(scope="module")
def quantized(trained: tuple[EagerModel, Context]) -> GraphModel:
    model, context = trained
    return QuantizeStatic(calibration_samples=256, weight_bits=EXACT_BITS)(
        model, context.with_root(context.root.with_name("int8"))
    )


@pytest.fixture(scope="module")
def exported(quantized: GraphModel, trained: tuple[EagerModel, Context]) -> OnnxModel:
    return ExportOnnx()(quantized, trained[1].with_root(quantized.path.with_name("onnx")))


@pytest.mark.slow
def test_every_heavy_operator_of_a_resnet_runs_in_integers(exported: OnnxModel) -> None:
    facts = exported.manifest.facts
    assert facts["integer_kernels"] == {"QGemm": 1, "QLinearAdd": 3, "QLinearConv": 9}
    assert facts["float_kernels"] == {}
    assert facts["opset"] == 20


@pytest.mark.slow
def test_torch_and_onnxruntime_agree_in_integers(
    exported: OnnxModel, quantized: GraphModel, trained: tuple[EagerModel, Context]
) -> None:
    model, context = trained
    assert LabelAgreement().measure(quantized, exported, context).value >= 0.995
    assert LabelAgreement().measure(model, exported, context).value >= 0.97
    with quantized.open() as expected, exported.open() as got:
        for batch in context.data.batches("val"):
            (a,), (b,) = expected(*batch.inputs), got(*batch.inputs)
            step = float(a.max() - a.min()) / 255
            assert float((a - b).abs().median()) < 1e-5
            assert float((a - b).abs().max()) < 3 * step


@pytest.mark.slow
def test_the_file_is_hardly_larger_than_its_weights(
    exported: OnnxModel, quantized: GraphModel
) -> None:
    assert exported.parameters() == quantized.parameters()
    assert exported.macs() == quantized.macs()
    assert exported.payload_bytes < 1.25 * quantized.parameters()
    assert b"File " not in exported.payload_path.read_bytes()  # stack traces


@pytest.mark.soak  # test_options.py and test_killed.py write files twice
@pytest.mark.slow
def test_equal_runs_give_equal_bytes(
    exported: OnnxModel, quantized: GraphModel, trained: tuple[EagerModel, Context], tmp_path: Path
) -> None:
    again = ExportOnnx()(quantized, trained[1].with_root(tmp_path / "again"))
    assert again.digest == exported.digest


@pytest.mark.soak  # test_coverage_page.py opens its ONNX files in one
@pytest.mark.slow
def test_a_fresh_process_answers_alike(
    exported: OnnxModel, tmp_path: Path, fresh_torch: Callable[[str], str]
) -> None:
    (image,) = IMAGE.example(3)
    with exported.open() as predict:
        torch.save({"image": image, "expected": predict(image)[0]}, tmp_path / "answer.pt")
    assert (
        fresh_torch(f"""
import torch
from compress.export import OnnxModel
saved = torch.load({str(tmp_path / "answer.pt")!r})
with OnnxModel.from_directory({str(exported.path)!r}).open() as predict:
    print(torch.equal(predict(saved["image"])[0], saved["expected"]))
""")
        == "True"
    )


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_the_batch_is_dynamic(exported: OnnxModel, batch: int) -> None:
    with exported.open() as predict:
        assert predict(*IMAGE.example(batch))[0].shape == (batch, 10)


@pytest.mark.slow
def test_names_are_the_signatures(exported: OnnxModel) -> None:
    graph = onnx.load(exported.payload_path).graph
    assert [v.name for v in graph.input] == ["image"]
    assert [v.name for v in graph.output] == ["logits"]
    assert graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


@pytest.mark.slow
def test_a_float_model_keeps_its_answers(
    trained: tuple[EagerModel, Context], tmp_path: Path
) -> None:
    model, context = trained
    stage = ExportOnnx(opset=18, gates=(Parity(atol=1e-4), LabelAgreement(minimum=1)))
    artifact = stage(model, context.with_root(tmp_path / "onnx"))
    assert artifact.manifest.facts["opset"] == 18
    assert artifact.manifest.facts["float_kernels"] == {"Conv": 9, "Gemm": 1}
    assert artifact.macs() == model.macs()


@pytest.mark.slow
def test_a_truncated_file_is_refused(exported: OnnxModel, tmp_path: Path) -> None:
    half = shutil.copytree(exported.path, tmp_path / "half")
    sealed = OnnxModel.from_directory(half)
    forge(half, "model.onnx", sealed.payload_path.read_bytes()[:5000])
    with (
        pytest.raises(ArtifactInvalid, match=r"model\.onnx is not the file that was sealed"),
        sealed.open(),
    ):
        pass
    broken = OnnxModel.from_directory(half)
    with (
        pytest.raises(ArtifactInvalid, match=r"model\.onnx: onnxruntime cannot load it"),
        broken.open(),
    ):
        pass
    with pytest.raises(ArtifactInvalid, match=r"model\.onnx: not an ONNX file, or truncated"):
        broken.parameters()


@pytest.mark.slow
def test_torchscript_runs_every_layer_in_integers(quantized: GraphModel, tmp_path: Path) -> None:
    torchscript = ExportTorchScript()(quantized, Context(root=tmp_path / "ts"))
    kernels = torchscript.manifest.facts["integer_kernels"]
    assert (kernels["conv2d"], kernels["add"]) == (9, 3)
    image = IMAGE.example(7)
    with quantized.open() as expected, torchscript.open() as got:
        # On some processors integer kernels round a few activations to the next step.
        assert relative_error(expected(*image)[0], got(*image)[0]) < 0.02
    assert torchscript.payload_bytes < 0.5 * 4 * quantized.parameters()
