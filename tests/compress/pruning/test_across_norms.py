"""Channels over which normalisations take statistics, removed with `across_norms`."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.edits.removal import keep_indices_
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.errors import StageFailed
from compress.common.forward import run_in_eval
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.data.splits import Splits
from compress.export.onnx.stage import ExportOnnx
from compress.pruning.allocation.ranking import rank
from compress.pruning.channel_settings import ChannelSelection
from compress.pruning.dependency.channel_groups import SlicePlan
from compress.pruning.prune_channels import PruneChannels
from compress.pruning.verification.masked_equivalence import VerificationInputs

HERE = Path(__file__).parent
EPS = 1e-3


def normal(x: torch.Tensor) -> torch.Tensor:
    """Return numbers of mean 0 and variance 1 along the last axis."""
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + EPS).sqrt()


def root_mean_square(x: torch.Tensor) -> torch.Tensor:
    """Return numbers of mean square 1 along the last axis."""
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def response(x: torch.Tensor) -> torch.Tensor:
    """Return what ConvNeXtV2's GRN multiplies by, of a single position."""
    return x * (x.abs() / (x.abs().mean(-1, keepdim=True) + EPS))


class ByHand(nn.Module):
    """A normalisation written as a formula, with a scale."""

    def __init__(self, formula: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.formula = nn.Parameter(torch.rand(16)), formula

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.formula(x) * self.weight


class OwnShape(nn.Module):
    """The first ConvNeXt's: torch's function, of a shape in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.normalized_shape = nn.Parameter(torch.rand(16)), (16,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, None, EPS)


class ByShape(nn.Module):
    """Divides by a number of channels that the graph has as a constant."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.sum(-1, keepdim=True) / x.shape[-1]


class Net(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(4, 16), norm, nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.first(x)))


def planned(net: nn.Module, *inputs: torch.Tensor) -> SlicePlan:
    ranking = rank(
        net.eval(),
        VerificationInputs(inputs, across_norms=True),
        ChannelSelection(across_norms=True),
    )
    return ranking.verify(ranking.allocate(0.25, ChannelSelection(round_to=1)))


NORMS = {
    "LayerNorm": (lambda: nn.LayerNorm(16, eps=EPS), normal),
    "without weights": (lambda: nn.LayerNorm(16, eps=EPS, elementwise_affine=False), normal),
    "RMSNorm": (lambda: nn.RMSNorm(16, eps=EPS), root_mean_square),
    "GroupNorm": (lambda: nn.GroupNorm(1, 16, eps=EPS), normal),
    "GroupNorm without weights": (lambda: nn.GroupNorm(1, 16, eps=EPS, affine=False), normal),
    "mean by hand": (lambda: ByHand(root_mean_square), root_mean_square),
    "var by hand": (lambda: ByHand(normal), normal),
    "GRN": (lambda: ByHand(response), response),
    "own shape": (OwnShape, normal),
}


@pytest.mark.parametrize("name", NORMS)
def test_statistics_are_those_of_the_channels_that_stay(name: str) -> None:
    torch.manual_seed(0)
    build, formula = NORMS[name]
    net, x = Net(build()).double(), torch.randn(5, 4).double()
    norm: nn.Module = net.norm
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, 0.5, 2)
    plan = planned(net, x.float())
    (stays,) = plan.kept["first.bias"].values()
    index = torch.tensor(stays)
    expected = formula(net.first(x)[:, index])
    weight, bias = (getattr(norm, kind, None) for kind in ("weight", "bias"))
    expected = expected if weight is None else expected * weight[index]
    expected = expected if bias is None else expected + bias[index]
    expected = F.linear(expected, net.head.weight[:, index], net.head.bias)
    keep_indices_(net, plan.kept, plan.attributes)
    assert len(stays) == 12
    torch.testing.assert_close(net(x), expected, rtol=1e-9, atol=1e-9)


def test_a_divisor_that_python_computed_is_refused() -> None:
    plan = planned(Net(ByShape()), torch.randn(5, 4))
    assert not plan.groups
    assert "answers otherwise than its masked twin" in plan.pinned["first"]


