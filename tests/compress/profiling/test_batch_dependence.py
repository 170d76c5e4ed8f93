"""Models whose answer to a row depends on its neighbours are found, and no others."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.errors import GateRefused
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.core.context import Caches, Context
from compress.core.gates import LabelAgreement, MaxDrop, MinMetric, Parity
from compress.data.splits import Splits
from compress.profiling import batch_dependence
from compress.profiling.batch_dependence import (
    COARSE_ROUNDING,
    BatchDependence,
    extreme_rows,
    measure,
    seeded_rows,
)

Arrays = list[np.ndarray]

random = np.random.default_rng(0)
WEIGHT = random.standard_normal((4, 3)).astype(np.float32)
TABLE = random.standard_normal((50, 4)).astype(np.float32)
ROWS = random.standard_normal((16, 4)).astype(np.float32)
TOKENS = random.integers(0, 50, (16, 6))
MASKS = (np.arange(6) < random.integers(1, 7, (16, 1))).astype(np.int64)
POINTS = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))
TEXTS = Signature(
    inputs=(
        TensorSpec(name="ids", shape=("batch", "length"), dtype="int64"),
        TensorSpec(name="mask", shape=("batch", "length"), dtype="int64"),
    )
)


def probed(
    call: Callable[..., Any],
    signature: Signature = POINTS,
    batch: Sequence[np.ndarray] = (ROWS,),
    **options: Any,
) -> BatchDependence:
    return measure(call, signature, batch, source="val", **options)


def one_scale(x: np.ndarray) -> np.ndarray:
    """Round to 8 bits with a scale taken from the whole call, as dynamic quantization does."""
    scale = np.abs(x).max() / 127
    return np.round(x / scale) * scale


def pooled(ids: np.ndarray, mask: np.ndarray) -> Arrays:
    with np.errstate(invalid="ignore"):  # a row of which nothing counts has no mean
        return [((TABLE[ids] * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)) @ WEIGHT]


def refuses_empty_rows(ids: np.ndarray, mask: np.ndarray) -> Arrays:
    if (mask.sum(1) == 0).any():
        raise ValueError("length 0")
    return pooled(ids, mask)


INDEPENDENT = {
    "linear": lambda x: [x @ WEIGHT],
    "labels": lambda x: [(x @ WEIGHT).argmax(-1)],
    "masked with infinity": lambda x: [np.where(x > 0, x, -np.inf)],
    "NaN of its own": lambda x: [np.where(x[:, :1] > 0, x, np.nan)],
    "rows on axis 1": lambda x: [np.broadcast_to(x @ WEIGHT, (2, len(x), 3))],
    "rows on axis 1, behind as many layers": lambda x: [np.broadcast_to(x, (8, len(x), 4))],
    "several places for each row": lambda x: [x.reshape(-1, 2)],
    "a constant table": lambda x: [x, np.arange(100.0)],
    "kernels that round": lambda x: [x @ WEIGHT * (1 + 1e-6 * len(x))],
}
DEPENDENT = {
    "batch statistics": lambda x: [(x - x.mean(0)) @ WEIGHT],
    "softmax over the batch": lambda x: [np.exp(x - x.max(0)) / np.exp(x - x.max(0)).sum(0)],
    "one scale for the call": lambda x: [one_scale(x) @ WEIGHT],
    "a hundredth of the neighbours' mean": lambda x: [x @ WEIGHT + 0.01 * x.mean()],
    "the number of rows": lambda x: [x @ WEIGHT * (1 + 0.01 * len(x))],
    "the place in the batch": lambda x: [x @ WEIGHT + 0.1 * np.arange(len(x))[:, None]],
    "a mean over the batch": lambda x: [(x @ WEIGHT).mean()],
    "the second output alone": lambda x: [x @ WEIGHT, x - x.mean(0)],
    "random numbers": lambda x: [x @ WEIGHT + 0.01 * random.standard_normal((len(x), 3))],
    "only extreme neighbours": lambda x: [x @ WEIGHT * (2 if np.abs(x).max() > 100 else 1)],
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_row_by_row_models_do_not_depend_on_the_batch(name: str) -> None:
    found = probed(INDEPENDENT[name])
    assert not found.depends and not found.why_not_joined, found


@pytest.mark.parametrize("name", DEPENDENT)
def test_models_that_depend_on_other_rows_are_detected(name: str) -> None:
    found = probed(DEPENDENT[name])
    assert found.depends and "depend" in found.why_not_joined, found


@pytest.mark.parametrize("name", [*INDEPENDENT, *DEPENDENT])
def test_large_outputs_are_asked_two_rows_and_compared_a_part_at_a_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def call(x: np.ndarray) -> Arrays:
        asked.append(len(x))
        return (INDEPENDENT | DEPENDENT)[name](x)

    monkeypatch.setattr(batch_dependence, "LARGEST_OUTPUTS", 1)
    monkeypatch.setattr(batch_dependence, "AT_ONCE", 3)
    assert probed(call).depends == (name in DEPENDENT)
    assert max(asked) == 2


@pytest.mark.parametrize("call", [pooled, refuses_empty_rows])
def test_text_models_that_refuse_wholly_masked_rows_may_be_batched(
    call: Callable[..., Arrays],
) -> None:
    found = probed(call, TEXTS, (TOKENS, MASKS))
    assert not found.why_not_joined and "beside extreme rows" in found.moves, found


def test_a_quantization_range_over_the_batch_is_detected_in_a_text_model() -> None:
    def call(ids: np.ndarray, mask: np.ndarray) -> Arrays:
        return [one_scale(TABLE[ids]).mean(1) @ WEIGHT]

    assert "beside other rows" in probed(call, TEXTS, (TOKENS, MASKS)).beyond_rounding


def test_dependence_on_padding_alone_lets_equal_shapes_be_batched() -> None:
    def ignores_the_mask(ids: np.ndarray, mask: np.ndarray) -> Arrays:
        return [TABLE[ids].mean(1) @ WEIGHT]

    lengths = MASKS.sum(1)
    alone = [[a[i : i + 1, : lengths[i]] for a in (TOKENS, MASKS)] for i in range(8)]
    found = probed(ignores_the_mask, TEXTS, (TOKENS, MASKS), unpadded=alone)
    assert found.beyond_rounding == ("unpadded",) and not found.why_not_joined
    assert not probed(pooled, TEXTS, (TOKENS, MASKS), unpadded=alone).depends


def test_eight_bit_steps_count_as_rounding_at_another_batch_size_only() -> None:
    def a_step_by_size(x: np.ndarray) -> Arrays:
        return [x @ WEIGHT + (0.1 if len(x) == 1 else 0)]

    assert probed(a_step_by_size).depends
    assert not probed(a_step_by_size, rounding=COARSE_ROUNDING).depends
    small = DEPENDENT["a hundredth of the neighbours' mean"]
    assert probed(small, rounding=COARSE_ROUNDING).depends


CHANGED_BY = {
    "alone": lambda x: [x @ WEIGHT + (0.6 if len(x) == 1 else 0)],
    "asked again": lambda x: [x @ WEIGHT + 0.01 * random.standard_normal((len(x), 3))],
    "beside other rows": lambda x: [x @ WEIGHT + 0.01 * np.tanh(x).mean()],
    "beside extreme rows": lambda x: [x @ WEIGHT + (0.01 if np.abs(x).max() > 100 else 0)],
    "reordered": lambda x: [x @ WEIGHT + 0.3 * np.arange(len(x))[:, None]],
}


@pytest.mark.parametrize("probe", CHANGED_BY)
def test_each_probe_finds_what_changes_answers_by_more_than_its_own_rounding(probe: str) -> None:
    # A hundredth is 8-bit rounding where a batch has another size or order, and nowhere else.
    found = probed(CHANGED_BY[probe], rounding=COARSE_ROUNDING)
    assert probe in found.beyond_rounding, found


def test_labels_shapes_and_nan_that_change_with_neighbours_are_detected() -> None:
    def labels(x: np.ndarray) -> Arrays:
        return [((x - x.mean(0)) @ WEIGHT).argmax(-1)]

    def shapes(x: np.ndarray) -> Arrays:
        return [np.resize(x @ WEIGHT, (len(x), 3 if np.abs(x).max() < 100 else 4))]

    def nan(x: np.ndarray) -> Arrays:
        return [np.where(np.abs(x).max() < 100, x, np.nan)]

    for call in (labels, shapes, nan):
        assert "beside extreme rows" in probed(call).beyond_rounding


def test_a_row_that_is_refused_alone_depends_on_its_batch() -> None:
    def training(x: np.ndarray) -> Arrays:
        if len(x) == 1:
            raise ValueError("Expected more than 1 value per channel")
        return [x @ WEIGHT]

    found = probed(training)
    assert found.beyond_rounding == ("alone",) and "Expected more than 1" in found.unproven


def test_a_fixed_batch_is_probed_at_its_size() -> None:
    fixed = Signature(inputs=(TensorSpec(name="x", shape=(4, 4)),))
    sizes = set()

    def call(x: np.ndarray) -> Arrays:
        sizes.add(len(x))
        return [x - x.mean(0)]

    assert probed(call, fixed, (ROWS[:4],)).depends and sizes == {4}
    assert not probed(INDEPENDENT["linear"], fixed, (ROWS[:4],)).depends
    single = Signature(inputs=(TensorSpec(name="x", shape=(1, 4)),))
    assert not probed(DEPENDENT["batch statistics"], single, (ROWS[:1],)).depends


def test_requests_are_not_batched_without_proof() -> None:
    linear = INDEPENDENT["linear"]
    alike = probed(linear, batch=(np.ones((16, 4), np.float32),))
    assert not alike.depends and "all alike" in alike.why_not_joined
    seeded = measure(linear, POINTS, seeded_rows(POINTS, 16), source="seeded")
    assert not seeded.depends and "add" not in seeded.unproven and "`val`" in seeded.why_not_joined

    def bounded(x: np.ndarray) -> Arrays:
        if np.abs(x).max() > 100:
            raise ValueError("out of range")
        return [x @ WEIGHT]

    assert "extreme rows is refused" in probed(bounded).why_not_joined


def test_seeded_integer_rows_differ() -> None:
    (ids, mask) = seeded_rows(TEXTS, 16)
    assert len({row.tobytes() for row in ids}) > 8 and mask.sum(1).min() >= 1


def test_extreme_rows_are_far_from_real_ones_and_integers_stay_in_a_tables_range() -> None:
    (points,) = extreme_rows([ROWS], POINTS.inputs)
    assert np.abs(points).max() > 500 * np.abs(ROWS).max() and np.isfinite(points).all()
    halves = extreme_rows([ROWS.astype(np.float16) * 100], POINTS.inputs)[0]
    assert np.isfinite(halves).all()
    ids, masks = extreme_rows([TOKENS, MASKS], TEXTS.inputs)
    assert TOKENS.min() <= ids.min() and ids.max() <= TOKENS.max()
    assert (masks.sum(1) == 0).any() and masks.all(1).any()
    # Characters and words, each of a table of its own.
    both = np.stack([TOKENS, TOKENS + 1000], 1)
    spec = TensorSpec(name="ids", shape=("batch", 2, "length"), dtype="int64")
    (rows,) = extreme_rows([both], [spec])
    assert rows[:, 0].max() <= TOKENS.max() and rows[:, 1].min() >= TOKENS.min() + 1000
    assert (rows != both).any((1, 2)).all()


NETS = """
import torch
from torch import nn

