import copy
import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.edits.split_attention import (
    SplitMultiheadAttention,
    is_splittable,
    split_attention_,
)
from compress.artifacts.recipe import Recipe, SplitAttention
from compress.common.signature import Signature, TensorSpec

FLAGS = (False, True)
WIDTHS = ({}, {"kdim": 8, "vdim": 12})
FACTORY = """
from torch import nn

def layer():
    return nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
"""


class Holder(nn.Module):
    def __init__(self, **arguments: object) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, **arguments)
        for parameter in self.attention.parameters():
            nn.init.normal_(parameter)


def twins(**arguments: object) -> tuple[Holder, Holder]:
    torch.manual_seed(0)
    ours = Holder(**arguments)
    theirs = copy.deepcopy(ours)
    split_attention_(ours, ["attention"])
    assert type(ours.attention) is SplitMultiheadAttention
    return theirs, ours


def masks(kind: str) -> dict[str, torch.Tensor | None]:
    """Return a mask of keys and one of scores; the first key is always seen."""
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[0, 5:] = True
    seen = torch.rand(5, 7) > 0.3
    seen[:, 0] = False
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "flags": {"attn_mask": seen, "key_padding_mask": padding},
        "floats": {"attn_mask": torch.randn(5, 7), "key_padding_mask": -2.0 * padding},
        "heads": {"attn_mask": torch.randn(12, 5, 7)},
    }[kind]


@pytest.mark.parametrize("kind", ["none", "padding", "flags", "floats", "heads"])
@pytest.mark.parametrize("training", FLAGS)
@pytest.mark.parametrize("widths", WIDTHS, ids=["equal", "different"])
def test_it_answers_as_torchs_own(kind: str, training: bool, widths: dict[str, int]) -> None:
    """Dropout included: equal seeds drop equal places."""
    for batch_first, bias, needed in itertools.product(FLAGS, repeat=3):
        theirs, ours = twins(batch_first=batch_first, bias=bias, dropout=0.3, **widths)
        query, key, value = torch.randn(3, 5, 16), torch.randn(3, 7, 16), torch.randn(3, 7, 16)
        key, value = key[..., : widths.get("kdim", 16)], value[..., : widths.get("vdim", 16)]
        if not batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        chosen = {"need_weights": needed, "average_attn_weights": bias, **masks(kind)}
        answers = []
        for holder in (theirs, ours):
            torch.manual_seed(1)
            answers.append(holder.train(training).attention(query, key, value, **chosen))
        torch.testing.assert_close(answers[1], answers[0], rtol=1e-5, atol=1e-6)


def test_a_single_sequence_and_a_causal_hint() -> None:
    theirs, ours = twins()
    x = torch.randn(5, 16)
    torch.testing.assert_close(ours.attention(x, x, x), theirs.attention(x, x, x))
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    for needed in FLAGS:
        chosen = {"attn_mask": mask, "is_causal": True, "need_weights": needed}
        expected = theirs.attention(x, x, x, **chosen)
        torch.testing.assert_close(ours.attention(x, x, x, **chosen), expected)
    with pytest.raises(RuntimeError, match="attn_mask, which is missing"):
        ours.attention(x, x, x, is_causal=True)


def test_what_is_frozen_stays_frozen_and_gradients_agree() -> None:
    theirs, ours = (holder.double() for holder in twins(batch_first=True))
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    for holder in (theirs, ours):
        holder.train().attention(x, x, x)[0].square().sum().backward()
    together = torch.cat([getattr(ours.attention, f"{n}_proj").weight.grad for n in "qkv"])
    torch.testing.assert_close(together, theirs.attention.in_proj_weight.grad)
    frozen = Holder()
    frozen.attention.in_proj_weight.requires_grad_(False)
    split_attention_(frozen, ["attention"])
    learns = {n for n, p in frozen.named_parameters() if p.requires_grad}
    assert not any("proj.weight" in name for name in learns - {"attention.out_proj.weight"})
    assert "attention.q_proj.bias" in learns


def test_a_module_held_twice_is_replaced_twice() -> None:
    both = nn.ModuleDict({"one": Holder(), "two": nn.Identity()})
    both["two"] = both["one"]
    both["again"] = both["one"].attention
    split_attention_(both, ["one.attention"])
    assert both["two"].attention is both["again"] is both["one"].attention
    assert len(list(both.parameters())) == 8


@pytest.mark.parametrize("extra", [{"add_bias_kv": True}, {"add_zero_attn": True}])
def test_what_it_does_not_have_is_left_alone(extra: dict[str, bool]) -> None:
    assert is_splittable(nn.MultiheadAttention(16, 4))
    assert not is_splittable(nn.MultiheadAttention(16, 4, **extra))
    assert not is_splittable(nn.Linear(4, 4))
    hooked = nn.MultiheadAttention(16, 4)
    hooked.register_forward_hook(lambda *_: None)
    assert not is_splittable(hooked)
    with pytest.raises(TypeError, match="'0' is Linear, expected MultiheadAttention"):
        split_attention_(nn.Sequential(nn.Linear(4, 4)), ["0"])


def test_the_edit_is_replayed_without_weights_and_with_them(tmp_path: Path) -> None:
    (tmp_path / "layers.py").write_text(FACTORY)
    edit = SplitAttention(modules=("self_attn",))
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", 5, 16)),))
    recipe = Recipe(factory="layers:layer", edits=(edit,))
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    module = recipe.build(tmp_path).eval()
    state = module.state_dict()
    model = EagerModel.create(tmp_path / "model", recipe, state, signature, folder=tmp_path)
    assert model.skeleton().self_attn.q_proj.weight.is_meta
    x = torch.randn(2, 5, 16)
    assert torch.equal(model.load()(x), module(x))
