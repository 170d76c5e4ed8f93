"""A `train` split that is a stream: order, resume after a kill, Parquet files, refusals."""

import multiprocessing
import signal
from pathlib import Path

import pytest
import torch

from compress.common.errors import CompressError, StageFailed
from compress.core.context import Context
from compress.data.loader_config import Loading
from compress.data.splits import DataReference, Splits
from compress.training.config.training import Training
from compress.training.fit import Fit, fit
from compress.training.objectives.objective import TargetLoss
from tests.compress.training.builders import import_net

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

HERE = Path(__file__).parent
OWN_STEPS = {"epochs": 3, "steps_per_epoch": 4}


def data(factory: str = "splits", workers: int = 0, **arguments) -> Splits:
    loading = Loading(workers=workers)
    return DataReference(f"streams:{factory}", arguments, HERE, 16, loading).load()


def train(root: Path, splits: Splits, **settings) -> Fit:
    source = import_net(root / "source", "nets:plain")
    training = Training(**{"epochs": 2, "batch_size": 16, **settings})
    where = Context(root=root / "train", data=splits)
    return fit(source, training, TargetLoss(), where, "train")


def largest_difference(a: Fit, b: Fit) -> float:
    weights, others = a.module.state_dict(), b.module.state_dict()
    return max(float((weights[name] - others[name]).abs().max()) for name in weights)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(tmp_path_factory.mktemp("whole"), data())


def test_each_pass_is_shuffled_by_its_number_and_read_once(tmp_path):
    trace = tmp_path / "trace"
    splits = data(trace=str(trace))
    trace.unlink()
    reader = splits.open_stream(0)
    read = torch.cat([batch.target for batch in reader.read(range(192), 16, 0)])
    assert trace.read_text().split() == [str(number) for number in range(1, 193)]
    orders = [torch.randperm(96, generator=torch.Generator().manual_seed(p)) for p in range(2)]
    labels = splits.datasets["train"].source.samples[1]
    assert torch.equal(read, torch.cat([labels[order] for order in orders]))


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}])
def test_workers_and_micro_batches_change_no_sample(tmp_path, whole, settings):
    other = train(tmp_path, data(workers=3), **settings)
    assert largest_difference(whole, other) <= (1e-6 if settings else 0)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.usefixtures("forked_ranks")
def test_two_ranks_train_as_one_process_and_resume_after_a_kill(tmp_path, whole):
    arguments = {"trace": str(tmp_path / "trace"), "dies_at": 96 + 70}
    settings = {"parallel": {"processes": 2}, "checkpoints": {"every_steps": 1}}
    killed = train(tmp_path, data(**arguments), **settings)
    assert (tmp_path / "trace.died").exists()
    assert largest_difference(killed, whole) <= 1e-6


@pytest.mark.multiprocess
@pytest.mark.usefixtures("forked_ranks")
def test_a_stream_that_divides_itself_by_rank_is_refused(tmp_path):
    divided = data("divided")
    assert train(tmp_path / "one", divided) is not None
    with pytest.raises(StageFailed, match="divides itself by rank, and so does training"):
        train(tmp_path / "two", divided, parallel={"processes": 2})


@pytest.fixture(scope="module")
def parquet_file(tmp_path_factory):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    from tests.compress.training.nets import tensors

    x, y = tensors(96, 0)
    path = tmp_path_factory.mktemp("parquet") / "rows.parquet"
    rows = datasets.Dataset.from_dict({"features": x.tolist(), "label": y.tolist()})
    rows.to_parquet(str(path))
    return path


@pytest.mark.parametrize(
    ("factory", "workers", "settings"),
    [
        # Whether the process or its worker is killed, and either file: one of each.
        pytest.param("splits", 0, {"epochs": 2}, marks=pytest.mark.soak),
        # Without its length, the resumed process counts the samples of the first pass.
        ("splits", 1, {**OWN_STEPS, "epochs": 5}),
        ("parquet", 0, OWN_STEPS),
        pytest.param("parquet", 1, OWN_STEPS, marks=pytest.mark.soak),
    ],
)
def test_a_killed_training_resumes_with_the_same_bits(
    tmp_path, request, factory, workers, settings
):
    trace = tmp_path / "trace"
    arguments = {"trace": str(trace), "dies_at": 96 + 60}
    if factory == "parquet":
        arguments["path"] = str(request.getfixturevalue("parquet_file"))
        arguments["dies_at"] += 1 + 96  # both readings of the first samples
    else:
        arguments["length"] = None if settings is not OWN_STEPS and workers else 96
    settings = {**settings, "checkpoints": {"every_steps": 1}}

    def run() -> None:
        train(tmp_path / "a", data(factory, workers, **arguments), **settings)

    if workers:
        with pytest.raises(StageFailed, match="a data worker"):
            run()
    else:
        child = multiprocessing.get_context("fork").Process(target=run)
        child.start()
        child.join(120)
        assert child.exitcode == -signal.SIGKILL
    assert Path(f"{trace}.died").exists()
    resumed = train(tmp_path / "a", data(factory, workers, **arguments), **settings)
    assert resumed.history[1].metric is not None
    undisturbed = train(tmp_path / "b", data(factory, workers, **arguments), **settings)
    assert undisturbed.history == resumed.history
    assert largest_difference(undisturbed, resumed) == 0


@pytest.mark.parametrize(
    ("length", "settings", "message"),
    [
        (
            None,
            {},
            r"^train: steps_per_epoch: split 'train' is a stream without __len__; set steps",
        ),
        (8, {}, "a stream of 8 samples, expected at least a batch of 16"),
        (112, {}, "ended after 96 samples in pass 1, expected 112"),
    ],
)
def test_a_stream_of_unknown_or_wrong_length_is_refused(tmp_path, length, settings, message):
    with pytest.raises(CompressError, match=message):
        train(tmp_path, data(length=length), **settings)


def test_steps_per_epoch_of_data_with_a_length_is_refused(tmp_path, whole):
    splits = Splits({name: data().datasets["val"] for name in ("train", "val")})
    with pytest.raises(CompressError, match="steps_per_epoch: is for a stream"):
        train(tmp_path, splits, steps_per_epoch=2)


def test_the_first_samples_in_order_calibrate_and_a_fingerprint_of_its_own_counts():
    splits, other = data(), data()
    batch = next(splits.calibration(16, seed=3))
    x = torch.stack([sample[0] for sample in splits.datasets["train"].read_first()[:16]])
    assert torch.equal(batch.inputs[0], x)
    assert splits.fingerprint() == other.fingerprint() != data(workers=1).fingerprint()
    other.datasets["train"].source.fingerprint = "changed"
    assert splits.fingerprint() != other.fingerprint()


def test_a_parquet_file_read_by_index_has_a_fingerprint_and_trains(tmp_path, parquet_file):
    once, again = (data("parquet", path=str(parquet_file), streaming=False) for _ in range(2))
    assert once.fingerprint() == again.fingerprint()
    assert train(tmp_path, once).history[-1].metric is not None
