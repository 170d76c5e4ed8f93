"""A cascade answers each row by its own model, and its threshold holds on other samples."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import compress
from compress import Artifact, Context, EagerModel, MaxDisagreement, MaxDrop, MaxLatency
from compress.common.errors import PipelineInvalid, StageFailed
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.core.bounds import score_threshold, share_bound
from compress.core.objectives.loss import Loss
from compress.core.objectives.task import TASKS
from compress.data.splits import Splits
from compress.export import Cascade, ExportOnnx, OnnxModel
from compress.serve.client.client import Client
from tests.serve.served_here import TOKEN, serving

SAMPLES, PERCENT, UNSURE = 500, 3.0, 0.2
WRONG = 40  # samples of the smallest margins that the small model answers otherwise


class Scores(nn.Module):
    """Returns two classes, whose margin is the first number of a row, and a sure answer beside.

    The large model adds a third number, by which rows are known apart, and has other labels where
    the second number is 1.
    """

    def __init__(self, large: bool = False, outputs: int = 1, classes: int = 2) -> None:
        super().__init__()
        self.large, self.outputs, self.classes = large, outputs, classes
        self.table = nn.Parameter(torch.eye(64))
        self.own = nn.Parameter(torch.ones(1) * (2 if large else 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        margin, flips, number = x[:, :1], x[:, 1:2], x[:, 2:3]
        # An embedding that both have, so that it is stored once.
        known = (nn.functional.embedding(number.long().clamp(0, 63), self.table)[:, 0] * 0).sum(
            -1, True
        )
        sign = 1 - 2 * flips if self.large else torch.ones_like(flips)
        scores = torch.cat([sign * margin / 2, -sign * margin / 2], 1) * self.own + known
        scores = scores[:, : self.classes] if self.classes > 1 else sign * margin * self.own
        return (scores, margin * 1.0) if self.outputs == 2 else scores


def signature(outputs: int = 1) -> Signature:
    names = ("scores", "sure")[:outputs]
    return Signature(
        inputs=(TensorSpec(name="x", shape=("batch", 3)),),
        outputs=tuple(OutputSpec(name=name) for name in names),
    )


def rows(flipped: int = WRONG, samples: int = SAMPLES) -> torch.Tensor:
    """Margins of 0.01 to 5 in a shuffled order; those of the smallest are of other labels."""
    margin = torch.arange(1, samples + 1) / 100
    x = torch.stack([margin, (torch.arange(samples) < flipped).float(), margin * 0 + 7], 1)
    return x[torch.randperm(samples, generator=torch.Generator().manual_seed(0))]


def context(tmp_path: Path, x: torch.Tensor, task: str = "classification") -> Context:
    data = Splits({"val": TensorDataset(x, torch.zeros(len(x), dtype=torch.long))}, batch_size=64)
    return Context(root=tmp_path / "cascade", data=data, loss=Loss(task=TASKS[task]))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., OnnxModel]:
    """Export each model once."""

    @functools.cache
    def export(name: str, opset: int | None = None, **settings: int) -> OnnxModel:
        arguments = {"large": name == "large", **settings}
        module = Scores(**arguments)
        model = EagerModel.from_module(
            module, arguments=arguments, signature=signature(module.outputs)
        )
        folder = tmp_path_factory.mktemp(name) / name
        return ExportOnnx(opset=opset).run_checked(model, Context(root=folder))

    return export


@pytest.fixture
def cascade(tmp_path: Path, exported: Callable[..., OnnxModel]) -> Callable[..., OnnxModel]:
    """Make a cascade of rows."""

    def make(x: torch.Tensor, task: str = "classification", **settings: Any) -> OnnxModel:
        own = {n: settings.pop(n) for n in ("outputs", "classes", "opset") if n in settings}
        small, large = (exported(name, **own) for name in ("small", "large"))
        made = replace(context(tmp_path, x, task), artifacts={"float": large, "source": large})
        return Cascade(fallback="float", **{"percent": PERCENT, **settings})(small, made)

    return make


def answer(model: Artifact, x: torch.Tensor) -> torch.Tensor:
    with model.open() as predict:
        return predict(x)[0]


def by_hand(x: torch.Tensor, threshold: float, exported, **settings: int) -> torch.Tensor:
    small, large = (answer(exported(name, **settings), x) for name in ("small", "large"))
    return torch.where(x[:, :1] > threshold, small, large)


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_each_row_is_answered_by_its_model_in_every_batch(batch: int, exported, cascade) -> None:
    x = rows()
    model = cascade(x)
    facts = model.manifest.facts["cascade"]
    for part in x[:128].split(batch):
        assert torch.equal(
            answer(model, part),
            by_hand(part, facts["threshold"], exported),
        )
    assert facts["rows_checked"] >= 3 * 16 + 20


def test_the_threshold_is_the_least_that_half_of_val_shows(cascade) -> None:
    x = rows()
    facts = cascade(x).manifest.facts["cascade"]
    half = x[::2]
    changed = (half[:, 1] == 1) & (half[:, 0] > facts["threshold"])
    assert facts["chosen_on"] == {"samples": SAMPLES // 2, "changed": int(changed.sum())}
    assert share_bound(int(changed.sum()), len(half), 0.95) <= PERCENT / 100
    assert share_bound(int(changed.sum()) + 1, len(half), 0.95) > PERCENT / 100
    # Halfway between the last row that may not be answered and the next.
    assert facts["threshold"] < x[:, 0][x[:, 1] == 1].max()
    assert facts["fallback_share"] == pytest.approx(
        float((x[:, 0] <= facts["threshold"]).float().mean())
    )
    other = x[1::2]
    confirmed = int(((other[:, 1] == 1) & (other[:, 0] > facts["threshold"])).sum())
    assert facts["confirmed_on"]["changed"] == confirmed
    bound = 100 * share_bound(confirmed, len(other), 0.95)
    assert facts["confirmed_on"]["bound_percent"] == pytest.approx(bound, abs=1e-4)


def test_what_both_models_hold_is_stored_once(exported, cascade) -> None:
    model = cascade(rows())
    small, large = map(exported, ("small", "large"))
    shared = 64 * 64
    assert model.payload_bytes < small.payload_bytes + large.payload_bytes - 4 * shared + 3_000
    assert model.parameters() == small.parameters() + large.parameters() - shared


def test_no_row_falls_back_where_no_label_differs(caplog, exported, cascade) -> None:
    x = rows(flipped=0)
    model = cascade(x)
    assert model.manifest.facts["cascade"]["fallback_share"] == 0
    assert "is not needed" in caplog.text
    assert torch.equal(answer(model, x[:9]), answer(exported("small"), x[:9]))


def test_many_rows_that_fall_back_are_a_warning(caplog, cascade) -> None:
    cascade(rows())
    assert "may cost more" not in caplog.text
    share = cascade(rows(flipped=100)).manifest.facts["cascade"]["fallback_share"]
    assert f"{100 * share:.3g} % of `val` fall back to float, which may cost more" in caplog.text
    assert "Bring the input model closer" in caplog.text


def test_answers_after_a_sigmoid_are_refused(cascade) -> None:
    x = rows(flipped=0) * torch.tensor([0.1, 1, 1])
    with pytest.raises(StageFailed, match=r"from 0 to 1, .* leave the sigmoid out of the model"):
        cascade(x, "multilabel", classes=1)


@pytest.mark.parametrize("opset", [18, 20])
def test_a_batch_of_rows_that_all_fall_back_and_one_that_is_not_a_number(
    opset: int, exported, cascade
) -> None:
    x = rows()
    model = cascade(x, opset=opset)
    assert model.manifest.facts["opset"] == opset
    unsure = x[x[:, 0] <= model.manifest.facts["cascade"]["threshold"]]
    large = exported("large")
    assert torch.equal(answer(model, unsure), answer(large, unsure))
    assert answer(model, x[:0]).shape == (0, 2)
    broken = torch.tensor([[math.nan, 0, 7], [4.0, 0, 7]])
    assert answer(model, broken)[0].isnan().all()
    assert torch.equal(answer(model, broken)[1], answer(model, broken[1:])[0])


def test_the_answers_are_those_of_a_plain_session(cascade) -> None:
    x = rows()
    model = cascade(x)
    session = onnxruntime.InferenceSession(str(model.payload_path))
    assert [o.name for o in session.get_outputs()] == ["scores"]
    (scores,) = session.run(None, {"x": x[:50].numpy()})
    assert np.array_equal(scores, answer(model, x[:50]).numpy())


def test_an_output_may_be_the_score(exported, cascade) -> None:
    x = rows()
    model = cascade(x, outputs=2, score="sure")
    threshold = model.manifest.facts["cascade"]["threshold"]
    with model.open() as predict:
        scores, sure = predict(x[:40])
    assert torch.equal(scores, by_hand(x[:40], threshold, exported, outputs=2))
    assert torch.equal(sure[:, 0], x[:40, 0])


def test_one_logit_is_as_sure_as_it_is_far_from_0(exported, cascade) -> None:
    x = rows()
    model = cascade(x, "multilabel", classes=1)
    threshold = model.manifest.facts["cascade"]["threshold"]
    assert torch.equal(
        answer(model, x[:64]),
        by_hand(x[:64], threshold, exported, classes=1),
    )


def test_too_few_samples_are_refused_before_anything_runs(cascade) -> None:
    with pytest.raises(
        PipelineInvalid, match="half of split 'val' has 90 samples, and it takes 99"
    ):
        cascade(rows(samples=180))


def test_gates_judge_the_half_that_chose_nothing(tmp_path: Path, exported, cascade) -> None:
    x = rows()
    gates = (MaxDisagreement(percent=PERCENT + 3, against="float"),)
    model = cascade(x, gates=gates)
    made = context(tmp_path, x)
    large = exported("large")
    verdict = gates[0].evaluate(large, model, made)
    assert verdict.bound.samples == SAMPLES // 2
    assert verdict.bound.changed == model.manifest.facts["cascade"]["confirmed_on"]["changed"]
    assert "the half of val that chose nothing" in verdict.basis()
    new = gates[0].evaluate(large, model, replace(made, val_chose_nothing=True))
    assert new.bound.samples == SAMPLES
    assert "half" not in new.basis()
    assert (
        MaxDrop(points=9, confidence=0.95).evaluate(large, model, made).bound.samples
        == SAMPLES // 2
    )
    small = exported("small")
    assert gates[0].evaluate(large, small, made).bound.samples == SAMPLES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"score": "nothing"}, "expected an output with one number a row, found 'nothing'"),
        ({"task": "regression"}, "compares labels, and a model for regression gives"),
        ({"percent": 1.2, "flipped": 500}, r"would have to answer all\. Bring the input"),
    ],
)
def test_what_makes_no_cascade_is_refused(
    tmp_path: Path, change: dict, message: str, cascade
) -> None:
    x = rows(flipped=change.pop("flipped", WRONG))
    with pytest.raises((StageFailed, PipelineInvalid), match=message):
        cascade(x, **change)
    assert not (tmp_path / "cascade").exists()


def test_models_of_other_interfaces_and_operator_sets_are_refused(tmp_path: Path, exported) -> None:
    small, two = exported("small"), exported("two", outputs=2)
    made = context(tmp_path, rows())
    made = replace(made, artifacts={"float": two})
    with pytest.raises(StageFailed, match="have other inputs or outputs"):
        Cascade(fallback="float", percent=PERCENT)(small, made)
    newer = exported("large", opset=21)
    made = replace(made, artifacts={"float": newer})
    with pytest.raises(StageFailed, match="give both exports the same opset"):
        Cascade(fallback="float", percent=PERCENT)(small, made)


def test_a_half_that_refutes_the_other_is_refused(cascade) -> None:
    x = rows(flipped=0)
    x[1::2, 1] = (
        torch.rand(SAMPLES // 2, generator=torch.Generator().manual_seed(0)) < 0.1
    ).float()
    with pytest.raises(StageFailed, match=r"is refuted: .* are the samples drawn independently"):
        cascade(x)


def test_it_is_a_function(tmp_path: Path, exported) -> None:
    small, large = exported("small"), exported("large")
    x = rows()
    made = Context(
        root=tmp_path / "out", data=context(tmp_path, x).data, artifacts={"float": large}
    )
    by_stage = Cascade(fallback="float", percent=PERCENT)(small, made)
    assert by_stage.signature == small.signature


def test_it_is_a_function_of_two_models(tmp_path: Path, exported) -> None:
    file, x = tmp_path / "cascade.onnx", rows()
    val = TensorDataset(x, torch.zeros(len(x), dtype=torch.long))
    settings = {"fallback": exported("large"), "percent": PERCENT, "val": val}
    model = compress.cascade(exported("small"), file, **settings)
    assert model.manifest.facts["cascade"]["chosen_on"]["samples"] == SAMPLES // 2
    session = onnxruntime.InferenceSession(str(file))
    (scores,) = session.run(None, {"x": x[:9].numpy()})
    assert np.array_equal(scores, answer(model, x[:9]).numpy())


@pytest.mark.slow
def test_a_server_gives_the_same_answers(exported, cascade) -> None:
    x = rows()[:40]
    model = cascade(rows())
    with (
        serving(model.path) as server,
        Client(server.url, "model", model.signature, token=TOKEN, max_rows=16) as client,
    ):
        (scores,) = client.predict([x.numpy()])
    threshold = model.manifest.facts["cascade"]["threshold"]
    assert np.array_equal(scores, by_hand(x, threshold, exported).numpy())


def simulated(samples: int, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    scores = draw.exponential(size=samples)
    return scores, draw.random(samples) < 0.3 * np.exp(-2 * scores)


def test_a_chosen_threshold_holds_on_all_inputs() -> None:
    # Of all inputs, those above t differ with a share of .3 / 3 exp(-3 t).
    broken, chosen = 0, []
    for seed in range(400):
        threshold = score_threshold(*simulated(400, np.random.default_rng(seed)), 0.02, 0.9)
        chosen.append(threshold)
        broken += 0.1 * math.exp(-3 * max(threshold, 0)) > 0.02
    assert broken <= 0.1 * 400 + 3 * math.sqrt(0.09 * 400)
    assert broken >= 8  # else it would be wider than it need be
    assert len(set(chosen)) > 100


def test_a_threshold_is_none_where_the_surest_samples_change_or_there_are_too_few() -> None:
    scores = np.arange(200.0)
    assert score_threshold(scores, scores > 150, 0.02, 0.95) is None
    assert score_threshold(scores[:50], scores[:50] < 0, 0.02, 0.95) is None
    assert score_threshold(scores, scores < 0, 0.02, 0.95) == -math.inf
    assert score_threshold(scores, scores < 30, 0.02, 0.95) == 29.5
    unknown = np.where(scores < 30, np.nan, scores)
    assert score_threshold(unknown, scores < 30, 0.02, 0.95) < 30


def test_latency_limits_take_one_figure() -> None:
    assert MaxLatency(mean_ms=2).rule == "mean at batch 1 <= 2 ms"
    assert MaxLatency(p99_ms=3, batch=4).limit == 3
    keys = [MaxLatency(p95_ms=ms).measurement_key() for ms in (1, 2)]
    assert keys[0] == keys[1] != MaxLatency(mean_ms=1).measurement_key()
    message = "expected one of p50_ms, p95_ms, p99_ms and mean_ms, found 2"
    with pytest.raises(ValueError, match=message):
        MaxLatency(p95_ms=1, mean_ms=1)
