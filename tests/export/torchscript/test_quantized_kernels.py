from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from compress.artifacts.artifact import Artifact
from compress.artifacts.graph_model import GraphModel
from compress.common.errors import StageFailed
from compress.common.signature import Signature
from compress.core.context import Context
from compress.core.stage import Stage
from compress.quantization.stages.dynamic import QuantizeDynamic
from compress.quantization.stages.static import QuantizeStatic
from compress.quantization.stages.weight_only import QuantizeWeights
from export.torchscript.file_io import load
from export.torchscript.lowering import Grid
from export.torchscript.stage import ExportTorchScript, TorchScriptModel
from tests.export.builders import EXACT_BITS, IMAGE, TOKENS, needs_32_bit_sums, network, samples


def quantized(root: Path, factory: str, signature: Signature, stage: Stage) -> GraphModel:
    model = network(root / "source", factory, signature)
    return stage(model, Context(root=root / "int8", data=samples(*signature.example(32))))


def scripted(model: GraphModel, root: Path) -> TorchScriptModel:
    return ExportTorchScript()(model, Context(root=root))


def answer(model: Artifact, *inputs: torch.Tensor) -> torch.Tensor:
    with model.open() as predict:
        return predict(*inputs)[0]


@pytest.fixture(scope="module")
def mobilenet(tmp_path_factory: pytest.TempPathFactory) -> tuple[GraphModel, TorchScriptModel]:
    root = tmp_path_factory.mktemp("mobilenet")
    model = quantized(
        root,
        "networks:mobilenet",
        IMAGE,
        QuantizeStatic(calibration_samples=32, weight_bits=EXACT_BITS),
    )
    return model, scripted(model, root / "ts")


def test_every_heavy_operator_is_an_integer_kernel_with_the_graphs_answers(
    mobilenet: tuple[GraphModel, TorchScriptModel],
) -> None:
    graph, torchscript = mobilenet
    facts = torchscript.manifest.facts
    assert facts["integer_kernels"] == {
        "conv2d": 3,
        "linear_with_input_q_dq_qweight_dq_output_fp32": 1,
    }
    assert facts["float_kernels"] == {}
    for batch in (1, 5):
        (image,) = IMAGE.example(batch, seed=batch)
        expected = answer(graph, image)
        assert torch.allclose(answer(torchscript, image), expected, rtol=0, atol=1e-6)
    assert torchscript.parameters() == graph.parameters()
    assert torchscript.macs() == graph.macs()


def test_equal_runs_give_equal_bytes(
    mobilenet: tuple[GraphModel, TorchScriptModel], tmp_path: Path
) -> None:
    graph, torchscript = mobilenet
    assert scripted(graph, tmp_path / "again").digest == torchscript.digest


def test_torch_alone_loads_it_in_a_fresh_process(
    mobilenet: tuple[GraphModel, TorchScriptModel],
    tmp_path: Path,
    fresh_torch: Callable[[str], str],
) -> None:
    _, torchscript = mobilenet
    (image,) = IMAGE.example(3)
    torch.save({"image": image, "expected": answer(torchscript, image)}, tmp_path / "answer.pt")
    assert (
        fresh_torch(f"""
import torch
saved = torch.load({str(tmp_path / "answer.pt")!r})
module = torch.jit.load({str(torchscript.payload_path)!r})
print(torch.equal(module(saved["image"]), saved["expected"]))
""")
        == "True"
    )


def test_what_is_no_kernel_stays_float_between_integers(tmp_path: Path) -> None:
    stage = QuantizeStatic(calibration_samples=32, weight_bits=EXACT_BITS)
    graph = quantized(tmp_path, "networks:branches", IMAGE, stage)
    torchscript = scripted(graph, tmp_path / "ts")
    (image,) = IMAGE.example(5)
    expected = answer(graph, image)
    # A kernel may round a number in the middle of two steps to the other one.
    step = float(expected.max() - expected.min()) / 255
    assert (answer(torchscript, image) - expected).abs().max() < 3 * step


@pytest.mark.parametrize("static", [True, pytest.param(False, marks=needs_32_bit_sums)])
def test_products_of_sequences_give_floats(tmp_path: Path, static: bool) -> None:
    stage = (
        QuantizeStatic(calibration_samples=32, weight_bits=EXACT_BITS)
        if static
        else QuantizeDynamic()
    )
    graph = quantized(tmp_path, "networks:sequence", TOKENS, stage)
    torchscript = scripted(graph, tmp_path / "ts")
    (kernel,) = torchscript.manifest.facts["integer_kernels"].items()
    assert kernel == (
        "linear_with_input_q_dq_qweight_dq_output_fp32" if static else "linear_dynamic",
        2,
    )
    tokens = torch.arange(33).view(3, 11)
    assert torch.allclose(answer(torchscript, tokens), answer(graph, tokens), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_few_bits_stay_packed(tmp_path: Path) -> None:
    stage = QuantizeWeights(group_size=16, embedding_bits=4)
    graph = quantized(tmp_path, "networks:sequence", TOKENS, stage)
    torchscript = scripted(graph, tmp_path / "ts")
    tokens = torch.arange(33).view(3, 11)
    assert torch.equal(answer(torchscript, tokens), answer(graph, tokens))
    state = load(torchscript.payload_path).state_dict()
    assert {t.dtype for t in state.values() if t.numel() > 256} == {torch.uint8}


def test_other_integers_are_refused() -> None:
    graph = torch.fx.Graph()
    quantize = torch.ops.quantized_decomposed.quantize_per_tensor.default
    node = graph.call_function(quantize, (None, 0.1, 0, -128, 127, torch.int8))
    with pytest.raises(StageFailed, match="unsigned 8 bits, found int8 from -128 to 127"):
        Grid.from_node(node)


def test_what_follows_a_convolution_may_be_flattened(tmp_path: Path) -> None:
    graph = quantized(
        tmp_path,
        "networks:flattened",
        IMAGE,
        QuantizeStatic(calibration_samples=32, weight_bits=EXACT_BITS),
    )
    torchscript = scripted(graph, tmp_path / "ts")
    kernels = torchscript.manifest.facts["integer_kernels"]
    assert kernels["conv2d"] == 1
    assert sum(kernels.values()) == 2, "the linear layer too"
    x = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(answer(torchscript, x), answer(graph, x), rtol=0, atol=1e-5)
