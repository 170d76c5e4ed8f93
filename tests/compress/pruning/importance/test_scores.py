"""Each criterion beside a value worked out by hand, or measured by brute force."""

import copy
import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compress.core.objectives.loss import Loss
from compress.data.batch import Batch
from compress.pruning.dependency.channel_groups import AxisGraph, ChannelGroup, trace
from compress.pruning.importance import scores as scores_module
from compress.pruning.importance.layer_calls import record_layer_calls
from compress.pruning.importance.scores import ScoringSamples, score_groups


def line(*widths: int, bias: bool = True, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [part for i, o in pairwise(widths) for part in (nn.Linear(i, o, bias=bias), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double().eval()


def graph_of(module: nn.Module, *shape: int) -> tuple[AxisGraph, ChannelGroup]:
    dtype = next(module.parameters()).dtype
    graph = trace(module, (torch.randn(2, *shape, dtype=dtype),))
    return graph, graph.groups[0]


def scores(module: nn.Module, criterion: str, *shape: int, batches: Sequence[Batch] = ()):
    graph, group = graph_of(module, *shape)
    (found,) = score_groups(module, [group], graph, criterion, ScoringSamples(batches=batches))
    assert isinstance(found, torch.Tensor)
    return found


@pytest.fixture
def by_hand() -> nn.Module:
    """Two hidden channels: rows (3, 4) and (0, 1), biases 0, columns 12 and 0."""
    net = line(2, 2, 1)
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
        net[0].bias.zero_()
        net[2].weight.copy_(torch.tensor([[12.0, 0.0]]))
    return net


def test_norms_cover_all_entries_of_a_channel(by_hand: nn.Module) -> None:
    assert scores(by_hand, "l1", 2).tolist() == [19, 1]
    assert scores(by_hand, "l2", 2).tolist() == [13, 1]  # 3, 4 and 12


def test_lamp_divides_by_the_sum_of_those_not_smaller(by_hand: nn.Module) -> None:
    assert scores(by_hand, "lamp", 2).tolist() == pytest.approx([1, 1 / 170])


def test_channels_near_the_geometric_median_score_lowest() -> None:
    net = line(1, 3, 1, bias=False)
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[0.0], [3.0], [9.0]]))
        net[2].weight.copy_(torch.tensor([[0.0, 4.0, 12.0]]))
    assert scores(net, "fpgm", 1).tolist() == pytest.approx([5 + 15, 5 + 10, 15 + 10])


def test_geometric_median_takes_all_weights_of_a_channel() -> None:
    net = line(3, 5, 2)
    rows = torch.cat([net[0].weight, net[0].bias[:, None], net[2].weight.T], 1).detach()
    distances = (rows[:, None] - rows[None]).square().sum(2).sqrt()
    torch.testing.assert_close(scores(net, "fpgm", 3), distances.sum(1))


def test_geometric_median_distinguishes_nearly_equal_channels() -> None:
    net = line(1, 30, 1, bias=False)
    with torch.no_grad():
        net[0].weight.copy_(1e6 + 1e-3 * torch.arange(30).double()[:, None])
        net[2].weight.zero_()
    expected = [1e-3 * sum(abs(i - j) for j in range(30)) for i in range(30)]
    assert scores(net, "fpgm", 1).tolist() == pytest.approx(expected, rel=1e-5)


def test_scales_of_batch_norm_alone_count() -> None:
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Conv2d(3, 2, 1)).eval()
    with torch.no_grad():
        net[1].weight.copy_(torch.tensor([0.5, -2.0, 1.0]))
        net[1].bias.copy_(torch.tensor([100.0, 0.0, 0.0]))
    assert scores(net, "bn_scale", 1, 4, 4).tolist() == [0.5, 2, 1]


def test_a_criterion_that_cannot_score_gives_a_reason() -> None:
    graph, group = graph_of(line(2, 2, 1), 2)
    (reason,) = score_groups(line(2, 2, 1), [group], graph, "bn_scale")
    assert reason == "no BatchNorm scales its channels, so bn_scale cannot rank them"
    with pytest.raises(ValueError, match="'obs' needs calibration samples"):
        score_groups(line(2, 2, 1), [group], graph, "obs")


def test_random_scores_follow_the_seed() -> None:
    net = line(2, 8, 1)
    graph, group = graph_of(net, 2)
    one, same, other = (
        score_groups(net, [group], graph, "random", ScoringSamples(seed=seed))[0]
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, same) and not torch.equal(one, other)


def silenced(module: nn.Module, channel: int, scale: float) -> nn.Module:
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin[2].weight[:, channel] *= scale
    return twin


def labelled(count: int = 12) -> Batch:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return Batch((x,), torch.arange(count) % 3)


