"""Inputs that a model seldom sees, and what excuses an export that differs on them."""

import pickle
from pathlib import Path

import pytest
import torch

from compress.artifacts.eager_model import EagerModel
from compress.common.errors import StageFailed
from compress.common.forward import Predictor
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.data.splits import Splits
from compress.export.parity.compare import (
    LARGE_KINDS,
    MIXED,
    MIXED_KIND,
    NOTHING_KIND,
    TINY_KIND,
    ParityMismatch,
    adversarial_inputs,
    find_adversarial_mismatch,
    usual_sizes,
)
from compress.export.parity.compare import (
    ROWS as HOSTILE_ROWS,
)
from compress.export.parity.sample_parity import FLOAT, Float64Reference
from compress.pipelines.system.error_context import name_stage_in_errors
from tests.export.builders import ROWS, check_parity, network_of

TEXT = Signature(
    inputs=(
        TensorSpec(name="ids", shape=("batch", "length"), dtype="int64"),
        TensorSpec(name="attention_mask", shape=("batch", "length"), dtype="bool"),
    )
)
WIDE = Signature(inputs=(TensorSpec(name="x", shape=("batch", 64)),))
SEEN = (torch.randn(16, 4, generator=torch.Generator().manual_seed(0)),)
SOURCE = """
import torch
from torch import nn

class Cancel(nn.Module):
    def forward(self, x):
        return (x + 3e4) - 3e4

class CancelInFloat32(nn.Module):
    def forward(self, x):
        return (x.to(torch.float32) + torch.full((4,), 3e4, dtype=torch.float32)) - 3e4

class Step(nn.Module):
    def forward(self, x):
        return (x.sum(-1, keepdim=True) > 0).to(x.dtype) + x

class Plain(nn.Module):
    def forward(self, x):
        return 2 * x

class Masked(nn.Module):
    def forward(self, x):
        return x.masked_fill(torch.arange(4) == 1, -torch.inf)

class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(1, eps=1e-30)

    def forward(self, x):
        return self.norm((x + 0.1).unsqueeze(1)).squeeze(1)

class Growing(nn.Module):
    def forward(self, x):
        return torch.cat([x, (x / 10).exp()], 1)
"""


def eager(folder: Path, factory: str) -> EagerModel:
    return network_of(folder, SOURCE, f"odd:{factory}")


def test_integers_stay_within_what_was_seen_and_masks_stay_valid() -> None:
    ids = torch.randint(3, 90, (5, 12), generator=torch.Generator().manual_seed(0))
    seen = [(ids, torch.ones(5, 12, dtype=torch.bool))]
    kinds = dict(adversarial_inputs(TEXT, seen))
    for kind, (tokens, mask) in kinds.items():
        assert ids.min() <= tokens.min() <= tokens.max() <= ids.max()
        assert mask[:, 0].all() == (kind != NOTHING_KIND)
    assert kinds["the largest value seen everywhere"][0].unique().tolist() == [int(ids.max())]
    lengths = kinds["rows of every length"][1].sum(1).tolist()
    assert lengths[0] == 1
    assert lengths[-1] == 12
    assert len(set(lengths)) == 8
    assert kinds["zeros"][0].unique().tolist() == [int(ids.min())], "0 was never seen"


def test_masks_stay_those_of_val_where_other_numbers_are_replaced() -> None:
    ids = torch.randint(3, 90, (2, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[True] * 6, [True] * 2 + [False] * 4])
    kinds = dict(adversarial_inputs(TEXT, [(ids, mask)]))
    base = torch.arange(2)
    for kind in (
        "zeros",
        "the smallest value seen everywhere",
        "the largest value seen everywhere",
    ):
        assert torch.equal(kinds[kind][1], mask[base]), kind


@pytest.mark.parametrize("rows", [torch.zeros(4, 3), torch.zeros(4, 0)], ids=["zeros", "nothing"])
def test_samples_without_a_number_to_scale_make_finite_inputs(rows: torch.Tensor) -> None:
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", "width")),))
    for kind, (x,) in adversarial_inputs(signature, [(rows,)]):
        assert x.isfinite().all(), kind
        assert x.shape == (2, rows.shape[1])


