"""How many channels stay: shares, caps, rounding, and targets."""

import copy
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from compress.artifacts.edits.removal import keep_indices_
from compress.common.errors import PipelineInvalid, StageFailed
from compress.graph.flops import count_macs
from compress.pruning.allocation.ranking import (
    RankedGroup,
    Ranking,
    mac_estimate,
    parameter_estimate,
    plan_for_target,
    rank,
)
from compress.pruning.channel_pruner import parameters_of
from compress.pruning.channel_settings import ChannelSelection
from compress.pruning.verification.masked_equivalence import VerificationInputs
from tests.compress.pruning import pruning_linear_nets as linear_nets
from tests.compress.pruning import pruning_nets as nets
from tests.compress.pruning.planning import plan_slices


def ranked(*scores: list[float], kinds: str = "") -> list[RankedGroup]:
    group = SimpleNamespace()
    return [
        RankedGroup(group, torch.tensor(own), 1, len(own), kinds[i] if kinds else None)
        for i, own in enumerate(scores)
    ]


def allocate(
    groups: list[RankedGroup], ratio: float, limits: ChannelSelection, comparable: bool = False
) -> list[int]:
    return Ranking(None, None, tuple(groups), {}, comparable, None).allocate(ratio, limits)


STRONG, WEAK = [8.0, 7, 6, 5], [4.0, 3, 2, 1]


def test_uniform_removes_the_same_share_of_each() -> None:
    limits = ChannelSelection(round_to=1)
    assert allocate(ranked(STRONG, WEAK), 0.5, limits) == [2, 2]
    assert allocate(ranked(STRONG, WEAK), 0.9, ChannelSelection(round_to=1, min_channels=3)) == [
        3,
        3,
    ]


@pytest.mark.parametrize(
    ("count", "entries", "ratio", "round_to", "kept"),
    [
        (64, 1, 0.5, 16, 32),
        (64, 1, 0.4, 16, 32),  # 38.4 is nearer to 32 than to 48
        (64, 1, 0.35, 16, 48),
        (64, 1, 0.99, 16, 16),
        (64, 1, 0.05, 16, 64),
        (24, 1, 0.5, 16, 16),  # too narrow for two sixteens: eights
        (8, 1, 0.5, 16, 4),
        (3, 1, 0.9, 16, 1),
        (12, 64, 0.5, 16, 6),  # heads 64 wide are multiples of 16 already
        (8, 8, 0.4, 16, 4),
        (10, 4, 0.75, 6, 3),  # 6 and 4 have 2 in common: threes
        (32, 1, 0.5, 16, 16),  # two sixteens are wide enough
        (6, 1, 0.25, 1, 5),  # 4.5 is rounded up
    ],
)
def test_the_nearest_multiple_stays(
    count: int, entries: int, ratio: float, round_to: int, kept: int
) -> None:
    group = RankedGroup(SimpleNamespace(), torch.arange(count), entries, count)
    assert allocate([group], ratio, ChannelSelection(round_to=round_to)) == [kept]


@pytest.mark.parametrize(("comparable", "kept"), [(True, [2, 4]), (False, [3, 3])])
def test_where_channels_cost_differently_the_dear_ones_leave_first(comparable, kept) -> None:
    groups, limits = ranked(WEAK, WEAK), ChannelSelection(scope="global", round_to=1)
    ranking = Ranking(None, None, tuple(groups), {}, comparable, None, costs=(10.0, 1.0))
    assert ranking.allocate(0.25, limits) == kept


