"""The user's functions after steps and epochs: called once each, and the result stays the same."""

import json

import pytest
from pydantic import ValidationError

from compress.common.dependency_recorder import recording
from compress.common.errors import PipelineInvalid, StageFailed
from compress.core.context import Context
from compress.core.objectives.loss import Loss
from compress.training.stage import Train
from tests.compress.training.builders import import_net, load_data

SETTINGS = {"epochs": 2, "batch_size": 32}
MODULE = """
import json, os, random, sys
from pathlib import Path

import numpy, torch

FOLDER = Path("{folder}")

def write(event, values):
    torch.manual_seed(len(values)), numpy.random.seed(3), random.seed(4), os.environ.get("TOKEN")
    (FOLDER / "read.txt").read_text()
    with (FOLDER / "calls.jsonl").open("a") as stream:
        stream.write(json.dumps([event, os.getpid(), values]) + "\\n")

def on_step(values):
    write("step", values)

def on_epoch(values):
    write("epoch", values)

def fails(values):
    if values["epoch"] == 1:
        raise ValueError("no such table\\nsecond line")

def leaves(values):
    sys.exit(3)

class Both:
    def __init__(self):
        self.steps = 0
    def on_step_end(self, values):
        self.steps += 1
    def on_epoch_end(self, values):
        write("epoch", {**values, "steps": self.steps})

class Neither:
    pass

class Broken:
    def __init__(self):
        raise KeyError("host")
"""
EACH = {"on_step_end": "events_here:on_step", "on_epoch_end": "events_here:on_epoch"}


@pytest.fixture
def source(tmp_path):
    return import_net(tmp_path / "source")  # with dropout


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "code"
    place.mkdir()
    (place / "events_here.py").write_text(MODULE.replace("{folder}", str(place)))
    (place / "read.txt").touch()
    return place


def train(source, root, folder, **settings):
    context = Context(root=root, data=load_data(), loss=Loss(folder=folder))
    return Train(**SETTINGS, **settings)(source, context)


def calls(folder, event: str) -> list[dict]:
    lines = map(json.loads, (folder / "calls.jsonl").read_text().splitlines())
    return [values for found, _, values in lines if found == event]


def test_functions_get_each_step_and_epoch_and_change_nothing(tmp_path, source, folder):
    plain = train(source, tmp_path / "a", folder)
    called = train(source, tmp_path / "b", folder, callbacks=EACH)
    assert called.digest == plain.digest
    steps, epochs = calls(folder, "step"), calls(folder, "epoch")
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert all(step["loss"] > 0 and step["gradient_norm"] > 0 for step in steps)
    assert [epoch["epoch"] for epoch in epochs] == [1, 2]
    history = plain.manifest.facts["history"]
    assert [e["metric"] for e in epochs] == [e["metric"] for e in history]


@pytest.mark.multiprocess
@pytest.mark.usefixtures("forked_ranks")
def test_they_are_called_in_one_process_of_several(tmp_path, source, folder):
    parallel = {"processes": 2}
    train(source, tmp_path / "a", folder, callbacks=EACH, parallel=parallel)
    lines = [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]
    assert [event for event, _, _ in lines].count("step") == 6
    assert len({process for _, process, _ in lines}) == 1


def test_a_class_is_created_once_for_a_training(tmp_path, source, folder):
    train(source, tmp_path / "a", folder, callbacks="events_here:Both")
    assert [epoch["steps"] >= 3 for epoch in calls(folder, "epoch")] == [True, True]


@pytest.mark.multiprocess
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("parallel", [{}, {"processes": 2}], ids=["one", "two"])
@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (
            {"on_step_end": "events_here:fails"},
            r"train: callbacks\.on_step_end: it raised: ValueError: no such table \(after step 1\)",
        ),
        (
            {"on_epoch_end": "events_here:fails"},
            r"train: callbacks\.on_epoch_end: it raised: ValueError: no such table .* epoch 1\)",
        ),
        (
            {"on_step_end": "events_here:leaves"},
            r"train: callbacks\.on_step_end: user code called sys\.exit\(3\) in events_here.*",
        ),
    ],
)
def test_an_exception_is_one_line(tmp_path, source, folder, callbacks, message, parallel):
    with pytest.raises(StageFailed, match=rf"^{message}$"):
        train(source, tmp_path / "a", folder, callbacks=callbacks, parallel=parallel)


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ({"on_step_end": "events_here:absent"}, "has no callable 'absent'; it has Both, Broken"),
        ("events_here:Neither", "events_here:Neither has no method on_step_end or on_epoch_end"),
        ("events_here:Broken", "callbacks: events_here:Broken raised: KeyError: 'host'"),
    ],
)
def test_what_cannot_be_called_is_refused_before_training(
    tmp_path, source, folder, callbacks, message
):
    with pytest.raises((StageFailed, PipelineInvalid), match=message):
        train(source, tmp_path / "a", folder, callbacks=callbacks)
    with pytest.raises(ValidationError, match="on_step"):
        Train(epochs=1, callbacks={"on_step": "events_here:on_step"})


def test_their_source_and_what_they_read_are_part_of_no_cache_key(
    tmp_path, source, folder, monkeypatch
):
    monkeypatch.setenv("TOKEN", "secret")
    with recording() as recorded:
        train(source, tmp_path / "a", folder, callbacks=EACH)
    assert calls(folder, "epoch")
    depends = recorded.dependencies(tmp_path)
    assert not [name for name in depends.files if name.startswith("code")]
    assert "TOKEN" not in depends.environment
    assert Train(**SETTINGS, callbacks=EACH).own_settings() == Train(**SETTINGS).own_settings()
