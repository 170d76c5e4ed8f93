import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.edits.split_attention import SplitMultiheadAttention
from compress.artifacts.libraries import timm_model
from compress.artifacts.recipe import KeepIndices, NameSizes, SplitAttention
from compress.common.forward import run_in_eval
from compress.core.context import Context
from compress.pruning.prune_channels import PruneChannels
from compress.pruning.verification.masked_equivalence import VerificationInputs
from compress.pruning.verification.module_rewrites import rewrite_
from tests.compress.pruning.planning import plan_slices
from tests.compress.pruning.zoo.registry import CASES


def sealed(name: str, path: Path) -> EagerModel:
    case = CASES[name]
    state = case.build().state_dict()
    return EagerModel.create(path, case.recipe, state, case.signature, folder=case.folder)


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> EagerModel:
    root = tmp_path_factory.mktemp("encoder")
    source = sealed("encoder", root / "source")
    return PruneChannels(ratio=0.5)(source, Context(root=root / "slim"))


def test_heads_of_torchs_transformer_layer_are_removed(pruned: EagerModel) -> None:
    rewriting, cut = pruned.recipe.edits
    names = tuple(f"encoder.layers.{i}.self_attn" for i in range(2))
    assert rewriting == SplitAttention(modules=names)
    assert isinstance(cut, KeepIndices)
    attention = pruned.load().get_submodule(names[0])
    assert isinstance(attention, SplitMultiheadAttention)
    assert (attention.num_heads, attention.embed_dim) == (2, 32)
    assert attention.q_proj.weight.shape == (16, 32)
    found = [f["modules"][0] for f in pruned.manifest.facts["families"]]
    assert f"{names[0]}.q_proj" in found


def test_outputs_are_identical_in_another_process(
    pruned: EagerModel, assert_reloads_identically: Callable[[EagerModel], None]
) -> None:
    assert_reloads_identically(pruned)


def test_sliced_attention_trains_with_dropout(pruned: EagerModel) -> None:
    module, tokens = pruned.load().train(), torch.randint(0, 13, (8, 6))
    one, two = module(tokens), module(tokens)
    assert not torch.equal(one, two)
    one.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.soak  # test_heads_leave_where_the_code_computes_sizes slices twice
@pytest.mark.slow
def test_a_sliced_model_is_sliced_again(pruned: EagerModel, tmp_path: Path) -> None:
    again = PruneChannels(ratio=0.5)(pruned, Context(root=tmp_path / "again"))
    assert [type(edit) for edit in again.recipe.edits] == [SplitAttention, KeepIndices, KeepIndices]
    assert again.load().encoder.layers[0].self_attn.num_heads == 1


@pytest.mark.soak  # test_heads_leave_where_the_code_computes_sizes excludes one
@pytest.mark.slow
def test_attention_that_stays_is_not_rewritten(tmp_path: Path) -> None:
    source = sealed("encoder", tmp_path / "source")
    stage = PruneChannels(ratio=0.5, exclude=("encoder.layers.0.self_attn",))
    slim = stage(source, Context(root=tmp_path / "slim"))
    assert slim.recipe.edits[0] == SplitAttention(modules=("encoder.layers.1.self_attn",))
    assert type(slim.load().encoder.layers[0].self_attn) is nn.MultiheadAttention


class Reader(nn.Module):
    """Takes the attention's weights itself, so that no other module can stand in."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = F.linear(x, self.attention.in_proj_weight).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]


def test_only_equivalent_rewrites_are_made() -> None:
    module = nn.Sequential(Plain(), Reader(), Plain()).eval()
    x = torch.randn(3, 5, 16)
    expected = run_in_eval(module, (x,))[0]
    split, *others = rewrite_(module, VerificationInputs((x,)))
    assert split == SplitAttention(modules=("0.attention", "2.attention"))
    assert {type(edit) for edit in others} == {NameSizes}
    torch.testing.assert_close(run_in_eval(module, (x,))[0], expected)
    assert type(module[1].attention) is nn.MultiheadAttention
    assert rewrite_(nn.Sequential(nn.Linear(4, 4)), VerificationInputs((torch.randn(1, 4),))) == ()


@pytest.mark.parametrize("is_read", [True, False])
def test_an_encoder_that_packs_its_padding_is_rewritten(is_read: bool) -> None:
    """torch's fused path leaves zeros in the place of padding; it is compared without that."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoder(layer, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            padding = torch.arange(5).expand(len(x), -1) > 2
            x = self.encoder(x, src_key_padding_mask=padding)
            return x if is_read else x[:, :3]

    x = torch.randn(2, 5, 16)
    module = Pooled().eval()
    expected = run_in_eval(module, (x,))[0]
    assert rewrite_(module, VerificationInputs((x,)))
    torch.testing.assert_close(run_in_eval(module, (x,))[0], expected)


