from dataclasses import replace

import pytest
import torch

from compress.common.errors import ArtifactInvalid, PipelineInvalid, StageFailed
from compress.core.context import Context
from compress.core.metrics import Metric
from compress.core.objectives.loss import Loss
from compress.training.checkpoint import (
    Epoch,
    TrainProgress,
    checkpoint_name,
    checkpoints,
    commit,
    create_partial,
    rotate,
)
from compress.training.config.training import Training
from compress.training.fit import fit
from compress.training.loop.trainer import is_better
from compress.training.objectives.objective import TargetLoss
from tests.compress.training.builders import import_net, load_data


@pytest.fixture
def source(tmp_path):
    return import_net(tmp_path / "source")


def context(root, factory="blobs", metric="accuracy", **arguments):
    return Context(root=root, data=load_data(factory, **arguments), metric=Metric(metric))


def run(source, where, epochs=4, objective=None, accept_start=False, **settings):
    training = Training(epochs=epochs, batch_size=16, **settings)
    return fit(
        source, training, objective or TargetLoss(), where, "train", accept_start=accept_start
    )


def same(a, b):
    one, other = a.module.state_dict(), b.module.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def run_with_notes(source, where):
    """Train, and return the result and what was reported: epochs done, all epochs, note."""
    notes = []

    def progress(task, *reported):
        notes.append(reported)

    return run(source, replace(where, progress=progress)), notes


def stop_after(where, epoch):
    def progress(task, done, total, note=""):
        if done == epoch and "resumed" not in note:
            raise KeyboardInterrupt

    return replace(where, progress=progress)


@pytest.mark.parametrize(("optimizer", "rate"), [("sgd", 0.1), ("adamw", 0.02)])
def test_a_model_learns_and_comes_back_fresh_in_eval_mode(tmp_path, source, optimizer, rate):
    before = source.load().state_dict()
    settings = {"optimizer": optimizer, "learning_rate": rate, "label_smoothing": 0}
    result = run(source, context(tmp_path / "a"), epochs=12, **settings)
    assert [e.epoch for e in result.history] == list(range(1, 13))
    assert result.history[-1].loss < 0.7 * result.history[0].loss
    assert result.kept.metric == max(e.metric for e in result.history)
    assert not result.module.training
    assert all(torch.equal(v, before[k]) for k, v in source.load().state_dict().items())


def test_equal_settings_give_equal_bits_and_another_seed_does_not(tmp_path, source):
    first, again = (run(source, context(tmp_path / name)) for name in "ab")
    assert same(first, again) and first.history == again.history
    where = context(tmp_path / "c")
    other = run(source, Context(root=where.root, data=where.data, seed=1))
    assert not same(first, other)


def test_an_interrupted_training_ends_bit_identical(tmp_path, source):
    whole = run(source, context(tmp_path / "whole"))
    where = context(tmp_path / "parts")
    for epoch in (1, 3):
        with pytest.raises(KeyboardInterrupt):
            run(source, stop_after(where, epoch))
    resumed, notes = run_with_notes(source, where)
    assert same(whole, resumed) and whole.history == resumed.history
    assert notes[0] == (3, 4, "resumed after epoch 3")
    assert [done for done, *_ in notes] == [3, 4]


RATE = "from torch.optim.lr_scheduler import StepLR\n\n\ndef rate(optimizer, steps):\n    "


def test_a_users_scheduler_goes_on_with_the_same_bits_but_not_after_an_edit(tmp_path, source):
    def with_code(name, number):
        folder = tmp_path / "code"
        folder.mkdir(exist_ok=True)
        (folder / "own_rate.py").write_text(f"{RATE}return StepLR(optimizer, steps // {number})\n")
        return replace(context(tmp_path / name), loss=Loss(folder=folder))

    settings = {"schedule": "own_rate:rate"}
    whole = run(source, with_code("whole", 3), **settings)
    assert len({epoch.learning_rate for epoch in whole.history}) == 3
    where = with_code("parts", 3)
    with pytest.raises(KeyboardInterrupt):
        run(source, stop_after(where, 2), **settings)
    assert same(whole, run(source, where, **settings))
    again = with_code("again", 3)
    with pytest.raises(KeyboardInterrupt):
        run(source, stop_after(again, 3), **settings)
    rates = [e.learning_rate for e in run(source, with_code("again", 2), **settings).history]
    assert rates[2] == pytest.approx(0.01) and whole.history[1].learning_rate < 0.1


