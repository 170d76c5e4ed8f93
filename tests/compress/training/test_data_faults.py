"""What goes wrong with data is one clear error, and sizes that do not divide stop nothing."""

import time
from pathlib import Path

import psutil
import pytest
import torch

from compress.core.checkpoint import import_checkpoint
from compress.core.data import DataReference, Splits
from compress.core.errors import StageFailed
from compress.core.loading import Loading
from compress.core.metrics import Metric
from compress.core.recipe import Recipe
from compress.core.signature import Signature, TensorSpec
from compress.core.stage import Context
from compress.training.fit import Fit, fit
from compress.training.objective import CrossEntropy
from compress.training.settings import Training

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

HERE = Path(__file__).parent
F1 = Metric("torchmetrics.classification.MulticlassF1Score", (("num_classes", 3),))


def train(root: Path, splits: Splits, processes: int = 1, **settings) -> Fit:
    signature = Signature(inputs=(TensorSpec(name="features", shape=("batch", 4)),))
    source = import_checkpoint(
        root / "source", Recipe(factory="nets:plain"), signature, checkpoint=None, folder=HERE
    )
    metric = settings.pop("metric", Metric())
    settings = {"epochs": 2, "batch_size": 16, **settings}
    training = Training(**settings, parallel={"processes": processes})
    where = Context(root=root / "train", data=splits, metric=metric)
    return fit(source, training, CrossEntropy(), where, "train")


def data(factory: str, loading: Loading | None = None, **arguments) -> Splits:
    return DataReference(f"nets:{factory}", arguments, HERE, 16, loading or Loading()).load()


def children() -> set[int]:
    found = psutil.Process().children(recursive=True)
    return {child.pid for child in found if "resource_tracker" not in " ".join(child.cmdline())}


RAISES = ("raise in a worker", r"ValueError: sample 7 cannot be read there$")
DIES = ("die in a worker", r"a data worker \(pid \d+\) was killed by signal: Killed; .*memory")


@pytest.mark.parametrize(
    ("processes", "behaviour", "told"),
    [
        (1, *RAISES),
        (1, *DIES),
        pytest.param(2, *DIES, marks=[pytest.mark.multiprocess, pytest.mark.slow]),
    ],
)
def test_a_failing_worker_is_one_clear_error(tmp_path, capfd, processes, behaviour, told):
    before = children()
    splits = data("behaving", Loading(workers=2), behaviour=behaviour)
    with pytest.raises(StageFailed, match=rf"^train: {told}"):
        train(tmp_path, splits, processes)
    deadline = time.monotonic() + 60
    while children() - before:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert capfd.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_sizes_that_do_not_divide_stop_nothing(tmp_path):
    """21 samples make one step of 16; a single one in `val` leaves the other ranks without."""
    result = train(tmp_path, data("uneven", train=21, val=1), 4, metric=F1)
    assert [epoch.metric is not None for epoch in result.history] == [True, True]
    alone = train(tmp_path / "alone", data("uneven", train=21, val=1), metric=F1)
    expected, got = alone.module.state_dict(), result.module.state_dict()
    # Gradients are added up in another order, nothing else differs.
    assert all(torch.allclose(expected[name], got[name], atol=1e-5) for name in expected)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_fewer_samples_than_a_batch_are_one_step(tmp_path):
    splits = data("uneven", train=11, val=3)
    result = train(tmp_path, splits, 2, batch_size=64, accumulate=2)
    assert all(epoch.loss > 0 and epoch.metric is not None for epoch in result.history)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_ranks_read_each_sample_once_through_a_cache(tmp_path):
    trace = tmp_path / "trace"
    loading = Loading(cache=str(tmp_path / "cache"), workers=2)
    splits = data("behaving", loading, behaviour="note", trace=str(trace))
    train(tmp_path, splits, 2, epochs=3)
    probed = 2 * 8
    assert len(trace.read_text().splitlines()) == 64 + probed