def test_tied_projections_stay_tied() -> None:
    module = nn.Sequential(Plain(), Plain()).eval()
    module[1].attention.in_proj_weight = module[0].attention.in_proj_weight
    assert rewrite_(module, VerificationInputs((torch.randn(3, 5, 16),))) == ()
    module[1].attention = module[0].attention  # the module itself, twice
    assert rewrite_(module, VerificationInputs((torch.randn(3, 5, 16),))) == (
        SplitAttention(modules=("0.attention",)),
    )
    assert module[1].attention is module[0].attention


@pytest.mark.slow
def test_heads_leave_where_the_code_computes_sizes(tmp_path: Path) -> None:
    source = sealed("nano_gpt", tmp_path / "source")
    stage = PruneChannels(ratio=0.25, round_to=1, exclude=("h.1.attn",))
    slim = stage(source, Context(root=tmp_path / "slim"))
    naming, cut = slim.recipe.edits
    assert isinstance(naming, NameSizes) and list(naming.sizes) == ["h.0.attn"]
    assert naming.sizes["h.0.attn"]["split_sizes_0"] == (32, 32, 32)
    assert cut.attributes["h.0.attn.split_sizes_0"] == [24, 24, 24]
    attention = slim.load().h[0]["attn"]
    assert (attention.c_attn.out_features, attention.c_proj.in_features) == (72, 24)
    # What it is named for is known from now on, so nothing is named again.
    stage = PruneChannels(ratio=0.5, round_to=1, include=("h.0.attn.*",))
    again = stage(slim, Context(root=tmp_path / "again"))
    assert [type(edit) for edit in again.recipe.edits] == [NameSizes, KeepIndices, KeepIndices]
    assert again.load().h[0]["attn"].c_proj.in_features == 16


def test_code_stays_where_attributes_say_the_sizes() -> None:
    case = CASES["vit"]
    module = case.build()
    assert rewrite_(module, VerificationInputs(case.inputs(2))) == ()


def test_code_stays_where_naming_its_sizes_lets_nothing_leave() -> None:
    class Counted(nn.Module):
        """Divides by a number that is the width by chance, which no size tells."""

        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.hidden(x).view(len(x), 8)
            return self.head(y / y.shape[1])

    module = Counted().eval()
    assert rewrite_(module, VerificationInputs((torch.randn(2, 4),))) == ()
    assert type(module) is Counted


def test_a_size_that_has_the_batch_in_it_is_no_attribute() -> None:
    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            n = len(x)
            return self.head(self.hidden(x).view(n * 4, 2).flip(1).view(n, 8))

    assert rewrite_(Folded().eval(), VerificationInputs((torch.randn(2, 4),))) == ()


@pytest.mark.slow
def test_halves_of_channels_lose_different_numbers() -> None:
    case = CASES["shuffle_net_v2"]
    module, inputs = case.build(), case.inputs(2)
    (naming,) = rewrite_(module, VerificationInputs(inputs))
    assert isinstance(naming, NameSizes)
    assert [call.source for call in naming.calls] == ["x.chunk(2, dim=1)"]
    plan = plan_slices(module, inputs, ratio=0.3, round_to=1)
    assert list(plan.pinned) == ["fc"]
    parts = [value for name, value in plan.attributes.items() if ".chunk_sizes_0" in name]
    assert any(left != right for left, right in parts)


@pytest.mark.slow
def test_heads_of_timms_vision_transformer_leave() -> None:
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 4}
    module = timm_model.build("vit_tiny_patch16_224", **sizes, num_classes=3).eval()
    inputs = (torch.randn(2, 3, 16, 16),)
    assert (
        rewrite_(module, VerificationInputs(inputs)) == ()
    )  # its code reads the number of heads from attributes
    plan = plan_slices(module, inputs, ratio=0.5, round_to=1)
    assert plan.attributes == {"blocks.0.attn.num_heads": 2, "blocks.0.attn.attn_dim": 16}
