from pathlib import Path

import pytest
import torch

from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.errors import GateRefused
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.core.gates import MinMetric
from compress.data.splits import DataReference
from compress.training.stage import Train
from tests.compress.training.builders import import_net, load_data

HERE = Path(__file__).parent
DIGITS = HERE.parents[2] / "examples" / "digits"


@pytest.fixture
def source(tmp_path):
    return import_net(tmp_path / "source")


def context(root):
    return Context(root=root, data=load_data(batch_size=128))


def test_training_twice_seals_the_same_artifact_which_opens_in_a_fresh_process(
    tmp_path, source, fresh_torch
):
    first, again = (Train(epochs=2)(source, context(tmp_path / name)) for name in "ab")
    assert first.digest == again.digest != source.digest
    first.verify()
    assert first.manifest.lineage[-1].stage == "train"
    assert first.manifest.lineage[-1].inputs == {"input": source.digest}
    assert [e["epoch"] for e in first.manifest.facts["history"]] == [1, 2]
    x = first.signature.example(batch=4)
    torch.save([x, first.load()(*x).detach()], tmp_path / "expected.pt")
    code = (
        "import torch; from compress.artifacts.eager_model import EagerModel; "
        f"x, y = torch.load({str(tmp_path / 'expected.pt')!r}, weights_only=True); "
        f"assert torch.equal(EagerModel.from_directory({str(first.path)!r}).load()(*x), y)"
    )
    fresh_torch(code)


def test_a_gate_refuses_and_the_artifact_is_kept(tmp_path, source):
    stage = Train(epochs=1, gates=(MinMetric(at=1.0),))
    with pytest.raises(GateRefused, match=r"train: min_metric: metric >= 1, .*\(artifact kept"):
        stage(source, context(tmp_path / "a"))
    assert (tmp_path / "a" / "manifest.json").exists()


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("seed", [0])
def test_the_defaults_train_the_example(tmp_path, seed):
    signature = Signature(inputs=(TensorSpec(name="image", shape=("batch", 1, 8, 8)),))
    recipe = Recipe(factory="models:resnet20")
    model = import_checkpoint(
        tmp_path / "source", recipe, signature, checkpoint=None, folder=DIGITS, seed=seed
    )
    data = DataReference("data:digits", {}, DIGITS, 128).load()
    where = Context(root=tmp_path / "train", data=data, seed=seed)
    trained = Train(epochs=12, parallel={"processes": 2})(model, where)
    assert where.score(trained) >= 0.975
