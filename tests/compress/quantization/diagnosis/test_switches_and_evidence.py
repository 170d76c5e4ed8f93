"""Switches compute what the integer graph does, and evidence tells what was put in."""

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from compress import Signature, Splits, TensorSpec
from compress.common.process import gc_disabled
from compress.data.batch import Batch
from compress.quantization.config.dtype_scheme import scheme_for
from compress.quantization.diagnosis.diagnosis import LayerEvidence, SwitchedGraph, collect_evidence
from compress.quantization.pt2e.graph_capture import capture, tap_activations
from compress.quantization.pt2e.quantizer import OnnxRuntimeQuantizer
from compress.quantization.ptq.calibrate import Corrections, convert, prepare_calibrated

SIGNATURE = Signature(inputs=(TensorSpec(name="x", shape=("batch", 3, 6, 6)),))


class Net(nn.Module):
    """Two convolutions with an addition, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.second(x) + x)
        return self.head(x.mean((2, 3)))


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 3, 6, 6, generator=generator)
    splits = Splits({"val": torch.utils.data.TensorDataset(x, torch.zeros(32))}, 16)
    return [*splits.batches("val")]


def prepared(net: Net):
    quantizer = OnnxRuntimeQuantizer(scheme_for("onnxruntime-cpu"), "minmax")
    common = (SIGNATURE, quantizer, batches(), lambda samples: None, Corrections())
    return prepare_calibrated(capture(net, SIGNATURE), *common)


def test_switches_that_are_on_compute_the_integer_graph(net: Net) -> None:
    (x, *_), *_ = (batch.inputs for batch in batches())
    switched = SwitchedGraph.from_prepared(prepared(net))
    integers = convert(prepared(net))
    expected = integers(x)
    assert torch.allclose(switched.graph(x), expected, atol=1e-5)
    assert not torch.allclose(switched.graph(x), net(x), atol=1e-5)


def test_switches_that_are_off_compute_the_float_model(net: Net) -> None:
    (x, *_), *_ = (batch.inputs for batch in batches())
    switched = SwitchedGraph.from_prepared(prepared(net))
    assert {"first", "second", "head"} <= {*switched.layers}
    assert any(name.startswith("add of") for name in switched.layers)
    rounded = switched.graph(x)
    with switched.in_float(switched.layers) as graph:
        assert torch.allclose(graph(x), net(x), atol=1e-5)
    with switched.in_float(["second"]) as graph:
        one = graph(x)
    assert not torch.equal(one, rounded)
    assert torch.equal(switched.graph(x), rounded), "the switches are on again"


def test_weights_alone_can_be_put_back(net: Net) -> None:
    (x, *_), *_ = (batch.inputs for batch in batches())
    switched = SwitchedGraph.from_prepared(prepared(net))
    with switched.in_float(switched.layers, ("activation", "bias")) as graph:
        only_weights = graph(x)
    rounded = copy.deepcopy(net)
    with torch.no_grad():
        for layer in (rounded.first, rounded.second, rounded.head):
            flat = layer.weight.flatten(1)
            scale = (flat.abs().amax(1, keepdim=True) / 127).view(
                -1, *[1] * (layer.weight.dim() - 1)
            )
            layer.weight.copy_((layer.weight / scale).round() * scale)
    assert torch.allclose(only_weights, rounded(x), atol=1e-5)


def test_the_layer_that_changes_the_outputs_most_is_known(net: Net) -> None:
    unlike = copy.deepcopy(net)
    with torch.no_grad():
        # relu(first) is read by the addition too, so it is the head's input that is scaled.
        unlike.head.weight[:, 0] *= 300
        unlike.head.weight[:, 1:] /= 50
    graph = prepared(unlike)
    evidence = collect_evidence(SwitchedGraph.from_prepared(graph), batches())
    assert all(e.effect > 0 for e in evidence.values())
    assert evidence["head"].own.sqnr_db > 10


def test_channels_of_other_ranges_are_found() -> None:
    evidence = LayerEvidence()
    x = torch.randn(64, 8, 5, 5, generator=torch.Generator().manual_seed(0))
    evidence.add_input(x, 1)
    assert evidence.channel_ratio() < 2
    assert evidence.outlier_ratio() < 2
    x[:, 3] *= 100
    unlike = LayerEvidence()
    unlike.add_input(x, 1)
    assert 70 < unlike.channel_ratio() < 130
    assert unlike.outlier_ratio() < 2


def test_outliers_widen_the_range() -> None:
    x = torch.randn(64, 8, 5, 5, generator=torch.Generator().manual_seed(0))
    x[0, 0, 0, 0] = 200.0
    evidence = LayerEvidence()
    evidence.add_input(x, 1)
    assert evidence.outlier_ratio() > 20
    assert evidence.channel_ratio() < 2


def test_values_outside_of_a_range_are_counted() -> None:
    evidence = LayerEvidence()
    evidence.add_input(torch.linspace(0, 1, 1000).view(10, 100), 1)
    assert evidence.share_outside(0.0, 1.0) == 0
    assert evidence.share_outside(-3.0, 0.9) == pytest.approx(0.1, abs=0.005)
    assert evidence.share_outside(0.25, 0.75) == pytest.approx(0.5, abs=0.005)


def test_a_mean_error_is_a_shift() -> None:
    generator = torch.Generator().manual_seed(0)
    expected = torch.zeros(100, 8)
    noise = torch.randn(100, 8, generator=generator)
    plain, shifted = LayerEvidence(), LayerEvidence()
    plain.add_error(expected, noise, 1)
    shifted.add_error(expected, noise + 2, 1)
    assert plain.shift() < 0.3
    assert shifted.shift() == pytest.approx(2, abs=0.3)


def test_what_layers_are_measured_with_is_freed_at_once(net: Net, monkeypatch) -> None:
    switched, probes = SwitchedGraph.from_prepared(prepared(net)), []
    zeros_like = torch.zeros_like

    def recorded(*args: Any, **options: Any) -> torch.Tensor:
        zeros = zeros_like(*args, **options)
        if options.get("requires_grad"):
            probes.append(weakref.ref(zeros))
        return zeros

    monkeypatch.setattr(torch, "zeros_like", recorded)
    with gc_disabled():
        collect_evidence(switched, batches())
        assert probes
        assert not any(probe() is not None for probe in probes)


def test_an_operator_that_fails_is_named_with_its_line_of_code(net: Net) -> None:
    graph = capture(net, SIGNATURE)
    layers = [node for node in graph.graph.nodes if node.target is torch.ops.aten.conv2d.default]
    batch = Batch((torch.zeros(2, 4, 6, 6),), None)
    with pytest.raises(RuntimeError, match=r"While executing (?s:.*)self\.first\(x\)"):
        tap_activations(graph, [batch], layers, lambda node, source: None)
