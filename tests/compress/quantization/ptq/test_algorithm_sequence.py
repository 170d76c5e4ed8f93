import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from compress.artifacts.recipe import Recipe
from compress.common.errors import StageFailed
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.core.context import Context
from compress.data.splits import Splits
from compress.graph.torch_export import export_program
from compress.quantization.algorithms import layer_corrections
from compress.quantization.algorithms.layer_corrections import (
    correct_bias_,
    equalize_,
    input_rows,
    sum_rows,
    weight_matrix,
)
from compress.quantization.config.dtype_scheme import scheme_for
from compress.quantization.pt2e.graph_capture import LayerInputs, functionalize
from compress.quantization.pt2e.observer_ranges import (
    bias_of,
    fit_ranges_,
    layers_of,
    observer_of,
    set_weight_,
    skip_observers,
    weight_of,
)
from compress.quantization.pt2e.quantizer import OnnxRuntimeQuantizer
from compress.quantization.pt2e.torchao_api import MinMaxObserver, convert_pt2e, prepare_pt2e
from compress.quantization.ptq.calibrate import Corrections, calibrate_
from compress.quantization.stages.static import QuantizeStatic
from tests.compress.quantization.builders import IMAGE, NETWORKS, build_model
from tests.compress.quantization.conftest import FreshProcessCheck


@functools.cache
def program(factory: str) -> torch.export.ExportedProgram:
    torch.manual_seed(0)
    module = Recipe(factory=f"networks:{factory}").build(NETWORKS).eval()
    return functionalize(export_program(module, IMAGE))


def prepared(factory: str, weight_bits: int = 3) -> fx.GraphModule:
    graph = program(factory).module(check_guards=False)
    return prepare_pt2e(
        graph, OnnxRuntimeQuantizer(scheme_for("onnxruntime-cpu", weight_bits), "minmax")
    )


def sample(digits: Splits) -> list:
    return list(digits.calibration(240, 0))


@pytest.mark.parametrize("factory", ["depthwise", "two_additions"])
def test_ranges_are_those_of_torchao_and_layouts_stay(factory: str, digits: Splits) -> None:
    graph, alone, batches = prepared(factory), prepared(factory), sample(digits)
    layouts = {name: tensor.stride() for name, tensor in graph.state_dict().items()}
    calibrate_(graph, IMAGE, batches, lambda seen: None)
    for batch in batches:
        alone(*batch.inputs)
    observers = {n: m for n, m in alone.named_modules() if type(m) is MinMaxObserver}
    assert len(observers) > 3
    for name, expected in observers.items():
        found: Any = graph.get_submodule(name)
        torch.testing.assert_close(found.calculate_qparams(), expected.calculate_qparams())
    assert {name: tensor.stride() for name, tensor in graph.state_dict().items()} == layouts


def rounded(digits: Splits, corrections: Corrections, factory: str = "depthwise") -> fx.GraphModule:
    graph, batches = prepared(factory), sample(digits)
    calibrate_(graph, IMAGE, batches, lambda seen: None)
    fit_ranges_(graph)
    corrections.round_(graph, batches)
    return convert_pt2e(graph)


def off(digits: Splits, graph: fx.GraphModule, factory: str = "depthwise") -> torch.Tensor:
    """Return how far answers to held-out images are off, relative to their spread."""
    images = torch.cat([batch.inputs[0] for batch in digits.batches("val")])
    with torch.no_grad():
        expected = program(factory).module(check_guards=False)(images)
        return (graph(images) - expected) / expected.std()


@pytest.mark.parametrize("factory", ["depthwise", "mlp"])
def test_corrections_bring_answers_nearer(digits: Splits, factory: str) -> None:
    nearest, shifted, adaptive, compensated = (
        off(digits, rounded(digits, corrections, factory), factory)
        for corrections in (
            Corrections(),
            Corrections(bias_correction=True),
            Corrections(rounding="adaround"),
            Corrections(rounding="gptq", bias_correction=True),
        )
    )
    assert shifted.mean(0).abs().max() < 0.2 * nearest.mean(0).abs().max()
    assert shifted.norm() < nearest.norm()
    assert adaptive.norm() < 0.75 * nearest.norm()
    assert compensated.norm() < 0.75 * nearest.norm()
    assert compensated.norm() < 0.95 * shifted.norm()


