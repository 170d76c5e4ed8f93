"""RefitResult layers beside torch's own least squares."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compress.artifacts.edits.removal import keep_indices_
from compress.common.errors import StageFailed
from compress.common.process import torch_threads
from compress.data.batch import Batch
from compress.pruning.dependency.channel_groups import trace
from compress.pruning.importance import layer_calls
from compress.pruning.importance.scores import Moments
from compress.pruning.recovery import recovery as recovery_module
from compress.pruning.recovery.recovery import (
    ReferenceOutputs,
    least_squares,
    recover_,
    refit_,
    relative_error,
)
from tests.compress.pruning import pruning_linear_nets as linear_nets
from tests.compress.pruning import pruning_nets as nets

NO_RIDGE = 1e-13


def cut(module: nn.Module, inputs: torch.Tensor, share: float = 0.5):
    """Return a copy with the first channels of each group gone, and what is kept."""
    graph = trace(module, (inputs,))
    removed = [c for f in graph.groups for c in f.channels[: int(len(f.channels) * share)]]
    kept = graph.kept(removed)
    smaller = copy.deepcopy(module)
    keep_indices_(smaller, kept, {})
    return smaller, kept


def batches(*shape: int, count: int = 3, samples: int = 40) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        Batch((torch.randn(samples, *shape, generator=generator, dtype=torch.float64),), None)
        for _ in range(count)
    ]


def everything(given: list[Batch]) -> torch.Tensor:
    return torch.cat([batch.inputs[0] for batch in given])


def lstsq(x: torch.Tensor, y: torch.Tensor, *, intercept: bool) -> tuple[torch.Tensor, ...]:
    if intercept:
        x = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    solution = torch.linalg.lstsq(x, y).solution
    return (solution[:-1], solution[-1]) if intercept else (solution,)


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_is_the_least_squares_solution(bias: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3, bias=bias)).double()
    given = batches(4)
    x = everything(given)
    smaller, kept = cut(net, x[:2])
    found = refit_(smaller, net, kept, given, ridge=NO_RIDGE)
    with torch.no_grad():
        hidden = smaller[1](smaller[0](x))
        weight, *rest = lstsq(hidden, net(x), intercept=bias)
        torch.testing.assert_close(smaller[2].weight, weight.T)
        if bias:
            torch.testing.assert_close(smaller[2].bias, rest[0])
        (layer,) = found
        left = (smaller(x) - net(x)).square().sum() / net(x).square().sum()
        assert layer.after == pytest.approx(float(left), rel=1e-6)
        assert layer.weight == "2.weight" and layer.after < layer.before
        assert torch.equal(smaller[0].weight, net[0].weight[8:])


@pytest.mark.parametrize(
    ("groups", "padding", "stride", "dilation"),
    [(1, 1, 1, 1), (1, "same", 1, 2), (2, 0, 2, 1), (2, (1, 0), 1, (1, 2))],
)
def test_a_convolution_is_the_least_squares_solution(groups, padding, stride, dilation) -> None:
    torch.manual_seed(0)
    second = nn.Conv2d(
        8, 6, (3, 2), padding=padding, stride=stride, dilation=dilation, groups=groups
    )
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), second).double()
    given = batches(1, 7, 7)
    smaller, kept = cut(net, everything(given)[:2])
    refit_(smaller, net, kept, given, ridge=NO_RIDGE)
    with torch.no_grad():
        hidden, wanted = smaller[1](smaller[0](everything(given))), net(everything(given))
        if padding == "same":
            hidden, padding = F.pad(hidden, (1, 1, 2, 2)), 0
        for group in range(groups):
            x = F.unfold(hidden.chunk(groups, 1)[group], (3, 2), dilation, padding, stride)
            y = wanted.chunk(groups, 1)[group].permute(0, 2, 3, 1)
            x, y = x.transpose(1, 2).flatten(0, 1), y.flatten(0, 2)
            weight, bias = lstsq(x, y, intercept=True)
            found = smaller[2].weight.chunk(groups)[group].flatten(1)
            torch.testing.assert_close(found, weight.T)
            torch.testing.assert_close(smaller[2].bias.chunk(groups)[group], bias)


@pytest.mark.parametrize("intercept", [True, False])
def test_a_ridge_is_a_row_that_wants_each_weight_to_be_zero(intercept: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = 2 + torch.randn(2, 30, 4, generator=generator, dtype=torch.float64)
    y = 1 + torch.randn(2, 30, 3, generator=generator, dtype=torch.float64)
    moments = Moments()
    for part in (slice(0, 11), slice(11, 30)):
        moments.add_(x[:, part], y[:, part])
    assert moments.positions == 30 and moments.energy == pytest.approx(float(y.square().sum()))
    found, shift, left = least_squares(moments, 0.3, intercept=intercept)
    assert left == pytest.approx(float((y - x @ found - shift[:, None]).square().sum()))
    strength = (0.3 * x.square().sum(1).mean()) ** 0.5
    for g in range(2):
        x_mean, y_mean = (t[g].mean(0) if intercept else 0 * t[g].mean(0) for t in (x, y))
        rows = torch.cat([x[g] - x_mean, strength * torch.eye(4).double()])
        wanted = torch.cat([y[g] - y_mean, torch.zeros(4, 3).double()])
        (expected,) = lstsq(rows, wanted, intercept=False)
        torch.testing.assert_close(found[g], expected)
        torch.testing.assert_close(shift[g], y_mean - x_mean @ expected)


def test_a_weight_that_lies_the_other_way_round_is_refitted() -> None:
    torch.manual_seed(0)
    net = linear_nets.Transposed().double().eval()
    given = batches(8)
    smaller, kept = cut(net, everything(given)[:2])
    before = ReferenceOutputs(net, given).error(smaller)
    found = refit_(smaller, net, kept, given)
    assert found and all(layer.after < layer.before for layer in found)
    assert ReferenceOutputs(net, given).error(smaller) < before / 2


class Adds(nn.Module):
    """A product to which a function adds what is no parameter of the layer."""

    def __init__(self, code: Callable[..., torch.Tensor], shape: tuple[int, int]) -> None:
        super().__init__()
        self.first, self.code = nn.Linear(4, 16), code
        self.weight, self.bias = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.code(self, x, torch.relu(self.first(x)))


@pytest.mark.parametrize(
    ("code", "shape"),
    [
        (lambda net, _, hidden: F.linear(hidden, net.weight, 2 * net.bias), (3, 16)),
        (lambda net, x, hidden: torch.addmm(x[:, :3].square(), hidden, net.weight), (16, 3)),
    ],
)
def test_what_a_layer_adds_to_its_product_stays(code, shape) -> None:
    torch.manual_seed(0)
    net = Adds(code, shape).double().eval()
    given = batches(4)
    x, axis = everything(given), shape.index(16)
    smaller, kept = cut(net, x[:2])
    (layer,) = refit_(smaller, net, {"weight": kept["weight"]}, given, ridge=NO_RIDGE)
    with torch.no_grad():
        hidden = torch.relu(smaller.first(x))
        product = net(x) - code(net, x, torch.zeros(len(x), 16).double())
        (expected,) = lstsq(hidden, product, intercept=False)
        torch.testing.assert_close(smaller.weight, expected if axis == 0 else expected.mT)
        left = (smaller(x) - net(x)).square().sum() / net(x).square().sum()
    assert layer.after == pytest.approx(float(left), rel=1e-6)


def falls_back(net: Adds, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    try:
        return F.linear(hidden.half(), net.weight)
    except RuntimeError:
        return F.linear(hidden, net.weight)


@pytest.mark.parametrize(
    ("code", "shape"),
    [
        (lambda net, _, hidden: torch.addmm(net.bias, hidden, net.weight, alpha=2), (16, 3)),
        (falls_back, (3, 16)),
    ],
)
def test_a_product_that_is_scaled_or_fails_at_first_is_not_refitted(code, shape) -> None:
    torch.manual_seed(0)
    net = Adds(code, shape).double().eval()
    given = batches(4)
    calls, _ = layer_calls.record_layer_calls(net, given[0], "cpu")
    assert [call.weight for call in calls] == ["first.weight", "weight"]
    smaller, kept = cut(net, everything(given)[:2])
    assert refit_(smaller, net, kept, given, ridge=NO_RIDGE) == []


class AddsTwice(nn.Module):
    """Adds what it changes between two calls of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(4, 16), nn.Parameter(torch.randn(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, added = torch.relu(self.first(x)), x.repeat(1, 4)
        hidden = torch.relu(torch.addmm(added, hidden, self.weight))
        added += 1
        return torch.addmm(added, hidden, self.weight)


def test_what_is_added_may_change_between_two_calls() -> None:
    torch.manual_seed(0)
    net, given = AddsTwice().double().eval(), batches(4)
    module = copy.deepcopy(net)
    with torch.no_grad():
        module.weight.mul_(0.9)  # the refit of the whole layer finds the weights again
    kept = {"weight": {0: list(range(16))}}
    refit_(module, net, kept, given, ridge=NO_RIDGE)
    # The second call's inputs are those of the weights before, so that its equations are others.
    x = everything(given)
    with torch.no_grad():
        hidden, added = torch.relu(net.first(x)), x.repeat(1, 4)
        inputs = [hidden, torch.relu(torch.addmm(added, hidden, 0.9 * net.weight))]
        right = [hidden, torch.relu(torch.addmm(added, hidden, net.weight))]
        (expected,) = lstsq(
            torch.cat(inputs), torch.cat([h @ net.weight for h in right]), intercept=False
        )
    torch.testing.assert_close(module.weight, expected)


def test_layers_are_taken_in_turn_and_make_up_for_errors_before_them() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(p for _ in range(3) for p in (nn.Linear(12, 12), nn.Tanh()))).double()
    given = batches(12)
    smaller, kept = cut(net, everything(given)[:2])
    found = refit_(smaller, net, kept, given, ridge=NO_RIDGE)
    assert [layer.weight for layer in found] == ["2.weight", "4.weight"]
    with torch.no_grad():
        x = smaller[:4](everything(given))  # as the layer before now answers
        weight, bias = lstsq(x, net[:5](everything(given)), intercept=True)
    torch.testing.assert_close(smaller[4].weight, weight.T)
    torch.testing.assert_close(smaller[4].bias, bias)


def test_a_layer_called_twice_serves_both_calls() -> None:
    torch.manual_seed(0)
    net = nets.Reused().double().eval()
    given = batches(1, 8, 8, samples=20)
    smaller, kept = cut(net, everything(given)[:2])
    found = refit_(smaller, net, kept, given)
    assert [layer.weight for layer in found] == ["shared.weight", "head.weight"]
    assert all(layer.after < layer.before for layer in found)


def test_weights_with_other_uses_stay() -> None:
    """Two layers share a weight and not their biases; a third reads its own."""
    torch.manual_seed(0)
    net = linear_nets.Tied().double().eval()
    given = batches(8)
    smaller, kept = cut(net, everything(given)[:2])
    before = smaller.second.weight.clone()
    found = refit_(smaller, net, kept, given)
    assert [layer.weight for layer in found] == ["head.weight"]
    assert torch.equal(smaller.second.weight, before)
    assert smaller.second.weight is smaller.third.weight


def test_what_never_varies_leaves_weights_as_they_are() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).double()
    with torch.no_grad():
        net[0].bias[8] = -100  # never active
    given = batches(4)
    smaller, kept = cut(net, everything(given)[:2])
    refit_(smaller, net, kept, given)
    torch.testing.assert_close(smaller[2].weight[:, 0], net[2].weight[:, 8])
    assert bool(smaller[2].weight.isfinite().all())


