import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compress.artifacts.edits.removal import keep_indices_
from compress.common.errors import PipelineInvalid, StageFailed
from compress.pruning.allocation.ranking import modules_matching
from compress.pruning.dependency.channel_groups import SlicePlan
from tests.compress.pruning import pruning_linear_nets as linear_nets
from tests.compress.pruning import pruning_nets as nets
from tests.compress.pruning.planning import plan_slices

IMAGE, VECTOR, SEQUENCE, TOKENS = (1, 8, 8), (4,), (5, 8), None

# name → net, shape of one sample, and of each group the channels before and after
CUT = {
    "mlp": (linear_nets.mlp, VECTOR, {"0": (32, 16), "2": (16, 8)}),
    "flatten": (nets.Flattened, IMAGE, {"conv": (16, 8)}),
    "separable": (
        nets.Separable,
        IMAGE,
        {"stem": (16, 8), "squeeze": (8, 4), "pointwise": (24, 16)},
    ),
    "dense": (nets.Dense, IMAGE, {"stem": (8, 4), "growth1": (8, 4), "growth2": (8, 4)}),
    "shuffle": (nets.Shuffled, IMAGE, {"stem": (8, 4), "grouped1": (4, 2), "grouped2": (8, 4)}),
    "grouped": (nets.Grouped, IMAGE, {"before": (4, 2), "grouped": (8, 4)}),
    "zero_padded": (nets.ZeroPadded, IMAGE, {"stem": (8, 4), "conv1": (16, 8)}),
    "upsampled": (nets.Upsampled, IMAGE, {"down": (16, 8), "up": (8, 4)}),
    "pixel_shuffle": (nets.PixelShuffled, IMAGE, {"conv": (8, 4)}),
    "reused": (nets.Reused, IMAGE, {"stem": (16, 8)}),
    "raw": (nets.Raw, IMAGE, {"kernel": (16, 8)}),
    "in_place": (nets.in_place, IMAGE, {"0": (16, 8)}),
    "transformer": (
        linear_nets.Transformer,
        TOKENS,
        {"attention.query": (4, 2), "feed_forward.up": (32, 16)},
    ),
    "grouped_queries": (
        lambda: linear_nets.Transformer(4, 2),
        TOKENS,
        {"attention.query": (2, 1), "feed_forward.up": (32, 16)},
    ),
    "by_hand": (linear_nets.ByHand, SEQUENCE, {"query": (4, 2)}),
    "fused": (linear_nets.Fused, SEQUENCE, {"qkv": (4, 2)}),
    "tied": (linear_nets.Tied, (8,), {"first": (16, 8)}),
    "transposed": (
        linear_nets.Transposed,
        (8,),
        {"encoder": (16, 8), "weight": (4, 2), "hidden": (16, 8)},
    ),
    "recurrent": (linear_nets.Recurrent, (5, 4), {"lstm": (16, 8), "gru": (16, 8)}),
    "unknown_operator": (linear_nets.UnknownOperator, VECTOR, {"second": (16, 8)}),
    "hidden_width": (linear_nets.HiddenWidth, VECTOR, {"second": (16, 8)}),
    "multi_head": (linear_nets.MultiHead, (5, 16), {"layer.linear1": (32, 16)}),
    "in_place_on_a_view": (linear_nets.InPlaceOnAView, VECTOR, {"second": (16, 8)}),
    "computed": (linear_nets.Computed, (5, 4), {"both_ways": (8, 4)}),
    "outer": (linear_nets.Outer, VECTOR, {"first": (8, 4)}),
    "disagreeing": (linear_nets.Disagreeing, VECTOR, {"first": (32, 16)}),
}

PINNED = {
    "in_place_on_a_view": ("first", "otherwise than its masked twin"),
    "outer": ("second", "it is stretched over other channels"),
    "disagreeing": ("second", "together with other cuts, the smaller model answers otherwise"),
    "unknown_operator": ("first", "operator 'linalg_pinv' is not known"),
    "hidden_width": ("first", "otherwise than its masked twin"),
    "multi_head": ("layer.self_attn", "the smaller model fails"),
    "transformer": ("embed", "layer_norm takes statistics over its channels"),
    "zero_padded": ("conv2", "padding between channels"),
    "mlp": ("4", "it is an output of the model"),
}


