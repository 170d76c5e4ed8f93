"""Metrics are added up batch by batch: no outputs are kept, and values are those of all at once."""

import pickle
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from compress.common.errors import PipelineInvalid, StageFailed
from compress.core.context import Context
from compress.core.gates import LabelAgreement, Parity
from compress.core.metrics import Metric, evaluate
from compress.data.splits import Splits

OWN = """
import torch
from torchmetrics import Metric
from torchmetrics.text import WordErrorRate

class Share(Metric):
    higher_is_better = True

    def __init__(self, ignored=-100):
        super().__init__()
        self.ignored = ignored
        self.add_state("right", torch.zeros(2), dist_reduce_fx="sum")

    def update(self, outputs, targets):
        known = targets != self.ignored
        right = outputs.argmax(1) == targets
        self.right += torch.stack([right[known].sum(), known.sum()])

    def compute(self):
        return self.right[0] / self.right[1]

def share(outputs, targets):
    return (outputs.argmax(1) == targets).double().mean()

WORDS = ["", "a", "b", "c"]

def decode(ids):
    return [" ".join(WORDS[i] for i in row if i > 0) for row in ids.tolist()]

class WordErrors(WordErrorRate):
    def update(self, outputs, targets):
        super().update(decode(outputs.argmax(-1)), decode(targets))

class Other:
    pass
"""
CLASSES = (("num_classes", 3),)
STREAMED = [
    *map(Metric, ("accuracy", "loss", "fidelity")),
    Metric("torchmetrics.classification.MulticlassF1Score", CLASSES),
]
IDS = [metric.name.rpartition(".")[2] for metric in STREAMED]


class Tracked:
    """A predictor that counts how many of its outputs are alive, views of them included."""

    def __init__(self) -> None:
        self.arrays: list[weakref.ref] = []
        self.most = 0

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        array = x[:, :3].numpy().copy()
        self.arrays.append(weakref.ref(array))
        self.most = max(self.most, sum(ref() is not None for ref in self.arrays))
        return (torch.from_numpy(array),)


@pytest.fixture
def own(tmp_path: Path) -> Callable[..., Metric]:
    (tmp_path / "mine.py").write_text(OWN)
    return lambda name, *args: Metric(f"mine:{name}", args, direction=True, folder=tmp_path)


def labelled(batches: int) -> Splits:
    x = torch.randn(4 * batches, 4, generator=torch.Generator().manual_seed(0))
    samples = [(row, row[:3].argmax() if i % 3 else torch.tensor(1)) for i, row in enumerate(x)]
    return Splits({"val": samples}, batch_size=4)


def most_outputs(metric: Metric, batches: int) -> int:
    tracked = Tracked()
    evaluate(tracked, labelled(batches), "val", metric, tracked)
    assert len(tracked.arrays) == batches * (2 if metric.name == "fidelity" else 1)
    return tracked.most


@pytest.mark.parametrize("metric", STREAMED, ids=IDS)
def test_the_number_of_outputs_in_memory_does_not_grow(metric: Metric) -> None:
    assert most_outputs(metric, 30) == most_outputs(metric, 3) <= 3


def test_only_a_function_needs_all_outputs(own: Callable[..., Metric]) -> None:
    assert most_outputs(own("Share"), 30) <= 3
    assert most_outputs(own("share"), 30) == 30


def test_texts_are_measured_by_a_subclass_that_decodes(own: Callable[..., Metric]) -> None:
    # Right, one word of two wrong, one of three missing; padding and -100 are no words.
    references = [[1, 2], [1, 2], [1, 2, 3]]
    answers = [[1, 2], [1, 3], [1, 2, 0]]
    samples = [(torch.tensor(a), torch.tensor(r)) for a, r in zip(answers, references, strict=True)]

    def predict(ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.nn.functional.one_hot(ids, 4).float(),)

    splits = Splits({"val": samples}, batch_size=2)
    assert evaluate(predict, splits, "val", own("WordErrors"), predict).value == pytest.approx(
        2 / 7
    )


