"""The mathematics of zeros."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from compress.common.errors import PipelineInvalid
from compress.core.progress import silent
from compress.data.batch import Batch
from compress.pruning.unstructured import masks as zeros_module
from compress.pruning.unstructured.masks import (
    AddZeros,
    group_by_block,
    n_of_m_masks,
    prunable_weights,
    set_calibrated_zeros_,
    smallest_of_neighbours,
    sparsegpt,
    unstructured_masks,
    wanda,
)
from compress.training.objectives.objective import KeepZeros
from tests.compress.pruning.pruning_weight_nets import Many, Text, Transposed, Wide


def activations(count=400, width=16, seed=0):
    """Return inputs that mostly follow from each other."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(width // 4, width, generator=generator, dtype=torch.float64)
    causes = torch.randn(count, width // 4, generator=generator, dtype=torch.float64)
    return causes @ mixed + torch.randn(count, width, generator=generator, dtype=torch.float64) / 4


def error(x, before, after):
    return float((x @ (before - after)[0].T).norm() / (x @ before[0].T).norm())


def test_the_smallest_weights_become_zero_by_layer_or_globally() -> None:
    weights = {"a": torch.tensor([[1.0, -2.0], [3.0, -4.0]]), "b": torch.tensor([[9.0, 0.5]])}
    by_layer = unstructured_masks(weights, 0.5, "l1", is_global=False)
    assert by_layer["a"].tolist() == [[True, True], [False, False]]
    assert by_layer["b"].tolist() == [[False, True]]
    of_all = unstructured_masks(weights, 0.5, "l1", is_global=True)
    assert of_all["a"].sum() == 2 and of_all["b"].tolist() == [[False, True]]
    drawn = unstructured_masks({"a": torch.ones(100, 10)}, 0.3, "random", is_global=False)["a"]
    assert drawn.sum() == 300 and drawn.sum(0).max() < 100


def test_of_m_neighbours_the_n_highest_stay() -> None:
    score = torch.tensor([[4.0, 1.0, 3.0, 2.0, 0.0, 0.0, 5.0, 6.0]])
    zeros = smallest_of_neighbours(score, (2, 4))
    assert zeros.tolist() == [[False, True, False, True, True, True, False, False]]
    of_groups = smallest_of_neighbours(score.reshape(2, 2, 2), (1, 2))
    assert of_groups.tolist() == [[[False, True], [False, True]], [[True, False], [True, False]]]


@pytest.mark.parametrize("method", ["l1", "random"])
def test_neighbours_are_channels_at_one_window_position(method: str) -> None:
    net = Many().eval()
    layouts = dict(
        prunable_weights(net, [torch.randn(2, 1, 8, 8)]).with_known_layout((2, 4)).layouts
    )
    layouts["attention.out_proj.weight"] = None
    weights = {name: net.get_parameter(name) for name in layouts}
    zeros = n_of_m_masks(weights, layouts, (2, 4), method)
    assert set(zeros) == set(layouts) - {"attention.out_proj.weight"}
    for name, where in zeros.items():
        weight = weights[name].detach()
        channels = weight.movedim(1, -1) if weight.dim() == 4 else weight
        leaving = where.movedim(1, -1) if weight.dim() == 4 else where
        order = channels.abs().reshape(-1, 4).argsort(1)
        smallest = torch.zeros(order.shape, dtype=torch.bool).scatter_(1, order[:, :2], True)
        assert (leaving.reshape(-1, 4).sum(1) == 2).all()
        assert torch.equal(leaving.reshape(-1, 4), smallest) == (method == "l1")


def test_wanda_scales_weights_by_input_norms() -> None:
    weight = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    gram = torch.diag(torch.tensor([100.0, 1.0, 1.0, 0.01]))[None]
    assert wanda(weight, gram, 0.5, None).tolist() == [[[False, True, False, True]]]
    assert wanda(weight, gram, 0.0, (1, 2)).tolist() == [[[False, True, False, True]]]
    groups = torch.tensor([[[1.0, 2, 3], [3, 2, 1]], [[-9.0, 8, -7], [4, -6, 9]]])
    diagonals = torch.tensor([[1.0, 1, 1], [1.0, 0.25, -1e-9]])  # rounding may leave less than 0
    grams = torch.diag_embed(diagonals) + 7 - 7 * torch.eye(3)
    assert wanda(groups, grams, 1 / 3, None).tolist() == [
        [[True, False, False], [False, False, True]],
        [[False, False, True], [False, False, True]],
    ]


def test_sparsegpt_takes_patterns_wider_than_a_block_of_columns() -> None:
    torch.manual_seed(0)
    x, weight = activations(width=320), torch.randn(1, 4, 320, dtype=torch.float64)
    found = sparsegpt(weight, (x.T @ x)[None], 0.0, (40, 160))
    assert ((found.reshape(-1, 160) != 0).sum(1) == 40).all()


@pytest.mark.parametrize(("n_of_m", "amount"), [(None, 0.5), ((2, 4), 0.0)])
def test_sparsegpt_compensates_zeros(n_of_m, amount) -> None:
    torch.manual_seed(0)
    x = activations(width=160)  # more than a block of columns
    weight = torch.randn(1, 24, 160, dtype=torch.float64)
    gram = (x.T @ x)[None]
    found = sparsegpt(weight, gram, amount, n_of_m)
    if n_of_m:
        assert ((found.reshape(-1, 4) == 0).sum(1) == 2).all()
    assert float((found == 0).double().mean()) == 0.5
    masked = weight.masked_fill(wanda(weight, gram, amount, n_of_m), 0)
    assert error(x, weight, found) < 0.6 * error(x, weight, masked)


def test_sparsegpt_with_one_zero_is_optimal_brain_surgeon() -> None:
    """One weight leaves a single column: the closed form of Hassibi and Stork (1993)."""
    x = activations(width=6)
    weight = torch.randn(1, 1, 6, dtype=torch.float64, generator=torch.manual_seed(1))
    weight[0, 0, 0] = 1e-3  # the first column's is the one to leave
    gram = x.T @ x
    found = sparsegpt(weight, gram[None], 1 / 6, None)
    damped = gram + 0.01 * gram.diagonal().mean() * torch.eye(6, dtype=torch.float64)
    inverse = torch.linalg.inv(damped)
    expected = weight[0, 0] - weight[0, 0, 0] / inverse[0, 0] * inverse[0]
    assert found[0, 0, 0] == 0
    torch.testing.assert_close(found[0, 0, 1:], expected[1:])


@pytest.mark.parametrize(
    ("n_of_m", "amount", "block"), [(None, 0.4, 8), ((2, 4), 0.0, 8), ((1, 3), 0.0, 6)]
)
def test_sparsegpt_is_the_papers_algorithm(monkeypatch, n_of_m, amount, block) -> None:
    """Algorithm 1, the Hessian of the columns to come inverted anew at each."""
    monkeypatch.setattr(zeros_module, "LAZY_INPUTS", 8)
    x = torch.stack([activations(width=12, seed=seed) for seed in (0, 1)])
    x[0, :, 4] = 0
    gram = x.mT @ x / 1e5  # small numbers, beside which the 1 that a silent input is given is large
    weight = torch.randn(2, 5, 12, dtype=torch.float64, generator=torch.manual_seed(2))
    before = weight.clone()
    found = sparsegpt(weight, gram, amount, n_of_m)
    assert torch.equal(weight, before)
    for g in range(2):
        left, moment = weight[g].numpy().copy(), gram[g].numpy()
        dead = np.diag(moment) == 0
        hessian = moment + 0.01 * np.diag(moment).mean() * np.eye(12)
        hessian[dead, dead] = 1
        left[:, dead] = 0
        inverses = [np.linalg.inv(hessian[i:, i:]) for i in range(12)]
        denominator = np.array([inverse[0, 0] for inverse in inverses])
        zeros = np.zeros_like(left, dtype=bool)
        for i in range(12):
            if n_of_m is None and i % block == 0:
                score = (left**2 / denominator)[:, i : i + block]
                least = np.argsort(score, axis=None)[: round(amount * score.size)]
                zeros[:, i : i + block].flat[least] = True  # of all rows together
            if n_of_m and i % n_of_m[1] == 0:
                score = (left**2 / denominator)[:, i : i + n_of_m[1]]
                for row, order in enumerate(np.argsort(score, axis=1)):
                    zeros[row, i + order[: n_of_m[1] - n_of_m[0]]] = True
            removed = np.where(zeros[:, i], left[:, i], 0)
            left[:, i:] -= removed[:, None] / inverses[i][0, 0] * inverses[i][0]
            left[zeros[:, i], i] = 0
        np.testing.assert_allclose(found[g].numpy(), left, rtol=1e-8, atol=1e-12)


def test_weights_of_constant_zero_inputs_become_zero() -> None:
    x = activations()
    x[:, 3] = 0
    found = sparsegpt(torch.ones(1, 4, 16, dtype=torch.float64), (x.T @ x)[None], 0.25, None)
    assert (found[0, :, 3] == 0).all() and found.isfinite().all()


def test_matrices_and_kernels_are_prunable_embeddings_not() -> None:
    net, x = Many().eval(), torch.randn(2, 1, 8, 8)
    found = prunable_weights(net, [x])
    assert list(found.layouts) == [
        "conv.weight", "grouped.weight", "depthwise.weight", "raw", "head.weight",
        "attention.in_proj_weight", "attention.out_proj.weight",
    ]  # fmt: skip
    for name, layout in found.layouts.items():
        if layout:
            weight = net.get_parameter(name)
            assert torch.equal(layout.weight(layout.matrix(weight), weight.shape), weight)
    pairs = found.with_known_layout((2, 4))
    assert list(pairs.layouts) == ["grouped.weight", "raw", "head.weight"]
    assert pairs.left["conv.weight"] == "it reads 1 channels, no multiple of 4"
    assert "cannot be seen" in pairs.left["attention.in_proj_weight"]
    text = prunable_weights(Text().eval(), [torch.zeros(2, 5, dtype=torch.int64)])
    assert list(text.layouts) == ["inner.weight"]
    assert "otherwise" in text.left["embed.weight"]


def test_patterns_select_weights() -> None:
    net, x = Many().eval(), torch.randn(2, 1, 8, 8)
    assert list(prunable_weights(net, [x], include=["conv", "head*"]).layouts) == [
        "conv.weight",
        "head.weight",
    ]
    assert "raw" not in prunable_weights(net, [x], exclude=["raw", "attention"]).layouts
    with pytest.raises(PipelineInvalid, match=r"include: .* matches 'haed'; did you mean 'head'"):
        prunable_weights(net, [x], include=["haed"])


def test_a_grouped_kernel_is_compensated_by_its_own_inputs() -> None:
    """Were its columns in another order than those of its inputs, nothing would be won."""
    net = Many().eval()
    x = torch.randn(24, 1, 8, 8, generator=torch.manual_seed(1))
    layouts, read = prunable_weights(net, [x]).layouts, net.conv(x).relu()
    before, errors = net.grouped(read), {}
    for method in ("wanda", "sparsegpt"):
        changed = copy.deepcopy(net)
        left = set_calibrated_zeros_(
            changed,
            {name: layouts[name] for name in ("grouped.weight", "raw")},
            [Batch((x,), None)],
            method=method,
            amount=0.0,
            n_of_m=(2, 4),
            device="cpu",
            progress=silent,
        )
        assert left == {}
        kernel = changed.grouped.weight.permute(0, 2, 3, 1).reshape(-1, 4)
        assert ((kernel == 0).sum(1) == 2).all()
        assert ((changed.raw.reshape(-1, 4) == 0).sum(1) == 2).all()
        errors[method] = float((changed.grouped(read) - before).detach().norm())
    assert errors["sparsegpt"] < 0.8 * errors["wanda"]


def test_weights_of_a_block_are_pruned_together() -> None:
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)]
    net = nn.Sequential(nn.Linear(4, 4), *blocks)
    names = ["0.weight", "1.0.weight", "1.0.bias"]
    assert group_by_block(net, names) == [["0.weight"], ["1.0.weight", "1.0.bias"]]


