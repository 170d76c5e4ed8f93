"""Inputs that a model seldom sees, and what excuses an export that differs on them."""

from pathlib import Path

import pytest
import torch

from compress.core.artifact import Predictor
from compress.core.data import Splits
from compress.core.eager import EagerModel
from compress.core.errors import StageFailed
from compress.core.recipe import Recipe
from compress.core.signature import Signature, TensorSpec
from compress.core.stage import Context
from export.agreement import Disagreement, prove_equal
from export.hostile import check_on_hostile, hostile_inputs
from export.truth import Truth

ROWS = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))
TEXT = Signature(
    inputs=(
        TensorSpec(name="ids", shape=("batch", "length"), dtype="int64"),
        TensorSpec(name="attention_mask", shape=("batch", "length"), dtype="bool"),
    )
)
SEEN = (torch.randn(16, 4, generator=torch.Generator().manual_seed(0)),)
SOURCE = """
import torch
from torch import nn

class Cancel(nn.Module):
    def forward(self, x):
        return (x + 3e4) - 3e4

class Step(nn.Module):
    def forward(self, x):
        return (x.sum(-1, keepdim=True) > 0).to(x.dtype) + x

class Plain(nn.Module):
    def forward(self, x):
        return 2 * x
"""


def eager(folder: Path, factory: str) -> EagerModel:
    (folder / "odd.py").write_text(SOURCE)
    return EagerModel.create(
        folder / factory, Recipe(factory=f"odd:{factory}"), {}, ROWS, folder=folder
    )


def test_integers_stay_within_what_was_seen_and_masks_stay_valid() -> None:
    ids = torch.randint(3, 90, (5, 12), generator=torch.Generator().manual_seed(0))
    seen = [(ids, torch.ones(5, 12, dtype=torch.bool))]
    kinds = dict(hostile_inputs(TEXT, seen))
    for tokens, mask in kinds.values():
        assert ids.min() <= tokens.min() <= tokens.max() <= ids.max()
        assert mask[:, 0].all()
    assert kinds["the largest value seen everywhere"][0].unique().tolist() == [int(ids.max())]
    lengths = kinds["rows of every length"][1].sum(1).tolist()
    assert lengths[0] == 1
    assert lengths[-1] == 12
    assert len(set(lengths)) == 8
    assert kinds["zeros"][0].unique().tolist() == [int(ids.min())], "0 was never seen"


def test_a_fixed_batch_keeps_its_size() -> None:
    fixed = Signature(inputs=(TensorSpec(name="x", shape=(3, 4)),))
    kinds = dict(hostile_inputs(fixed, []))
    assert {len(x) for (x,) in kinds.values()} == {3}
    assert kinds["zeros"][0].abs().max() == 0


def test_an_export_that_is_wrong_on_extremes_alone_is_refused(tmp_path: Path) -> None:
    model = eager(tmp_path, "Plain")
    data = Splits({"val": [(x, torch.tensor(0)) for x in SEEN[0]]}, batch_size=8)
    context = Context(root=tmp_path / "next", data=data)
    prove_equal(model, lambda x: (2 * x,), context)
    with pytest.raises(Disagreement, match=r"hostile inputs \(real inputs times 10\)") as refused:
        prove_equal(model, lambda x: ((2 * x).clamp(-8, 8),), context)
    assert refused.value.inputs[0].shape == (2, 4)
    with pytest.raises(StageFailed, match=r"hostile inputs \(zeros\)"):
        prove_equal(model, lambda x: (2 * x.where(x != 0, torch.nan),), context)


def test_where_the_source_has_no_answer_nothing_is_compared() -> None:
    def refuses_zeros(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not x.any():
            raise ValueError("empty")
        return (x / (x.amax() - x.amin()),)

    def another(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(t + 0.5 * (x.std() == 0) for t in refuses_zeros(x))

    cases = list(hostile_inputs(ROWS, [SEEN]))
    assert check_on_hostile(refuses_zeros, another, ROWS, iter(cases), 1e-3) is None


def test_a_runtime_as_near_to_float64_as_torch_is_excused(tmp_path: Path) -> None:
    model = eager(tmp_path, "Cancel")

    def off_by(error: float) -> Predictor:
        return lambda x: (x * (1 + error),)

    with model.open() as expected:
        truth = Truth(model, expected)
        assert (expected(*SEEN)[0] - SEEN[0]).norm() > 5e-4 * SEEN[0].norm()
        assert truth.excuses(SEEN, off_by(0)(*SEEN), 1e-6)
        assert not truth.excuses(SEEN, off_by(0.1)(*SEEN), 1e-6)
        assert not truth.excuses(SEEN, (SEEN[0][:2],), 1e-6)


def test_where_the_source_itself_jumps_either_side_is_right(tmp_path: Path) -> None:
    model = eager(tmp_path, "Step")
    zeros, ones = (torch.zeros(2, 4),), (torch.ones(2, 4),)
    with model.open() as expected:
        truth = Truth(model, expected)
        other = tuple(1 - t for t in expected(*zeros))
        assert truth.excuses(zeros, other, 1e-3)
        assert not truth.excuses(ones, tuple(t - 1 for t in expected(*ones)), 1e-3)