def test_taylor_is_the_slope_of_the_measured_loss() -> None:
    net, batch = line(4, 6, 3), labelled()
    found = scores(net, "taylor", 4, batches=[batch])

    def loss(module: nn.Module) -> float:
        return F.cross_entropy(module(*batch.inputs), batch.target).item()

    step = 1e-6
    slopes = [(loss(silenced(net, c, 1 - step)) - loss(net)) / step for c in range(6)]
    assert found.tolist() == pytest.approx([abs(s) for s in slopes], rel=1e-4)


@pytest.mark.parametrize(("loss", "function"), [("mse", F.mse_loss), ("l1", F.l1_loss)])
def test_taylor_of_numbers_is_the_slope_of_the_tasks_loss(loss, function) -> None:
    net, (x,) = line(4, 6, 3), labelled().inputs
    batch = Batch((x,), x[:, :3] * 2 + 1)
    graph, group = graph_of(net, 4)
    (found,) = score_groups(
        net, [group], graph, "taylor", ScoringSamples(batches=[batch], loss=Loss(loss))
    )

    def value(module: nn.Module) -> float:
        return function(module(x), batch.target).item()

    step = 1e-6
    slopes = [(value(silenced(net, c, 1 - step)) - value(net)) / step for c in range(6)]
    assert found.tolist() == pytest.approx([abs(s) for s in slopes], rel=1e-4)


def test_taylor_takes_the_root_mean_square_over_parts() -> None:
    net, batch = line(4, 6, 3), labelled(24)
    apart = [scores(net, "taylor", 4, batches=[part]) for part in scores_module.parts([batch], 16)]
    together = scores(net, "taylor", 4, batches=[batch])
    expected = ((16 * apart[0] ** 2 + 8 * apart[1] ** 2) / 24).sqrt()
    torch.testing.assert_close(together, expected)


def test_samples_without_a_label_are_left_out_where_others_have_one() -> None:
    net, batch = line(4, 6, 3), labelled(12)
    target = batch.target.clone()
    target[::2] = -100
    labels = Batch((batch.inputs[0][1::2],), batch.target[1::2])
    mixed = scores(
        net, "taylor", 4, batches=[Batch(batch.inputs, target), Batch(batch.inputs, None)]
    )
    torch.testing.assert_close(mixed, scores(net, "taylor", 4, batches=[labels]))


def test_taylor_without_labels_is_the_change_of_the_outputs() -> None:
    """Over many random directions, the mean square is the outputs' squared change."""
    net = line(4, 6, 3)
    x = torch.randn(1, 4, dtype=torch.float64)
    batches = [Batch((x,), None)] * 1500
    found = scores(net, "taylor", 4, batches=batches)
    with torch.no_grad():
        changes = [float((silenced(net, c, 0)(x) - net(x)).norm()) for c in range(6)]
    assert found.tolist() == pytest.approx(changes, rel=0.1)


@pytest.mark.parametrize("has_labels", [True, False])
def test_hessian_is_the_quadratic_form_of_a_channels_block(has_labels: bool) -> None:
    net, batch = line(4, 2, 3, seed=4), labelled()
    target = batch.target if has_labels else None
    with torch.no_grad():
        now = net(*batch.inputs)

    def loss(column: torch.Tensor) -> torch.Tensor:
        outputs = F.linear(torch.tanh(net[0](*batch.inputs)), column, net[2].bias)
        if has_labels:
            return F.cross_entropy(outputs, batch.target)
        return (outputs - now).square().sum() / (2 * len(now))

    weight = net[2].weight.detach()
    full = torch.autograd.functional.hessian(loss, weight)
    expected = []
    for channel in range(2):
        own = torch.zeros_like(weight)
        own[:, channel] = weight[:, channel]
        expected.append(0.5 * abs(float(torch.einsum("ij,ijkl,kl", own, full, own))))
    graph, group = graph_of(net, 4)
    drawn = [
        score_groups(
            net,
            [group],
            graph,
            "hessian",
            ScoringSamples(batches=[Batch(batch.inputs, target)], seed=s),
        )
        for s in range(8)
    ]
    # Two channels' signs are equal or opposite: in the mean, what they share cancels.
    found = torch.stack([one for (one,) in drawn])
    mean = (found.amax(0) + found.amin(0)) / 2
    assert mean.tolist() == pytest.approx(expected, rel=1e-6)
    assert not torch.allclose(found.amax(0), found.amin(0))


def test_hessian_goes_through_fused_attention() -> None:
    from tests.compress.pruning import pruning_linear_nets as nets

    torch.manual_seed(0)
    module = nets.Transformer().eval()
    tokens = torch.randint(0, 11, (4, 8))
    graph = trace(module, (tokens,))
    found = score_groups(
        module, graph.groups, graph, "hessian", ScoringSamples(batches=[Batch((tokens,), None)])
    )
    assert all(bool((one > 0).all()) for one in found)


