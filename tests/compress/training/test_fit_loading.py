import time
from pathlib import Path

import psutil
import pytest
import torch

from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.errors import PipelineInvalid
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.data.loader_config import Loading
from compress.data.splits import DataReference
from compress.training.config.training import Training
from compress.training.fit import Fit, fit
from compress.training.objectives.objective import TargetLoss
from tests.compress.training.builders import import_net, load_data

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

HERE = Path(__file__).parent


def train(root: Path, *, processes: int = 1, **loading) -> Fit:
    source = import_net(root / "source")
    data = load_data("behaving", loading=Loading(**loading), behaviour="noise")
    training = Training(epochs=3, batch_size=16, parallel={"processes": processes})
    where = Context(root=root / "train", data=data)
    return fit(source, training, TargetLoss(), where, "train")


def workers() -> set[int]:
    children = psutil.Process().children(recursive=True)
    return {child.pid for child in children if "resource_tracker" not in " ".join(child.cmdline())}


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    "processes", [1, pytest.param(2, marks=[pytest.mark.multiprocess, pytest.mark.slow])]
)
def test_workers_train_the_same_weights_and_are_gone_after(tmp_path, processes) -> None:
    before = workers()
    here = train(tmp_path / "here", processes=processes)
    there = train(tmp_path / "there", processes=processes, workers=2)
    assert here.history == there.history
    expected, got = here.module.state_dict(), there.module.state_dict()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    deadline = time.monotonic() + 60
    while workers() - before:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_samples_without_the_length_to_bucket_by_are_refused(tmp_path) -> None:
    with pytest.raises(PipelineInvalid, match=r"^train: data\.loader\.bucket_by: .*no 'ids'"):
        train(tmp_path, bucket_by="ids")


def test_epochs_are_evaluated_with_inputs_in_the_models_order(tmp_path) -> None:
    names = ("plus", "minus")
    signature = Signature(inputs=tuple(TensorSpec(name=n, shape=("batch",)) for n in names))
    recipe = Recipe(factory="nets:Difference")
    source = import_checkpoint(tmp_path / "source", recipe, signature, checkpoint=None, folder=HERE)
    data = DataReference("nets:mappings", {}, HERE, 16, input_names=names).load()
    training = Training(epochs=1, batch_size=16, learning_rate=1e-6)
    result = fit(
        source, training, TargetLoss(), Context(root=tmp_path / "train", data=data), "train"
    )
    assert result.kept.metric == 1
