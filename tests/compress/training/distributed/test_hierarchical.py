from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from compress.training.config.parallel import Parallel

HERE = Path(__file__).parents[1]
ELEMENTS = 24 * 41 + 41 + 41 * 10 + 10


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, launch) -> list[dict]:
    """Return what four real processes in two groups came to, and with DDP's own average."""
    folder = tmp_path_factory.mktemp("hierarchy")
    launch(HERE / "hierarchical_ranks.py", 4, folder)
    return [torch.load(folder / f"rank-{r}.pt", weights_only=True) for r in range(4)]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_weights_are_those_of_one_average_over_all(ranks):
    plain, _ = ranks[0]["ddp"]
    for rank in ranks:
        weights, _ = rank["hierarchical"]
        # 20 steps in fp32: four gradients are added up in another order, and AdamW's division by a
        # small second moment enlarges the difference.
        assert all((weights[name] - plain[name]).abs().max() < 1e-5 for name in plain)
        own, _ = ranks[0]["hierarchical"]
        assert all(torch.equal(weights[name], own[name]) for name in own)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_bytes_within_and_between_groups_are_what_the_rings_send(ranks):
    (total, between), *others = ranks[0]["hierarchical"][1]
    assert set(others) == {(total, between)}
    # A half of each bucket (of an odd number of gradients in one, so that 1 is padding) goes to the
    # other group, as a ring of two sends it; and within the group three times: twice to scatter, by
    # gloo's all-reduce, and once to gather.
    half = 4 * ELEMENTS // 2
    assert half <= between <= half + 2 * 4
    assert total == between + 3 * between
    plain, none = ranks[0]["ddp"][1][0]
    assert plain == pytest.approx(2 * 3 / 4 * 4 * ELEMENTS, abs=4)
    assert none is None
    # What a node sends to another: 2 processes here; of DDP's ring, the one at the node's end.
    assert 2 * between < 0.7 * plain


@pytest.mark.parametrize(
    "settings",
    [
        {"processes": 4},
        {"processes": 4, "group_processes": 3},
        {"processes": 4, "group_processes": 1},
        {"processes": 1, "nodes": 2},
    ],
)
def test_one_level_is_no_hierarchy(settings):
    with pytest.raises(ValidationError, match="hierarchical needs groups of 2 processes or more"):
        Parallel(communication="hierarchical", **settings)


def test_groups_are_nodes_unless_said_otherwise():
    assert Parallel(communication="hierarchical", processes=4, nodes=2).communication_group == 4
    with pytest.raises(ValidationError, match="group_processes is for communication: hierarch"):
        Parallel(processes=4, group_processes=2)