def test_a_nan_of_any_batch_makes_the_smallest_and_largest_value_nan() -> None:
    batches = [(torch.ones(2, 4),), (torch.full((2, 4), torch.nan),)]
    kinds = dict(adversarial_inputs(ROWS, batches))
    for kind in ("the smallest value seen everywhere", "the largest value seen everywhere"):
        assert kinds[kind][0].isnan().all(), kind


def test_a_fixed_batch_keeps_its_size() -> None:
    fixed = Signature(inputs=(TensorSpec(name="x", shape=(3, 4)),))
    kinds = dict(adversarial_inputs(fixed, []))
    assert {len(x) for (x,) in kinds.values()} == {3}
    assert kinds["zeros"][0].abs().max() == 0


def test_each_kind_costs_one_call_of_each_model_and_all_are_few_rows() -> None:
    ids = torch.randint(3, 90, (64, 6), generator=torch.Generator().manual_seed(0))
    rows: dict[str, list[int]] = {"source": [], "export": []}

    def counting(name: str) -> Predictor:
        def predict(ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
            rows[name].append(len(ids))
            return (ids.float() * mask,)

        return predict

    kinds = [*adversarial_inputs(TEXT, [(ids, torch.ones(64, 6, dtype=torch.bool))])]
    pair = counting("source"), counting("export")
    assert find_adversarial_mismatch(*pair, TEXT, kinds) is None
    assert rows["source"][1:] == rows["export"], "and one seeded call for the usual size"
    assert len(rows["export"]) == len(kinds)
    assert sum(rows["export"]) <= 28


def test_an_export_that_is_wrong_on_extremes_alone_is_refused(tmp_path: Path) -> None:
    model = eager(tmp_path, "Plain")
    data = Splits({"val": [(x, torch.tensor(0)) for x in SEEN[0]]}, batch_size=8)
    context = Context(root=tmp_path / "next", data=data)
    check_parity(model, lambda x: (2 * x,), context)
    with pytest.raises(
        ParityMismatch, match=r"adversarial inputs \(real inputs times 10\)"
    ) as refused:
        check_parity(model, lambda x: ((2 * x).clamp(-8, 8),), context)
    assert refused.value.inputs[0].shape == (2, 4)
    with pytest.raises(StageFailed, match=r"adversarial inputs \(zeros\)"):
        check_parity(model, lambda x: (2 * x.where(x != 0, torch.nan),), context)


@pytest.mark.parametrize(("error", "passes"), [(9e-4, True), (1.5e-3, False)])
def test_a_float_export_may_be_off_by_a_thousandth_of_the_norm(
    error: float, passes: bool, tmp_path: Path
) -> None:
    model, data = eager(tmp_path, "Plain"), Splits({"val": [(x, torch.tensor(0)) for x in SEEN[0]]})
    with_data, without = (Context(root=tmp_path / "next", data=d) for d in (data, None))

    def off(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (2 * x * (1 + error),)

    def off_where_large(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return off(x) if float(x.abs().max()) > 50 else (2 * x,)

    for got, context in ((off, without), (off, with_data), (off_where_large, with_data)):
        if passes:
            check_parity(model, got, context)
        else:
            with pytest.raises(ParityMismatch, match=r"of their norm, expected at most 0\.001"):
                check_parity(model, got, context)


def test_where_the_source_has_no_answer_nothing_is_compared() -> None:
    def refuses_zeros(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not x.any():
            raise ValueError("empty")
        return (x / (x.amax() - x.amin()),)

    def another(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(t + 0.5 * (x.std() == 0) for t in refuses_zeros(x))

    cases = list(adversarial_inputs(ROWS, [SEEN]))
    assert find_adversarial_mismatch(refuses_zeros, another, ROWS, iter(cases)) is None

    def answers_nan(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x / (x.amax() - x.amin()),)

    def fails_instead(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not answers_nan(x)[0].isfinite().any():
            raise ValueError("no scale of NaN")
        return answers_nan(x)

    assert find_adversarial_mismatch(answers_nan, fails_instead, ROWS, iter(cases)) is None


def test_an_export_that_fails_is_said_to_fail(tmp_path: Path) -> None:
    model = eager(tmp_path, "Plain")
    data = Splits({"val": [(x, torch.tensor(0)) for x in SEEN[0]]}, batch_size=8)

    def fails_where_large(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if float(x.abs().max()) > 50:
            raise ValueError("too large for a byte")
        return (2 * x,)

    with pytest.raises(ParityMismatch, match=r"fails where the source answers \(too large for a b"):
        check_parity(model, fails_where_large, Context(root=tmp_path / "next", data=data))


@pytest.mark.parametrize("factory", ["Cancel", "CancelInFloat32"])
def test_a_runtime_as_near_to_float64_as_torch_is_excused(factory: str, tmp_path: Path) -> None:
    model = eager(tmp_path, factory)

    def off_by(error: float) -> Predictor:
        return lambda x: (x * (1 + error),)

    with model.open() as expected:
        truth = Float64Reference(model, expected)
        assert (expected(*SEEN)[0] - SEEN[0]).norm() > 5e-4 * SEEN[0].norm()
        assert truth.explains(SEEN, off_by(0)(*SEEN), 1e-6)
        assert not truth.explains(SEEN, off_by(0.1)(*SEEN), 1e-6)
        assert not truth.explains(SEEN, (SEEN[0][:2],), 1e-6)


def test_where_the_source_itself_jumps_either_side_is_right(tmp_path: Path) -> None:
    model = eager(tmp_path, "Step")
    zeros, ones = (torch.zeros(2, 4),), (torch.ones(2, 4),)
    with model.open() as expected:
        truth = Float64Reference(model, expected)
        other = tuple(1 - t for t in expected(*zeros))
        assert truth.explains(zeros, other, 1e-3)
        assert not truth.explains(ones, tuple(t - 1 for t in expected(*ones)), 1e-3)


def test_numbers_are_tiny_large_and_both_at_a_time() -> None:
    kinds = {kind: x for kind, (x,) in adversarial_inputs(ROWS, [SEEN])}
    for kind, size in {TINY_KIND: 1e-9, **LARGE_KINDS}.items():
        torch.testing.assert_close(kinds[kind].abs().max(), torch.tensor(size))
        torch.testing.assert_close(kinds[kind] * (SEEN[0][:2].abs().max() / size), SEEN[0][:2])
    mixed = dict(adversarial_inputs(WIDE, []))[MIXED_KIND][0].abs()
    assert mixed.shape == (HOSTILE_ROWS, 64)
    assert [float(((mixed > s / 9) & (mixed < s * 9)).sum() > 9) for s in (MIXED[0], 1e3)] == [1, 1]


def test_what_a_runtime_computes_otherwise_by_its_nature_is_left_out() -> None:
    everything = dict(adversarial_inputs(ROWS, [SEEN]))
    rounded = dict(adversarial_inputs(ROWS, [SEEN], {"Gemm": 1, "Elu": 1}))
    assert everything.keys() - rounded.keys() == {TINY_KIND}
    chosen = dict(adversarial_inputs(ROWS, [SEEN], {"TopK": 1}))
    assert everything.keys() - chosen.keys() == {*LARGE_KINDS, MIXED_KIND}
    recurrent = dict(adversarial_inputs(ROWS, [SEEN], {"DynamicQuantizeLSTM": 1}))
    assert everything.keys() - recurrent.keys() == {MIXED_KIND}


def refused_on(source: EagerModel, got: Predictor) -> str:
    """Return the kind of input on which two models differ; nothing where they are alike."""
    with source.open() as expected:
        cases = adversarial_inputs(ROWS, [SEEN])
        truth = Float64Reference(source, expected)
        found = find_adversarial_mismatch(expected, got, ROWS, cases, FLOAT, truth)
    return found[0] if found else ""


def test_masked_scores_are_compared_beside_their_mask(tmp_path: Path) -> None:
    model = eager(tmp_path, "Masked")
    mask = torch.arange(4) == 1
    assert refused_on(model, lambda x: (x.masked_fill(mask, -torch.inf),)) == ""
    assert refused_on(model, lambda x: (x.masked_fill(mask, -1e30),)) == "zeros"
    assert refused_on(model, lambda x: (x.masked_fill(mask, torch.nan),)) == "zeros"
    clamped = refused_on(model, lambda x: (x.clamp(-50, 50).masked_fill(mask, -torch.inf),))
    assert clamped == "real inputs brought to 100"


def test_where_float32_overflows_an_export_need_not(tmp_path: Path) -> None:
    model = eager(tmp_path, "Growing")

    def got(x: torch.Tensor, highest: float = torch.inf) -> tuple[torch.Tensor, ...]:
        return (torch.cat([x, (x / 10).exp().clamp(max=highest)], 1),)

    assert refused_on(model, got) == ""
    assert refused_on(model, lambda x: got(x, 3e38)) == "", "float64 is finite there"
    assert refused_on(model, lambda x: got(x, 1e4)) == "real inputs brought to 1000"


def test_where_float32_itself_says_nothing_a_difference_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = eager(tmp_path, "Normalized")

    def got(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x + 0.1
        normalized = torch.nn.functional.layer_norm(x, (4,), eps=1e-30)
        # As far off as torch's own answer to a constant, about 1e5 for 0.1, and not as it.
        return (normalized.where(x.amax(1, keepdim=True) > x.amin(1, keepdim=True), 1e7),)

    assert refused_on(model, got) == ""
    assert "on zeros the exported model's answers differ" in caplog.text
    assert refused_on(model, lambda x: (1.1 * got(x)[0],)) == "real inputs times 10"


def test_less_than_the_rounding_of_a_usual_answer_is_nothing_but_for_tiny_inputs(
    tmp_path: Path,
) -> None:
    model = eager(tmp_path, "Plain")
    assert refused_on(model, lambda x: (2 * x + 1e-8,)) == TINY_KIND

    def sigmoid(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x.sigmoid(),)

    def flushed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x.sigmoid().where(x > -16, 0),)

    low = [("low", (torch.full((2, 4), -17.0),))]
    assert find_adversarial_mismatch(sigmoid, flushed, ROWS, iter(low)) is None
    assert find_adversarial_mismatch(sigmoid, lambda x: (0 * x,), ROWS, iter(low)) is None
    high = [("high", (torch.full((2, 4), -13.0),))]
    assert find_adversarial_mismatch(sigmoid, lambda x: (0 * x,), ROWS, iter(high)) is not None

    def detector(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ((x - 17).sigmoid(),)

    cases = [("zeros", (torch.zeros(2, 4),)), (TINY_KIND, (torch.full((2, 4), 1e-9),))]
    nothing, found = (torch.full((2, 4), value) for value in (-20.0, 20.0))
    compared = (detector, lambda x: (0 * x,), ROWS, cases, FLOAT, None)
    of_nothing, of_found = (usual_sizes(detector, ROWS, [(x,)]) for x in (nothing, found))
    assert find_adversarial_mismatch(*compared, of_nothing) is not None
    assert find_adversarial_mismatch(*compared, of_found) is None


def test_a_jump_to_infinity_excuses_nothing() -> None:
    class Nudged(Float64Reference):
        def exact(self, inputs):
            return None

    def expected(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x.where(x == x.round(), torch.inf),)

    ones = (torch.ones(2, 4),)
    truth = Nudged(None, expected)  # type: ignore[arg-type]
    assert not truth.explains(ones, (2 * ones[0],), 1e-3)


def test_a_disagreement_can_be_named_and_sent_to_another_process() -> None:
    error = ParityMismatch("they differ", "zeros", SEEN)
    sent = pickle.loads(pickle.dumps(error))
    assert (str(sent), sent.kind) == ("they differ", "zeros")
    with (
        pytest.raises(StageFailed, match=r"^onnx: they differ$"),
        name_stage_in_errors("onnx", Path()),
    ):
        raise error