def test_parts_of_a_batch_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3)).double()
    given = batches(1, 7, 7)
    whole, kept = cut(net, everything(given)[:2])
    pieces = copy.deepcopy(whole)
    refit_(whole, net, kept, given)
    monkeypatch.setattr(layer_calls, "MAX_PART", 1500)
    refit_(pieces, net, kept, given)
    torch.testing.assert_close(pieces[2].weight, whole[2].weight)


def test_batch_norm_takes_what_a_bias_would_add() -> None:
    def net(*, bias: bool, is_read_twice: bool = False) -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3, bias=bias)]
        layers += [nn.BatchNorm2d(6), nn.ReLU()]
        if is_read_twice:
            layers.insert(3, ReadTwice())
        whole = nn.Sequential(*layers, nn.Flatten(), nn.Linear(6 * 9, 3)).double().eval()
        with torch.no_grad():
            whole[2].weight.copy_(torch.linspace(-1, 2, 6 * 8 * 9).view(6, 8, 3, 3).sin())
            if bias:
                whole[2].bias.zero_()
        return whole

    given = batches(1, 7, 7)
    shifted = {}
    for options in ({"bias": True}, {"bias": False}, {"bias": False, "is_read_twice": True}):
        whole = net(**options)
        smaller, kept = cut(whole, everything(given)[:2])
        kept = {"2.weight": kept["2.weight"]}
        refit_(smaller, whole, kept, given)
        norm = next(part for part in smaller if isinstance(part, nn.BatchNorm2d))
        shifted[tuple(options.values())] = norm.running_mean, smaller[2]
    mean, layer = shifted[False,]
    torch.testing.assert_close(layer.weight, shifted[True,][1].weight)
    torch.testing.assert_close(-mean, shifted[True,][1].bias)
    assert (shifted[False, True][0] == 0).all() and not torch.equal(
        shifted[False, True][1].weight, layer.weight
    )


