"""Training on samples with random augmentation is repeated, resumed and distributed exactly."""

import pytest
import torch

from compress.core.context import Context
from compress.data.loader_config import Loading
from compress.data.splits import Splits
from compress.training.config.training import Training
from compress.training.fit import fit
from compress.training.objectives.objective import TargetLoss
from tests.compress.data.augmented import data
from tests.compress.training.builders import import_net

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def train(root, kind="numpy", workers=0, stop_after=None, **settings):
    """Train with a new dataset, whose generators have another state each time."""
    source = import_net(root / "source", "nets:plain")
    notes = []

    def progress(task, done, total, note=""):
        notes.append(note)
        if done == stop_after:
            raise KeyboardInterrupt

    splits = Splits(data(kind), 16, Loading(workers=workers))
    where = Context(root=root / "train", data=splits, progress=progress)
    settings = {"epochs": 3, "batch_size": 16, "optimizer": "sgd", **settings}
    result = fit(source, Training(**settings), TargetLoss(), where, "train")
    return result.module.state_dict(), notes


@pytest.mark.parametrize(("kind", "workers"), [("numpy", 0), ("lazy", 2), ("global", 0)])
def test_an_interrupted_training_with_augmentation_ends_bit_identical(tmp_path, kind, workers):
    whole, _ = train(tmp_path / "whole", kind)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "parts", kind, workers, stop_after=2)
    resumed, notes = train(tmp_path / "parts", kind, workers)
    assert notes[0] == "resumed after epoch 2"
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.usefixtures("forked_ranks")
def test_two_ranks_and_micro_batches_augment_as_one_process_does(tmp_path):
    settings = {"epochs": 1, "learning_rate": 0.1}
    alone, _ = train(tmp_path / "one", **settings)
    for name, more in {"two": {"parallel": {"processes": 2}}, "parts": {"accumulate": 4}}.items():
        other, _ = train(tmp_path / name, **settings, **more)
        for key, value in alone.items():
            torch.testing.assert_close(other[key], value, rtol=0, atol=1e-6)
