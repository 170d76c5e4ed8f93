"""Grids, learned steps and folded layers, each against its formula."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compress.common.signature import Signature, TensorSpec
from compress.quantization.config.dtype_scheme import scheme_for
from compress.quantization.pt2e.graph_capture import capture
from compress.quantization.pt2e.quantizer import OnnxRuntimeQuantizer
from compress.quantization.pt2e.torchao_api import MinMaxObserver, PerChannelMinMaxObserver
from compress.quantization.ptq.calibrate import prepare
from compress.quantization.qat.fake_model import (
    ConvBnParameters,
    ConvBnQat,
    FakeQuantizedModel,
    FreezeSchedule,
)
from compress.quantization.qat.fake_quantize import (
    ActivationFakeQuantize,
    FreezeFlag,
    LearnedStepSize,
    WeightFakeQuantize,
)


def observed_weight(weight: torch.Tensor, bits: int = 4) -> PerChannelMinMaxObserver:
    largest = 2 ** (bits - 1) - 1
    observer = PerChannelMinMaxObserver(
        dtype=torch.int8,
        quant_min=-largest,
        quant_max=largest,
        qscheme=torch.per_channel_symmetric,
        eps=2.0**-60,
    )
    observer(weight)
    return observer


def observed_activation(values: torch.Tensor) -> MinMaxObserver:
    observer = MinMaxObserver(
        dtype=torch.uint8, quant_min=0, quant_max=255, qscheme=torch.per_tensor_affine, eps=2.0**-60
    )
    observer(values)
    return observer


def weight_grid(weight: torch.Tensor, learns: bool = False) -> WeightFakeQuantize:
    observer = observed_weight(weight)
    grid = WeightFakeQuantize(observer, len(weight), learns)
    grid.init_from_observer_(observer, weight)
    return grid


def test_a_weight_range_follows_the_weight_until_frozen() -> None:
    weight_OI = torch.tensor([[0.7, -0.3], [0.0, 0.0]])
    grid = weight_grid(weight_OI)
    torch.testing.assert_close(grid(weight_OI)[0], torch.tensor([0.7, -0.3]))
    grid(2 * weight_OI)
    assert grid.scale[0].item() == pytest.approx(0.2)
    grid.frozen.turn_on_()
    clipped = grid(4 * weight_OI)
    assert grid.scale[0].item() == pytest.approx(0.2)
    torch.testing.assert_close(clipped[0], torch.tensor([1.4, -1.2]))


def test_a_channel_of_zeros_keeps_its_scale_and_others_their_share() -> None:
    weight_OI = torch.tensor([[0.7, -0.3], [0.0, 0.0]])
    observer = observed_weight(weight_OI)
    observer.max_val = torch.tensor([1.4, 0.07])  # as if a bias needed room
    grid = WeightFakeQuantize(observer, 2, learn_scale=False)
    grid.init_from_observer_(observer, weight_OI)
    grid(weight_OI / 2)
    torch.testing.assert_close(grid.scale, torch.tensor([0.1, 0.01]))


def test_an_activation_range_follows_batches_only_in_training() -> None:
    first = torch.tensor([-1.0, 3.0])
    grid = ActivationFakeQuantize(observed_activation(first), learn_scale=False, track_range=True)
    grid.init_from_observer_(observed_activation(first))
    begun = grid.scale.clone(), grid.zero_point.clone()
    torch.testing.assert_close(begun[0], torch.tensor([4 / 255]))
    grid.eval()(torch.tensor([-9.0, 9.0]))
    assert (grid.scale, grid.zero_point) == begun
    grid.train()(torch.tensor([-1.0, 5.0]))
    assert grid.scale.item() == pytest.approx((4 + 0.01 * 2) / 255, rel=1e-3)


def test_a_symmetric_range_stays_symmetric() -> None:
    observer = MinMaxObserver(
        dtype=torch.int8, quant_min=-128, quant_max=127, qscheme=torch.per_tensor_symmetric
    )
    observer(torch.tensor([-1.0, 3.0]))
    grid = ActivationFakeQuantize(observer, learn_scale=False, track_range=True)
    grid.init_from_observer_(observer)
    assert grid.scale.item() == pytest.approx(6 / 255)
    grid.train()(torch.tensor([-1.0, 5.0]))
    assert grid.scale.item() == pytest.approx(2 * (3 + 0.01 * 2) / 255, rel=5e-3)
    assert grid.zero_point.item() == 0


def test_gradients_pass_within_the_range_and_end_beyond() -> None:
    grid = weight_grid(torch.tensor([[0.7, -0.3]]))
    grid.frozen.turn_on_()
    values = torch.tensor([[0.34, 0.9]], requires_grad=True)
    grid(values).sum().backward()
    assert values.grad.tolist() == [[1.0, 0.0]]


def straight_through(values, scale, zero_point, low, high, factor):
    """Equations 1 to 3 of the paper, for autograd."""
    scale = scale * factor + (scale - scale * factor).detach()
    scaled = values / scale
    whole = torch.clamp(scaled, low - zero_point, high - zero_point)
    rounded = whole + (whole.round() - whole).detach()
    return rounded * scale


@pytest.mark.parametrize("axis", [None, 0])
def test_lsq_has_the_papers_gradient(axis: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 8, generator=generator)
    scale = torch.tensor([0.1, 0.2, 0.3] if axis == 0 else [0.2])
    zero_point = torch.tensor([0, 0, 0] if axis == 0 else [3], dtype=torch.int32)
    low, high = (-7, 7) if axis == 0 else (0, 15)
    weights = torch.randn(3, 8, generator=generator) / 50

    log_scale, own = scale.log().requires_grad_(), values.clone().requires_grad_()
    result = LearnedStepSize.quantize(own, log_scale.exp(), zero_point, axis, low, high)
    (result * weights).sum().backward()

    step, theirs = scale.clone().requires_grad_(), values.clone().requires_grad_()
    broad = step.view(-1, 1) if axis == 0 else step
    middle = zero_point.view(-1, 1) if axis == 0 else zero_point
    factor = 1 / (8 * high) ** 0.5
    expected = straight_through(theirs, broad, middle, low, high, factor)
    (expected * weights).sum().backward()

    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(own.grad, theirs.grad)
    # A share of the step, as the paper moves it: d log(s) = ds / s.
    torch.testing.assert_close(log_scale.grad, step.grad / scale)


@pytest.mark.parametrize("size", [1e6, -1e6])
def test_the_lsq_gradient_is_bounded(size: float) -> None:
    log_scale = torch.tensor([0.2]).log().requires_grad_()
    grid = torch.tensor([3], dtype=torch.int32), None, 0, 15
    rounded = LearnedStepSize.quantize(torch.linspace(-2, 2, 9), log_scale.exp(), *grid)
    (size * rounded.sum()).backward()
    # Three values lie beyond the lower end, at -3 steps, so that smaller steps make the sum larger.
    assert log_scale.grad.tolist() == pytest.approx([-1.0 if size > 0 else 1.0])


@pytest.mark.parametrize(
    ("axis", "shape", "sharing"), [(None, (7,), 1), (None, (2, 3, 4), 12), (1, (2, 3, 4), 8)]
)
def test_the_lsq_gradient_is_scaled_by_the_number_of_values(axis, shape, sharing) -> None:
    """Esser et al., section 2.2: N is the number of features of a sample, or of a channel."""
    count = 1 if axis is None else shape[axis]
    log_scale = torch.full((count,), 0.1).log().requires_grad_()
    zero_point = torch.full((count,), 2, dtype=torch.int32)
    values = torch.full(shape, 9.0)  # beyond the range, whose end lies 13 steps above 0
    (
        1e-3 * LearnedStepSize.quantize(values, log_scale.exp(), zero_point, axis, 0, 15)
    ).sum().backward()
    each = 1e-3 * 13 * values.numel() / count / (sharing * 15) ** 0.5
    assert log_scale.grad.tolist() == pytest.approx([each / 0.1] * count)


def test_a_checkpoint_saves_the_freeze_flag() -> None:
    frozen, restored = FreezeFlag(), FreezeFlag()
    frozen.turn_on_()
    restored.load_state_dict(frozen.state_dict())
    assert restored.on


def test_zeros_of_a_matrix_stay_and_biases_learn() -> None:
    linear = nn.Linear(3, 2)
    nn.init.zeros_(linear.bias)
    with torch.no_grad():
        linear.weight[0, 1] = 0
    before = linear.weight.detach().clone()
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        linear(torch.ones(4, 3)).sum().backward()
        with FreezeSchedule(ranges=0.5, batch_norm=0.5).around(linear, step, 3):
            optimizer.step()
    assert (linear.weight == 0).tolist() == [[False, True, False], [False, False, False]]
    assert (linear.weight != before).sum() == 5
    assert (linear.bias != 0).all()


class Positions(nn.Module):
    """Makes a tensor while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 4)
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x + self.table(torch.arange(x.shape[1])))