@pytest.mark.parametrize("tokens", [4, 5])
def test_batch_norm_of_tokens_takes_no_shift_of_channels(tokens: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4, bias=False), nn.BatchNorm1d(tokens)]
    whole = nn.Sequential(*layers).double().eval()
    given = batches(tokens, 6)
    smaller, kept = cut(whole, everything(given)[:2])
    refit_(smaller, whole, {"2.weight": kept["2.weight"]}, given)
    assert torch.equal(smaller[3].running_mean, torch.zeros(tokens).double())


def test_layers_called_without_samples_are_left_out_of_sums() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.layers(x[:0])
            return self.layers(x)

    torch.manual_seed(0)
    whole = Experts().double().eval()
    given = batches(6)
    once, kept = cut(whole.layers, everything(given)[:2])
    smaller = Experts()
    smaller.layers = copy.deepcopy(once)
    refit_(once, whole.layers, {"2.weight": kept["2.weight"]}, given)
    refit_(smaller, whole, {"layers.2.weight": kept["2.weight"]}, given)
    torch.testing.assert_close(smaller.layers[2].weight, once[2].weight)
    no_images = Batch((torch.ones(0, 4, 5, 5),), None)
    (call,), _ = layer_calls.record_layer_calls(nn.Conv2d(4, 6, 3, groups=2), no_images, "cpu")
    assert [*call.parts()] == []


