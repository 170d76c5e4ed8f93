"""Meshes through `fit`: processes of its own, a teacher, and one clear error."""

from pathlib import Path

import pytest
import torch

from compress.common.errors import StageFailed
from compress.core.context import Context
from compress.core.metrics import Metric
from compress.data.splits import DataReference
from compress.distillation.distillation_objective import DistillationObjective
from compress.training.config.training import Training
from compress.training.fit import fit
from compress.training.objectives.objective import TargetLoss, Teaching
from tests.compress.training.builders import import_transformer

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.usefixtures("forked_ranks"),
]

HERE = Path(__file__).parent


def make_source(path, seed=0, **arguments):
    torch.manual_seed(seed)
    return import_transformer(path, **arguments)


def run(root, source, objective, **parallel):
    data = DataReference("transformers_here:tokens", {}, HERE, 16).load()
    training = Training(epochs=2, batch_size=16, keep="last", learning_rate=0.01, parallel=parallel)
    return fit(source, training, objective, Context(root=root, data=data), "train")


@pytest.mark.parametrize(
    "parallel",
    [
        # The teacher is whole in each; test_device_mesh.py divides matrices.
        pytest.param({"tensor": 2}, id="tensor", marks=pytest.mark.soak),
        pytest.param({"pipeline": {}}, id="pipeline"),
    ],
)
def test_distillation_into_a_divided_model_keeps_frozen_weights(tmp_path, parallel):
    student = make_source(tmp_path / "student", frozen_layers=1)
    teacher = make_source(tmp_path / "teacher", 1)
    training = Training(epochs=1, label_smoothing=0.0)
    objective = DistillationObjective.from_teaching(
        Teaching(temperature=2.0), teacher, TargetLoss(training.label_smoothing)
    )
    alone = run(tmp_path / "alone", student, objective)
    spread = run(tmp_path / "spread", student, objective, processes=2, **parallel)
    expected, got = alone.module.state_dict(), spread.module.state_dict()
    assert expected.keys() == got.keys()
    # 6 steps in fp32, whose sums are in another order.
    assert all(torch.allclose(expected[name], got[name], atol=1e-5) for name in expected)
    assert torch.equal(got["words.weight"], student.load().words.weight)
    data = DataReference("transformers_here:tokens", {}, HERE, 16).load()
    sealed = student.derive(tmp_path / "sealed", spread.module)
    exact = Context(root=tmp_path / "exact", data=data, metric=Metric("accuracy")).score(sealed)
    assert exact == spread.kept.metric


def test_a_model_that_cannot_be_divided_is_one_clear_error(tmp_path, capfd):
    source = make_source(tmp_path / "source", frozen_layers=2)
    message = r"^train: parallel\.pipeline: stage 0 has no weights that require"
    with pytest.raises(StageFailed, match=message):
        run(tmp_path / "run", source, TargetLoss(), processes=2, pipeline={})
    assert capfd.readouterr() == ("", "")