def test_tensors_that_the_graph_creates_move_with_it() -> None:
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", "length", 4)),))
    graph = capture(Positions().eval(), signature)
    quantizer = OnnxRuntimeQuantizer(scheme_for("onnxruntime-cpu"), "minmax")
    model = FakeQuantizedModel(prepare(graph, quantizer), {}, learn_scale=False, track_ranges=True)
    made = [n for n in model.graph.graph.nodes if "device" in n.kwargs]
    assert made
    model.to("meta")
    assert all(node.kwargs["device"] == torch.device("meta") for node in made)


def layer_and_norm(gain: float = 1.5) -> tuple[nn.Conv2d, nn.BatchNorm2d, ConvBnQat]:
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
    nn.init.uniform_(norm.running_mean, -0.5, 0.5)
    nn.init.constant_(norm.weight, gain)
    normed = ConvBnParameters(
        conv.weight,
        conv.bias,
        norm.weight,
        norm.bias,
        norm.running_mean,
        norm.running_var,
        norm.momentum,
        norm.eps,
    )
    return conv, norm, ConvBnQat(F.conv2d, normed, nn.Identity(), nn.Identity())


@pytest.mark.parametrize("training", [True, False])
def test_a_folded_layer_is_the_layer_and_its_batch_norm(training: bool) -> None:
    conv, norm, folded = layer_and_norm()
    image = torch.randn(5, 2, 6, 6)
    for part in (conv, norm, folded):
        part.train(training)
    expected = norm(conv(image))
    found = folded(image)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(folded.mean, norm.running_mean)
    torch.testing.assert_close(folded.variance, norm.running_var)
    for output in (expected, found):
        output.square().sum().backward()
    torch.testing.assert_close(folded.weight.grad, conv.weight.grad, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(folded.gain.grad, norm.weight.grad, atol=1e-3, rtol=1e-3)


def test_frozen_statistics_normalize_and_do_not_change() -> None:
    _, norm, folded = layer_and_norm()
    folded.train().frozen.turn_on_()
    image = torch.randn(5, 2, 6, 6)
    found = folded(image)
    assert torch.equal(folded.mean, norm.running_mean)
    assert torch.equal(found, folded.eval()(image))


def test_a_channel_whose_gain_is_zero_stays_finite() -> None:
    _, _, folded = layer_and_norm(gain=0.0)
    output = folded.train()(torch.randn(5, 2, 6, 6))
    output.square().sum().backward()
    assert output.isfinite().all()
    assert all(p.grad.isfinite().all() for p in folded.parameters())
