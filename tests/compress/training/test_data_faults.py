"""What goes wrong with data is one clear error, and what goes well is read once."""

import time
from pathlib import Path

import psutil
import pytest

from compress.common.errors import PipelineInvalid, StageFailed
from compress.core.context import Context
from compress.data.loader_config import Loading
from compress.data.splits import DataReference, Splits
from compress.training.config.training import Training
from compress.training.distributed.base import Strategy
from compress.training.fit import Fit, fit
from compress.training.objectives.objective import TargetLoss
from tests.compress.training.builders import import_net

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

HERE = Path(__file__).parent


def train(root: Path, splits: Splits, processes: int = 1, **settings) -> Fit:
    source = import_net(root / "source", "nets:plain")
    settings = {"epochs": 2, "batch_size": 16, **settings}
    training = Training(**settings, parallel={"processes": processes})
    where = Context(root=root / "train", data=splits)
    return fit(source, training, TargetLoss(), where, "train")


def data(factory: str, loading: Loading | None = None, **arguments) -> Splits:
    return DataReference(f"nets:{factory}", arguments, HERE, 16, loading or Loading()).load()


def children() -> set[int]:
    found = psutil.Process().children(recursive=True)
    return {child.pid for child in found if "resource_tracker" not in " ".join(child.cmdline())}


RAISES = (
    "raise in a worker",
    PipelineInvalid,
    r"data\.factory 'nets:behaving': a sample of split 'train' cannot be read: "
    r"ValueError: sample 7 cannot be read there$",
)
DIES = (
    "die in a worker",
    StageFailed,
    r"a data worker \(pid \d+\) was killed by signal: Killed; .*memory",
)


@pytest.mark.parametrize(
    ("processes", "behaviour", "failure", "message"),
    [
        (1, *RAISES),
        (1, *DIES),
        pytest.param(2, *DIES, marks=[pytest.mark.multiprocess, pytest.mark.slow]),
    ],
)
def test_a_failing_worker_is_one_clear_error(
    tmp_path, capfd, processes, behaviour, failure, message
):
    before = children()
    splits = data("behaving", Loading(workers=2), behaviour=behaviour)
    with pytest.raises(failure, match=rf"^train: {message}"):
        train(tmp_path, splits, processes)
    deadline = time.monotonic() + 60
    while children() - before:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_data_workers_start_before_the_model_is_loaded(tmp_path, monkeypatch):
    before, started, load = children(), [], Strategy.load

    def observed(self, model, device):
        started.append(len(children() - before))
        return load(self, model, device)

    monkeypatch.setattr(Strategy, "load", observed)
    train(tmp_path, data("behaving", Loading(workers=2), behaviour=""), 1)
    assert started == [2 * len(("train", "val"))]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.usefixtures("forked_ranks")
def test_two_ranks_read_each_sample_once_through_a_cache(tmp_path):
    trace = tmp_path / "trace"
    loading = Loading(cache=str(tmp_path / "cache"), workers=2)
    splits = data("behaving", loading, behaviour="note", trace=str(trace))
    train(tmp_path, splits, 2, epochs=3)
    probed = 2 * 8
    assert len(trace.read_text().splitlines()) == 64 + probed
