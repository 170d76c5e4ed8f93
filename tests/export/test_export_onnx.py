import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from compress.artifacts.artifact import Artifact
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.artifacts.recipe import Recipe
from compress.common.errors import ArtifactInvalid, GateRefused, StageFailed
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.core.gates import LabelAgreement, Parity
from compress.core.stage import Context
from compress.data.splits import Splits
from compress.quantization.stages.static import QuantizeStatic
from export.onnx.graph import count_macs
from export.onnx.proto_io import write
from export.onnx.stage import ExportOnnx, OnnxModel
from export.parity.compare import check_agreement
from tests.forging import forge

ROOT = Path(__file__).parents[2]
NETWORKS = ROOT / "tests" / "compress" / "quantization"
DIGITS = ROOT / "examples" / "digits"
IMAGE = Signature(
    inputs=(TensorSpec(name="image", shape=("batch", 1, 8, 8)),),
    outputs=(OutputSpec(name="logits"),),
)
ROWS = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))
TOKENS = Signature(
    inputs=(TensorSpec(name="tokens", shape=("batch", "length"), dtype="int64"),),
    outputs=(OutputSpec(name="states"),),
)


def source(path: Path, factory: str, signature: Signature = IMAGE) -> EagerModel:
    torch.manual_seed(0)
    recipe = Recipe(factory=factory)
    state = recipe.build(NETWORKS).state_dict()
    return EagerModel.create(path, recipe, state, signature, folder=NETWORKS)


def rows(*inputs: torch.Tensor) -> Splits:
    samples = [(tuple(x[i] for x in inputs), torch.tensor(0)) for i in range(len(inputs[0]))]
    return Splits({"train": samples, "val": samples}, batch_size=32)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, digits: Splits) -> tuple[EagerModel, Context]:
    """Return a ResNet-20 after two epochs on digits, some 90 % right."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = Recipe(factory="models:resnet20", arguments={"width": 8})
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
    return QuantizeStatic(calibration_samples=256)(
        model, context.with_root(context.root.with_name("int8"))
    )


@pytest.fixture(scope="module")
def exported(quantized: GraphModel, trained: tuple[EagerModel, Context]) -> OnnxModel:
    return ExportOnnx()(quantized, trained[1].with_root(quantized.path.with_name("onnx")))


def test_every_heavy_operator_of_a_resnet_runs_in_integers(exported: OnnxModel) -> None:
    facts = exported.manifest.facts
    assert facts["integer_kernels"] == {"QGemm": 1, "QLinearAdd": 9, "QLinearConv": 21}
    assert facts["float_kernels"] == {}
    assert facts["opset"] == 20


def test_torch_and_onnxruntime_agree_in_integers(
    exported: OnnxModel, quantized: GraphModel, trained: tuple[EagerModel, Context]
) -> None:
    model, context = trained
    assert LabelAgreement().measure(quantized, exported, context) >= 0.995
    assert LabelAgreement().measure(model, exported, context) >= 0.97
    with quantized.open() as expected, exported.open() as got:
        for batch in context.data.batches("val"):
            (a,), (b,) = expected(*batch.inputs), got(*batch.inputs)
            step = float(a.max() - a.min()) / 255
            assert float((a - b).abs().median()) < 1e-5
            assert float((a - b).abs().max()) < 3 * step


def test_the_file_is_hardly_larger_than_its_weights(
    exported: OnnxModel, quantized: GraphModel
) -> None:
    assert exported.parameters() == quantized.parameters()
    assert exported.macs() == quantized.macs()
    assert exported.payload_bytes < 1.25 * quantized.parameters()
    assert b"File " not in exported.payload_path.read_bytes()  # stack traces


def test_equal_runs_give_equal_bytes(
    exported: OnnxModel, quantized: GraphModel, trained: tuple[EagerModel, Context], tmp_path: Path
) -> None:
    again = ExportOnnx()(quantized, trained[1].with_root(tmp_path / "again"))
    assert again.digest == exported.digest


def test_a_fresh_process_answers_alike(
    exported: OnnxModel, tmp_path: Path, fresh_torch: Callable[[str], str]
) -> None:
    (image,) = IMAGE.example(3)
    with exported.open() as predict:
        torch.save({"image": image, "expected": predict(image)[0]}, tmp_path / "answer.pt")
    assert (
        fresh_torch(f"""
import torch
from export import OnnxModel
saved = torch.load({str(tmp_path / "answer.pt")!r})
with OnnxModel.from_directory({str(exported.path)!r}).open() as predict:
    print(torch.equal(predict(saved["image"])[0], saved["expected"]))