def test_a_layer_that_no_sample_reaches_stays() -> None:
    class Idle(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, width), nn.Linear(width, 4))
            self.last = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.layers(x[:0])
            return self.last(x)

    whole, smaller = Idle(8).double(), Idle(5).double()
    weight = smaller.layers[1].weight.detach().clone()
    refit_(smaller, whole, {"layers.1.weight": {1: tuple(range(5))}}, batches(6))
    assert torch.equal(smaller.layers[1].weight, weight)


class ReadTwice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0 * x.mean()


def test_new_statistics_stay_only_where_they_help() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 25, 3)
    )
    net = net.double().eval()
    given = batches(1, 7, 7)
    with torch.no_grad():
        for batch in given:
            net.train()(batch.inputs[0])
    net.eval()[1].running_mean.add_(3)  # statistics that no data has
    smaller, kept = cut(net, everything(given)[:2])
    mean = smaller[1].running_mean.clone()
    report = recover_(smaller, net, kept, given)
    assert set(report["output_error"]) == {"cut", "refit"}
    assert torch.equal(smaller[1].running_mean, mean)
    without, _ = cut(net, everything(given)[:2])
    report = recover_(without, net, kept, given, refit=False)
    assert set(report["output_error"]) == {"cut", "batch_norm"} and report["layers"] == {}
    assert not torch.equal(without[1].running_mean, mean)