@pytest.mark.parametrize("gate", [Parity(atol=0), LabelAgreement()], ids=lambda gate: gate.gate)
def test_gates_that_compare_outputs_keep_none(gate, mlp, blobs, tmp_path, monkeypatch) -> None:
    context = Context(root=tmp_path, data=blobs)

    def most(batch_size: int) -> int:
        tracked = Tracked()
        monkeypatch.setattr("compress.core.context.accept_any_batch", lambda *_: tracked)
        monkeypatch.setattr(Context, "judged_batch_size", lambda *_: batch_size)
        assert gate.evaluate(mlp, mlp, context).passed
        assert len(tracked.arrays) == 2 * 60 / batch_size
        return tracked.most

    assert most(2) == most(20) <= 4


@pytest.mark.parametrize("metric", STREAMED[:3], ids=IDS[:3])
def test_batches_of_other_lengths_are_measured_without_padding(metric: Metric) -> None:
    scores = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    rows = [torch.arange(n) + i for i, n in enumerate((3, 5, 2, 6, 4, 1))]
    samples = [{"ids": row, "labels": scores[row].argmax(1) % 2} for row in rows]
    splits = Splits({"val": samples}, batch_size=2)

    def predict(ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (scores[ids].movedim(2, 1),)

    found = evaluate(predict, splits, "val", metric, predict).value
    (outputs,) = predict(pad_sequence(rows, batch_first=True))
    labels = pad_sequence([s["labels"] for s in samples], batch_first=True, padding_value=-100)
    if metric.name == "fidelity":
        assert found == 1
    else:
        assert 0 < found != 1
        assert found == pytest.approx(metric.score(outputs, labels), rel=1e-12)


def test_a_function_of_all_outputs_needs_one_shape(own: Callable[..., Metric]) -> None:
    meter = own("share").meter()
    for length in (2, 3):
        meter.update(torch.zeros(1, 3, length), torch.zeros(1, length))
    with pytest.raises(StageFailed, match=r"batches differ in shape .* torchmetrics.Metric takes"):
        meter.compute()


def test_a_class_of_the_users_is_streamed(own: Callable[..., Metric]) -> None:
    share = own("Share", ("ignored", 1))
    share.check()
    whole = next(labelled(5).batches("val", 20))
    known = whole.target != 1
    expected = own("share").score(whole.inputs[0][known, :3], whole.target[known])
    assert evaluate(Tracked(), labelled(5), "val", share).value == pytest.approx(expected)
    with pytest.raises(PipelineInvalid, match=r"mine:Other.*expected .*subclass of torchmetrics"):
        own("Other").check()


def regression() -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs and targets far from zero, where sums of squares lose all digits."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randn(53, 2, generator=generator, dtype=torch.float64) + 1e4
    return targets + torch.randn(53, 2, generator=generator, dtype=torch.float64), targets


def in_shares(metric: Metric, outputs: torch.Tensor, targets: torch.Tensor, ranks: int) -> float:
    """Measure shares of the samples in batches of 4, and merge what is sent of them."""
    meters = [metric.meter() for _ in range(ranks)]
    for rank, meter in enumerate(meters):
        pairs = zip(outputs[rank::ranks].split(4), targets[rank::ranks].split(4), strict=True)
        for batch in pairs:
            meter.update(*batch)
    meters[0].add_shares_([pickle.loads(pickle.dumps(meter.state())) for meter in meters])
    return meters[0].compute()


@pytest.mark.parametrize("ranks", [1, 3, 60])
@pytest.mark.parametrize("name", ["r2", "mse", "mae"])
def test_shares_add_up_to_the_whole(name: str, ranks: int) -> None:
    outputs, targets = regression()
    x, y = outputs - 1e4, targets - 1e4
    expected = {
        "r2": (1 - (x - y).square().sum(0) / (y - y.mean(0)).square().sum(0)).mean(),
        "mse": (x - y).square().mean(),
        "mae": (x - y).abs().mean(),
    }[name]
    assert in_shares(Metric(name), outputs, targets, ranks) == pytest.approx(float(expected), 1e-11)


def test_r2_of_batches_of_other_widths_is_refused() -> None:
    meter = Metric("r2").meter()
    meter.update(torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(StageFailed, match="3 outputs and of another 4; pad all samples"):
        meter.update(torch.zeros(2, 4), torch.zeros(2, 4))
