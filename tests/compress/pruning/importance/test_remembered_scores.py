"""Which scores are taken from memory: those of the same channels, by the same samples alone."""

import pytest
import torch
from torch import nn

from compress.data.batch import Batch
from compress.pruning.allocation.ranking import rank
from compress.pruning.channel_settings import ChannelSelection
from compress.pruning.importance import remembered_scores
from compress.pruning.importance.remembered_scores import remembering_scores
from compress.pruning.importance.scores import ScoringSamples
from compress.pruning.verification.masked_equivalence import VerificationInputs


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The criteria by which channels were scored."""
    found: list[str] = []
    score_groups = remembered_scores.score_groups

    def counted(module, groups, graph, criterion, *others):
        found.append(criterion)
        return score_groups(module, groups, graph, criterion, *others)

    monkeypatch.setattr(remembered_scores, "score_groups", counted)
    return found


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))


def samples(seed: int = 0, count: int = 64) -> ScoringSamples:
    generator = torch.Generator().manual_seed(seed)
    return ScoringSamples([Batch((torch.randn(count, 4, generator=generator),), None)])


def scores(module: nn.Module, scoring: ScoringSamples, **selection: object) -> list[list[float]]:
    chosen = ChannelSelection.model_validate({"importance": "obs", **selection})
    ranking = rank(module, VerificationInputs((torch.randn(2, 4),)), chosen, scoring)
    return [one.scores.tolist() for one in ranking.ranked]


def test_the_same_channels_are_scored_once_in_a_block(scored: list[str]) -> None:
    with remembering_scores():
        first = scores(net(), samples())
        assert scores(net(), samples()) == first
        assert scored == ["obs"]
    assert scores(net(), samples()) == first
    assert scored == ["obs", "obs"], "nothing is remembered after the block"


def test_whatever_changes_scores_has_them_measured_anew(scored: list[str]) -> None:
    cut, labelled = net(), samples()
    with torch.no_grad():
        cut[0].weight[0] = 0
    labelled.batches[0].__dict__["target"] = torch.zeros(64, dtype=torch.long)
    others = [
        (net(), samples(seed=1), {}),
        (net(), samples(count=32), {}),
        (net(), ScoringSamples(samples().batches, seed=1), {}),
        (net(), labelled, {}),
        (net(), samples(), {"importance": "taylor"}),
        (net(), samples(), {"exclude": ["0"]}),
        (cut, samples(), {}),
    ]
    with remembering_scores():
        scores(net(), samples())
        for number, (module, scoring, selection) in enumerate(others, 2):
            found = scores(module, scoring, **selection)
            assert len(scored) == number
            assert scores(module, scoring, **selection) == found and len(scored) == number
    alone = [scores(module, scoring, **selection) for module, scoring, selection in others]
    assert scores(cut, samples()) == alone[-1]


def test_scores_by_weights_alone_take_no_memory(scored: list[str]) -> None:
    with remembering_scores():
        for _ in range(2):
            scores(net(), samples(), importance="l2")
    assert scored == ["l2", "l2"]
