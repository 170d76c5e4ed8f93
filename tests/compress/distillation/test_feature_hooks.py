"""Losses inside of the models: hooks, projections, and where they cannot work."""

from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from compress.artifacts.eager_model import EagerModel
from compress.common.errors import StageFailed
from compress.distillation.distillation_objective import DistillationObjective, pairs_of
from compress.distillation.stage import Distill
from compress.distillation.teacher import Teacher
from compress.distillation.terms import Hint

HINT = {"loss": "hint", "student": "layers.1", "teacher": "layers.3", "weight": 1}
EVERY = [
    {"loss": "kl", "temperature": 4, "weight": 0.9},
    {"loss": "labels", "weight": 0.1},
    {"loss": "dkd", "weight": 0.05},
    {"loss": "dist"},
    {"loss": "mse", "weight": 0.1},
    {"loss": "cosine"},
    {"loss": "relational"},
    {"loss": "relational", "student": "layers.0"},
    {"loss": "similarity", "student": "layers.*"},
    {"loss": "contrastive", "student": "layers.0", "teacher": "layers.1"},
    {"loss": "hint", "student": "layers.*", "compare": "cosine"},
    HINT,
]


def test_all_losses_together_teach_and_leave_nothing_behind(school):
    student = school.make()
    learnt = school.distil(student, epochs=3, losses=EVERY)
    assert school.weights(learnt).keys() == school.weights(student).keys()
    losses = [e["loss"] for e in learnt.manifest.facts["history"][1:]]
    assert losses[-1] < losses[0]
    assert school.context().score(learnt) > school.context().score(student)
    EagerModel.from_directory(learnt.path).verify()


@pytest.mark.parametrize("term", EVERY[2:], ids=lambda t: f"{t['loss']}-{t.get('student', '')}")
def test_each_loss_alone_falls(school, term):
    learnt = school.distil(school.make(), epochs=3, losses=[term])
    losses = [e["loss"] for e in learnt.manifest.facts["history"][1:]]
    assert losses[-1] < losses[0]


def test_a_projection_is_trained_beside_the_student():
    teacher, student = torch.nn.Linear(3, 5), torch.nn.Linear(3, 2)

    class Fixed:
        def load(self, device, modules=()):
            return lambda inputs: (student(*inputs).detach(), teacher(*inputs).detach())

    from compress.data.batch import Batch
    from compress.training.objectives.objective import TargetLoss

    term = Hint(loss="hint", student="0", teacher="x")
    objective = DistillationObjective(Fixed(), (term,), ((("0", "x"),),), TargetLoss())  # type: ignore[arg-type]
    module = torch.nn.Sequential(student)
    loss, batch = objective.prepare("cpu"), Batch((torch.randn(32, 3),), None)
    loss.attach_(module, batch)
    own = dict(module.named_parameters())
    assert {name: tuple(p.shape) for name, p in own.items() if "beside" in name} == {
        "_beside_0_0_weight": (5, 2),
        "_beside_0_0_bias": (5,),
    }
    assert torch.equal(module.eval()(batch.inputs[0]), student(batch.inputs[0]))
    module.train()
    optimizer, values = torch.optim.Adam(module.parameters(), 0.05), []
    for _ in range(60):
        optimizer.zero_grad()
        value = loss(module(batch.inputs[0]), batch)
        value.backward()
        optimizer.step()
        values.append(value.item())
    assert all(p.grad is not None and p.grad.any() for p in own.values())
    # The best linear map of two features onto five that depend on three leaves less than the start.
    assert values[-1] < 0.5 * values[0]


def test_hints_of_images_pass_other_widths_and_a_sequential_is_not_run_through_them(school):
    teacher = school.make("images", width=8, seed=1)
    context = school.context(other=teacher)
    hint = {"loss": "hint", "student": "second", "compare": "mse"}
    attention = {"loss": "attention", "student": "second"}
    learnt = school.distil(
        school.make("images"), context, teacher="other", losses=[hint, attention]
    )
    assert len(school.weights(learnt)) == 6
    wide = school.make("listed", width=16, seed=1)
    context = school.context(other=wide)
    losses = [{"loss": "hint", "student": "1"}, {"loss": "kl"}]
    learnt = school.distil(school.make("listed"), context, teacher="other", losses=losses)
    assert school.weights(learnt).keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_layers_are_mapped_evenly_the_last_to_the_last(school):
    student, teacher = school.make(depth=2).load(), school.make(depth=6).load()
    (pairs,) = pairs_of([Hint(loss="hint", student="layers.*")], student, teacher)
    assert pairs == (("layers.0", "layers.2"), ("layers.1", "layers.5"))
    term = Hint(loss="hint", student=("layers.1", "embed"), teacher=("layers.0", "layers.4"))
    (pairs,) = pairs_of([term], student, teacher)
    assert pairs == (("layers.1", "layers.0"), ("embed", "layers.4"))