def samples(count: int, *shape: int) -> Batch:
    generator = torch.Generator().manual_seed(5)
    mixed = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    return Batch((mixed,), None)


def test_wanda_is_the_norm_of_weights_times_that_of_activations() -> None:
    net, batch = line(4, 6, 3), samples(20, 4)
    found = scores(net, "wanda", 4, batches=[batch])
    with torch.no_grad():
        activation = torch.tanh(net[0](*batch.inputs))
    expected = net[2].weight.detach().norm(dim=0) * activation.norm(dim=0)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("criterion", ["wanda", "obs"])
def test_a_weight_that_is_read_by_rows_ranks_as_its_transpose(criterion: str) -> None:
    class ByRows(nn.Module):
        def __init__(self, plain: nn.Sequential) -> None:
            super().__init__()
            self.first = copy.deepcopy(plain[0])
            self.weight = nn.Parameter(plain[2].weight.detach().T.clone())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.first(x)) @ self.weight

    net, batch = line(4, 6, 3), samples(40, 4)
    expected = scores(net, criterion, 4, batches=[batch])
    found = scores(ByRows(net).eval(), criterion, 4, batches=[batch])
    torch.testing.assert_close(found, expected)


def test_wanda_adds_up_what_several_layers_read() -> None:
    """Two layers, the first in two groups of four columns, two columns for each of two channels."""
    drawn = np.random.default_rng(0)
    entries = torch.tensor([[0, 2], [1, 3]])
    weights = drawn.standard_normal((2, 4, 3)), drawn.standard_normal((1, 4, 5))
    inputs = drawn.standard_normal((2, 9, 4)), drawn.standard_normal((1, 9, 4))
    readings = [
        scores_module.Consumer(torch.from_numpy(w), torch.from_numpy(x.swapaxes(1, 2) @ x), entries)
        for w, x in zip(weights, inputs, strict=True)
    ]
    expected = np.zeros(2)
    for w, x in zip(weights, inputs, strict=True):
        for group, channel, entry in np.ndindex(len(w), 2, 2):
            column = int(entries[channel, entry])
            outputs = np.outer(x[group, :, column], w[group, column])
            expected[channel] += (outputs**2).sum()
    assert scores_module.wanda(readings).tolist() == pytest.approx(list(expected**0.5))


def regression_error(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x @ torch.linalg.lstsq(x, y).solution - y).square().sum() / len(y))


def slope_roots(net: nn.Module, weight: str, batch: Batch) -> torch.Tensor:
    """Return what an error of each output channel of a layer is multiplied by."""
    found = scores_module.mean_square_slopes(net, [weight], ScoringSamples([batch]))
    return found[weight].sqrt()


def test_slopes_are_the_mean_square_change_of_the_outputs() -> None:
    net, batch = line(4, 6, 3), samples(4000, 4)
    root = slope_roots(net, "0.weight", batch)
    with torch.no_grad():
        hidden = torch.tanh(net[0](batch.inputs[0][: scores_module.SLOPE_SAMPLES]))
        jacobian = net[2].weight * (1 - hidden.square())[:, None]  # [samples, outputs, channels]
    expected = jacobian.square().sum((0, 1))
    # Each sample has one random direction, whose square is the mean over all alone.
    torch.testing.assert_close(root.square(), expected, rtol=0.8, atol=0)
    assert root.argmax() == expected.argmax()


def test_obs_takes_errors_relative_to_a_layers_own_outputs_where_nothing_is_differentiated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scores_module, "RIDGE", 1e-12)

    class Labels(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).argmax(1)

    batch = samples(40, 4)
    net = Labels(*line(4, 6, 3)).eval()
    found = scores(net, "obs", 4, batches=[batch])
    net[2].weight.data *= 10
    torch.testing.assert_close(scores(net, "obs", 4, batches=[batch]), found)


def test_obs_is_the_rise_of_the_squared_error_by_brute_force(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scores_module, "RIDGE", 1e-12)
    net, batch = line(4, 6, 3), samples(40, 4)
    with torch.no_grad():
        x = torch.tanh(net[0](*batch.inputs))
        y = F.linear(x, net[2].weight) * slope_roots(net, "2.weight", batch)
    left, errors = list(range(6)), []
    found = scores(net, "obs", 4, batches=[batch])
    while len(left) > 1:  # the cheapest leaves, the others adapt
        rises = {c: regression_error(x[:, [i for i in left if i != c]], y) for c in left}
        cheapest = min(rises, key=lambda c: rises[c])
        errors.append((cheapest, rises[cheapest]))
        left.remove(cheapest)
    assert found.argsort().tolist()[:5] == [channel for channel, _ in errors]
    first, error = errors[0]
    unseen = 1 / (1 - 6 / 40) ** 2  # of 6 columns by 40 positions
    assert float(found[first]) == pytest.approx(unseen * error, rel=1e-6)
    totals = [0.0, *(error for _, error in errors)]
    rises = [unseen * (after - before) for before, after in pairwise(totals)]
    rises = list(accumulate(rises, max))[1:]  # so that the order is that of leaving
    assert found[[c for c, _ in errors[1:]]].tolist() == pytest.approx(rises, rel=1e-6)