class Standardized(nn.Module):
    # Subtracts the batch's mean in eval mode too.

    def forward(self, x):
        return x - x.mean(0)

class Centered(nn.Module):
    def forward(self, x):
        return x - 1
"""


@pytest.fixture
def models(tmp_path: Path) -> dict[str, EagerModel]:
    (tmp_path / "batch_nets.py").write_text(NETS)
    signature = Signature(
        inputs=(TensorSpec(name="x", shape=("batch", 3)),), outputs=(OutputSpec(name="y"),)
    )
    return {
        name: import_checkpoint(
            tmp_path / name,
            Recipe(factory=f"batch_nets:{name}"),
            signature,
            checkpoint=None,
            folder=tmp_path,
        )
        for name in ("Standardized", "Centered")
    }


@pytest.fixture
def context(tmp_path: Path) -> Context:
    """Return rows that are labelled by their largest entry, of which the mean is 1 in a batch."""
    labels = torch.arange(96) % 3
    rows = 3 * torch.eye(3)[labels] + 0.01 * torch.arange(96.0)[:, None] / 96
    return Context(
        root=tmp_path / "out", data=Splits({"val": TensorDataset(rows, labels)}, batch_size=96)
    )


def test_gates_measure_a_batch_dependent_model_at_the_served_batch_size(
    models: dict[str, EagerModel], context: Context
) -> None:
    whole, alone = models["Centered"], models["Standardized"]
    assert context.judged_batch_size(whole) is None
    assert context.judged_batch_size(whole, alone) == 1
    # In a batch of 96 both answer alike; alone, every row is its own mean.
    assert context.score(whole) == 1.0
    assert context.score(alone) == pytest.approx(1 / 3)
    assert not MinMetric(at=0.9).evaluate(whole, alone, context).passed
    assert MaxDrop(points=1).evaluate(whole, alone, context).value == pytest.approx(66.7, abs=0.1)
    agreement = LabelAgreement().evaluate(whole, alone, context)
    assert agreement.value == pytest.approx(1 / 3)
    assert Parity(atol=0.1).evaluate(whole, alone, context).value == pytest.approx(2, abs=0.1)


def test_gates_use_served_batch_size(models: dict[str, EagerModel], context: Context) -> None:
    from dataclasses import replace

    served = replace(context, served_batch_size=48, caches=Caches())
    assert served.score(models["Standardized"]) == 1.0


def test_a_stage_is_refused_for_its_outputs_at_batch_size_one(
    models: dict[str, EagerModel], context: Context
) -> None:
    from compress.export.onnx.stage import ExportOnnx

    stage = ExportOnnx(gates=(MinMetric(at=0.9),))
    with pytest.raises(GateRefused, match=r"found 0\.3333"):
        stage(models["Standardized"], context)


def test_rows_are_spread_over_val_or_seeded_without_it(
    models: dict[str, EagerModel], context: Context, tmp_path: Path
) -> None:
    found = context.batch_dependence(models["Centered"])
    assert (found.source, found.rows, found.why_not_joined) == ("val", 8, "")
    blind = Context(root=tmp_path / "blind")
    assert blind.batch_dependence(models["Standardized"]).depends
    assert blind.batch_dependence(models["Centered"]).why_not_joined


@pytest.fixture
def slow_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that makes each row of a model take a second."""
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: now[0])
    monkeypatch.setattr(batch_dependence, "time", clock)

    def slowed(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(x: np.ndarray) -> Any:
            now[0] += len(x)
            return call(x)

        return called

    return slowed


@pytest.mark.parametrize("name", [*INDEPENDENT, *DEPENDENT])
def test_models_whose_calls_take_long_are_asked_a_few_times(name: str, slow_clock) -> None:
    asked: list[int] = []
    call = slow_clock(lambda x: asked.append(len(x)) or (INDEPENDENT | DEPENDENT)[name](x))
    found = probed(call)
    assert found.depends == (name in DEPENDENT), found
    # The first row twice, as the first call may compile; the second; both, and beside extreme ones.
    assert sum(asked) <= 1 + 1 + 1 + 2 + 2 * 2 + 2 * found.depends
    assert (found.rows, found.calls) == (2, len(asked))
    if name == "random numbers":
        assert "asked again" in found.beyond_rounding


def test_fewer_rows_are_asked_where_all_would_take_too_long(slow_clock, monkeypatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(batch_dependence, "MEASURED_SECONDS", 40.0)
    found = probed(slow_clock(lambda x: asked.append(len(x)) or [x @ WEIGHT]))
    assert found.rows == 4 and not found.depends
    assert sum(asked) == 2 + 8 * 4
    assert {*found.moves} == {
        "alone",
        "asked again",
        "beside other rows",
        "beside extreme rows",
        "reordered",
    }
