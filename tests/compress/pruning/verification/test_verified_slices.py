"""The proof stands between every rule and the user: whatever a rule gets wrong is refused."""

import copy
import gc
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.edits.removal import keep_indices_
from compress.artifacts.recipe import Recipe
from compress.common.errors import StageFailed
from compress.common.forward import run_in_eval
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.data.splits import Splits
from compress.pruning.dependency import channel_groups as graph
from compress.pruning.dependency.channel_groups import SlicePlan
from compress.pruning.prune_channels import PruneChannels
from compress.pruning.verification import masked_equivalence
from compress.pruning.verification.masked_equivalence import MaskedEquivalence, VerificationInputs
from tests.compress.pruning.planning import plan_slices
from tests.compress.pruning.zoo.registry import CASES


def assert_right(module: nn.Module, cut: SlicePlan, inputs: tuple[torch.Tensor, ...]) -> None:
    """Compare with zeros written here, on inputs that the proof did not see."""
    masked, smaller = copy.deepcopy(module).double(), copy.deepcopy(module).double()
    for name, axes in cut.kept.items():
        owner, _, short = name.rpartition(".")
        tensor = getattr(masked.get_submodule(owner), short)
        for axis, kept in axes.items():
            with torch.no_grad():
                tensor.movedim(axis, 0)[[i for i in range(tensor.shape[axis]) if i not in kept]] = 0
    keep_indices_(smaller, cut.kept, cut.attributes)
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    torch.testing.assert_close(
        run_in_eval(smaller, inputs), run_in_eval(masked, inputs), rtol=1e-7, atol=1e-7
    )


def mixed_up(labels: torch.Tensor) -> torch.Tensor:
    """Return labels with every axis the other way round: none is where it belongs."""
    return labels.flip(tuple(range(labels.dim())))


BROKEN = [
    ("shuffled", "transpose"),
    ("shuffled", "view"),
    ("dense", "cat"),
    ("separable", "mul"),
    ("separable", "conv2d"),
    ("flattened", "flatten"),
    ("flattened", "max_pool2d"),
    ("glu", "glu"),
    ("fused", "permute"),
    ("fused", "scaled_dot_product_attention"),
    ("by_hand", "matmul"),
    ("recurrent", "lstm"),
    ("group_norm", "group_norm"),
    ("space_to_depth", "pixel_unshuffle"),
    ("selective_kernel", "softmax"),
    ("window", "index"),
    ("einsum", "einsum"),
    ("transposed_groups", "conv_transpose2d"),
]


