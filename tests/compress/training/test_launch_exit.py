"""A rank that has done its work ends well, whatever its threads still do."""

from pathlib import Path

import pytest

from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.data.splits import DataReference
from compress.training.config.training import Training
from compress.training.fit import fit
from compress.training.objectives.objective import TargetLoss

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

HERE = Path(__file__).parent


def test_collectives_in_flight_do_not_abort_a_rank_at_its_end(tmp_path):
    signature = Signature(inputs=(TensorSpec(name="features", shape=("batch", 4)),))
    recipe = Recipe(factory="nets:plain")
    source = import_checkpoint(tmp_path / "source", recipe, signature, checkpoint=None, folder=HERE)
    data = DataReference("busy:busy", {"trace": str(tmp_path / "x")}, HERE, 16).load()
    training = Training(epochs=1, batch_size=16, keep="last", parallel={"processes": 2})
    result = fit(source, training, TargetLoss(0.1), Context(root=tmp_path / "a", data=data), "t")
    assert result.kept.epoch == 1
    assert {f.name for f in tmp_path.glob("rank-*")} == {"rank-0", "rank-1"}