""")
        == "True"
    )


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_the_batch_is_dynamic(exported: OnnxModel, batch: int) -> None:
    with exported.open() as predict:
        assert predict(*IMAGE.example(batch))[0].shape == (batch, 10)


def test_names_are_the_signatures(exported: OnnxModel) -> None:
    graph = onnx.load(exported.payload_path).graph
    assert [v.name for v in graph.input] == ["image"]
    assert [v.name for v in graph.output] == ["logits"]
    assert graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


def test_a_float_model_keeps_its_answers(
    trained: tuple[EagerModel, Context], tmp_path: Path
) -> None:
    model, context = trained
    stage = ExportOnnx(opset=18, gates=(Parity(atol=1e-4), LabelAgreement(minimum=1)))
    artifact = stage(model, context.with_root(tmp_path / "onnx"))
    assert artifact.manifest.facts["opset"] == 18
    assert artifact.manifest.facts["float_kernels"] == {"Conv": 21, "Gemm": 1}
    assert artifact.macs() == model.macs()


@pytest.mark.parametrize(
    ("factory", "integer", "largest"),
    [
        ("networks:mlp", {"QGemm": 3}, 1e-3),
        ("networks:mobilenet", {"QGemm": 1, "QLinearAveragePool": 1, "QLinearConv": 3}, 1e-2),
    ],
)
def test_other_networks_run_in_integers(
    tmp_path: Path, factory: str, integer: dict[str, int], largest: float
) -> None:
    model = source(tmp_path / "source", factory)
    context = Context(root=tmp_path / "int8", data=rows(torch.randn(128, 1, 8, 8)))
    graph = QuantizeStatic(calibration_samples=128)(model, context)
    artifact = ExportOnnx()(graph, context.with_root(tmp_path / "onnx"))
    assert artifact.manifest.facts["integer_kernels"] == integer
    assert artifact.manifest.facts["float_kernels"] == {}
    assert LabelAgreement().measure(graph, artifact, context) >= 0.99
    assert Parity(atol=0).measure(graph, artifact, context) < largest


def test_sequences_of_any_length_run_in_integers(tmp_path: Path) -> None:
    model = source(tmp_path / "source", "networks:sequence", TOKENS)
    context = Context(root=tmp_path / "int8", data=rows(torch.randint(0, 50, (64, 8))))
    graph = QuantizeStatic(calibration_samples=64)(model, context)
    artifact = ExportOnnx()(graph, context.with_root(tmp_path / "onnx"))
    assert artifact.manifest.facts["integer_kernels"] == {"MatMulIntegerToFloat": 2}
    assert artifact.parameters() == model.parameters()
    assert artifact.macs() == model.macs() == 2 * 16 * 64 * 8


def test_two_inputs_and_dict_outputs(tmp_path: Path) -> None:
    signature = Signature(
        inputs=(
            TensorSpec(name="image", shape=("batch", 1, "height", "width")),
            TensorSpec(name="context", shape=("batch", 4)),
        ),
        outputs=(OutputSpec(name="logits"), OutputSpec(name="features")),
    )
    model = source(tmp_path / "source", "networks:two_inputs", signature)
    artifact = ExportOnnx(gates=(Parity(atol=1e-5),))(model, Context(root=tmp_path / "onnx"))
    with artifact.open() as predict:
        logits, features = predict(torch.randn(5, 1, 12, 9), torch.randn(5, 4))
    assert (logits.shape, features.shape) == ((5, 3), (5, 8))


def test_a_baked_in_batch_is_refused_by_name(tmp_path: Path) -> None:
    model = source(tmp_path / "source", "networks:baked_batch", ROWS)
    with pytest.raises(StageFailed, match="axis 'batch' is baked in"):
        ExportOnnx()(model, Context(root=tmp_path / "onnx"))
    assert not (tmp_path / "onnx").exists()


def test_a_refusing_gate_keeps_the_artifact(tmp_path: Path) -> None:
    model = source(tmp_path / "source", "networks:mobilenet")
    context = Context(root=tmp_path / "int8", data=rows(torch.randn(64, 1, 8, 8)))
    graph = QuantizeStatic(calibration_samples=64)(model, context)
    stage = ExportOnnx(gates=(Parity(atol=0, against="source"),))
    kept = Context(root=tmp_path / "kept", data=context.data, artifacts={"source": model})
    with pytest.raises(GateRefused, match=r"max \|difference\| <= 0"):
        stage(graph, kept)
    Artifact.from_directory(tmp_path / "kept").verify()


def test_an_unknown_opset_is_refused() -> None:
    with pytest.raises(ValidationError, match="less than or equal to 24"):
        ExportOnnx(opset=99)


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


def test_a_lowering_that_fixes_an_axis_is_caught() -> None:
    def right(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * 2,)

    def fixed_shape(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.zeros(2, 4),)

    def fixed_values(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.cat([x[:2] * 2, x[2:]]),)

    check_agreement(right, right, ROWS)
    with pytest.raises(StageFailed, match=r"axis 'batch' at size 1: .* returns shapes"):
        check_agreement(right, fixed_shape, ROWS)
    with pytest.raises(StageFailed, match=r"axis 'batch' at size 3: .* answers differ"):
        check_agreement(right, fixed_values, ROWS)


def test_only_what_is_right_elsewhere_is_called_baked_in() -> None:
    def right(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * 2,)

    def broken(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        raise RuntimeError("never works\nmore")

    def of_two(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x.view(2, 4) * 2,)

    with pytest.raises(StageFailed, match=r"size 1: .* answers \(never works\)$"):
        check_agreement(right, broken, ROWS)
    with pytest.raises(StageFailed, match=r"size 1: .*, so the axis is baked in"):
        check_agreement(right, of_two, ROWS)


def test_rounded_models_may_differ_a_little() -> None:
    def right(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x,)

    def by(error: float) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
        return lambda x: (x * (1 + error),)

    check_agreement(right, by(0.05), ROWS, rounded=True)
    with pytest.raises(StageFailed, match=r"differ .* by 0\.05 .*at most 0\.001"):
        check_agreement(right, by(0.05), ROWS)
    with pytest.raises(StageFailed, match=r"differ .* by 0\.2 .*at most 0\.1"):
        check_agreement(right, by(0.2), ROWS, rounded=True)


@pytest.mark.parametrize("batch", ["batch", 3])
def test_macs_of_recurrent_and_transposed_layers_are_of_one_sample(
    tmp_path: Path, batch: str | int
) -> None:
    signature = Signature(inputs=(TensorSpec(name="x", shape=(batch, 4, 8)),))
    model = source(tmp_path / "source", "networks:recurrent", signature)
    artifact = ExportOnnx()(model, Context(root=tmp_path / "onnx"))
    transposed, recurrent, head = 8 * 4 * 6 * 2, 16 * 4 * 5 * (6 + 5), 16 * 5 * 3
    assert artifact.macs() == transposed + recurrent + head


def graph_of(operator: str, left: tuple[int, int], right: tuple[int, int]) -> onnx.ModelProto:
    node = onnx.parser.parse_node(operator)
    result = onnx.helper.make_tensor_value_info("c", onnx.TensorProto.FLOAT, [6, 5])
    values = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in (("a", left), ("b", right))
    ]
    return onnx.helper.make_model(onnx.helper.make_graph([node], "g", values, [result]))


def test_macs_follow_the_transposition_and_are_none_where_unknown() -> None:
    assert count_macs(graph_of("c = Gemm <transA = 1> (a, b)", (2, 6), (2, 5))) == 6 * 5 * 2 // 2
    einsum = graph_of('c = Einsum <equation = "ij,jk->ik"> (a, b)', (6, 2), (2, 5))
    assert count_macs(einsum) is None


def test_what_is_not_valid_is_told_in_one_line(tmp_path: Path) -> None:
    unknown = graph_of("c = Unknown(a, b)", (6, 2), (2, 5))
    with pytest.raises(StageFailed, match=r"not valid ONNX: .*Unknown") as caught:
        write(unknown, tmp_path / "model.onnx")
    assert "\n" not in str(caught.value)


def test_the_operator_without_an_onnx_form_is_named(tmp_path: Path) -> None:
    model = source(tmp_path / "source", "networks:eigenvalues", ROWS)
    with pytest.raises(StageFailed, match=r"no ONNX form: .*linalg_eig") as caught:
        ExportOnnx()(model, Context(root=tmp_path / "onnx"))
    assert "step 3/3" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_a_layer_left_in_floats_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = source(tmp_path / "source", "networks:mlp")
    context = Context(root=tmp_path / "int8", data=rows(torch.randn(32, 1, 8, 8)))
    graph = QuantizeStatic(calibration_samples=32, exclude=("1",))(model, context)
    artifact = ExportOnnx()(graph, context.with_root(tmp_path / "onnx"))
    assert artifact.manifest.facts["float_kernels"] == {"Gemm": 1}
    assert "quantized, yet computed in floats: ['Gemm']" in caplog.text


def test_settings_import_neither_torch_nor_onnx(fresh_process: Callable[[str], str]) -> None:
    code = (
        "import export.onnx.stage, export.torchscript.stage, sys; "
        "print({'torch', 'onnx'} & {*sys.modules})"
    )
    assert fresh_process(code) == "set()"
