"""No process has the whole model in its memory, not even before it is divided."""

import json
from pathlib import Path

import pytest
import torch

from tests.compress.training.builders import import_transformer

pytestmark = pytest.mark.multiprocess

HERE = Path(__file__).parents[1]

CASES = {
    "tensor": ("source", {"tensor": 2}),
    "pipeline": ("source", {"pipeline": {}}),
    "tied pipeline": ("tied", {"pipeline": {}}),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, launch):
    """Return what two ranks counted, and the bytes of the whole model."""
    root = tmp_path_factory.mktemp("divided")
    torch.manual_seed(0)
    # Without gradients, which would take as much again.
    source = import_transformer(root / "source", depth=8, width=64, frozen_layers=8)
    import_transformer(root / "tied", depth=8, width=64, frozen_layers=8, tied=True)
    launch(HERE / "divided_ranks.py", 2, root, json.dumps(CASES))
    found = [json.loads((root / f"divided-{rank}.json").read_text()) for rank in (0, 1)]
    return found, sum(weight.nbytes for weight in source.load().parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_rank_materialises_its_share_of_the_weights(ranks, name):
    found, whole = ranks
    for rank in found:
        assert rank[name]["on_meta"]
        assert 0.45 * whole < rank[name]["held"] < 0.55 * whole
        assert rank[name]["peak"] < 0.65 * whole