def test_conversion_keeps_the_integers_that_adaround_chose(
    digits: Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = []

    def noted(*arguments: object) -> torch.Tensor:
        chosen.append(adaptive(*arguments))
        return chosen[-1]

    adaptive = layer_corrections.round_adaptively
    monkeypatch.setattr(layer_corrections, "round_adaptively", noted)
    corrections = Corrections(rounding="adaround", rounding_steps=50)
    converted = rounded(digits, corrections)
    held = [t for _, t in converted.named_buffers() if t.dtype is torch.int8 and t.dim() > 1]
    assert len(held) == len(chosen) == 4
    for integers, expected in zip(held, chosen, strict=True):
        assert torch.equal(integers.flatten().float(), expected.flatten())
    assert 0.05 < corrections.facts["rounded_away"] < 0.5


@pytest.mark.parametrize("groups", [1, 2])
def test_gptq_lets_later_weights_make_up_for_those_rounded_before(groups: int) -> None:
    torch.manual_seed(0)
    # Neighbouring pixels are alike, and one channel is always 0: its moments are singular.
    images = torch.randn(16, 4, 3, 3).repeat_interleave(4, 2).repeat_interleave(4, 3)
    images[:, 1] = 0
    layer = torch.nn.Conv2d(4, 6, 3, groups=groups)
    image = TensorSpec(name="x", shape=("batch", 4, 12, 12))
    signature = Signature(inputs=(image,), outputs=(OutputSpec(name="y"),))
    graph = functionalize(export_program(layer.eval(), signature)).module(check_guards=False)
    quantizer = OnnxRuntimeQuantizer(scheme_for("onnxruntime-cpu", 4), "minmax")
    graph = prepare_pt2e(graph, quantizer)
    graph(images)
    (node,) = layers_of(graph)
    scale_O, _ = observer_of(graph, node.args[1]).calculate_qparams()
    scale_O = scale_O.view(-1, 1, 1, 1)
    nearest = (layer.weight / scale_O).round() * scale_O
    share = layer_corrections.gptq_(graph, node, [(images, images)], bias_correction=True)
    found = weight_of(graph, node)
    steps = found / scale_O
    assert torch.allclose(steps, steps.round(), atol=1e-4)
    assert steps.abs().max() <= 7
    assert share == pytest.approx(float((found - nearest).abs().gt(1e-5).float().mean()))
    assert share > 0.05

    def error(weight: torch.Tensor) -> float:
        off = F.conv2d(images, (weight - layer.weight).detach(), groups=groups)
        return float((off - off.mean((0, 2, 3), keepdim=True)).square().mean())

    assert error(found) < 0.5 * error(nearest)


@pytest.mark.parametrize(("bias", "offset", "most"), [(True, 1000.0, 1.0), (False, 0.5, 0.6)])
def test_gptq_of_inputs_far_from_zero(bias: bool, offset: float, most: float) -> None:
    torch.manual_seed(0)
    # Products of values near 1000 lose a variance of 1e-4; without a bias the mean is an error too.
    rows = offset + torch.randn(512, 64) * (0.01 if bias else 0.5)
    layer = torch.nn.Linear(64, 8, bias=bias)
    signature = Signature(
        inputs=(TensorSpec(name="x", shape=("batch", 64)),), outputs=(OutputSpec(name="y"),)
    )
    graph = functionalize(export_program(layer.eval(), signature)).module(check_guards=False)
    graph = prepare_pt2e(graph, OnnxRuntimeQuantizer(scheme_for("onnxruntime-cpu", 4), "minmax"))
    graph(rows)
    (node,) = layers_of(graph)
    scale_O, _ = observer_of(graph, node.args[1]).calculate_qparams()
    nearest = (layer.weight / scale_O[:, None]).round() * scale_O[:, None]
    layer_corrections.gptq_(graph, node, [(rows, rows)], bias_correction=True)

    def error(weight: torch.Tensor) -> float:
        off = F.linear(rows - offset * bias, (weight - layer.weight).detach())
        return float((off - off.mean(0) * bias).square().mean())

    assert error(weight_of(graph, node)) < most * error(nearest)


def test_values_that_memory_has_no_room_for_are_read_from_files(
    digits: Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    corrected = []
    for room in (LayerInputs.MEMORY, 0):
        monkeypatch.setattr(LayerInputs, "MEMORY", room)
        graph = prepared("depthwise")
        calibrate_(graph, IMAGE, sample(digits), lambda _: None)
        Corrections(rounding="gptq", bias_correction=True).round_(graph, sample(digits))
        corrected.append(graph.state_dict())
    assert all(torch.equal(x, corrected[1][name]) for name, x in corrected[0].items())


def test_equalized_channels_share_a_range_and_answers_stay(digits: Splits) -> None:
    graph = prepared("depthwise")
    assert len(equalize_(graph)) == 2
    images = sample(digits)[0].inputs[0]
    with torch.no_grad():
        got = graph(images)
        expected = program("depthwise").module(check_guards=False)(images)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    first, depthwise, pointwise, _ = (weight_of(graph, layer) for layer in layers_of(graph))
    made_O, read_O = first.flatten(1).abs().amax(1), depthwise.flatten(1).abs().amax(1)
    torch.testing.assert_close(made_O, read_O, rtol=1e-3, atol=0)
    torch.testing.assert_close(read_O, pointwise.abs().amax((0, 2, 3)), rtol=1e-3, atol=0)


def test_channels_that_are_zero_or_never_read_keep_their_weights(digits: Splits) -> None:
    graph = prepared("depthwise")
    first, depthwise, *_ = layers_of(graph)
    made, read = weight_of(graph, first).clone(), weight_of(graph, depthwise).clone()
    made[0], read[1], made[2], read[2] = 0, 0, 0, 0
    set_weight_(graph, first, made)
    set_weight_(graph, depthwise, read)
    images = sample(digits)[0].inputs[0]
    with torch.no_grad():
        expected = graph(images)
        equalize_(graph)
        torch.testing.assert_close(graph(images), expected, rtol=1e-4, atol=1e-5)
    for layer, before in ((first, made), (depthwise, read)):
        after = weight_of(graph, layer)
        assert after.isfinite().all()
        assert torch.equal(after[:3] == 0, before[:3] == 0)
    assert torch.equal(weight_of(graph, first)[1], made[1])


class ReadTwice(torch.nn.Module):
    """What a convolution makes is read by another one, and added to what that makes."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Conv2d(i, 4, 3, padding=1) for i in (1, 4))
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.first(x)
        read = made if self.where == "no relu" else made.relu()
        return self.second(read) + (made if self.where == "before the relu" else read)


@pytest.mark.parametrize("where", ["no relu", "before the relu", "behind the relu"])
def test_a_convolution_with_two_readers_is_not_equalized(where: str) -> None:
    graph = functionalize(export_program(ReadTwice(where).eval(), IMAGE)).module(check_guards=False)
    quantizer = OnnxRuntimeQuantizer(scheme_for("onnxruntime-cpu"), "minmax")
    assert equalize_(prepare_pt2e(graph, quantizer)) == []


def test_equalized_modules_are_named() -> None:
    assert equalize_(prepared("depthwise")) == ["layers.0.0", "layers.1.0"]


def test_a_corrected_bias_takes_back_the_mean_shift(digits: Splits) -> None:
    graph, batches = prepared("depthwise"), sample(digits)
    calibrate_(graph, IMAGE, batches, lambda seen: None)
    fit_ranges_(graph)
    floats = [torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(n)) for n in (3, 5)]
    layer = layers_of(graph)[0]
    weight, before = weight_of(graph, layer), bias_of(graph, layer)
    scale = observer_of(graph, layer.args[1]).calculate_qparams()[0].view(-1, 1, 1, 1)
    held = (weight / scale).round().clamp(-3, 3) * scale
    pairs = [(x, (4 * x).round() / 4) for x in floats]
    options = layer.args[3:]
    exact, found = (
        torch.cat([layer.target(p[i], w, None, *options).double() for p in pairs])
        for i, w in ((0, weight), (1, held))
    )
    correct_bias_(graph, layer, weight, pairs)
    expected = before.double() + (exact - found).mean((0, 2, 3))
    torch.testing.assert_close(bias_of(graph, layer).double(), expected, rtol=1e-5, atol=1e-7)
    assert (expected - before).abs().max() > 1e-3


def test_layers_around_relu6_are_not_equalized() -> None:
    assert not equalize_(prepared("mobilenet"))


def test_an_equalized_network_loses_less_with_one_scale_for_all(digits: Splits) -> None:
    errors = []
    for equalize in (False, True):
        graph = prepared("depthwise", weight_bits=8)
        if equalize:
            equalize_(graph)
        for layer in layers_of(graph)[:3]:
            observer, weight = observer_of(graph, layer.args[1]), weight_of(graph, layer)
            step = weight.abs().max() / observer.quant_max
            graph.get_parameter(skip_observers(layer.args[1]).target).data = (
                weight / step
            ).round() * step
        errors.append(off(digits, graph).norm())
    assert errors[1] < 0.7 * errors[0]


@pytest.mark.parametrize(
    ("shape", "weight", "options"),
    [
        ((2, 6, 9, 8), (4, 6, 3, 3), {"stride": 2, "padding": (1, 0)}),
        ((2, 6, 9, 8), (6, 1, 3, 3), {"groups": 6, "padding": "same"}),
        ((2, 6, 9, 8), (4, 3, 2, 3), {"groups": 2, "padding": "same", "dilation": (2, 1)}),
        ((2, 6, 9), (4, 6, 3), {"stride": 2, "padding": 1, "dilation": 2}),
        ((2, 6, 5, 4, 7), (4, 3, 3, 2, 2), {"groups": 2, "stride": (1, 2, 1), "padding": 1}),
        ((2, 5, 6), (4, 6), {}),
    ],
)
def test_a_layer_is_a_product_of_rows(shape: tuple, weight: tuple, options: dict) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(weight))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            run = {2: F.linear, 3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[len(weight)]
            return run(x, self.weight, **options)

    module, x = Layer(), torch.randn(shape)
    graph = functionalize(torch.export.export(module, (x,))).graph
    layer = next(n for n in graph.nodes if "conv" in str(n.target) or "linear" in str(n.target))
    weight_GOI = weight_matrix(layer, module.weight.detach())
    answers_GNO = input_rows(layer, x, weight[2:]) @ weight_GOI.mT
    expected = module(x).detach()
    if len(weight) > 2:
        expected = expected.movedim(1, -1)
    got = answers_GNO.permute(1, 0, 2).reshape(expected.shape)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    sums_GI, rows = sum_rows(layer, x, weight[2:])
    assert rows == answers_GNO.shape[1]
    summed_GO1 = weight_GOI @ sums_GI[..., None].float()
    torch.testing.assert_close(summed_GO1[..., 0], answers_GNO.sum(1), rtol=1e-4, atol=1e-5)


class LargestTensor(TorchDispatchMode):
    """Records the bytes of the largest storage that an operator returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **kwargs or {})
        if isinstance(output, torch.Tensor):
            self.largest = max(self.largest, output.untyped_storage().nbytes())
        return output


def test_rows_of_large_images_are_chosen_before_they_are_gathered() -> None:
    # All patches of 3x3 pixels would take nine times the input.
    module, x = torch.nn.Conv2d(4, 4, 3, padding=1, groups=4), torch.randn(2, 4, 256, 256)
    graph = functionalize(torch.export.export(module, (x,))).graph
    layer = next(n for n in graph.nodes if "conv" in str(n.target))
    with LargestTensor() as recorded:
        rows_GNI = input_rows(layer, x, (3, 3))
        sum_rows(layer, x, (3, 3))
    assert rows_GNI.shape == (4, 256, 9)
    padded = 4 * 2 * 4 * 258**2
    assert recorded.largest <= padded


@pytest.mark.slow
def test_a_corrected_model_is_reported_and_loads_again(
    tmp_path: Path, digits: Splits, assert_same_in_fresh_process: FreshProcessCheck
) -> None:
    model = build_model(tmp_path / "source", "networks:depthwise")
    settings = {"equalize": True, "bias_correction": True, "rounding": "adaround"}
    stage = QuantizeStatic(calibration_samples=120, rounding_steps=50, **settings)
    small = stage(model, Context(root=tmp_path / "int8", data=digits))
    assert small.manifest.facts["equalized_pairs"] == 2
    assert_same_in_fresh_process(small, *IMAGE.example(3))
    with pytest.raises(StageFailed, match="quantize_static needs data"):
        stage(model, Context(root=tmp_path / "none"))