def test_obs_takes_moments_with_a_ridge(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first to leave costs w_c² / inv(G + d)_cc, whose d is a share of the mean square."""
    monkeypatch.setattr(scores_module, "RIDGE", 0.3)
    drawn = np.random.default_rng(0)
    weight, x = drawn.standard_normal((2, 4, 3)), drawn.standard_normal((2, 9, 4)) / 30
    gram = x.swapaxes(1, 2) @ x
    damped = gram + 0.3 * np.trace(gram, axis1=1, axis2=2).mean() / 4 * np.eye(4)
    rises = (weight**2).sum(2) / np.linalg.inv(damped).diagonal(axis1=1, axis2=2)
    expected = rises.sum(0) / (weight * (gram @ weight)).sum()
    entries = torch.arange(4)[:, None]
    reading = scores_module.Consumer(torch.from_numpy(weight), torch.from_numpy(gram), entries)
    found = scores_module.optimal_brain_surgeon([reading])
    first = int(expected.argmin())
    assert int(found.argmin()) == first
    assert float(found[first]) == pytest.approx(expected[first], rel=1e-9)
    silent = scores_module.Consumer(reading.weight_gio, 0 * reading.gram_gii, entries)
    assert scores_module.optimal_brain_surgeon([silent]).isfinite().all()


@pytest.mark.parametrize("groups", [1, 2])
def test_obs_of_a_convolution_takes_its_whole_window(groups: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3, groups=groups))
    net = net.double().eval()
    batch = samples(60, 1, 6, 6)
    found = scores(net, "obs", 1, 6, 6, batches=[batch])
    with torch.no_grad():
        hidden = net[1](net[0](*batch.inputs))
        y = F.conv2d(hidden, net[2].weight, groups=groups)
    root = slope_roots(net, "2.weight", batch)
    first = int(found.argmin())
    unseen = 1 / (1 - 72 / groups / 240) ** 2  # of 72 columns by four positions of 60 samples
    error = 0.0
    per_group = 8 // groups
    for group in range(groups):
        own = [c for c in range(per_group) if c != first]
        x = F.unfold(hidden[:, [group * per_group + c for c in own]], 3)
        x = x.transpose(1, 2).reshape(-1, len(own) * 9)
        wanted = (y * root[:, None, None])[
            :, group * 6 // groups : (group + 1) * 6 // groups
        ].permute(0, 2, 3, 1)
        wanted = wanted.reshape(len(x), -1)
        error += float((x @ torch.linalg.lstsq(x, wanted).solution - wanted).square().sum())
    assert float(found[first]) == pytest.approx(unseen * error / y[:, 0].numel(), rel=0.02)


def test_obs_keeps_one_of_two_equal_channels() -> None:
    net, batch = line(4, 6, 3), samples(40, 4)
    with torch.no_grad():
        net[0].weight[5], net[0].bias[5] = net[0].weight[2], net[0].bias[2]
        net[2].weight[:, 5] = 10 * net[2].weight[:, 2]  # large, and of no use beside the other
    found = scores(net, "obs", 4, batches=[batch])
    order = found.argsort().tolist()
    assert order[0] in (2, 5) and ({2, 5} - {order[0]}).isdisjoint(order[1:3])
    assert math.isfinite(float(found.max()))


def test_a_norm_behind_a_layer_is_found_where_nothing_else_reads_it() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Linear(4, 4, bias=False) for _ in range(2))
            self.third, self.last = (nn.Linear(4, 4, bias=False) for _ in range(2))
            self.norm, self.twice = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
            self.of_batch = nn.BatchNorm1d(4, track_running_stats=False)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.norm(self.first(x))
            x = self.twice(self.second(x)) + self.twice(x)
            hidden = self.third(self.of_batch(x))
            return self.norm2(hidden), hidden

        def norm2(self, x: torch.Tensor) -> torch.Tensor:
            return self.of_batch(self.last(x))

    _, observed = record_layer_calls(Net().double().eval(), samples(6, 4), "cpu")
    assert observed.means == {"first.weight": "norm.running_mean"}
