"""`max_disagreement`, and `confidence` of `max_drop`: they pass only where samples show it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from compress import Context, EagerModel, LabelAgreement, MaxDisagreement, MaxDrop
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.core.bounds import paired_bound, share_bound
from compress.core.gates import rule_in_words
from compress.core.metrics.score import Score
from compress.core.objectives.loss import Loss
from compress.core.objectives.task import TASKS
from compress.core.verdict import explain
from compress.data.splits import Splits

SAMPLES = 500


class Table(nn.Module):
    """Returns its input, of the first samples with another sign."""

    def __init__(self, changed: int = 0, outputs: int = 1) -> None:
        super().__init__()
        self.changed, self.outputs = changed, outputs
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        answers = torch.where(x[:, :1] < self.changed, -1.0, 1.0) * x[:, 1:] * self.scale
        if self.outputs == 1:
            return answers
        boxes = torch.cat([answers[:, None, :2].abs(), answers[:, None, :2].abs() + 2], 2)
        return boxes + (answers[:, None, :1] < 0) * 0.5, boxes[..., 0] * 0 + 1, boxes[..., 0] * 0


class Shares(Table):
    """Says yes or no by a share of 0 to 1, as after a sigmoid."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(super().forward(x)[:, :1] - 0.5)


def table(
    changed: int = 0, outputs: tuple[str, ...] = ("scores",), kind: type[Table] = Table
) -> EagerModel:
    signature = Signature(
        inputs=(TensorSpec(name="x", shape=("batch", 4)),),
        outputs=tuple(OutputSpec(name=name) for name in outputs),
    )
    module = kind(changed, len(outputs))
    arguments = {"changed": changed, "outputs": len(outputs)}
    return EagerModel.from_module(module, arguments=arguments, signature=signature)


def context(tmp_path, task: str | None = None) -> Context:
    """Samples are numbered, and their class, of three, is the place of a 1."""
    labels = torch.arange(SAMPLES) % 3
    x = torch.cat([torch.arange(SAMPLES)[:, None].float(), nn.functional.one_hot(labels, 3)], 1)
    data = Splits({"val": TensorDataset(x, labels)}, batch_size=64)
    return Context(root=tmp_path, data=data, loss=Loss(task=TASKS[task] if task else None))


def test_shares_after_a_sigmoid_are_a_yes_above_one_half(tmp_path) -> None:
    # All are positive: by their signs no label could differ. Of the first six samples two are yes.
    pair = table(kind=Shares), table(6, kind=Shares)
    found = MaxDisagreement(percent=2).measure(*pair, context(tmp_path)).bound
    assert (found.changed, found.classes.keys()) == (2, {"0", "1"})
    assert LabelAgreement().evaluate(*pair, context(tmp_path)).value == 1 - 2 / SAMPLES


def test_labels_are_judged_by_their_bound_and_not_by_their_share(tmp_path) -> None:
    verdict = MaxDisagreement(percent=2).evaluate(table(), table(6), context(tmp_path))
    assert verdict.bound.measured == pytest.approx(1.2)
    assert verdict.value == pytest.approx(100 * share_bound(6, SAMPLES, 0.95))
    assert verdict.value > 2
    assert not verdict.passed
    assert "with 95 % confidence" in verdict.rule
    assert "measured 1.2: 6 of 500 samples changed; " in explain(verdict)
    assert "samples would show the limit at this rate" in explain(verdict)
    assert MaxDisagreement(percent=3).evaluate(table(), table(6), context(tmp_path)).passed
    sure = MaxDisagreement(percent=3, confidence=0.9999)
    assert not sure.evaluate(table(), table(6), context(tmp_path)).passed


def test_a_rate_over_the_limit_is_shown_by_no_number_of_samples(tmp_path) -> None:
    verdict = MaxDisagreement(percent=1).evaluate(table(), table(6), context(tmp_path))
    assert "no number of samples would show the limit" in explain(verdict)


def test_bounds_of_classes_hold_all_at_once(tmp_path) -> None:
    verdict = MaxDisagreement(percent=5).evaluate(table(), table(6), context(tmp_path))
    shared = 100 * share_bound(2, 167, 1 - 0.05 / 3)
    assert verdict.bound.classes["0"] == pytest.approx(shared, abs=1e-3)
    assert [*verdict.bound.classes] == ["0", "1", "2"]
    said = verdict.bound.statement()
    assert "drawn independently" in said and "Bonferroni" in said and "Clopper–Pearson" in said