def test_an_interrupted_training_with_hints_goes_on_with_its_projections(school, monkeypatch):
    student, settings = school.make(), {"epochs": 3, "losses": [HINT], "ema_decay": 0.5}
    whole = school.distil(student, **settings)
    from compress.training.loop import trainer

    close = trainer._finish_epoch

    def stop(job, progress, *given, **more):
        if progress.trained_epochs == 1:
            raise KeyboardInterrupt
        return close(job, progress, *given, **more)

    context = school.context()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(trainer, "_finish_epoch", stop)
        school.distil(student, context, **settings)
    assert school.same(school.distil(student, context, **settings), whole)


@pytest.mark.parametrize("settings", [{"accumulate": 2}, {"activation_checkpointing": "full"}])
def test_other_ways_of_the_same_step_give_the_same(school, settings):
    student = school.make()
    expected = school.distil(student, epochs=1, losses=[HINT], keep="last")
    found = school.distil(student, epochs=1, losses=[HINT], keep="last", **settings)
    a, b = school.weights(expected), school.weights(found)
    assert all(torch.allclose(a[name], b[name], atol=1e-5) for name in a)
    assert not torch.equal(
        school.weights(student)["head.weight"], a["head.weight"]
    ) or not school.same(student, expected)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.soak), "zero1"])
def test_two_processes_train_the_same_projections(school, strategy):
    student, losses = school.make(), [HINT, {"loss": "kl"}]
    alone = school.distil(student, epochs=1, losses=losses, keep="last")
    parallel = {"processes": 2, "strategy": strategy}
    spread = school.distil(student, epochs=1, losses=losses, keep="last", parallel=parallel)
    a, b = school.weights(alone), school.weights(spread)
    assert a.keys() == b.keys()
    assert all(torch.allclose(a[name], b[name], atol=1e-5) for name in a)


def test_a_misspelt_module_is_refused_with_those_that_are_near(school):
    wrong = [{"loss": "kl"}, {"loss": "hint", "student": "layer.1"}]
    with pytest.raises(StageFailed, match=r"losses\[1\]: the student has no module 'layer.1'; did"):
        school.distil(school.make(), losses=wrong)
    wrong = [{"loss": "hint", "student": "layers.1", "teacher": "layers.9"}]
    with pytest.raises(StageFailed, match=r"the teacher has no module 'layers.9'.*'layers.3'"):
        school.distil(school.make(), losses=wrong)
    more = school.make(depth=6)
    with pytest.raises(StageFailed, match="6 modules of the student and 4 of the teacher"):
        school.distil(more, losses=[{"loss": "hint", "student": "layers.*"}])
    with pytest.raises(StageFailed, match="'unused' takes no part in the model's forward pass"):
        school.distil(school.make(), losses=[{"loss": "hint", "student": "unused"}])
    with pytest.raises(StageFailed, match=r"losses\[0\] \(hint\): 'layers.1' of the student has"):
        school.distil(school.make(), losses=[HINT | {"projection": "none"}])
    with pytest.raises(StageFailed, match=r"losses\[0\] \(attention\): 'layers.1' of the student"):
        school.distil(school.make(), losses=[{"loss": "attention", "student": "layers.1"}])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"losses": [HINT], "parallel": {"processes": 2, "strategy": "fsdp"}}, "found 2 processes"),
        ({"losses": [HINT], "parallel": {"processes": 2, "tensor": 2}}, "use strategy: ddp"),
        ({"losses": [HINT], "compile": "whole"}, "found compile: whole"),
        ({"losses": [HINT], "teacher": {"onnx": "big.onnx"}}, "of an ONNX file the outputs alone"),
        ({"losses": [{"loss": "labels"}]}, "no term of the teacher"),
        ({"losses": [{"loss": "kl"}], "temperature": 2}, "found temperature beside it"),
        (
            {"losses": [{"loss": "hint", "teacher": "a"}]},
            "and student names none",
        ),
        ({"losses": [{"loss": "kld"}]}, "losses"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(settings, message):
    with pytest.raises(ValidationError, match=message):
        Distill.model_validate({"teacher": "train", "epochs": 1} | settings)


def test_a_teacher_that_is_no_module_is_refused_for_hints(school):
    teacher = replace(Teacher.from_model(school.teacher), kind=None)
    with pytest.raises(StageFailed, match="the teacher is an onnx file, whose outputs alone"):
        _ = teacher.module