class NormedHeads(nn.Module):
    """Attention with a class token and positions, whose queries are normalised head by head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.token = nn.Linear(6, 16), nn.Parameter(torch.randn(1, 1, 16))
        self.places = nn.Parameter(torch.randn(1, 6, 16))
        self.norm, self.query_norm = nn.LayerNorm(16), nn.LayerNorm(4)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.out, self.head = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x)], 1) + self.places
        y = self.norm(x)
        heads = (part(y).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.key, self.value))
        query = self.query_norm(self.query(y).unflatten(-1, (-1, 4)).transpose(1, 2))
        answer = F.scaled_dot_product_attention(query, *heads).transpose(1, 2).flatten(2)
        return self.head(self.norm(x + self.out(answer))[:, 0])


def test_heads_that_are_normalised_alone_stay_whole() -> None:
    torch.manual_seed(0)
    net, inputs = NormedHeads(), torch.randn(2, 5, 6)
    plan = planned(net, inputs)
    assert {one.group.name: (one.before, one.after) for one in plan.groups} == {
        "embed": (16, 12),
        "query": (4, 3),
    }
    keep_indices_(net, plan.kept, plan.attributes)
    assert net.token.shape[-1] == net.places.shape[-1] == net.norm.weight.shape[0] == 12
    assert net.query_norm.normalized_shape == (4,) and net.query.weight.shape == (12, 12)


def normed() -> nn.Module:
    return Net(nn.LayerNorm(16))


@pytest.fixture
def source(tmp_path: Path) -> EagerModel:
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))
    recipe = Recipe(factory="test_across_norms:normed")
    return import_checkpoint(tmp_path / "source", recipe, signature, checkpoint=None, folder=HERE)


def test_the_refusal_names_the_setting(source: EagerModel, tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match="hold those of first: set across_norms: true"):
        PruneChannels(ratio=0.25)(source, Context(root=tmp_path / "out"))


def test_readers_are_refitted_to_the_whole_width(source: EagerModel, tmp_path: Path) -> None:
    data = Splits({"train": TensorDataset(torch.randn(64, 4))})
    context = Context(root=tmp_path / "out", data=data)
    pruned = PruneChannels(ratio=0.5, across_norms=True)(source, context)
    error = pruned.manifest.facts["refit"]["output_error"]
    assert pruned.load().norm.weight.shape == (8,)
    assert error["refit"] < 0.5 * error["cut"]


WORDS = (TensorSpec(name="input_ids", shape=("batch", 8), dtype="int64"),)
IMAGE = (TensorSpec(name="pixel_values", shape=("batch", 3, 16, 16)),)
HIDDEN = {
    "bert_classifier": (WORDS, "bert.embeddings.word_embeddings.weight"),
    "llama": (WORDS, "model.embed_tokens.weight"),
    "Classifier": (IMAGE, "vit.embeddings.position_embeddings"),
    "convnextv2": (IMAGE, "classifier.weight"),
}


@pytest.mark.parametrize(
    "factory",
    [
        pytest.param(n, marks=[pytest.mark.soak if n == "Classifier" else pytest.mark.slow])
        for n in HIDDEN
    ],
)
def test_the_hidden_width_of_transformers_is_cut(factory: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    inputs, tensor = HIDDEN[factory]
    whole = import_checkpoint(
        tmp_path / "whole",
        Recipe(factory=f"transformers_here:{factory}"),
        Signature(inputs=inputs),
        checkpoint=None,
        folder=HERE,
    )
    stage = PruneChannels(ratio=0.25, round_to=8, across_norms=True)
    pruned = stage(whole, Context(root=tmp_path / "pruned"))
    state = EagerModel.from_directory(pruned.path).load().state_dict()
    assert whole.load().state_dict()[tensor].shape[-1] == 32
    assert state[tensor].shape[-1] == 24
    assert pruned.parameters() < 0.7 * whole.parameters()
    if factory == "convnextv2":  # has the rarest normalisations; the export compares answers
        ExportOnnx()(pruned, Context(root=tmp_path / "onnx"))
    if factory == "bert_classifier":  # a configuration says all of its widths
        from tests.compress.pruning.transformers_here import bert_classifier

        smaller = bert_classifier(width=24, heads=3, inner=48)
        smaller.load_state_dict(state)
        x = pruned.signature.example(seed=3)
        assert torch.equal(run_in_eval(smaller, x)[0], run_in_eval(pruned.load(), x)[0])
