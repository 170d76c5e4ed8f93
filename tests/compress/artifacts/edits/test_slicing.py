import pytest
import torch
from torch import nn

from compress.artifacts.edits.removal import keep_indices_


def test_sizes_that_layers_record_are_mended() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 16, 1, groups=8))
    first, norm, depthwise = net
    kept = {0: (0, 2, 5)}
    pairs = {0: (0, 1, 4, 5, 10, 11)}
    tensors = {f"{name}": kept for name in ("0.weight", "0.bias", "1.weight", "1.bias")}
    tensors |= {"1.running_mean": kept, "1.running_var": kept, "2.weight": pairs, "2.bias": pairs}
    expected = first.weight[[0, 2, 5]].clone()
    keep_indices_(net, tensors, {})
    assert torch.equal(first.weight, expected)
    assert (first.out_channels, norm.num_features) == (3, 3)
    assert (depthwise.groups, depthwise.in_channels, depthwise.out_channels) == (3, 3, 6)
    assert net.eval()(torch.randn(1, 3, 5, 5)).shape == (1, 6, 3, 3)


def test_tied_weights_stay_tied_and_frozen() -> None:
    net = nn.ModuleDict({"a": nn.Embedding(5, 8), "b": nn.Linear(8, 5, bias=False)})
    net["b"].weight = net["a"].weight
    net["a"].weight.requires_grad_(False)
    keep_indices_(net, {name: {1: (1, 3)} for name in ("a.weight", "b.weight")}, {})
    assert net["a"].weight is net["b"].weight
    assert not net["a"].weight.requires_grad
    assert (net["a"].embedding_dim, net["b"].in_features) == (2, 2)


def test_recurrent_layers_use_the_cut_weights() -> None:
    net = nn.Sequential(nn.GRU(4, 6))
    gates = {0: tuple(gate * 6 + unit for gate in range(3) for unit in (0, 4))}
    kept = dict.fromkeys(("0.weight_ih_l0", "0.bias_ih_l0", "0.bias_hh_l0"), gates)
    keep_indices_(net, {**kept, "0.weight_hh_l0": {**gates, 1: (0, 4)}}, {})
    assert net[0].hidden_size == 2
    assert net(torch.randn(3, 1, 4))[0].shape == (3, 1, 2)


def test_attributes_are_set_last() -> None:
    net = nn.Sequential(nn.Linear(2, 4))
    net[0].heads = 4
    keep_indices_(net, {"0.weight": {0: (0,)}, "0.bias": {0: (0,)}}, {"0.heads": 1})
    assert (net[0].heads, net[0].out_features) == (1, 1)


@pytest.mark.parametrize("name", ["1.weight", "0.scale"])
def test_an_unknown_tensor_is_refused(name: str) -> None:
    with pytest.raises(KeyError):
        keep_indices_(nn.Sequential(nn.Linear(2, 4)), {name: {0: (0,)}}, {})


def test_an_index_outside_is_refused() -> None:
    with pytest.raises(IndexError):
        keep_indices_(nn.Sequential(nn.Linear(2, 4)), {"0.weight": {0: (4,)}}, {})