def test_a_stored_verdict_has_its_bound_for_another_limit(tmp_path) -> None:
    verdict = MaxDisagreement(percent=5).evaluate(table(), table(6), context(tmp_path))
    other = MaxDisagreement(percent=1).stored_verdict(verdict.measured)
    assert not other.passed and other.bound == verdict.bound


@pytest.mark.parametrize(
    ("task", "apart"),
    [("regression", 2.0), (None, 2.0), ("embedding", 2.0), ("detection", 1 - 2.25 / 5.75)],
)
def test_answers_without_labels_are_apart_by_an_error(tmp_path, task, apart) -> None:
    names = ("boxes", "scores", "labels") if task == "detection" else ("numbers",)
    judge = context(tmp_path, task)
    before, after = table(outputs=names), table(6, names)
    gate = MaxDisagreement(percent=3, error=0.99 * apart)
    verdict = gate.evaluate(before, after, judge)
    assert verdict.bound is not None, verdict.reason
    # Of the first six scenes two have their box at the place that moves.
    assert verdict.bound.changed == (2 if task == "detection" else 6)
    same = gate.model_copy(update={"error": 1.01 * apart}).evaluate(before, after, judge)
    assert same.bound.changed == 0
    assert verdict.bound.quantiles["99"] == pytest.approx(apart)
    assert verdict.bound.quantiles["90"] == pytest.approx(0, abs=1e-9)
    assert "99.9" not in verdict.bound.quantiles, "too few samples"


def test_what_has_no_labels_needs_an_error() -> None:
    problem = MaxDisagreement(percent=1).unsuitable_task(TASKS["embedding"])
    assert "add error: the largest 1 - cosine" in problem
    assert not MaxDisagreement(percent=1, error=0.1).unsuitable_task(TASKS["embedding"])
    assert "boxes" in MaxDisagreement(percent=1, score=0.3).unsuitable_task(TASKS["classification"])


def test_too_few_samples_are_known_before_anything_runs(tmp_path) -> None:
    judge = context(tmp_path)
    (unmet,) = MaxDisagreement(percent=0.5).unmet_by(judge)
    assert "it takes 598 to show" in unmet.problem
    assert not [*MaxDisagreement(percent=1).unmet_by(judge)]
    assert [*MaxDrop(points=0.5, confidence=0.95).unmet_by(judge)]
    assert not [*MaxDrop(points=0.5).unmet_by(judge)]
    assert not [*MaxDrop(points=0.5, confidence=0.95).unmet_by(replace(judge, data=None))]


def test_the_drop_is_judged_by_its_paired_bound(tmp_path) -> None:
    judge = context(tmp_path)
    verdict = MaxDrop(points=2, confidence=0.95).evaluate(table(), table(6), judge)
    assert verdict.value == pytest.approx(100 * paired_bound(6, 0, SAMPLES, 0.95))
    assert verdict.value > 2
    assert not verdict.passed and "about" in explain(verdict)
    assert MaxDrop(points=2).evaluate(table(), table(6), judge).passed
    words = rule_in_words(verdict, "accuracy")
    assert words == "with 95 % confidence loses at most 2 points of accuracy"


@pytest.mark.parametrize("metric", ["f1", "map", "perplexity", "mse", "r2", "my:own"])
def test_metrics_that_are_no_shares_have_no_bound(metric) -> None:
    assert "is no share of samples" in MaxDrop(points=1, confidence=0.95).unsuitable_metric(metric)


def test_shares_of_samples_with_several_labels_are_bounded_by_betting() -> None:
    scores = [
        Score.from_sums(sum(own) / 16, torch.tensor([own, [4.0] * 4]).numpy(), is_fraction=True)
        for own in ([4.0, 3, 2, 1], [4.0, 3, 2, 0])
    ]
    bound = scores[0].drop_bound(scores[1], 0.95)
    assert bound.measured == pytest.approx(6.25) and bound.value > 6.25 and bound.changed == 1
    assert Score.from_json(scores[0].to_json()).are_shares
    uneven = Score.from_sums(0.5, torch.tensor([[4.0, 1], [4.0, 2]]).numpy(), is_fraction=True)
    with pytest.raises(Exception, match="different numbers of labels"):
        uneven.drop_bound(uneven, 0.95)


def test_by_default_the_uncompressed_model_is_compared_with(tmp_path) -> None:
    from compress.core.stage import evaluate_gates

    judge = replace(context(tmp_path), artifacts={"source": table()})
    (verdict,) = evaluate_gates([MaxDisagreement(percent=3)], table(6), table(6), judge)
    assert verdict.against == "source" and verdict.bound.changed == 6
