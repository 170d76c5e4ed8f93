import pytest
import torch
from torch import nn

from compress.core.errors import StageFailed
from compress.training.activations import checkpoint_activations_
from compress.training.blocks import large_blocks, named_blocks, repeated_blocks
from compress.training.clipping import clip_norm_
from compress.training.settings import Training


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.dropout(self.up(x).relu()))


def net(depth=4):
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(*[Block() for _ in range(depth)]))


def saved_bytes(module, x):
    """Return the bytes of activations kept for the backward pass, weights left out."""
    weights = {p.data_ptr() for p in module.parameters()}
    kept = {}

    def pack(tensor):
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = module(x).square().mean()
    total = sum(t.numel() * t.element_size() for t in kept.values())
    loss.backward()
    return total


@pytest.mark.parametrize(("setting", "share"), [("full", 0.4), (2, 0.75)])
def test_gradients_and_names_stay_and_less_is_kept(setting, share):
    torch.manual_seed(0)
    plain, other = net(), net()
    other.load_state_dict(plain.state_dict())
    checkpoint_activations_(other, Training(epochs=1, activation_checkpointing=setting))
    x = torch.randn(64, 8)
    torch.manual_seed(1)
    kept = saved_bytes(plain, x)
    torch.manual_seed(1)
    assert saved_bytes(other, x) < share * kept
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in other.named_parameters()] == names
    for one, two in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)  # dropout drew the same numbers again


def test_blocks_are_found_named_or_refused():
    module = net(2)
    assert [type(b) for b in repeated_blocks(module)] == [Block, Block]
    assert named_blocks(module, ["Block"], "wrap") == [module[1][1], module[1][0]]
    with pytest.raises(StageFailed, match=r"wrap: .* class 'Blok'; did you mean 'Block'\?"):
        named_blocks(module, ["Blok"], "wrap")
    with pytest.raises(StageFailed, match="no repeated blocks; name their classes"):
        repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


def test_large_blocks_leave_attention_whole_and_tied_weights_outside():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    assert layer.self_attn in large_blocks(layer, 500)
    assert layer.self_attn.out_proj not in large_blocks(layer, 1)
    embedding, head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
    head.weight = embedding.weight
    assert large_blocks(nn.Sequential(embedding, Block(), head), 50)[0:1] != [embedding]
    assert head not in large_blocks(nn.Sequential(embedding, Block(), head), 50)


def test_what_inner_blocks_hold_is_not_counted_again():
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
