"""An int8 file of an ill-conditioned graph: what its rounding explains, and what it does not."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.errors import StageFailed
from compress.common.forward import Predictor, flatten_outputs
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.data.splits import Splits
from compress.export.exporter import ALLOWED
from compress.export.onnx.stage import ExportOnnx
from compress.export.parity import sample_parity
from compress.export.parity.sample_parity import (
    FEWEST_SAMPLES,
    LARGEST_SPREAD,
    QUANTIZED,
    SAMPLES,
    Float64Reference,
    RoundingNoise,
    SampleErrors,
    check_on_samples,
    is_quantizer,
    limits_of_noise,
    noise_on,
    val_inputs,
)
from compress.quantization.stages.static import QuantizeStatic
from tests.export.builders import EXACT_BITS, network
from tests.export.parity.rounded_nets import disturbed_rows, rounded_net

ROWS = disturbed_rows()
Change = Callable[[torch.Tensor, float], torch.Tensor]
FAULTS: dict[str, Change] = {
    "zero point off by 10": lambda x, step: x + 10 * step,
    "scale off by 30 %": lambda x, step: 1.3 * x,
    "two channels swapped": lambda x, step: x[:, [1, 0, *range(2, x.shape[1])]],
    "channels rolled": lambda x, step: x.roll(1, 1),
    "a channel lost": lambda x, step: torch.cat([0 * x[:, :1], x[:, 1:]], 1),
    "a layer lost": lambda x, step: 0 * x,
    "saturated at a third of the range": lambda x, step: x.clamp(-42 * step, 42 * step),
}


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> tuple[GraphModel, EagerModel]:
    return rounded_net(tmp_path_factory.mktemp("nets") / "deep", depth=20, gain=2.5)


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sums differ by more than the last bits, as so small a network has few of them."""
    monkeypatch.setattr(sample_parity, "LAST_BITS", 2.0**-11)


def noise_of_nets(nets: tuple[GraphModel, EagerModel], *, knows_float: bool) -> RoundingNoise:
    known: dict[str, Any] = {"source": nets[1]} if knows_float else {}
    return RoundingNoise(nets[0], Context(root=Path("next"), artifacts=known))


