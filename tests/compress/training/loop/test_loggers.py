"""Figures of each epoch in TensorBoard and MLflow, once each however often a training resumes."""

import importlib.util
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from compress.common.errors import Unavailable
from compress.core.context import Context
from compress.core.metrics import Metric
from compress.pipelines import Pipeline
from compress.pipelines.planning.planner import build_plan
from compress.training.config.training import Training
from compress.training.fit import fit
from compress.training.loop.metrics import EpochMetrics, TensorBoardLogger, log_records
from compress.training.objectives.objective import TargetLoss
from tests.compress.training.builders import import_net, load_data

HERE = Path(__file__).parents[1]


def job_with(**profile) -> SimpleNamespace:
    """Return what a training's logger reads of it."""
    return SimpleNamespace(
        training=Training(epochs=1, profile=profile),
        folder=Path("fit-0123456789"),
        metric=Metric("accuracy"),
    )


@pytest.fixture
def source(tmp_path):
    return import_net(tmp_path / "source", "nets:plain")


def context(root, stop_after=None):
    def progress(task, done, total, note=""):
        if done == stop_after:
            raise KeyboardInterrupt

    return Context(root=root, data=load_data(), progress=progress)


def run(source, where, **settings):
    training = Training(epochs=4, batch_size=16, **settings)
    return fit(source, training, TargetLoss(), where, "train")


def interrupt_and_resume(source, root, **settings):
    with pytest.raises(KeyboardInterrupt):
        run(source, context(root, stop_after=2), **settings)
    return run(source, context(root), **settings)


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Return the values by name and step of the one run in a folder; each step stands once."""
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (place,) = {file.parent for file in folder.rglob("events.out.*")}
    events = EventAccumulator(str(place))
    events.Reload()
    found = {name: events.Scalars(name) for name in events.Tags()["scalars"]}
    assert all(len({e.step for e in entries}) == len(entries) for entries in found.values())
    return {name: {e.step: e.value for e in entries} for name, entries in found.items()}


def epoch(number: int) -> EpochMetrics:
    return EpochMetrics(epoch=number, loss=float(number), metric=None, learning_rate=0.1)


def test_tensorboard_shows_each_epoch_once_though_the_training_was_interrupted(tmp_path, source):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    result = interrupt_and_resume(source, tmp_path / "out", profile={"tracker": "tensorboard"})
    found = scalars(tmp_path / "tracking")
    assert found["loss"] == pytest.approx({e.epoch: e.loss for e in result.history})
    assert found["val/accuracy"] == pytest.approx({e.epoch: e.metric for e in result.history})
    assert set(found["learning_rate"]) == set(found["samples_per_second"]) == {1, 2, 3, 4}
    assert min(found["peak_mebibytes/rank0"].values()) >= 0
    assert "tokens_per_second" not in found


def test_values_of_epochs_that_are_trained_again_are_replaced(tmp_path, ordered_files):
    for done, epochs in ((0, (1, 2, 3)), (1, (2,))):
        logger = TensorBoardLogger(tmp_path / "run", first_step=done + 1)
        for number in epochs:
            logger.write(number, {"loss": 10.0 * done + number})
        logger.close()
    assert scalars(tmp_path) == {"loss": {1: 1.0, 2: 12.0}}


def test_an_epoch_logged_twice_is_written_once(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    job = job_with(tracker="tensorboard", tracking_uri=str(tmp_path / "boards"))
    with log_records(job, tmp_path / "unused", "train", 0, 0) as write:
        for number in (1, 2, 2, 1, 3):
            write(epoch(number))
    assert scalars(tmp_path / "boards")["loss"] == {1: 1.0, 2: 2.0, 3: 3.0}
    assert not (tmp_path / "unused").exists()


def test_a_tracker_that_fails_gives_a_warning_and_training_continues(tmp_path, source, caplog):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        result = run(
            source,
            context(tmp_path / "out"),
            profile={"tracker": "tensorboard", "tracking_uri": "file"},
        )
    assert len(result.history) == 4
    assert caplog.text.count("tracker tensorboard failed (NotADirectoryError") == 1


@pytest.mark.parametrize("tracker", ["tensorboard", "mlflow"])
def test_a_tracker_that_is_not_installed_is_refused_first(tmp_path, source, monkeypatch, tracker):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == tracker else find(n))
    wanted = rf"needs {tracker}, which is not installed; pip install -e '\.\[{tracker}\]'"
    with pytest.raises(Unavailable, match=wanted):
        run(source, context(tmp_path / "out"), profile={"tracker": tracker})
    assert not (tmp_path / "out.work").exists()
    settings = {"epochs": 1, "profile": {"tracker": tracker}}
    for stage in (
        {"stage": "train", **settings},
        {"stage": "distill", "teacher": "source", **settings},
        {"stage": "prune_channels", "ratio": 0.5, "finetune": settings},
    ):
        (tmp_path / "pipeline.yaml").write_text(
            "version: 1\nmodel: {factory: nets:plain, inputs: [{name: x, shape: [batch, 4]}]}\n"
            f"data: {{factory: nets:blobs}}\nstages: [{stage}]\n"
        )
        with pytest.raises(Unavailable, match=wanted):
            build_plan(Pipeline.from_yaml(tmp_path / "pipeline.yaml"))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_mlflow_shows_each_epoch_once_though_the_training_was_interrupted(tmp_path, source, capfd):
    pytest.importorskip("mlflow", reason="needs mlflow")
    from mlflow import MlflowClient

    profile = {"tracker": "mlflow", "log_every": 3}
    result = interrupt_and_resume(source, tmp_path / "out", profile=profile)
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'tracking' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("compress").experiment_id
    (found,) = client.search_runs([experiment])
    assert found.info.status == "FINISHED" and found.info.run_name.startswith("train-")
    points = client.get_metric_history(found.info.run_id, "loss")
    assert [(p.step, p.value) for p in sorted(points, key=lambda p: p.step)] == [
        (e.epoch, pytest.approx(e.loss)) for e in result.history
    ]
    assert "peak_mebibytes/rank0" in found.data.metrics
    steps = client.get_metric_history(found.info.run_id, "step/gradient_norm")
    assert sorted(point.step for point in steps) == [3, 6, 9, 12, 15, 18, 21, 24]
    assert capfd.readouterr().err == ""