def test_errors_are_counted_until_they_are_as_large_as_others() -> None:
    net = nn.Linear(4, 3).double()
    given = batches(4)
    expected = ReferenceOutputs(net, given)
    worse, calls = copy.deepcopy(net), list[object]()
    with torch.no_grad():
        worse.weight.mul_(0.9)
    worse.register_forward_hook(lambda *_: calls.append(None))
    whole = expected.error(worse)
    for error, batches_read in ((0.0, 1), (1e9, 3)):
        calls.clear()
        others = [(error, 1.0)] * 3
        found = expected.error(worse, 3, others)
        assert len(calls) == batches_read
        assert (found < relative_error(others)) == (batches_read == 3)
    assert found == whole


def test_samples_of_another_shape_are_refused() -> None:
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).double()
    smaller, kept = cut(net, torch.randn(2, 4, dtype=torch.float64))
    with pytest.raises(StageFailed, match=r"does not take .* a batch of shape \(40, 5\): Runtime"):
        refit_(smaller, net, kept, batches(5))


def test_zeros_of_the_weight_stay_and_the_others_are_the_best_without_them(monkeypatch) -> None:
    monkeypatch.setattr(recovery_module, "MAX_ENTRIES", 2 * 6**2)
    generator = torch.Generator().manual_seed(0)
    columns = torch.randn(1, 50, 6, generator=generator, dtype=torch.float64)
    answers = torch.randn(1, 50, 5, generator=generator, dtype=torch.float64)
    fixed = torch.rand(1, 6, 5, generator=generator) < 0.5
    fixed[:, :, 2] = False
    moments = Moments()
    moments.add_(columns, answers)
    found, _, left = least_squares(moments, 0.0, intercept=False, fixed_gio=fixed)
    for output in range(5):
        free = ~fixed[0, :, output]
        best = torch.linalg.lstsq(columns[0][:, free], answers[0][:, output]).solution
        torch.testing.assert_close(found[0, free, output], best)
    assert (found[fixed] == 0).all()
    assert left == pytest.approx(float((answers - columns @ found).square().sum()))


def test_many_columns_of_several_outputs_with_zeros_are_solved_by_two_threads() -> None:
    # oneMKL's LU of several such matrices at once ended with an error on an AMD processor.
    columns = torch.randn(1, 3000, 1440)
    answers, fixed = columns[:, :, :8] + 1, torch.zeros(1, 1440, 8, dtype=torch.bool)
    fixed[:, 100] = True
    moments = Moments()
    moments.add_(columns, answers)
    with torch_threads(2):
        found, shift, _ = least_squares(moments, 1e-6, intercept=True, fixed_gio=fixed)
    torch.testing.assert_close(found[0], torch.eye(1440, 8).double(), atol=1e-3, rtol=0)
    torch.testing.assert_close(shift, torch.ones(1, 8).double(), atol=1e-3, rtol=0)
