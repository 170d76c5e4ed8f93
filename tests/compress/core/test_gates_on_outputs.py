"""Gates and the metric `fidelity` of models with several outputs: all are read that can be."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from compress import Context, LabelAgreement, MinCosine
from compress.artifacts.eager_model import EagerModel
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.core.gates import value_in_words
from compress.core.metrics import Metric
from compress.core.metrics.builtin import labelled_outputs
from compress.core.objectives.task import TASKS
from compress.core.verdict import explain
from compress.data.splits import Splits

OUTPUTS = ("kind", "color", "count")


class Heads(nn.Module):
    """Scores of kinds and of colors, and a number; the head of colors may be another one."""

    def __init__(self, turned: float = 0.0) -> None:
        super().__init__()
        self.turned = turned
        self.kind, self.color, self.count = nn.Linear(6, 4), nn.Linear(6, 3), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        color = self.color(x)
        return self.kind(x), color + self.turned * color.flip(1), -self.count(x)


@pytest.fixture
def heads(tmp_path) -> tuple[EagerModel, EagerModel, Context]:
    torch.manual_seed(0)
    signature = Signature(
        inputs=(TensorSpec(name="x", shape=("batch", 6)),),
        outputs=tuple(OutputSpec(name=name) for name in OUTPUTS),
    )
    module = Heads()
    before = EagerModel.from_module(module, signature=signature)
    changed = Heads(turned=0.9)
    changed.load_state_dict(module.state_dict())
    with torch.no_grad():
        changed.count.weight.neg_()  # the sign of one number is no direction
    after = EagerModel.from_module(changed, arguments={"turned": 0.9}, signature=signature)
    data = Splits({"val": TensorDataset(torch.randn(100, 6), torch.arange(100) % 4)}, batch_size=32)
    return before, after, Context(root=tmp_path, data=data)


def test_labels_of_every_head_are_compared_and_the_worst_is_named(heads) -> None:
    before, after, context = heads
    verdict = LabelAgreement(minimum=0.999).evaluate(before, after, context)
    assert not verdict.passed
    x = context.data.datasets["val"].tensors[0]
    colors = [model.load()(x)[1].argmax(1) for model in (before, after)]
    share = float((colors[0] == colors[1]).float().mean())
    assert verdict.outputs == {"kind": 1.0, "color": pytest.approx(share)}
    assert verdict.value == verdict.outputs["color"] < 1
    assert explain(verdict).endswith("(output 'color', the worst of 2)")
    assert value_in_words(verdict, "accuracy").endswith(" % (output 'color', the worst of 2)")
    stored = LabelAgreement(minimum=0.1).stored_verdict(verdict.measured)
    assert stored.passed and stored.outputs == verdict.outputs


def test_vectors_of_every_output_are_compared(heads) -> None:
    before, after, context = heads
    verdict = MinCosine(minimum=0.9).evaluate(before, after, context)
    assert not verdict.passed
    assert verdict.outputs["kind"] == pytest.approx(1)
    assert verdict.value == verdict.outputs["color"]
    assert [*verdict.outputs] == ["kind", "color"], "of one number the sign would be compared"
    assert MinCosine(minimum=0.99).evaluate(before, before, context).passed


def test_fidelity_counts_samples_whose_labels_are_equal_in_every_output(heads) -> None:
    before, after, context = heads
    context = Context(
        root=context.root,
        data=context.data,
        metric=Metric("fidelity"),
        artifacts={"source": before},
    )
    agreement = LabelAgreement().evaluate(before, after, context)
    score = context.score_by_sample(after)
    assert score.value == pytest.approx(agreement.value)
    assert context.score(before) == 1
    change = context.drop_uncertainty(before, after)
    assert change.lost == round(100 * (1 - score.value)), "samples are right or wrong"


def test_one_output_has_no_name(heads) -> None:
    before, _, context = heads
    signature = Signature(inputs=before.signature.inputs)
    one = EagerModel.from_module(
        nn.Linear(6, 3), signature=signature, arguments={"in_features": 6, "out_features": 3}
    )
    verdict = LabelAgreement().evaluate(one, one, context)
    assert verdict.passed and verdict.outputs == {}
    assert verdict.measured == 1.0
    assert "output" not in explain(verdict)


@pytest.mark.parametrize(
    ("task", "shapes", "read"),
    [
        (None, [(8, 4), (8, 3), (8, 1), (8, 2, 4)], [0, 1]),
        ("segmentation", [(8, 4, 5, 5), (8, 2, 5, 5), (8, 4, 6, 6)], [0, 1]),
        ("token-classification", [(8, 7, 4), (8, 7, 2), (8, 4), (8, 6, 4)], [0, 1]),
        ("multilabel", [(8, 4), (8, 4), (8, 3)], [0, 1]),
        (None, [(8, 1), (8, 1), (8, 3)], [0, 1]),
    ],
)
def test_outputs_have_labels_if_they_are_as_many_as_those_of_the_first(task, shapes, read) -> None:
    outputs = [torch.zeros(shape) for shape in shapes]
    found = labelled_outputs(outputs, TASKS[task] if task else None)
    assert found == read
    assert labelled_outputs([outputs[0], outputs[1].long()]) == [0]


def test_an_output_of_zeros_that_stays_is_not_turned(tmp_path) -> None:
    class Zeros(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, x * 0

    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", 6)),))
    model = EagerModel.from_module(Zeros(), signature=signature)
    assert MinCosine(minimum=0.99).evaluate(model, model, Context(root=tmp_path)).passed