@pytest.mark.parametrize(("name", "operator"), BROKEN)
def test_wrong_labels_cost_channels_never_correctness(
    name: str, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, called = CASES[name], []
    right = graph.RULES.get(operator, graph.elementwise.pointwise)

    def broken(call, book):
        called.append(call)
        found = right(call, book)
        return [mixed_up(x) for x in found] if isinstance(found, list) else mixed_up(found)

    monkeypatch.setitem(graph.RULES, operator, broken)
    module = case.build()
    cut = plan_slices(module, case.inputs(2), ratio=0.4, round_to=1, importance="random")
    assert called
    assert_right(module, cut, case.inputs(3))


def test_a_rule_that_does_not_couple_channels_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["softmax_over_channels"]
    monkeypatch.setitem(graph.RULES, "softmax", graph.elementwise.identity)
    module = case.build()
    cut = plan_slices(module, case.inputs(2), ratio=0.5)
    assert {f.group.name for f in cut.groups} == {"conv1", "conv3"}
    assert "answers otherwise than its masked twin" in cut.pinned["conv2"]
    assert_right(module, cut, case.inputs(3))


class Branches(nn.Module):
    """Many layers side by side, of which some divide by a width that was read from a shape."""

    def __init__(self, layers: int, wrong: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 16) for _ in range(layers))
        self.heads = nn.ModuleList(nn.Linear(16, 3) for _ in range(layers))
        self.wrong = wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = 0.0
        for place, (layer, head) in enumerate(zip(self.layers, self.heads, strict=True)):
            y = F.softplus(layer(x))
            total = total + head(y / y.shape[-1] if place in self.wrong else y)
        return total


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "wrong", "most"),
    [
        (16, (), 1),
        pytest.param(16, (5,), 12, marks=pytest.mark.soak),
        (16, (3, 9), 20),
        (8, range(8), 23),
    ],
)
def test_groups_are_verified_together(
    layers: int, wrong: tuple[int, ...], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []
    refute = MaskedEquivalence.find_mismatch

    def counted(self, *arguments):
        compared.append(arguments)
        return refute(self, *arguments)

    monkeypatch.setattr(MaskedEquivalence, "find_mismatch", counted)
    torch.manual_seed(0)
    module = Branches(layers, tuple(wrong)).eval()
    cut = plan_slices(module, (torch.randn(2, 4),), ratio=0.5)
    refused = {name for name, reason in cut.pinned.items() if "masked twin" in reason}
    assert refused == {f"layers.{place}" for place in wrong}
    assert [f.group.name for f in cut.groups] == [
        f"layers.{place}" for place in range(layers) if place not in wrong
    ]
    assert len(compared) <= most


def test_changes_of_one_attribute_by_several_groups_add_up() -> None:
    class TwoParts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.width = 16 + 24
            self.first, self.second = nn.Linear(4, 16), nn.Linear(4, 24)
            self.head = nn.Linear(self.width, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            both = torch.cat([self.first(x).sin(), self.second(x).cos()], -1)
            return self.head(both.view(-1, self.width))

    module = TwoParts().eval()
    cut = plan_slices(module, (torch.randn(2, 4),), ratio=0.25, round_to=1)
    assert cut.attributes == {"width": 12 + 18}
    assert_right(module, cut, (torch.randn(3, 4),))


def test_a_shared_configuration_changes_for_all_its_modules() -> None:
    case = CASES["shared_configuration"]
    module = case.build()
    cut = plan_slices(module, case.inputs(2), ratio=0.5)
    assert cut.attributes["layers.0.config.heads"] == 2
    assert len(cut.groups) == 2
    keep_indices_(module, cut.kept, cut.attributes)
    assert module.layers[1].config.width == 16


@pytest.mark.parametrize("scale", [0.0, 1e-6])
def test_a_branch_scaled_to_almost_zero_is_verified_too(scale: float) -> None:
    """Residual branches begin at zero, or at 1e-6 (LayerScale): a wrong cut must still be seen."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 32), nn.Linear(32, 4)
            self.scale = nn.Parameter(torch.full((4,), scale))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x).relu()
            return x + self.scale * self.second(y / y.shape[-1])

    module = Residual().eval()
    cut = plan_slices(module, (torch.randn(2, 4),), ratio=0.5)
    assert "masked twin" in cut.pinned["first"]
    assert torch.equal(module.scale, torch.full((4,), scale))


@pytest.mark.parametrize("right", [True, False])
def test_modules_that_cast_to_float32_have_a_larger_tolerance(right: bool) -> None:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 256), nn.Linear(4, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, z = self.first(x).float(), self.second(x).float()
            y = y if right else y * (1 + 1e-4 * (y.shape[-1] < 256))
            return (y @ z.mT).to(x.dtype)  # sums that are rounded to float32

    cut = plan_slices(Casting().eval(), (torch.randn(64, 4),), ratio=0.5)
    assert bool(cut.groups) == right


@pytest.mark.parametrize("seed", range(4))
def test_an_index_off_by_one_channel_is_caught(seed: int) -> None:
    """Half of all channels are clamped in place; one more or less shows only where it matters."""
    case = CASES["in_place_on_a_view"]
    module = case.build(seed)
    cut = plan_slices(
        module, case.inputs(2), ratio=0.25, round_to=1, importance="random", seed=seed
    )
    assert_right(module, cut, case.inputs(64))


def test_random_numbers_in_a_forward_are_the_same_for_both() -> None:
    class Noisy(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + torch.randn(x.shape, dtype=x.dtype))

    module = Noisy(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3)).eval()
    state = torch.get_rng_state()
    assert plan_slices(module, (torch.randn(2, 4),), ratio=0.5).groups
    torch.randn(2, 4)
    torch.set_rng_state(state)  # and the user's own stream goes on where it was
    torch.randn(2, 4)


def test_reasons_contain_the_hard_coded_size() -> None:
    for name, layer, constant in (
        ("written_view", "conv2", "256"),
        ("written_heads", "query", "4, 8"),
    ):
        case = CASES[name]
        cut = plan_slices(case.build(), case.inputs(2), ratio=0.5)
        assert "the smaller model fails" in cut.pinned[layer]
        assert constant in cut.pinned[layer]


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 32), nn.Linear(32, 3)


def test_nan_in_a_later_output_is_a_mismatch() -> None:
    class NanWhereNarrow(TwoLayers):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = self.first(x).relu()
            return self.second(y), x / (32 if y.shape[-1] == 32 else torch.nan)

    torch.manual_seed(0)
    cut = plan_slices(NanWhereNarrow().eval(), (torch.randn(2, 4),), ratio=0.5)
    assert not cut.groups
    assert "answers otherwise than its masked twin (by nan)" in cut.pinned["first"]


def test_a_model_that_returns_nan_cannot_be_verified() -> None:
    class Undefined(TwoLayers):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.second(self.first(x).relu()), x * torch.nan

    cut = plan_slices(Undefined().eval(), (torch.randn(2, 4),), ratio=0.5)
    assert "the model itself answers NaN to all inputs" in cut.pinned["first"]


@pytest.mark.parametrize("right", [True, False])
def test_masked_scores_are_equal_and_the_others_are_compared(right: bool) -> None:
    class Masked(TwoLayers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x).relu()
            scores = self.second(y if right else y / y.shape[-1])
            return scores.masked_fill(torch.arange(3) == 1, -torch.inf)

    torch.manual_seed(0)
    cut = plan_slices(Masked().eval(), (torch.randn(2, 4),), ratio=0.5)
    assert bool(cut.groups) == right


def test_signs_of_weights_are_tried_of_models_with_masked_scores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An infinity must not leave out what else is asked than the weights as they are.

    And one copy of each is compared on all inputs.
    """
    tried = []
    variant_of = MaskedEquivalence._variant

    def counted(self, variant, *kept):
        tried.append(variant)
        return variant_of(self, variant, *kept)

    monkeypatch.setattr(MaskedEquivalence, "_variant", counted)

    class Masked(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).masked_fill(torch.arange(3) == 1, -torch.inf)

    torch.manual_seed(0)
    module = Masked(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3)).eval()
    seeded, real = (torch.randn(2, 4),), (torch.randn(4, 4),)
    assert plan_slices(module, seeded, ratio=0.5, real=real).groups
    smaller, twins = tried[1::2], tried[::2]
    assert smaller == twins == list(range(8))


PIXELS = """
import torch
from torch import nn

class Pixels(nn.Module):
    '''Computes otherwise where pixels are bright, with a width that was read from a shape.'''

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 3)

    def forward(self, x):
        y = self.first(x).relu()
        bright = (x.amax(-1, keepdim=True) > 100).to(x.dtype)
        return self.second(y * (1 + bright * 32 / y.shape[-1]))
"""


def test_a_branch_that_only_real_samples_reach_is_verified(tmp_path: Path) -> None:
    (tmp_path / "pixels.py").write_text(PIXELS)
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", 16)),))
    recipe = Recipe(factory="pixels:Pixels")
    torch.manual_seed(0)
    state = recipe.build(tmp_path).state_dict()
    model = EagerModel.create(tmp_path / "source", recipe, state, signature, folder=tmp_path)
    assert plan_slices(model.load(), signature.example(), ratio=0.5).groups, "noise is not bright"
    generator = torch.Generator().manual_seed(0)
    dark = torch.randint(0, 50, (40, 16), generator=generator).float()
    dark[31, 5] = 255  # one of 40 samples takes the branch
    data = Splits({"train": [(x, torch.tensor(0)) for x in dark]}, batch_size=16)
    for samples in (None, 0):
        stage = PruneChannels(ratio=0.5, calibration_samples=samples)
        with pytest.raises(StageFailed, match="answers otherwise than its masked twin"):
            stage(model, Context(root=tmp_path / f"slim{samples}", data=data))


def test_the_masked_twin_is_not_run_where_the_smaller_model_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes longest, and of many groups that cannot be cut most fail by a size."""
    masked: list[object] = []
    zero_masked = masked_equivalence.zero_masked

    def counted(module: nn.Module, kept: graph.Kept, *replacements: object) -> nn.Module:
        masked.extend([kept] if kept else ())
        return zero_masked(module, kept, *replacements)

    monkeypatch.setattr(masked_equivalence, "zero_masked", counted)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    equivalence = MaskedEquivalence(net, VerificationInputs((torch.randn(2, 4),)))
    kept: graph.Kept = {"0.weight": {0: (0, 1)}, "0.bias": {0: (0, 1)}}
    plan = SlicePlan(kept=kept, attributes={}, groups=(), pinned={})
    reason = equivalence.find_mismatch(plan)
    assert reason is not None and reason.startswith("the smaller model fails: RuntimeError: mat1")
    assert not masked
    whole = SlicePlan(kept=kept | {"2.weight": {1: (0, 1)}}, attributes={}, groups=(), pinned={})
    assert equivalence.find_mismatch(whole) is None and masked


def test_no_masked_twin_is_kept_after_a_mismatch() -> None:
    """It is a copy of the model, with its weights in float64."""
    masked: list[weakref.ref[nn.Module]] = []

    class Watched(MaskedEquivalence):
        def _variant(self, variant: int, kept: graph.Kept | None = None) -> nn.Module:
            made = super()._variant(variant, kept)
            masked.extend([weakref.ref(made)] if kept else ())
            return made

    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    equivalence = Watched(net, VerificationInputs((torch.randn(2, 4),)))
    # Half of the inputs of the last layer are masked, and stay where they are.
    kept: graph.Kept = {"2.weight": {1: (0, 1, 2, 3)}}
    reason = equivalence.find_change_mismatch(lambda smaller: None, kept)
    assert reason is not None and "answers otherwise than its masked twin" in reason
    gc.collect()
    assert masked and all(twin() is None for twin in masked)