@pytest.mark.parametrize("comparable", [True, False])
@pytest.mark.parametrize("ratio", [0.2, 0.45, 0.7, 0.95])
def test_global_keeps_the_best_of_all_channels(ratio: float, comparable: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    groups = [
        RankedGroup(SimpleNamespace(), torch.rand(n, generator=generator) * size, 1, original)
        for n, size, original in ((12, 3.0, 12), (7, 1.0, 10), (9, 2.0, 9), (2, 0.0, 10))
    ]
    limits = ChannelSelection(scope="global", round_to=1, min_channels=2, max_ratio=0.7)
    kept = [min(len(f.scores), max(2, math.ceil(0.3 * f.original - 1e-9))) for f in groups]
    left = [
        sorted(
            (s / (1.0 if comparable else f.scores.mean().item() or 1.0) for s in f.scores),
            reverse=True,
        )[k:]
        for f, k in zip(groups, kept, strict=True)
    ]
    # One by one, the best that is left of any group. Earlier cuts left the last one two channels.
    while sum(kept) < round((1 - ratio) * 41) and any(left):
        best = max((i for i in range(4) if left[i]), key=lambda i: left[i][0])
        left[best].pop(0)
        kept[best] += 1
    assert allocate(groups, ratio, limits, comparable=comparable) == kept


def test_global_compares_all_channels_up_to_a_cap() -> None:
    groups = ranked(STRONG, WEAK)
    everything = ChannelSelection(scope="global", round_to=1, min_channels=1, max_ratio=0.99)
    assert allocate(groups, 0.375, everything, comparable=True) == [4, 1]
    capped = ChannelSelection(scope="global", round_to=1, min_channels=1, max_ratio=0.5)
    assert allocate(groups, 0.375, capped, comparable=True) == [3, 2]
    assert allocate(groups, 0.99, capped, comparable=True) == [2, 2]
    # Relative to their means the largest of each are 8/6.5, 4/2.5 …
    assert allocate(groups, 0.5, everything) == [2, 2]
    assert allocate(ranked(STRONG, [9.0, 0.1, 0.1, 0.1]), 0.375, everything) == [4, 1]


def test_isomorphic_compares_groups_of_one_structure() -> None:
    groups = ranked(STRONG, WEAK, [0.4, 0.3], kinds="aab")
    limits = ChannelSelection(scope="isomorphic", round_to=1, min_channels=1, max_ratio=0.99)
    assert allocate(groups, 0.5, limits, comparable=True) == [3, 1, 1]


def test_caps_and_minima_are_rounded_up() -> None:
    group = ranked([float(i) for i in range(64)], [0.0] * 64)
    limits = ChannelSelection(scope="global", round_to=16, min_channels=1, max_ratio=0.7)
    assert allocate(group, 0.6, limits, comparable=True)[1] == 32  # 20 at least, in sixteens


@pytest.mark.parametrize(
    ("channels", "max_ratio", "least"), [(10, 0.75, 3), (7, 0.5, 4), (9, 0.3, 7)]
)
def test_no_group_loses_more_than_max_ratio(channels: int, max_ratio: float, least: int) -> None:
    """Where the share is no whole number of channels, one more stays and not one less."""
    groups = ranked([9.0] * channels, [0.0] * channels)
    limits = ChannelSelection(scope="global", round_to=1, min_channels=1, max_ratio=max_ratio)
    kept = allocate(groups, max_ratio, limits, comparable=True)
    assert kept[1] == least
    assert channels - least <= max_ratio * channels < channels - least + 1


def test_groups_of_one_structure_are_found() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(p for _ in range(3) for p in (nn.Linear(8, 8), nn.ReLU())))
    ranking = rank(net.eval(), VerificationInputs((torch.randn(2, 8),)))
    assert len({one.structure for one in ranking.ranked}) == 1
    ranking = rank(
        linear_nets.Transformer().eval(), VerificationInputs((torch.randint(0, 11, (2, 8)),))
    )
    assert len({one.structure for one in ranking.ranked}) == 2  # heads and hidden units


def test_only_included_modules_are_pruned() -> None:
    net = nets.Dense().eval()
    ranking = rank(
        net,
        VerificationInputs((torch.randn(2, 1, 8, 8),)),
        ChannelSelection(include=("growth*",), exclude=("growth2",)),
    )
    assert [one.group.name for one in ranking.ranked] == ["growth1"]
    assert ranking.pinned["stem"] == "not among those that `include` names"
    with pytest.raises(PipelineInvalid, match=r"include: no module matches 'grow'.*'growth1'"):
        rank(
            net, VerificationInputs((torch.randn(2, 1, 8, 8),)), ChannelSelection(include=("grow",))
        )


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 24, 3), nn.ReLU(), nn.Conv2d(24, 40, 3), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(640, 32), nn.Tanh(), nn.Linear(32, 4)),
    ).eval()


CASES = {
    "convolutions": (wide, torch.randn(2, 1, 8, 8)),
    "transformer": (linear_nets.Transformer, torch.randint(0, 11, (2, 8))),
}


@pytest.mark.parametrize("scope", ["uniform", "global"])
@pytest.mark.parametrize("share", [0.8, 0.5, 0.37])
@pytest.mark.parametrize("quantity", ["macs", "parameters"])
def test_targets_are_reached_and_not_exceeded(quantity: str, share: float, scope: str) -> None:
    net, inputs = wide(), CASES["convolutions"][1]
    smaller, goal, largest = to_target(
        net, inputs, quantity, share, ChannelSelection(scope=scope, round_to=4)
    )
    assert goal - largest <= cost(smaller, inputs, quantity) <= goal


