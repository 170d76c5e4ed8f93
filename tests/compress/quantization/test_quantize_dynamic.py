import gc
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx.numpy_helper import to_array
from torch.fx import GraphModule

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.errors import StageFailed
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.core.context import Context
from compress.export.aotinductor.stage import ExportAot
from compress.export.onnx.stage import ExportOnnx, OnnxModel
from compress.quantization.stages.dynamic import QuantizeDynamic
from compress.serve.worker.loaders import load_graph
from tests.compress.quantization.builders import IMAGE, TOKENS, answer, build_model
from tests.compress.quantization.conftest import FreshProcessCheck
from tests.export.builders import needs_32_bit_sums


def dynamic(model: EagerModel, root: Path, **settings: object) -> GraphModel:
    return QuantizeDynamic.model_validate(settings)(model, Context(root=root / "int8"))


def both(model: EagerModel, root: Path, **settings: object) -> tuple[GraphModel, OnnxModel]:
    quantized = dynamic(model, root, **settings)
    return quantized, ExportOnnx()(quantized, Context(root=root / "onnx"))


def test_each_batch_has_its_own_range(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "networks:mlp", IMAGE)
    quantized = dynamic(model, tmp_path)
    (image,) = IMAGE.example(64)
    for size in (1e-3, 1.0, 1e3):
        expected, got = answer(model, image * size), answer(quantized, image * size)
        assert (got - expected).norm() / expected.norm() < 0.02


def test_float_weights_do_not_stay_in_memory(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "networks:mlp", IMAGE)
    kept = graphs_with_weights()
    dynamic(model, tmp_path)
    assert not graphs_with_weights() - kept


def test_a_new_graph_is_not_read_to_be_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"length": 12}  # of samples of `val`; an export records it without any, too
    monkeypatch.setattr(Context, "typical_sizes", lambda self, signature: sizes)
    model = build_model(tmp_path / "source", "networks:sequence", TOKENS)
    quantized = dynamic(model, tmp_path)
    read = GraphModel.from_directory(quantized.path)
    expected = read.macs(), read.macs(sizes), read.parameters()
    monkeypatch.delattr(GraphModel, "program")
    assert (quantized.macs(), quantized.macs(sizes), quantized.parameters()) == expected
    assert 0 < expected[0] < expected[1]


def graphs_with_weights() -> set[int]:
    gc.collect()
    # By type: an object of torch warns where it is asked for its class.
    graphs = (found for found in gc.get_objects() if issubclass(type(found), GraphModule))
    return {id(graph) for graph in graphs if any(True for _ in graph.parameters())}


@pytest.mark.slow
def test_a_batch_without_rows_is_answered(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "networks:mlp", IMAGE)
    (image,) = IMAGE.example(3)
    quantized, exported = both(model, tmp_path)
    served = load_graph(quantized.payload_path, {}, 1)
    rows = len(answer(model, image)[0])
    for got in (answer(quantized, image[:0]), answer(exported, image[:0])):
        assert got.shape == (0, rows)
    assert served([image[:0].numpy()])[0].shape == (0, rows)
    torch.testing.assert_close(
        answer(quantized, image), torch.from_numpy(served([image.numpy()])[0])
    )


@pytest.mark.parametrize(
    ("factory", "signature"), [("networks:mlp", IMAGE), ("networks:sequence", TOKENS)]
)
def test_onnxruntime_computes_in_integers_what_torch_does(
    tmp_path: Path, factory: str, signature: Signature
) -> None:
    model = build_model(tmp_path / "source", factory, signature)
    quantized, exported = both(model, tmp_path)
    inputs = signature.example(5)
    expected = answer(quantized, *inputs)
    # The same integers in both: sums of floats in another order remain.
    assert torch.allclose(answer(exported, *inputs), expected, rtol=0, atol=1e-5)
    assert not torch.equal(expected, answer(model, *inputs))
    assert exported.manifest.facts["float_kernels"] == {}
    products = quantized.manifest.facts["quantized_operators"]["linear"]
    assert sum(exported.manifest.facts["integer_kernels"].values()) == products
    assert quantized.parameters() == exported.parameters() == model.parameters()
    assert quantized.macs() == exported.macs() == model.macs()


@pytest.mark.slow
def test_rows_of_a_table_are_looked_up_as_integers(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "networks:sequence", TOKENS)
    table = model.load().embedding.weight.detach()
    quantized, exported = both(model, tmp_path)
    (lookup, _) = [
        node
        for node in quantized.program().graph.nodes
        if node.target is torch.ops.aten.embedding.default
    ]
    assert lookup.meta["val"].dtype is torch.int8
    assert exported.manifest.facts["operators"]["Gather"] == 2
    scale_V1 = table.abs().amax(1, keepdim=True) / 127
    rounded = (table / scale_V1).round() * scale_V1
    step = (rounded - table).abs().max()
    assert 0 < step <= scale_V1.max() / 2
    as_floats = dynamic(model, tmp_path / "floats", embeddings=False)
    assert as_floats.manifest.facts["quantized_operators"] == {"linear": 2}
    assert as_floats.manifest.facts["float_modules"] == ["embedding"]
    tokens = torch.arange(50)[None]
    from_table, from_integers = answer(as_floats, tokens), answer(quantized, tokens)
    assert not torch.equal(from_table, from_integers)


@pytest.mark.slow
def test_convolutions_stay_float(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "networks:mobilenet", IMAGE)
    quantized, exported = both(model, tmp_path)
    assert quantized.manifest.facts["quantized_operators"] == {"linear": 1}
    assert "stem.0" in quantized.manifest.facts["float_modules"]
    assert exported.manifest.facts["integer_kernels"] == {"DynamicQuantizeMatMul": 1}


