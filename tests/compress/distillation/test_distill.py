from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.errors import GateRefused, StageFailed
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.core.gates import MinMetric
from compress.data.splits import DataReference, Splits
from compress.distillation.stage import Distill
from compress.training.stage import Train

ROOT = Path(__file__).parents[3]
NETS = ROOT / "tests" / "compress" / "training"
FEATURES = Signature(inputs=(TensorSpec(name="features", shape=("batch", 4)),))


def make(path, **arguments):
    recipe = Recipe(factory="nets:classifier", arguments=arguments)
    return import_checkpoint(path, recipe, FEATURES, checkpoint=None, folder=NETS)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tiny models on many threads crawl where other programs run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def data():
    return DataReference("nets:blobs", {"train": 640}, NETS, 128).load()


@pytest.fixture(scope="module")
def taught(tmp_path_factory, data):
    """A student that knows nothing yet, and a context with a teacher."""
    root = tmp_path_factory.mktemp("models")
    student = make(root / "student")
    teacher = Train(epochs=6)(make(root / "fresh"), Context(root=root / "teacher", data=data))
    where = Context(
        root=root / "result", data=data, artifacts={"source": student, "train": teacher}
    )
    assert where.score(teacher) > 0.8
    return student, where


def unlabelled(data):
    features, _ = data.datasets["train"].tensors
    return Splits({"train": TensorDataset(features), "val": data.datasets["val"]})


def test_a_student_learns_without_a_single_label_and_opens_in_a_fresh_process(
    tmp_path, data, taught, fresh_torch
):
    student, where = taught
    where = replace(where, root=tmp_path / "distilled", data=unlabelled(data))
    stage = Distill(teacher="train", epochs=4)
    assert stage.extra_inputs == ("train",)
    learnt = stage(student, where)
    assert where.score(learnt) > where.score(student) + 0.2
    step = learnt.manifest.lineage[-1]
    assert step.inputs == {"input": student.digest, "teacher": where.artifact("train").digest}
    assert [e["epoch"] for e in learnt.manifest.facts["history"]] == [0, 1, 2, 3, 4]
    x = FEATURES.example(batch=4)
    torch.save([x, learnt.load()(*x).detach()], tmp_path / "expected.pt")
    code = (
        "import torch; from compress.artifacts.eager_model import EagerModel; "
        f"x, y = torch.load({str(tmp_path / 'expected.pt')!r}, weights_only=True); "
        f"assert torch.equal(EagerModel.from_directory({str(learnt.path)!r}).load()(*x), y)"
    )
    fresh_torch(code)


def test_labels_count_only_by_their_weight(tmp_path, data, taught):
    student, where = taught
    features, labels = data.datasets["train"].tensors
    wrong = {**data.datasets, "train": TensorDataset(features, (labels + 1) % 3)}

    def history(name, splits, **settings):
        here = replace(where, root=tmp_path / name, data=splits)
        facts = Distill(teacher="train", epochs=1, **settings)(student, here).manifest.facts
        return facts["history"]

    soft = history("soft", unlabelled(data))
    assert history("ignored", Splits(wrong), hard_weight=0) == soft
    assert history("wrong", Splits(wrong)) != soft


def test_a_harmful_distillation_leaves_the_input_as_it_was(tmp_path, data, taught):
    _, where = taught
    teacher = where.artifact("train")
    earlier = {"source": make(tmp_path / "ignorant")}
    where = replace(where, root=tmp_path / "a", artifacts=earlier)
    kept = Distill(teacher="source", epochs=1, hard_weight=0)(teacher, where)
    assert kept.manifest.facts["kept_epoch"] == 0
    before, after = teacher.load().state_dict(), kept.load().state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_wrong_teacher_is_refused_in_one_line(tmp_path, taught):
    student, where = taught
    where = replace(where, root=tmp_path / "a")
    with pytest.raises(StageFailed, match="no earlier artifact is named 'big'; known: source"):
        Distill(teacher="big", epochs=1)(student, where)
    other = {"other": make(tmp_path / "other", classes=7)}
    with pytest.raises(StageFailed, match=r"distill: the teacher's output has shape \(64, 7\)"):
        Distill(teacher="other", epochs=1)(student, replace(where, artifacts=other))


def test_a_gate_refuses(tmp_path, taught):
    student, where = taught
    stage = Distill(teacher="train", epochs=1, gates=(MinMetric(at=1.0),))
    with pytest.raises(GateRefused, match="distill: min_metric"):
        stage(student, replace(where, root=tmp_path / "a"))


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.usefixtures("forked_ranks")
def test_every_rank_loads_the_teacher(tmp_path, taught):
    student, where = taught
    parallel = {"processes": 2}
    stage = Distill(teacher="train", epochs=2, parallel=parallel, cache_teacher=False)
    learnt = stage(student, replace(where, root=tmp_path / "a"))
    losses = [e["loss"] for e in learnt.manifest.facts["history"][1:]]
    assert losses[1] < losses[0]