def sample(shape: tuple[int, ...] | None, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    if shape is TOKENS:
        return (torch.randint(0, 11, (2, 8), generator=generator),)
    return (torch.randn(2, *shape, generator=generator),)


def built(factory, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    module = factory().eval()
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):  # statistics that are not zero and one
            layer.running_mean.uniform_(-1, 1)
            layer.running_var.uniform_(0.5, 2)
    return module


def assert_equals_masked_twin(
    module: nn.Module, cut: SlicePlan, inputs: tuple[torch.Tensor, ...]
) -> None:
    """Compare on inputs that the proof did not see, with zeros written here."""
    masked, smaller = copy.deepcopy(module).double(), copy.deepcopy(module).double()
    tensors = {
        **dict(masked.named_parameters(remove_duplicate=False)),
        **dict(masked.named_buffers()),
    }
    for name, axes in cut.kept.items():
        for axis, kept in axes.items():
            silent = [i for i in range(tensors[name].shape[axis]) if i not in kept]
            with torch.no_grad():
                tensors[name].movedim(axis, 0)[silent] = 0
    keep_indices_(smaller, cut.kept, cut.attributes)
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    with torch.no_grad():
        torch.testing.assert_close(smaller(*inputs), masked(*inputs), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CUT)
def test_a_pruned_net_answers_as_its_masked_twin(name: str) -> None:
    factory, shape, expected = CUT[name]
    module = built(factory)
    cut = plan_slices(module, sample(shape, 1), ratio=0.5)
    assert {f.group.name: (f.before, f.after) for f in cut.groups} == expected
    assert_equals_masked_twin(module, cut, sample(shape, 2))
    if name in PINNED:
        module_name, reason = PINNED[name]
        assert reason in cut.pinned[module_name]


def test_a_wrong_slice_is_refused() -> None:
    cut = plan_slices(built(linear_nets.SplitByNumber), (torch.randn(2, 4),), ratio=0.5)
    assert not cut.groups
    assert "masked twin" in cut.pinned["first"]


@pytest.mark.parametrize(("change", "is_proven"), [(0.0, True), (1e-3, False)])
def test_a_module_that_requires_float32_is_verified_in_it(change: float, is_proven: bool) -> None:
    module = built(lambda: linear_nets.FloatAlone(change))
    cut = plan_slices(module, (torch.randn(2, 4),), ratio=0.5)
    assert bool(cut.groups) == is_proven
    if not is_proven:
        assert "masked twin (by 1.0e-03)" in cut.pinned["first"]


def test_opaque_layers_have_a_reason() -> None:
    pinned = plan_slices(built(linear_nets.Computed), (torch.randn(2, 5, 4),), ratio=0.5).pinned
    assert "its weight is computed from others" in pinned["normed"]
    assert "its weight is computed from others" in pinned["linear"]


def test_weights_of_the_outermost_module_go_by_their_own_names() -> None:
    (group,) = plan_slices(built(nets.Raw), (torch.randn(2, 1, 8, 8),), ratio=0.5).groups
    assert group.group.producers == ("kernel",)
    assert group.group.producer_modules == ("",)


def test_the_number_of_heads_changes_with_the_slice() -> None:
    module = built(lambda: linear_nets.Transformer(4, 2))
    cut = plan_slices(module, (torch.randint(0, 11, (2, 8)),), ratio=0.5)
    assert cut.attributes == {"attention.heads": 2, "attention.key_heads": 1}
    keep_indices_(module, cut.kept, cut.attributes)
    assert module.attention.query.weight.shape == (12, 16)
    assert module.attention.key.weight.shape == (6, 16)


def test_tied_weights_stay_tied() -> None:
    module = built(linear_nets.Tied)
    cut = plan_slices(module, (torch.randn(2, 8),), ratio=0.5)
    keep_indices_(module, cut.kept, cut.attributes)
    assert module.third.weight is module.second.weight
    assert module.second.weight.shape == (8, 8)


def random_cnn(seed: int) -> nn.Module:
    """Return a network of convolutions that add, concatenate or gate what came before."""
    choose = random.Random(seed)

    class Random(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.joins: list[str] = []
            self.layers = nn.ModuleList([nn.Conv2d(1, 8, 3, padding=1)])
            self.norms = nn.ModuleList()
            width = 8
            for _ in range(4):
                join = choose.choice(["add", "concatenate", "replace", "gate", "depthwise"])
                wider = choose.choice([8, 12]) if join in ("concatenate", "replace") else width
                groups = width if join == "depthwise" else choose.choice([1, 1, 2])
                self.joins.append(join)
                self.layers.append(nn.Conv2d(width, wider, 3, padding=1, groups=groups))
                width = width + wider if join == "concatenate" else wider
                self.norms.append(nn.BatchNorm2d(width) if choose.random() < 0.5 else nn.Identity())
            self.head = nn.Linear(width * 16, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, *rest = self.layers
            x = F.relu(first(x))
            for join, layer, norm in zip(self.joins, rest, self.norms, strict=True):
                y = layer(x)
                if join == "add":
                    x = x + y
                elif join == "concatenate":
                    x = torch.cat([x, y], 1)
                elif join == "gate":
                    x = x * torch.sigmoid(y)
                else:
                    x = y
                x = F.relu(norm(x))
            return self.head(F.max_pool2d(x, 2).flatten(1))

    return built(Random, seed)


RANDOM_IN_CI = 6
"""Random nets that CI tries; `make soak` tries twice as many, of the same parts."""


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=[pytest.mark.soak] * (seed >= RANDOM_IN_CI))
        for seed in range(2 * RANDOM_IN_CI)
    ],
)
def test_random_cnns_answer_as_their_masked_twins(seed: int) -> None:
    module = random_cnn(seed)
    cut = plan_slices(module, (torch.randn(2, 1, 8, 8),), ratio=0.4, round_to=2)
    assert cut.groups
    assert_equals_masked_twin(module, cut, (torch.randn(2, 1, 8, 8),))