def test_nothing_to_quantize_is_refused(tmp_path: Path) -> None:
    rows = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))
    model = build_model(tmp_path / "source", "networks:unquantizable", rows)
    with pytest.raises(StageFailed, match=r"no operator could be quantized.*quantize_static"):
        QuantizeDynamic()(model, Context(root=tmp_path / "int8"))
    assert not (tmp_path / "int8").exists()


@pytest.mark.slow
def test_products_with_7_bit_weights_fit_in_16_bits(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "networks:sequence", TOKENS)
    _, exported = both(model, tmp_path, weight_bits=7)
    graph = onnx.load(exported.payload_path).graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    products = [node for node in graph.node if node.op_type == "MatMulInteger"]
    largest = {np.abs(to_array(tensors[node.input[1]])).max() for node in products}
    assert len(products) == 2 and largest == {63}


@pytest.mark.slow
def test_excluded_modules_stay_float(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "networks:sequence", TOKENS)
    quantized, exported = both(model, tmp_path, exclude=["down", "embedding"])
    assert quantized.manifest.facts["quantized_operators"] == {"linear": 1}
    assert quantized.manifest.facts["float_modules"] == ["down", "embedding"]
    assert exported.manifest.facts["operators"]["MatMulInteger"] == 1


@pytest.mark.soak  # as the graphs of test_quantize_static.py and test_smoothquant.py
@pytest.mark.slow
def test_a_fresh_process_answers_alike(
    tmp_path: Path, assert_same_in_fresh_process: FreshProcessCheck
) -> None:
    model = build_model(tmp_path / "source", "networks:sequence", TOKENS)
    assert_same_in_fresh_process(dynamic(model, tmp_path), *TOKENS.example(3))


HOSTILE = {"networks:mlp": IMAGE, "sequences:Encoder": TOKENS}


@pytest.mark.slow
@pytest.mark.parametrize("factory", HOSTILE)
def test_with_row_ranges_outputs_do_not_depend_on_other_rows(tmp_path: Path, factory: str) -> None:
    signature = HOSTILE[factory]
    if factory == "sequences:Encoder":
        signature = signature.model_copy(
            update={"outputs": (OutputSpec(name="logits"), OutputSpec(name="states"))}
        )
    model = build_model(tmp_path / "source", factory, signature)
    real = signature.example(6)[0]
    hostile = real * 1000 if real.is_floating_point() else 49 - real
    beside = torch.cat([real[:3], hostile[3:]])
    # That a range of the whole tensor lets them depend is shown for one of them.
    for name in ("tensor", "row")[factory != "networks:mlp" :]:
        quantized, exported = both(model, tmp_path / name, activation_range=name)
        for made in (quantized, exported):
            same = torch.equal(answer(made, real)[:3], answer(made, beside)[:3])
            assert same == (name == "row"), made
    # The same integers in both: sums of floats in another order remain.
    expected = answer(quantized, real)
    assert torch.allclose(answer(exported, real), expected, rtol=0, atol=1e-5)
    reference = answer(model, real)
    assert 0 < (expected - reference).norm() / reference.norm() < 0.03
    kernels = exported.manifest.facts["integer_kernels"]
    assert kernels == {"MatMulInteger": quantized.manifest.facts["quantized_operators"]["linear"]}
    assert quantized.parameters() == model.parameters() and quantized.macs() == exported.macs()


@pytest.mark.slow
def test_with_row_ranges_rows_of_any_size_and_of_zeros_keep_their_outputs(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "networks:mlp", IMAGE)
    _, exported = both(model, tmp_path, activation_range="row")
    for size in (1e-8, 1.0, 1e8):
        image = IMAGE.example(4)[0] * size
        image[1] = 0
        expected, got = answer(model, image), answer(exported, image)
        assert (got[1] - expected[1]).norm() / expected[1].norm() < 0.02, size
        assert (got - expected).norm() / expected.norm() < 0.02, size


@pytest.mark.slow
def test_recurrent_layers_stay_float_with_row_ranges(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "recurrences:classifier", TOKENS)
    quantized, exported = both(model, tmp_path, activation_range="row")
    assert quantized.manifest.facts["quantized_operators"].keys() == {"embedding", "linear"}
    assert "DynamicQuantizeLSTM" not in exported.manifest.facts["operators"]
    assert not Context(root=tmp_path).batch_dependence(exported).depends


@needs_32_bit_sums
@pytest.mark.soak  # tests/export/aotinductor/test_lowering.py has rows of a sequence
@pytest.mark.slow
def test_aotinductor_multiplies_rows_of_integers(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "networks:mlp", IMAGE)
    settings = {"activation_range": "row", "target": "inductor-cpu"}
    quantized = dynamic(model, tmp_path, **settings)
    compiled = ExportAot()(quantized, Context(root=tmp_path / "aot"))
    assert compiled.manifest.facts["float_kernels"] == {}
    kernels = compiled.manifest.facts["integer_kernels"]  # oneDNN's, or torch's int_mm
    products = quantized.manifest.facts["quantized_operators"]["linear"]
    assert sum(kernels.values()) == products, kernels
    (image,) = IMAGE.example(6)
    with compiled.open() as predict:
        expected = predict(image)[0]
        beside = predict(torch.cat([image[:3], 1000 * image[3:]]))[0]
    assert torch.equal(expected[:3], beside[:3])
    assert torch.allclose(expected, answer(quantized, image), rtol=0, atol=1e-5)
