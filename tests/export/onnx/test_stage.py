from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from pydantic import ValidationError

from compress.artifacts.artifact import Artifact
from compress.common.errors import GateRefused, StageFailed
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.core.gates import LabelAgreement, Parity
from compress.export.onnx.graph import count_macs
from compress.export.onnx.proto_io import write
from compress.export.onnx.stage import ExportOnnx
from compress.export.parity.compare import check_axis_sizes
from compress.export.parity.sample_parity import QUANTIZED
from compress.quantization.stages.static import QuantizeStatic
from tests.export.builders import IMAGE_AND_CONTEXT, ROWS, TOKENS, network, samples

MOBILENET = {
    "QGemm": 1,
    "QLinearAveragePool": 1,
    "QLinearConv": 3,
    "QLinearGlobalAveragePool": 1,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "integer", "largest"),
    [
        pytest.param("networks:mlp", {"QGemm": 3}, 1e-3, marks=pytest.mark.soak),
        ("networks:mobilenet", MOBILENET, 1e-2),
    ],
)
def test_other_networks_run_in_integers(
    tmp_path: Path, factory: str, integer: dict[str, int], largest: float
) -> None:
    model = network(tmp_path / "source", factory)
    context = Context(root=tmp_path / "int8", data=samples(torch.randn(128, 1, 8, 8)))
    graph = QuantizeStatic(calibration_samples=128)(model, context)
    artifact = ExportOnnx()(graph, context.with_root(tmp_path / "onnx"))
    assert artifact.manifest.facts["integer_kernels"] == integer
    assert artifact.manifest.facts["float_kernels"] == {}
    assert artifact.manifest.facts["integer_share"] == 1
    assert LabelAgreement().measure(graph, artifact, context).value >= 0.99
    assert Parity(atol=0).measure(graph, artifact, context) < largest


@pytest.mark.slow
def test_sequences_of_any_length_run_in_integers(tmp_path: Path) -> None:
    model = network(tmp_path / "source", "networks:sequence", TOKENS)
    context = Context(root=tmp_path / "int8", data=samples(torch.randint(0, 50, (64, 8))))
    graph = QuantizeStatic(calibration_samples=64)(model, context)
    artifact = ExportOnnx()(graph, context.with_root(tmp_path / "onnx"))
    assert artifact.manifest.facts["integer_kernels"] == {"MatMulIntegerToFloat": 2}
    assert artifact.parameters() == model.parameters()
    assert artifact.macs() == model.macs() == 2 * 16 * 64 * 8


def test_two_inputs_and_dict_outputs(tmp_path: Path) -> None:
    model = network(tmp_path / "source", "networks:two_inputs", IMAGE_AND_CONTEXT)
    artifact = ExportOnnx(gates=(Parity(atol=1e-5),))(model, Context(root=tmp_path / "onnx"))
    with artifact.open() as predict:
        logits, features = predict(torch.randn(5, 1, 12, 9), torch.randn(5, 4))
    assert (logits.shape, features.shape) == ((5, 3), (5, 8))


def test_a_baked_in_batch_is_refused_by_name(tmp_path: Path) -> None:
    model = network(tmp_path / "source", "networks:baked_batch", ROWS)
    with pytest.raises(StageFailed, match="axis 'batch' is baked in"):
        ExportOnnx()(model, Context(root=tmp_path / "onnx"))
    assert not (tmp_path / "onnx").exists()


def test_a_refusing_gate_keeps_the_artifact(tmp_path: Path) -> None:
    model = network(tmp_path / "source", "networks:mobilenet")
    context = Context(root=tmp_path / "int8", data=samples(torch.randn(64, 1, 8, 8)))
    graph = QuantizeStatic(calibration_samples=64)(model, context)
    stage = ExportOnnx(gates=(Parity(atol=0, against="source"),))
    kept = Context(root=tmp_path / "kept", data=context.data, artifacts={"source": model})
    with pytest.raises(GateRefused, match=r"max \|difference\| <= 0"):
        stage(graph, kept)
    Artifact.from_directory(tmp_path / "kept").verify()


def test_an_unknown_opset_is_refused() -> None:
    with pytest.raises(ValidationError, match="less than or equal to 24"):
        ExportOnnx(opset=99)


def test_a_lowering_that_fixes_an_axis_is_caught() -> None:
    def right(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * 2,)

    def fixed_shape(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.zeros(2, 4),)

    def fixed_values(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.cat([x[:2] * 2, x[2:]]),)

    check_axis_sizes(right, right, ROWS)
    with pytest.raises(StageFailed, match=r"axis 'batch' at size 1: .* returns shapes"):
        check_axis_sizes(right, fixed_shape, ROWS)
    with pytest.raises(StageFailed, match=r"axis 'batch' at size 3: .* answers differ"):
        check_axis_sizes(right, fixed_values, ROWS)


def test_one_answer_near_zero_is_compared_with_the_usual_ones() -> None:
    zero = ROWS.example(sizes={"batch": 1})[0].sum()  # of this batch the regressor answers 0

    def regressor(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x.sum(1, keepdim=True) - zero,)

    def off_by(size: float) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
        return lambda x: (regressor(x)[0] + size,)

    check_axis_sizes(regressor, off_by(1e-6), ROWS)
    with pytest.raises(StageFailed, match=r"axis 'batch' at size 1: .* answers differ"):
        check_axis_sizes(regressor, off_by(1e-2), ROWS)