def steps(constraint, net, count):
    """Train, and yield the share of zeros after each step."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for step in range(count):
        optimizer.zero_grad()
        net(torch.randn(8, 4)).square().sum().backward()
        with constraint.around(net, step, count):
            optimizer.step()
        yield {name: float((p == 0).float().mean()) for name, p in net.named_parameters()}


def test_zeros_stay_and_grow_by_the_schedule() -> None:
    torch.manual_seed(0)
    names = ("up.weight", "down.weight")
    cubic = AddZeros(names, 0.5, whole=False, schedule="cubic", until=0.5, updates=4)
    linear = AddZeros(names, 0.5, whole=False, schedule="linear", until=0.5, updates=4)
    assert [round(cubic.amount_at(i), 4) for i in range(5)] == [0, 0.2891, 0.4375, 0.4922, 0.5]
    assert [linear.amount_at(i) for i in range(5)] == [0, 0.125, 0.25, 0.375, 0.5]
    assert not cubic.is_met(0.0) and not cubic.is_met(0.49) and cubic.is_met(0.5)
    found = list(steps(linear, Wide(), 16))
    shares = [step["up.weight"] for step in found]
    assert shares[0] == 0 and shares[1] == 0.125 and shares[8:] == [0.5] * 8
    assert found[-1]["down.weight"] == 0.5 and found[-1]["up.bias"] == 0


def test_zeros_of_the_start_are_the_zeros_of_the_end() -> None:
    torch.manual_seed(0)
    net = Wide()
    where = torch.rand_like(net.up.weight) < 0.5
    net.up.weight.data.masked_fill_(where, 0)
    before = net.up.weight.detach().clone()
    list(steps(KeepZeros(("up.weight",)), net, 5))
    assert torch.equal(net.up.weight == 0, where)
    assert not torch.equal(net.up.weight, before)


def test_a_weight_that_lies_the_other_way_round_is_zeroed_by_inputs() -> None:
    net, x = Transposed().eval(), activations(200, 8).float()
    layouts = prunable_weights(net, [x]).layouts
    assert list(layouts) == ["weight"] and layouts["weight"].read_axis == 0
    before = net(x).detach()
    errors = {}
    for method in ("wanda", "sparsegpt"):
        changed = copy.deepcopy(net)
        settings = {"amount": 0.0, "n_of_m": (2, 4), "device": "cpu", "progress": silent}
        set_calibrated_zeros_(changed, layouts, [Batch((x,), None)], method=method, **settings)
        assert ((changed.weight.t().reshape(-1, 4) == 0).sum(1) == 2).all()
        errors[method] = float((changed(x) - before).detach().norm())
    assert errors["sparsegpt"] < 0.8 * errors["wanda"]