@pytest.mark.parametrize(
    "change", [{"learning_rate": 0.01}, {"objective": TargetLoss(label_smoothing=0.2)}]
)
def test_a_checkpoint_of_other_settings_is_not_resumed(tmp_path, source, change):
    fresh = run(source, context(tmp_path / "fresh"), **change)
    where = context(tmp_path / "stale")
    with pytest.raises(KeyboardInterrupt):
        run(source, stop_after(where, 2))
    assert same(fresh, run(source, where, **change))


def checkpoints_of(where):
    (folder,) = where.work.glob("fit-*")
    return checkpoints(folder)


@pytest.mark.parametrize(
    "damage",
    [
        # Its digest is wrong, as that of an altered one.
        pytest.param("truncated", marks=pytest.mark.soak),
        *("altered", "missing", "half-written"),
    ],
)
def test_a_damaged_checkpoint_is_replaced_by_the_one_before(tmp_path, source, caplog, damage):
    whole = run(source, context(tmp_path / "whole"))
    where = context(tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        run(source, stop_after(where, 3))
    *_, before, last = checkpoints_of(where)
    (file,) = last.glob("*.distcp")
    content = bytearray(file.read_bytes())
    if damage == "truncated":
        file.write_bytes(content[:-100])
    elif damage == "altered":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif damage == "missing":
        file.unlink()
    else:
        last.rename(last.with_name(f"{last.name}.partial"))
    resumed, notes = run_with_notes(source, where)
    assert same(whole, resumed) and whole.history == resumed.history
    assert notes[0] == (2, 4, "resumed after epoch 2")
    said = [m for m in caplog.messages if "is damaged" in m]
    assert len(said) == (damage != "half-written")
    assert before.parent.joinpath(f"{last.name}.damaged").is_dir() == bool(said)


def test_checkpoints_within_an_epoch_change_nothing_and_cost_fewer_steps(tmp_path, source):
    whole = run(source, context(tmp_path / "whole"))
    where = context(tmp_path / "a", factory="behaving", behaviour="noise")
    settings = {"checkpoints": {"every_steps": 2, "keep": 3}}
    saved = run(source, where, **settings)
    found = [c.name for c in checkpoints_of(where)]
    assert found[-3:] == ["step-000000000012", "step-000000000014", "step-000000000016"]
    plain = run(source, context(tmp_path / "b", factory="behaving", behaviour="noise"))
    assert same(plain, saved) and plain.history == saved.history and not same(plain, whole)
    last = checkpoints_of(where)[-1]
    last.rename(last.with_name(f"{last.name}.partial"))
    resumed = run(source, where, **settings)
    assert same(plain, resumed) and plain.history == resumed.history


def test_a_checkpoint_stays_while_another_one_needs_it(tmp_path):
    for step, kept_in in ((1, None), (2, 1), (3, 1), (4, 4)):
        kept = checkpoint_name(kept_in) if kept_in else None
        commit(create_partial(tmp_path, step), TrainProgress(kept_in=kept))
    rotate(tmp_path, 2)
    assert [c.name for c in checkpoints(tmp_path)] == [checkpoint_name(step) for step in (1, 3, 4)]
    rotate(tmp_path, 1)
    assert [c.name for c in checkpoints(tmp_path)] == [checkpoint_name(4)]


def test_no_more_checkpoints_are_kept_than_asked_for(tmp_path, source):
    where = context(tmp_path / "a")
    result = run(source, where, epochs=6, checkpoints={"keep": 1, "asynchronous": False})
    steps = 96 // 16
    kept = {f"step-{steps * epoch:012d}" for epoch in (result.kept.epoch, 6)}
    assert {c.name for c in checkpoints_of(where)} == kept


def test_progress_is_reported_while_training_runs(tmp_path, source):
    notes = []
    where = context(tmp_path / "a")
    run(source, Context(root=where.root, data=where.data, progress=lambda *a: notes.append(a)))
    assert [note[1] for note in notes] == [0, 1, 2, 3, 4]
    assert notes[-1][:3] == ("train", 4, 4)
    assert notes[-1][3].startswith("epoch 4/4 loss ") and " val accuracy " in notes[-1][3]


def test_a_harmful_training_is_not_accepted(tmp_path, source):
    good = run(source, context(tmp_path / "good"), epochs=12)
    trained = source.derive(tmp_path / "trained", good.module)
    harm = {"learning_rate": 30.0, "schedule": "constant", "epochs": 2}
    kept = run(trained, context(tmp_path / "a"), accept_start=True, **harm)
    assert kept.kept.epoch == 0 and [e.epoch for e in kept.history] == [0, 1, 2]
    assert same(kept, good)
    worse = run(trained, context(tmp_path / "b"), **harm)
    assert worse.kept.epoch > 0 and worse.kept.metric < kept.kept.metric
    resumed = context(tmp_path / "c")
    with pytest.raises(KeyboardInterrupt):
        run(trained, stop_after(resumed, 1), accept_start=True, **harm)
    assert same(run(trained, resumed, accept_start=True, **harm), kept)


def test_the_last_weights_are_kept_when_asked_and_the_best_by_a_falling_metric(tmp_path, source):
    harm = {"learning_rate": 3.0, "schedule": "constant"}
    best = run(source, context(tmp_path / "best", metric="loss"), epochs=6, **harm)
    assert best.kept.metric == min(e.metric for e in best.history)
    last = run(source, context(tmp_path / "last", metric="loss"), epochs=6, keep="last", **harm)
    assert last.kept.epoch == 6 and last.history == best.history


def test_the_gradient_is_clipped(tmp_path, source):
    still = run(source, context(tmp_path / "a"), clip_norm=1e-9, weight_decay=0)
    before, after = source.load().state_dict(), still.module.state_dict()
    assert torch.allclose(before["hidden.weight"], after["hidden.weight"], atol=1e-6)
    assert not torch.equal(before["norm.running_mean"], after["norm.running_mean"])


def test_fidelity_compares_with_the_source(tmp_path, source):
    where = context(tmp_path / "a", metric="fidelity")
    where = Context(
        root=where.root, data=where.data, metric=where.metric, artifacts={"source": source}
    )
    result = run(source, where, accept_start=True)
    assert result.history[0].metric == 1.0 and result.kept.epoch == 0


def test_a_loss_that_is_not_finite_names_epoch_step_and_rate(tmp_path, source):
    where = context(tmp_path / "a", scale=float("inf"))
    with pytest.raises(
        StageFailed, match=r"train: the loss is nan in epoch 1, step 1, at learning rate 0\.004"
    ):
        run(source, where)


def test_what_cannot_be_trained_is_refused_in_one_line(tmp_path, source):
    with pytest.raises(StageFailed, match="train needs data"):
        run(source, Context(root=tmp_path / "a"))
    with pytest.raises(StageFailed, match="a loss needs targets"):
        run(source, context(tmp_path / "b", labelled=False))
    with pytest.raises(PipelineInvalid, match="has 1 samples for 2 processes"):
        run(source, context(tmp_path / "c", train=1), parallel={"processes": 2})
    frozen = import_net(tmp_path / "frozen", frozen=True)
    with pytest.raises(StageFailed, match="nothing to train"):
        run(frozen, context(tmp_path / "d"))
    with pytest.raises(PipelineInvalid, match=r"^train: .*ValueError: sample 7 cannot be read$"):
        run(source, context(tmp_path / "e", "behaving", behaviour="raise"))


def test_the_best_needs_a_val_split_and_the_last_does_not(tmp_path, source):
    where = context(tmp_path / "a")
    del where.data.datasets["val"]
    with pytest.raises(PipelineInvalid, match="keep: best needs a split 'val'"):
        run(source, where)
    result = run(source, where, keep="last")
    assert result.kept.epoch == 4 and result.kept.metric is None


def test_errors_keep_their_class(tmp_path, source):
    where = context(tmp_path / "a", metric="no_such_metric:at_all")
    with pytest.raises(PipelineInvalid, match=r"^train: cannot import"):
        run(source, where)
    (source.payload_path).chmod(0o644)
    source.payload_path.write_bytes(b"")
    with pytest.raises((ArtifactInvalid, StageFailed), match=r"^train: "):
        run(source, context(tmp_path / "b"))


def test_a_tie_goes_to_the_later_epoch_and_never_against_the_start():
    def epoch(number, value):
        return Epoch(epoch=number, loss=1.0, metric=value, learning_rate=0.1)

    accuracy, loss = Metric("accuracy"), Metric("loss")
    assert is_better(epoch(1, 0.5), None, accuracy)
    assert is_better(epoch(2, 0.5), epoch(1, 0.5), accuracy)
    assert not is_better(epoch(2, 0.5), epoch(0, 0.5), accuracy)
    assert not is_better(epoch(2, 0.4), epoch(1, 0.5), accuracy)
    assert is_better(epoch(2, 0.4), epoch(0, 0.5), loss)
