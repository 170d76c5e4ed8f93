from collections import Counter
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compress.common.errors import StageFailed
from compress.training.config.training import ActivationSegments, Training
from compress.training.optim.optimizer import clip_norm_
from compress.training.optim.transformer_blocks import (
    checkpoint_activations_,
    chosen_blocks,
    large_blocks,
    named_blocks,
    repeated_blocks,
    split_into_segments,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.dropout(self.up(x).relu()))


def net(depth=4):
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(*[Block() for _ in range(depth)]))


class Made(TorchDispatchMode):
    """Remembers the memory of every result, without keeping it."""

    def __init__(self) -> None:
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                self.storages[reference.cdata] = reference, storage.nbytes()
        return result


def kept_bytes(module, x):
    """Return the bytes that are still there after a forward pass, then go backward.

    What hooks on saved tensors see leaves out what selective checkpointing keeps by itself.
    """
    given = {t.untyped_storage()._cdata for t in (x, *module.parameters())}
    with Made() as made:
        loss = module(x).square().mean()
    kept = sum(
        size
        for cdata, (reference, size) in made.storages.items()
        if cdata not in given and not reference.expired()
    )
    loss.backward()
    return kept


@pytest.mark.parametrize(
    ("setting", "least", "most"),
    [
        ("full", 0, 0.4),
        (2, 0.5, 0.75),
        ("selective", 0.3, 0.5),
        ({"segments": 2}, 0.5, 0.6),
        ({"segments": 4}, 0.2, 0.4),
    ],
)
def test_gradients_and_names_stay_and_less_is_kept(setting, least, most):
    torch.manual_seed(0)
    plain, other = net(), net()
    other.load_state_dict(plain.state_dict())
    checkpoint_activations_(other, Training(epochs=1, activation_checkpointing=setting))
    x = torch.randn(64, 8)
    torch.manual_seed(1)
    kept = kept_bytes(plain, x)
    torch.manual_seed(1)
    assert least * kept < kept_bytes(other, x) < most * kept
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in other.named_parameters()] == names
    for one, two in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)  # dropout drew the same numbers again


class NormalizedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.norm(self.linear(x)).relu() * scale


@pytest.mark.parametrize("setting", ["full", "selective", {"segments": "auto"}])
def test_recomputing_leaves_the_statistics_of_batch_norm_alone(setting):
    plain, other = (nn.Sequential(*[NormalizedBlock() for _ in range(4)]) for _ in range(2))
    other.load_state_dict(plain.state_dict())
    checkpoint_activations_(other, Training(epochs=1, activation_checkpointing=setting))
    for module in (plain, other):
        module(torch.arange(32.0).view(4, 8)).sum().backward()
    assert all(map(torch.equal, plain.state_dict().values(), other.state_dict().values()))


class Chain(nn.Module):
    """Calls its blocks one after the other, as `between` says."""

    def __init__(self, between) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NormalizedBlock() for _ in range(4))
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = self.between(index, block, x)
        return x


def segmented(between, segments=2):
    module = Chain(between)
    setting = {"segments": segments}
    checkpoint_activations_(module, Training(epochs=1, activation_checkpointing=setting))
    return module


@pytest.mark.parametrize(
    ("between", "message"),
    [
        (lambda i, block, x: block(x + 1), "'blocks.1' does not read the output of 'blocks.0'"),
        (lambda i, block, x: block(x.mul_(2) if i else x), "does not read the output .* as it is"),
        (lambda i, block, x: block(x, 1.0 + i), "'blocks.1' has other arguments than 'blocks.0'"),
        (lambda i, block, x: x if i == 0 else block(x), "'blocks.1' is called before 'blocks.0'"),
        (lambda i, block, x: block(x=x), "'blocks.0' has no tensor as its first positional"),
    ],
)
def test_segments_of_blocks_that_do_not_follow_each_other_are_refused(between, message):
    module = segmented(between)
    with pytest.raises(StageFailed, match=f"^activation_checkpointing: segments .* {message}"):
        module(torch.ones(4, 8))
    with torch.no_grad():
        module(torch.ones(4, 8))  # nothing is saved there


def test_outputs_within_a_segment_are_those_of_its_blocks():
    torch.manual_seed(0)
    plain, seen = Chain(lambda i, block, x: block(x, scale=0.5)), []
    other = segmented(plain.between)
    other.load_state_dict(plain.state_dict())
    for module in (plain, other):
        for block in module.blocks:
            block.register_forward_hook(lambda block, args, output: seen.append(output))
        sum(out.sum() for out in [module(torch.ones(4, 8)), *seen[-4:]]).backward()
    assert all(map(torch.equal, seen[:4], seen[4:])) and len(seen) == 8
    for one, two in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)