def test_the_module_is_not_changed() -> None:
    module = built(nets.Separable)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    plan_slices(module, (torch.randn(2, 1, 8, 8),), ratio=0.5)
    assert module.depthwise.groups == 16
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def test_least_important_channels_are_removed() -> None:
    module = built(linear_nets.mlp)
    with torch.no_grad():
        module[0].weight[::2] *= 0.01
        module[2].weight[:, ::2] *= 0.01
    for importance in ("l1", "l2"):
        cut = plan_slices(module, (torch.randn(2, 4),), ratio=0.5, importance=importance)
        assert cut.kept["0.weight"][0] == tuple(range(1, 32, 2))
    with torch.no_grad():  # what reads the channels counts as much as what makes them
        module[2].weight[:, ::2] *= 1e6
    for importance in ("l1", "l2"):
        cut = plan_slices(module, (torch.randn(2, 4),), ratio=0.5, importance=importance)
        assert cut.kept["0.weight"][0] == tuple(range(0, 32, 2))
    random_ones = [
        plan_slices(module, (torch.randn(2, 4),), ratio=0.5, importance="random", seed=seed).kept
        for seed in (1, 1, 2)
    ]
    assert random_ones[0] == random_ones[1] != random_ones[2]


def test_excluded_modules_keep_their_channels() -> None:
    module = built(nets.Dense)
    cut = plan_slices(module, (torch.randn(2, 1, 8, 8),), ratio=0.5, exclude=("growth*",))
    assert [f.group.name for f in cut.groups] == ["stem"]
    assert cut.pinned["growth1"] == "excluded by 'growth*'"


def test_an_excluded_normalisation_keeps_its_channels() -> None:
    module = built(nets.Separable)
    cut = plan_slices(module, (torch.randn(2, 1, 8, 8),), ratio=0.5, exclude=("norm",))
    assert [f.group.name for f in cut.groups] == ["squeeze", "pointwise"]
    assert cut.pinned["stem"] == "excluded by 'norm'"


def test_a_pattern_matches_inner_modules() -> None:
    module = built(linear_nets.Transformer)
    assert modules_matching(module, ["attention"])["attention.query"] == "attention"
    with pytest.raises(PipelineInvalid, match=r"no module matches 'atention'.*'attention'"):
        modules_matching(module, ["atention"])


def test_a_model_that_cannot_be_traced_says_so() -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(StageFailed, match=r"torch\.export cannot trace Branching"):
        plan_slices(Branching().eval(), (torch.randn(2, 4),), ratio=0.5)
