"""Steps in console, log and tracker: the same figures for any number of processes."""

import logging

import pytest
import torch
from pydantic import ValidationError
from torch.nn.utils import get_total_norm

from compress.core.context import Context
from compress.data.loader_config import Loading
from compress.data.splits import DataReference
from compress.training.config.training import Profile
from compress.training.loop.metrics import EpochMetrics, StepRecord, log_records
from compress.training.optim.optimizer import clip_norm_
from compress.training.stage import Train
from tests.compress.training.builders import HERE, import_net, import_transformer, load_data
from tests.compress.training.loop.test_loggers import job_with, scalars

SETTINGS = {"epochs": 2, "batch_size": 32, "learning_rate": 0.01, "schedule": "constant"}


@pytest.fixture
def source(tmp_path):
    return import_net(tmp_path / "source", "nets:plain")


def logged_steps(caplog) -> list[dict]:
    fields = [getattr(record, "log_fields", {}) for record in caplog.records]
    return [field for field in fields if field.get("event") == "step"]


def train(source, root, caplog, notes=None, data=None, **settings):
    """Return the artifact and the figures of each logged step."""

    def progress(task, done, total, note=""):
        if notes is not None:
            notes.append(note)

    caplog.clear()
    with caplog.at_level(logging.INFO, "compress.training.fit"):
        context = Context(root=root, data=data or load_data(), progress=progress)
        artifact = Train(**{**SETTINGS, **settings})(source, context)
    return artifact, {fields["step"]: fields["figures"] for fields in logged_steps(caplog)}


def test_steps_are_logged_and_the_result_stays_the_same(tmp_path, source, caplog):
    notes = []
    plain, none = train(source, tmp_path / "a", caplog)
    logged, steps = train(
        source, tmp_path / "b", caplog, notes, profile={"log_every": 2, "peak_flops": 1e9}
    )
    assert logged.digest == plain.digest and none == {}
    assert list(steps) == [2, 4, 6]
    assert all(figures["learning_rate"] == 0.01 for figures in steps.values())
    # 4 × 16 and 16 × 3 multiply-accumulates; 2 FLOPs each, three times with the backward pass.
    flops = 6 * (4 * 16 + 16 * 3)
    for figures in steps.values():
        assert figures["mfu"] == pytest.approx(figures["samples_per_second"] * flops / 1e9)
    (note,) = [note for note in notes if "step 4/6" in note]
    assert note.startswith("epoch 2/2 step 4/6 loss ") and "samples/s, MFU" in note


@pytest.mark.multiprocess
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_log_the_figures_of_one(tmp_path, source, caplog, strategy):
    logging_steps = {"profile": {"log_every": 1, "peak_flops": 1e9}}
    _, alone = train(source, tmp_path / "a", caplog, **logging_steps)
    parallel = {"processes": 2, "strategy": strategy}
    _, both = train(source, tmp_path / "b", caplog, parallel=parallel, **logging_steps)
    assert list(both) == list(alone) == [1, 2, 3, 4, 5, 6]
    for step, figures in alone.items():
        for name in ("loss", "gradient_norm", "learning_rate"):
            assert both[step][name] == pytest.approx(figures[name], rel=1e-6)
        # The peak is that of both devices.
        rate = both[step]["samples_per_second"]
        assert both[step]["mfu"] == pytest.approx(
            figures["mfu"] / figures["samples_per_second"] * rate / 2
        )


def test_flops_of_token_models_are_counted_by_token(tmp_path, caplog):
    source = import_transformer(tmp_path / "source")
    tokens = DataReference("transformers_here:tokens", {}, HERE, 16, Loading()).load()
    profile = {"log_every": 1, "peak_flops": 1e9}
    _, steps = train(source, tmp_path / "a", caplog, data=tokens, epochs=1, profile=profile)
    figures = steps[1]
    assert figures["tokens_per_second"] == pytest.approx(6 * figures["samples_per_second"])
    flops = 6 * source.macs() / 6
    assert figures["mfu"] == pytest.approx(figures["tokens_per_second"] * flops / 1e9)


@pytest.mark.parametrize("limit", [0.01, None])
def test_the_gradient_norm_is_torchs_from_before_clipping(limit):
    torch.manual_seed(0)
    module = torch.nn.Linear(5, 3)
    module(torch.randn(4, 5)).sum().backward()
    gradients = [weight.grad for weight in module.parameters()]
    before = [gradient.clone() for gradient in gradients]
    assert clip_norm_(module.parameters(), limit) == get_total_norm(before)
    unchanged = all(torch.equal(*pair) for pair in zip(gradients, before, strict=True))
    assert unchanged is (limit is None)


def test_a_peak_without_steps_is_refused():
    with pytest.raises(ValidationError, match="peak_flops is for the MFU of log_every; set log_ev"):
        Profile(peak_flops=1e12)


def record(step: int, epoch: int = 1) -> StepRecord:
    return StepRecord(
        step=step, epoch=epoch, loss=float(step), learning_rate=0.1, samples_per_second=1.0
    )


def epoch(number: int) -> EpochMetrics:
    return EpochMetrics(epoch=number, loss=float(number), metric=None, learning_rate=0.1)


def test_tensorboard_has_each_step_once_though_the_training_was_resumed(tmp_path, ordered_files):
    """What was logged after the last checkpoint, and is trained again, is replaced."""
    job = job_with(tracker="tensorboard", log_every=1)
    for epochs, steps, records in (
        (0, 0, [record(1), record(2), epoch(1), record(3), record(4)]),
        (1, 3, [record(3), replaced(record(4)), record(5), record(5), epoch(2)]),
    ):
        with log_records(job, tmp_path, "train", epochs, steps) as write:
            for each in records:
                write(each)
    (folder,) = (tmp_path / "tracking").iterdir()
    assert scalars(folder / "steps")["step/loss"] == {1: 1.0, 2: 2.0, 3: 3.0, 4: 40.0, 5: 5.0}
    assert "step/gradient_norm" not in scalars(folder / "steps")
    (folder / "steps").rename(tmp_path / "elsewhere")
    assert scalars(folder)["loss"] == {1: 1.0, 2: 2.0}


def replaced(of: StepRecord) -> StepRecord:
    return of.model_copy(update={"loss": 10 * of.loss})