def test_integers_unlike_those_of_val_refuse_no_export(caplog: pytest.LogCaptureFixture) -> None:
    bytes_ = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4), dtype="int32"),))
    val = [(torch.tensor([[200, 3, 90, 41], [7, 0, 1, 255]], dtype=torch.int32),)]

    def right(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x.float(),)

    def off_where(share: float) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
        return lambda x: (x * torch.where(x.amax() > 1, share, 1.01),)

    check_axis_sizes(right, off_where(1.0), bytes_, val_batches=val)
    assert "on rows of zeros and ones, unlike `val`, the exported model's answers" in caplog.text
    for share, batches in ((1.0, []), (1.01, val)):
        with pytest.raises(StageFailed, match=r"axis 'batch' at size 1: .* answers differ"):
            check_axis_sizes(right, off_where(share), bytes_, val_batches=batches)


def test_only_what_is_right_elsewhere_is_called_baked_in() -> None:
    def right(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * 2,)

    def broken(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        raise RuntimeError("never works\nmore")

    def of_two(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x.view(2, 4) * 2,)

    with pytest.raises(StageFailed, match=r"size 1: .* answers \(never works\)$"):
        check_axis_sizes(right, broken, ROWS)
    with pytest.raises(StageFailed, match=r"size 1: .*, so the axis is baked in"):
        check_axis_sizes(right, of_two, ROWS)


def test_rounded_models_may_differ_a_little() -> None:
    def right(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x,)

    def by(error: float) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
        return lambda x: (x * (1 + error),)

    check_axis_sizes(right, by(0.05), ROWS, QUANTIZED)
    with pytest.raises(StageFailed, match=r"differ .* by 0\.05 .*at most 0\.001"):
        check_axis_sizes(right, by(0.05), ROWS)
    with pytest.raises(StageFailed, match=r"differ .* by 0\.2 .*at most 0\.1"):
        check_axis_sizes(right, by(0.2), ROWS, QUANTIZED)


@pytest.mark.parametrize("batch", ["batch", 3])
def test_macs_of_recurrent_and_transposed_layers_are_of_one_sample(
    tmp_path: Path, batch: str | int
) -> None:
    signature = Signature(inputs=(TensorSpec(name="x", shape=(batch, 4, 8)),))
    model = network(tmp_path / "source", "networks:recurrent", signature)
    artifact = ExportOnnx()(model, Context(root=tmp_path / "onnx"))
    transposed, recurrent, head = 8 * 4 * 6 * 2, 16 * 4 * 5 * (6 + 5), 16 * 5 * 3
    assert artifact.macs() == transposed + recurrent + head
    if isinstance(batch, str):
        assert artifact.macs({batch: 7}) == artifact.macs(), "of one sample"


def graph_of(operator: str, left: tuple[int, int], right: tuple[int, int]) -> ir.Model:
    node = onnx.parser.parse_node(operator)
    result = onnx.helper.make_tensor_value_info("c", onnx.TensorProto.FLOAT, [6, 5])
    values = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in (("a", left), ("b", right))
    ]
    graph = onnx.helper.make_graph([node], "g", values, [result])
    return ir.from_proto(onnx.helper.make_model(graph))


def test_macs_follow_the_transposition_and_are_none_where_unknown() -> None:
    assert count_macs(graph_of("c = Gemm <transA = 1> (a, b)", (2, 6), (2, 5))) == 6 * 5 * 2 // 2
    einsum = graph_of('c = Einsum <equation = "ij,jk->ik"> (a, b)', (6, 2), (2, 5))
    assert count_macs(einsum) is None


def test_what_is_not_valid_is_reported_in_one_line(tmp_path: Path) -> None:
    unknown = graph_of("c = Unknown(a, b)", (6, 2), (2, 5))
    with pytest.raises(StageFailed, match=r"not valid ONNX: .*Unknown") as caught:
        write(unknown, tmp_path / "model.onnx")
    assert "\n" not in str(caught.value)


def test_the_operator_without_an_onnx_form_is_named(tmp_path: Path) -> None:
    model = network(tmp_path / "source", "networks:eigenvalues", ROWS)
    with pytest.raises(StageFailed, match=r"no ONNX form: .*linalg_eig") as caught:
        ExportOnnx()(model, Context(root=tmp_path / "onnx"))
    assert "step 3/3" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "is_warned"), [({"activation_bits": 16}, True), ({"exclude": ("1",)}, False)]
)
def test_a_layer_is_named_that_is_computed_in_floats_though_quantized(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], is_warned: bool
) -> None:
    model = network(tmp_path / "source", "networks:mlp")
    context = Context(root=tmp_path / "int8", data=samples(torch.randn(32, 1, 8, 8)))
    graph = QuantizeStatic(calibration_samples=32, **settings)(model, context)
    artifact = ExportOnnx()(graph, context.with_root(tmp_path / "onnx"))
    assert artifact.manifest.facts["float_kernels"].keys() <= {"Gemm", "FusedGemm"}
    assert ("quantized, yet computed in floats" in caplog.text) == is_warned


def test_settings_import_neither_torch_nor_onnx(fresh_process: Callable[[str], str]) -> None:
    code = (
        "import compress.export.onnx.stage, compress.export.torchscript.stage, sys; "
        "print({'torch', 'onnx'} & {*sys.modules})"
    )
    assert fresh_process(code) == "set()"