def changed(graph: GraphModel, change: Change, place: int | None = None) -> Predictor:
    """Return the graph with a change before one of its quantizers, or before each."""
    module: Any = graph.load()
    found = [n for n in module.graph.nodes if is_quantizer(n)]
    for node in found if place is None else found[place : place + 1]:
        with module.graph.inserting_before(node):
            wrong = module.graph.call_function(change, (node.args[0], node.args[1]))
        node.replace_input_with(node.args[0], wrong)
    module.recompile()

    def predict(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return flatten_outputs(module(*inputs))

    return predict


def other_runtime(graph: GraphModel, seed: int, share: float) -> Predictor:
    """Return a graph whose sums are rounded as some runtime's may be."""
    generator = torch.Generator().manual_seed(1000 + seed)

    def disturb(x: torch.Tensor, step: float) -> torch.Tensor:
        drawn = 2 * torch.rand(x.shape, generator=generator) - 1
        return x + share * 255 * sample_parity.LAST_BITS * step * drawn

    return changed(graph, disturb)


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("knows_float", [True, False])
def test_files_whose_sums_are_rounded_otherwise_pass(
    nets: tuple[GraphModel, EagerModel], knows_float: bool, caplog: pytest.LogCaptureFixture
) -> None:
    noise, beyond = noise_of_nets(nets, knows_float=knows_float), 0
    caplog.set_level(logging.INFO)
    with nets[0].open() as expected:
        for seed in range(8):
            export = other_runtime(nets[0], seed, share=1 / (1 + seed % 4))
            errors = check_on_samples(expected, export, ROWS, QUANTIZED, noise)
            beyond += errors.relative_error > QUANTIZED.spread
            assert bool(errors.allowed) >= (errors.relative_error > QUANTIZED.spread)
    assert beyond >= 4, "else nothing was tested"
    assert "differs from its graph by 0." in caplog.text
    assert "int8 rounding alone moves the graph by 0." in caplog.text


@pytest.mark.usefixtures("coarse")
def test_noise_takes_one_pass_of_the_graph(nets: tuple[GraphModel, EagerModel]) -> None:
    noise, disturbed, asked = noise_of_nets(nets, knows_float=True), list[object](), list[object]()
    outputs, export = noise.outputs, other_runtime(nets[0], 0, share=1)
    noise.outputs = lambda *inputs: disturbed.append(inputs) or outputs(*inputs)
    with nets[0].open() as predict:
        errors = check_on_samples(predict, export, ROWS, QUANTIZED, noise)
        assert errors.allowed and len(disturbed) == len(ROWS)
        reference = Float64Reference(
            nets[0], lambda *inputs: asked.append(inputs) or predict(*inputs), noise
        )
        assert reference.explains(ROWS[0], export(*ROWS[0]), QUANTIZED.adversarial)
    assert len(asked) == 1, "what noise explains needs no other inputs"


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("place", [1, pytest.param(10, marks=pytest.mark.soak)])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_file_is_refused_though_the_graph_is_ill_conditioned(
    nets: tuple[GraphModel, EagerModel], fault: str, place: int
) -> None:
    wrong = changed(nets[0], FAULTS[fault], place)
    noise = noise_of_nets(nets, knows_float=True)
    with nets[0].open() as expected, pytest.raises(StageFailed, match="samples of `val` "):
        check_on_samples(expected, wrong, ROWS, QUANTIZED, noise)


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("fault", ["channels rolled", "a layer lost", "scale off by 30 %"])
def test_without_a_float_model_outputs_near_chance_are_refused(
    nets: tuple[GraphModel, EagerModel], fault: str
) -> None:
    wrong = changed(nets[0], FAULTS[fault], 1)
    noise = noise_of_nets(nets, knows_float=False)
    refusal = r"by \d\.?\d* of their spread, expected at most .* \(int8 rounding alone moves"
    with nets[0].open() as expected, pytest.raises(StageFailed, match=refusal):
        check_on_samples(expected, wrong, ROWS, QUANTIZED, noise)


def test_where_rounding_is_small_nothing_is_allowed_beyond_the_fixed_tolerance(
    nets: tuple[GraphModel, EagerModel],
) -> None:
    noise = noise_of_nets(nets, knows_float=False)
    with nets[0].open() as expected:
        found = noise_on(ROWS, noise, expected, expected)
    assert found is not None
    limits = limits_of_noise(found, QUANTIZED)
    assert limits.spreads == (QUANTIZED.spread,)
    assert limits.label_changes == QUANTIZED.label_changes


def test_no_noise_allows_outputs_at_chance(
    nets: tuple[GraphModel, EagerModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_parity, "LAST_BITS", 2.0**-2)
    noise = noise_of_nets(nets, knows_float=False)
    with nets[0].open() as expected:
        found = noise_on(ROWS, noise, expected, expected)
        assert found is not None
        limits = limits_of_noise(found, QUANTIZED)
        assert limits.noise.relative_error > 1
        assert limits.spreads == (LARGEST_SPREAD,)
        reference = Float64Reference(nets[0], expected, noise)
        (outputs,) = expected(*ROWS[0])
        assert not reference.explains(ROWS[0], (-outputs,), limit=0.1)


def test_noise_is_measured_only_beyond_the_fixed_tolerance(
    nets: tuple[GraphModel, EagerModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> fx.GraphModule:
        raise AssertionError("the graph was opened once more")

    noise = noise_of_nets(nets, knows_float=True)
    with nets[0].open() as expected:
        monkeypatch.setattr(GraphModel, "load", load)
        monkeypatch.setattr(EagerModel, "load", load)
        errors = check_on_samples(
            expected, lambda x: (expected(x)[0] * 1.2,), ROWS, QUANTIZED, noise
        )
    assert isinstance(errors, SampleErrors)
    assert not errors.allowed


RESNET = """
from benchmarks.shapes import resnet50

def net():
    return resnet50()
"""


@pytest.mark.soak
@pytest.mark.slow
def test_a_resnet_50_of_seeded_weights_passes_and_a_shifted_one_does_not(tmp_path: Path) -> None:
    (tmp_path / "seeded50.py").write_text(RESNET)
    signature = Signature(inputs=(TensorSpec(name="image", shape=("batch", 3, 64, 64)),))
    source = network(tmp_path / "source", "seeded50:net", signature, tmp_path)
    images = torch.randn(128, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    rows = [(image, torch.tensor(0)) for image in images]
    data = Splits({"train": rows, "val": rows}, batch_size=32)
    context = Context(root=tmp_path / "int8", data=data, artifacts={"source": source})
    graph = QuantizeStatic(calibration_samples=64, weight_bits=EXACT_BITS)(source, context)
    exported = ExportOnnx()(graph, context.with_root(tmp_path / "onnx"))
    # Some machines' kernels stay within the fixed tolerance.
    assert exported.manifest.facts.get(ALLOWED, math.inf) > QUANTIZED.spread
    wrong, noise = changed(graph, FAULTS["zero point off by 10"], 1), RoundingNoise(graph, context)
    with graph.open() as expected, pytest.raises(StageFailed, match=r"of their spread"):
        check_on_samples(expected, wrong, [(x,) for x in images.split(32)], QUANTIZED, noise)


def test_a_bounded_number_of_samples_is_read_and_fewer_for_a_dear_model(
    nets: tuple[GraphModel, EagerModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [(torch.zeros(4), torch.tensor(0))] * (SAMPLES + 50)
    context = Context(tmp_path, data=Splits({"val": samples}, batch_size=100))
    assert [sum(len(x) for (x,) in val_inputs(context, net)) for net in nets] == [SAMPLES] * 2
    monkeypatch.setattr(sample_parity, "LARGEST_MACS", 1)
    read = [sum(len(x) for (x,) in val_inputs(context, net)) for net in nets]
    assert read == [FEWEST_SAMPLES] * 2
    assert [*val_inputs(Context(tmp_path), nets[0])] == []