@pytest.mark.slow
def test_products_of_attention_are_counted_in_a_target() -> None:
    net, inputs = linear_nets.Transformer().eval(), CASES["transformer"][1]
    smaller, goal, _ = to_target(net, inputs, "macs", 0.7, ChannelSelection(round_to=1))
    assert 0.93 * goal <= cost(smaller, inputs, "macs") <= goal


def cost(net: nn.Module, inputs: torch.Tensor, quantity: str) -> int:
    return parameters_of(net) if quantity == "parameters" else count_macs(net, (inputs,))


def to_target(net, inputs, quantity: str, share: float, limits: ChannelSelection):
    """Return the cut net, the goal, and what the largest single step of a group costs."""
    ranking = rank(net, VerificationInputs((inputs,)))
    build = {"parameters": parameter_estimate, "macs": partial(mac_estimate, inputs=(inputs,))}
    estimate = build[quantity](net, ranking.graph)
    goal = share * cost(net, inputs, quantity)

    def after(cut) -> nn.Module:
        smaller = copy.deepcopy(net)
        keep_indices_(smaller, cut.kept, cut.attributes)
        return smaller

    measure = partial(cost, inputs=inputs, quantity=quantity)
    cut = plan_for_target(ranking, limits, goal, measure, estimate)
    whole = estimate.without([])
    assert whole == pytest.approx(cost(net, inputs, quantity))
    steps = [whole - estimate.without([one.group.channels[:4]]) for one in ranking.ranked]
    return after(cut), goal, max(steps)


def test_a_target_out_of_reach_says_how_far_it_is() -> None:
    with pytest.raises(StageFailed, match=r"target of .* cannot be reached: the smallest that"):
        to_target(wide(), CASES["convolutions"][1], "macs", 0.001, ChannelSelection(round_to=16))


@pytest.mark.parametrize("goal", [0.35, 0.6, 0.9])
def test_latency_is_searched_among_few_candidates(goal: float) -> None:
    ranking = rank(wide(), VerificationInputs((CASES["convolutions"][1],)))
    asked = []

    def measure(net: nn.Module) -> float:  # a staircase, as latencies are
        left = sum(len(net[i].weight) for i in (0, 2, 5)) / 96
        asked.append(left)
        return round(0.1 + left, 1)

    cut = plan_for_target(ranking, ChannelSelection(round_to=4), goal, measure)
    found = round(0.1 + sum(one.after for one in cut.groups) / 96, 1)
    assert goal - 0.15 <= found <= goal
    assert len(asked) <= 6
    with pytest.raises(StageFailed, match=r"the smallest that was found is"):
        plan_for_target(ranking, ChannelSelection(round_to=4), 0.05, measure)


def test_unverified_groups_are_left_out_of_a_target() -> None:
    torch.manual_seed(0)
    net, inputs = linear_nets.HiddenWidth().eval(), torch.randn(2, 4)
    smaller, goal, _ = to_target(net, inputs, "parameters", 0.8, ChannelSelection(round_to=1))
    assert 0.9 * goal <= parameters_of(smaller) <= goal
    assert smaller.first.weight.shape == net.first.weight.shape


def test_an_unverified_group_may_be_an_error() -> None:
    ranking: Ranking = rank(
        linear_nets.SplitByNumber().eval(), VerificationInputs((torch.randn(2, 4),))
    )
    keep = ranking.allocate(0.5, ChannelSelection())
    assert not ranking.verify(keep).groups
    with pytest.raises(StageFailed, match=r"'first' cannot be verified: .*; exclude it, or set"):
        ranking.verify(keep, "error")


def test_with_l2_the_channels_with_the_largest_norms_stay() -> None:
    net = wide()
    cut = plan_slices(net, (torch.randn(2, 1, 8, 8),), ratio=0.5, round_to=1)
    for layer, reader, per_channel in ((0, 2, 9), (2, 5, 16), (5, 7, 1)):
        made, read = net[layer], net[reader].weight.flatten(2 if reader == 2 else 1)
        if reader == 2:
            read = read.transpose(0, 1).flatten(1)
        else:
            read = read.unflatten(1, (-1, per_channel)).transpose(0, 1).flatten(1)
        everything = [made.weight.flatten(1), made.bias[:, None], read]
        norms = torch.cat(everything, 1).norm(dim=1)
        count = len(norms) // 2
        assert set(cut.kept[f"{layer}.weight"][0]) == set(norms.topk(count).indices.tolist())
