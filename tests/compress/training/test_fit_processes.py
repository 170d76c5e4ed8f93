import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from compress.common.errors import PipelineInvalid, StageFailed
from compress.core.context import Context
from compress.core.metrics import Metric
from compress.data.splits import Splits
from compress.training.checkpoint import newest_intact, read_progress
from compress.training.config.training import Training
from compress.training.fit import fit
from compress.training.launch.spawn import start_rank
from compress.training.objectives.objective import TargetLoss
from tests.compress.training.builders import import_net, load_data

pytestmark = pytest.mark.multiprocess

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TWO = {"processes": 2}


def context(root, factory="blobs", metric="accuracy", progress=None, **arguments):
    data = load_data(factory, **arguments)
    more = {"progress": progress} if progress else {}
    return Context(root=root, data=data, metric=Metric(metric), **more)


def run(source, where, **settings):
    training = Training(**{"batch_size": 16, "parallel": TWO, **settings})
    return fit(
        source, training, TargetLoss.for_training(training, where, source.signature), where, "train"
    )


def program(root, behaviour="slow", epochs=5, **more):
    return subprocess.Popen(
        [sys.executable, HERE / "train_stage_script.py", root, behaviour, str(epochs), "2"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **more,
    )


def group_is_gone(process):
    for _ in range(600):
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.slow
def test_two_processes_train_one_model_and_leave_the_parent_as_it_was(tmp_path, capfd, caplog):
    caplog.set_level("INFO")
    notes = []
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    environment = dict(os.environ)
    source = import_net(tmp_path / "source", spare_head=True)
    where = context(tmp_path / "a", progress=lambda *args: notes.append(args))
    result = run(source, where, epochs=8)
    assert [note[1] for note in notes] == list(range(9))
    assert notes[-1][3].startswith("epoch 8/8 loss ")
    assert result.history[-1].loss < 0.8 * result.history[0].loss
    assert sum("by the 8 samples of each of 2 processes" in m for m in caplog.messages) == 1
    exact = context(tmp_path / "exact")
    sealed = source.derive(tmp_path / "sealed", result.module)
    assert exact.score(sealed) == result.kept.metric
    assert capfd.readouterr() == ("", "")
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert dict(os.environ) == environment


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_sharded_model_comes_back_whole_with_any_metric(tmp_path):
    source = import_net(tmp_path / "source", spare_head=True)
    f1 = "torchmetrics.classification.MulticlassF1Score"
    metric = Metric(f1, (("num_classes", 3),))
    data = load_data("uneven", train=96)
    where = Context(root=tmp_path / "a", data=data, metric=metric)
    parallel = {"strategy": "fsdp", "processes": 2, "wrap": 32}
    training = Training(epochs=3, batch_size=16, parallel=parallel)
    result = fit(source, training, TargetLoss(0.1), where, "train")
    exact = Context(root=tmp_path / "b", data=data, metric=metric)
    sealed = source.derive(tmp_path / "sealed", result.module)
    # A shard's forward may add in another order, which changes no label here.
    assert exact.score(sealed) == pytest.approx(result.kept.metric, abs=1e-6)
    assert result.history[-1].loss < result.history[0].loss


@pytest.mark.usefixtures("forked_ranks")
def test_the_first_error_keeps_its_message(tmp_path, capfd):
    source = import_net(tmp_path / "source")
    where = context(tmp_path / "a", "behaving", behaviour="raise in a rank")
    with pytest.raises(
        StageFailed, match=r"^train: rank [01]: ValueError: sample 7 cannot be read here$"
    ):
        run(source, where, epochs=2)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_that_is_killed_again_and_again_ends_the_training(tmp_path, caplog):
    source = import_net(tmp_path / "source")
    where = context(tmp_path / "a", "behaving", behaviour="die in a rank")
    with pytest.raises(
        StageFailed, match=r"^train: rank [01] was ended by SIGKILL; perhaps memory"
    ):
        run(source, where, epochs=2, parallel={**TWO, "restarts": 1})
    assert sum("all are started again" in message for message in caplog.messages) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_after_a_rank_was_killed_the_weights_are_those_of_an_uninterrupted_training(
    tmp_path, caplog
):
    source = import_net(tmp_path / "source")
    trace = tmp_path / "died"
    settings = {
        "epochs": 4,
        "parallel": {**TWO, "strategy": "fsdp", "wrap": 32},
        "checkpoints": {"every_steps": 1},
    }
    behaviour = {"behaviour": "die once, in the third epoch", "trace": str(trace)}
    killed = run(source, context(tmp_path / "a", "behaving", **behaviour), **settings)
    assert trace.exists() and any("all are started again" in m for m in caplog.messages)
    assert killed.history[-1].epoch == 4
    whole = run(source, context(tmp_path / "b", "behaving", **behaviour), **settings)
    expected, got = whole.module.state_dict(), killed.module.state_dict()
    # In the step after an evaluation FSDP gathers a block in vain (torch 2.13), after a start not.
    assert _without_sent_bytes(whole.history) == _without_sent_bytes(killed.history)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def _without_sent_bytes(history):
    return [epoch.model_copy(update={"sent_bytes": None}) for epoch in history]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_that_exits_is_an_error(tmp_path):
    source = import_net(tmp_path / "source")
    where = context(tmp_path / "a", "behaving", behaviour="exit in a rank")
    with pytest.raises(StageFailed, match=r"^train: user code called sys\.exit\(0\) in nets\.py"):
        run(source, where, epochs=2)


NO_GUARD = """
from pathlib import Path
import torch
from compress import Context, Splits, Train
from compress.artifacts.eager_model import EagerModel

root = Path({root!r})
x, y = torch.randn(9000, 4), torch.zeros(9000, dtype=torch.int64)  # more than a pipe holds
data = Splits(dict.fromkeys(("train", "val"), torch.utils.data.TensorDataset(x, y)))
Train(epochs=1, parallel=dict(processes=2))(
    EagerModel.from_directory(root / "source"), Context(root=root / "train", data=data)
)
"""


@pytest.mark.slow
def test_a_script_without_a_main_guard_gets_a_clear_error(tmp_path, fresh_torch):
    import_net(tmp_path / "source")
    # It is a fork, whose ranks are new processes that run it again.
    with pytest.raises(AssertionError, match=r'must start under `if __name__ == "__main__":`'):
        fresh_torch(NO_GUARD.format(root=str(tmp_path)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, forking_ranks):
    """Return a training of five epochs that nothing disturbed."""
    root = tmp_path_factory.mktemp("whole")
    where = context(root / "whole", "behaving", behaviour="")
    with forking_ranks():
        return run(import_net(root / "source"), where, epochs=5)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_full_disk_is_an_error_and_earlier_checkpoints_stay(tmp_path, whole):
    source = import_net(tmp_path / "source")
    where = context(tmp_path / "a", "behaving", behaviour="no more room from the third epoch")
    with pytest.raises(StageFailed, match=r"cannot be written .*(File too large|No space)"):
        run(source, where, epochs=5)
    (folder,) = where.work.glob("fit-*")
    progress = read_progress(newest_intact(folder))
    assert progress.trained_epochs in (1, 2)
    assert whole.history[: progress.trained_epochs] == progress.history


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_an_error_of_rank_0_alone_keeps_its_class(tmp_path):
    source = import_net(tmp_path / "source")
    with pytest.raises(PipelineInvalid, match=r"^train: cannot import 'no_such_metric'"):
        run(source, context(tmp_path / "a", metric="no_such_metric:at_all"), epochs=2)


def test_data_that_cannot_travel_are_refused(tmp_path):
    class Local(torch.utils.data.TensorDataset):
        pass

    x, y = torch.randn(32, 4), torch.zeros(32, dtype=torch.int64)
    data = Splits({"train": Local(x, y), "val": Local(x, y)})
    source = import_net(tmp_path / "source")
    with pytest.raises(StageFailed, match=r"cannot be sent to 2 processes: .* data factory"):
        run(source, Context(root=tmp_path / "a", data=data), epochs=1)


def test_a_rank_whose_runner_was_killed_before_it_started_does_nothing(tmp_path, capfd):
    gone = 1
    child = multiprocessing.get_context("fork").Process(
        target=start_rank, args=(0, str(tmp_path), None, gone, None)
    )
    child.start()
    child.join(60)
    assert child.exitcode == 1
    assert list(tmp_path.iterdir()) == [], "it went on, and wrote why it failed"
    assert capfd.readouterr() == ("", ""), "it went on without the ranks"


@pytest.mark.soak  # tests/cli interrupts a training by Ctrl-C, and compares its weights
@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_after_ctrl_c_nothing_runs_on_and_the_next_call_ends_bit_identical(tmp_path, whole):
    source = import_net(tmp_path / "source")
    process = program(tmp_path)
    for line in process.stdout:
        if line.startswith("train 2 "):
            os.killpg(process.pid, signal.SIGINT)
            break
    out, err = process.communicate(timeout=150)
    assert process.returncode == 130 and out.endswith("interrupted\n") and err == ""
    assert group_is_gone(process)
    notes = []
    where = context(
        tmp_path / "train", "behaving", progress=lambda *args: notes.append(args), behaviour="slow"
    )
    resumed = run(source, where, epochs=5)
    assert notes[0][1] >= 2 and notes[0][3].startswith("resumed after epoch")
    assert whole.history == resumed.history
    expected, got = whole.module.state_dict(), resumed.module.state_dict()
    assert all(torch.equal(expected[name], got[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "to_the_group"),
    # Ctrl-C to the group is above; of what is killed all at once nothing is left to end.
    [pytest.param(signal.SIGTERM, True, marks=pytest.mark.soak), (signal.SIGKILL, False)],
)
def test_a_signal_ends_every_process(tmp_path, number, to_the_group):
    import_net(tmp_path / "source")
    process = program(tmp_path, epochs=50)
    for line in process.stdout:
        if line.startswith("train 1 "):
            (os.killpg if to_the_group else os.kill)(process.pid, number)
            break
    _, err = process.communicate(timeout=150)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert err == "" or number == signal.SIGKILL  # Python itself reports what a kill leaves behind
    assert group_is_gone(process)