def test_each_list_of_blocks_is_divided_evenly_but_for_its_last_segment():
    module = nn.Sequential(*[nn.Sequential(*[Block() for _ in range(n)]) for n in (10, 2)])
    blocks = chosen_blocks(module, ("Block",), "activation_checkpointing")

    def sizes(segments):
        found = split_into_segments(module, blocks, ActivationSegments(segments=segments))
        return [list(segment) for segment in found]

    first = [f"0.{index}" for index in range(10)]
    assert sizes("auto") == [first[:4], first[4:7]]
    assert sizes(2) == [first[:5], ["1.0"]]
    assert sizes(20) == [*[[name] for name in first[:9]], ["1.0"]]


def calls(setting, **more):
    """Return how often an operator runs in a forward and a backward pass."""
    module, counts = net(), Counter()
    training = Training(epochs=1, activation_checkpointing=setting, **more)
    checkpoint_activations_(module, training)
    module(torch.randn(64, 8))  # the first call measures

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counts[func.name()] += 1
            return func(*args, **(kwargs or {}))

    with Counting():
        module(torch.randn(64, 8)).sum().backward()
    return counts


def test_results_are_saved_within_the_budget_and_only_where_that_saves_products():
    none, full, selective = calls("none"), calls("full"), calls("selective")
    # Of each of 4 blocks' two products one is computed again; of the second one only its input is
    # needed, so that torch ends before it.
    assert full["aten::addmm"] == none["aten::addmm"] + 4
    assert selective["aten::addmm"] == none["aten::addmm"]
    assert full["aten::relu"] == selective["aten::relu"] == 2 * none["aten::relu"]
    assert calls("selective", activation_budget=0.3)["aten::addmm"] == full["aten::addmm"]


class Widths(nn.Module):
    """Multiplies by matrices of several sizes: bytes of results and FLOPs do not go together."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (16, 512, 16, 16, 512, 16)
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).sin()
        return x


def test_saved_are_the_results_that_cost_most_for_their_bytes():
    module = nn.Sequential(Widths(), Widths())
    x = torch.randn(64, 16)
    settings = {"activation_checkpointing": "selective", "activation_budget": 0.026}
    checkpoint_activations_(module, Training(epochs=1, **settings))
    module(x)
    # Besides the input there is room for two of three results of 16 columns.
    assert module[0].forward.saved == module[1].forward.saved == {1, 4}


def test_blocks_are_found_named_or_refused():
    module = net(2)
    assert [type(b) for b in repeated_blocks(module, "setting")] == [Block, Block]
    assert named_blocks(module, ["Block"], "wrap") == [module[1][1], module[1][0]]
    with pytest.raises(StageFailed, match=r"wrap: .* class 'Blok'; did you mean 'Block'\?"):
        named_blocks(module, ["Blok"], "wrap")
    with pytest.raises(StageFailed, match=r"^setting: .* no repeated blocks; name"):
        chosen_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), (), "setting")


def test_large_blocks_leave_attention_whole_and_tied_weights_outside():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    assert layer.self_attn in large_blocks(layer, 500)
    assert layer.self_attn.out_proj not in large_blocks(layer, 1)
    embedding, head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
    head.weight = embedding.weight
    assert large_blocks(nn.Sequential(embedding, Block(), head), 50)[0:1] != [embedding]
    assert head not in large_blocks(nn.Sequential(embedding, Block(), head), 50)


def test_weights_of_inner_blocks_are_not_counted_again():
    module = net(1)
    block = module[1][0]  # 288 + 264 weights
    assert large_blocks(module, 500) == [block]
    assert large_blocks(module, 250) == [block.up, block.down]


def test_the_whole_gradient_is_clipped_as_torch_does():
    one, two = net(1), net(1)
    two.load_state_dict(one.state_dict())
    for module in (one, two):
        module.eval()(torch.ones(2, 8)).sum().backward()
    torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
    clip_norm_(two.parameters(), 0.1)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    clip_norm_([torch.zeros(2, requires_grad=True)], 1.0)


def test_sparse_gradients_are_clipped_as_dense_ones() -> None:
    torch.manual_seed(0)
    tables = [nn.Embedding(20, 4, sparse=sparse) for sparse in (True, False)]
    tables[1].load_state_dict(tables[0].state_dict())
    for table in tables:
        table(torch.tensor([3, 3, 7])).sum().backward()
    norms = [clip_norm_(table.parameters(), 0.1) for table in tables]
    assert float(norms[0]) == pytest.approx(float(norms[1])) == pytest.approx((4 * 5) ** 0.5)
    torch.testing.assert_close(tables[0].weight.grad.to_dense(), tables[1].weight.grad)
