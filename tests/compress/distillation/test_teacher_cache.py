"""The teacher's answers, kept on disk."""

import shutil
from collections import Counter
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch.utils.data import Dataset

from compress.common.errors import StageFailed
from compress.data.batch import SampleWithTeacher, collate
from compress.data.sample_cache import RecordLog, Sample
from compress.data.splits import Splits
from compress.distillation import teacher_cache


def asked(trace: Path) -> int:
    """Return how many samples a model was asked about."""
    return sum(int(line.split()[1]) for line in trace.read_text().splitlines())


@pytest.fixture
def traced(school, tmp_path):
    """A teacher that writes down how many samples it is asked about."""
    trace = tmp_path / "trace"
    context = school.context(traced=school.make(width=16, depth=3, seed=5, trace=str(trace)))
    trace.unlink()
    return trace, context


def test_the_teacher_is_asked_once_about_each_sample(school, traced):
    trace, context = traced
    school.distil(school.make(), context, teacher="traced", epochs=4)
    assert asked(trace) == 96


def test_training_is_the_same_to_the_last_bit_with_and_without(school, traced):
    trace, context = traced
    student, settings = school.make(), {"teacher": "traced", "epochs": 4, "keep": "last"}
    kept = school.distil(student, context, **settings)
    count = asked(trace)
    again = school.context(traced=context.artifact("traced"))
    fresh = school.distil(student, again, **settings, cache_teacher=False)
    # Four epochs, and nothing is asked in evaluation.
    assert asked(trace) - count == 4 * 96
    assert kept.manifest.facts == fresh.manifest.facts
    assert school.same(kept, fresh)
    assert not school.same(kept, student)
    assert kept.manifest.lineage == fresh.manifest.lineage


def test_features_are_kept_where_that_is_asked_for(school, traced):
    trace, context = traced
    settings = {
        "teacher": "traced",
        "epochs": 3,
        "keep": "last",
        "losses": [{"loss": "hint", "student": "layers.*"}, {"loss": "kl"}],
    }
    kept = school.distil(school.make(), context, **settings, cache_teacher=True)
    assert asked(trace) == 96
    again = school.context(traced=context.artifact("traced"))
    assert school.same(kept, school.distil(school.make(), again, **settings))
    # Two samples are asked about where projections are made.
    assert asked(trace) == 96 + 3 * 96 + 2


def test_an_interrupted_run_goes_on_with_the_answers_there_are(school, traced, monkeypatch):
    trace, context = traced
    append, student = RecordLog.append, school.make()

    def stop(records, index, content):
        if index == 40:
            raise KeyboardInterrupt
        append(records, index, content)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RecordLog, "append", stop)
        school.distil(student, context, teacher="traced", keep="last")
    before = asked(trace)
    resumed = school.distil(student, context, teacher="traced", keep="last")
    # Of 96 answers 40 were kept; the rest makes three and a half batches, filled up to four.
    assert asked(trace) - before == 64
    again = school.context(traced=context.artifact("traced"))
    assert school.same(resumed, school.distil(student, again, teacher="traced", keep="last"))


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.usefixtures("forked_ranks")
def test_two_processes_read_what_one_has_asked(school, traced):
    trace, context = traced
    student, settings = school.make(), {"teacher": "traced", "epochs": 2, "keep": "last"}
    parallel = {"processes": 2}
    kept = school.distil(student, context, **settings, parallel=parallel)
    assert asked(trace) == 96
    again = school.context(traced=context.artifact("traced"))
    fresh = school.distil(student, again, **settings, parallel=parallel, cache_teacher=False)
    assert asked(trace) == 96 + 2 * 96
    assert school.same(kept, fresh)


def test_samples_that_change_are_not_kept(school, caplog):
    context, student = school.context(school.data(kind="noisy")), school.make()
    school.distil(student, context)
    assert "run in each epoch: sample 0 of split 'train' differs" in caplog.text
    with pytest.raises(StageFailed, match=r"cache_teacher: sample 0 of.*set cache_teacher: false"):
        school.distil(student, context, cache_teacher=True)


def test_too_small_a_disk_is_noticed_before_it_is_full(school, monkeypatch, caplog):
    little = shutil._ntuple_diskusage(100, 90, 1000)
    monkeypatch.setattr(teacher_cache.shutil, "disk_usage", lambda path: little)
    context, student = school.context(), school.make()
    with pytest.raises(StageFailed, match=r"answers would take 0 MiB, and .* has 0 MiB left"):
        school.distil(student, context, cache_teacher=True)
    school.distil(student, context)
    assert "run in each epoch: answers would take" in caplog.text


def test_a_damaged_record_is_refused_and_voided(school, tmp_path):
    dataset = school.data().datasets["train"]
    records = RecordLog(tmp_path, len(dataset))
    answer = Sample((torch.ones(2), torch.zeros(1, 4)), target=None, names=None)
    records.append(3, answer.to_bytes())
    with_outputs = teacher_cache.DatasetWithTeacher(dataset, tmp_path)
    other = SampleWithTeacher(dataset[4], (torch.zeros(2), torch.ones(1, 4)))
    batch = collate([with_outputs[3], other])
    assert torch.equal(batch.inputs[0], dataset.tensors[0][3:5])
    assert torch.equal(batch.teacher_outputs[0], torch.tensor([[1.0, 1], [0, 0]]))
    assert batch.teacher_outputs[1].shape == (2, 1, 4)
    assert len(batch.to("cpu").tensors()) == 4
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(StageFailed, match=r"the answer to sample 3 in .* is gone or damaged; run"):
        with_outputs[3]
    assert RecordLog(tmp_path, len(dataset)).read(3) is None


class Changing(Dataset):
    """Samples that differ each time they are read."""

    reads = count()

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor([float(next(self.reads))]), index


def test_samples_that_change_are_found_beside_answers_too(tmp_path):
    records = RecordLog(tmp_path, 4)
    for index in range(4):
        answer = Sample((torch.ones(2),), target=None, names=None)
        records.append(index, answer.to_bytes())
    plain = Splits({"train": Changing()})
    with_outputs = plain.with_view(lambda _, data: teacher_cache.DatasetWithTeacher(data, tmp_path))
    assert with_outputs.contents().unrepeatable == {"train"}


def test_answers_that_were_stored_without_names_are_read():
    content = save({str(i): torch.full((2,), float(i)) for i in range(12)})
    restored = Sample.from_bytes(content)
    assert [x[0].item() for x in restored.inputs] == list(range(12))
    assert restored.target is None


def test_each_sample_gets_its_own_answer_whatever_the_order(school):
    context = school.context()
    stage_data = school.data(train=50)
    from compress.distillation.distillation_objective import DistillationObjective
    from compress.distillation.teacher import Teacher
    from compress.training.config.training import Training

    objective = DistillationObjective(Teacher.from_model(school.teacher), (), (), 0.0)

    data = teacher_cache.with_teacher_outputs(
        objective, Training(epochs=1, batch_size=16), replace(context, data=stage_data), "t"
    )
    expected = school.teacher.load()(stage_data.datasets["train"].tensors[0]).detach()
    order = torch.randperm(50).tolist()
    batches = list(data.read("train", order, 10))
    found = torch.cat([batch.teacher_outputs[0] for batch in batches])
    assert torch.allclose(found, expected[order], atol=1e-6)
    targets = torch.cat([batch.target for batch in batches])
    assert Counter(targets.tolist()) == Counter(stage_data.datasets["train"].tensors[1].tolist())
