import pytest
import torch
from torch import nn

from compress.graph.flops import count_macs


def test_macs_equal_the_textbook_formulas() -> None:
    conv = nn.Conv2d(3, 8, 3, padding=1)
    assert count_macs(conv, (torch.zeros(1, 3, 5, 5),)) == 8 * 3 * 9 * 25
    assert count_macs(nn.Linear(4, 6), (torch.zeros(10, 4),)) == 24, "for one sample"


def test_the_fused_encoder_layer_is_counted() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    tokens = 5
    products = tokens * (4 * 16 * 16 + 2 * 16 * 32) + 2 * tokens * tokens * 16
    assert count_macs(layer, (torch.zeros(1, tokens, 16),)) == products
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize(("layer", "gates"), [(nn.RNN, 1), (nn.GRU, 3), (nn.LSTM, 4)])
def test_recurrent_layers_are_counted(layer: type[nn.RNNBase], gates: int) -> None:
    steps, inputs, units = 7, 5, 6
    module = layer(inputs, units, batch_first=True).eval()
    counted = count_macs(module, (torch.randn(2, steps, inputs),))
    assert counted == steps * gates * units * (inputs + units)


BRANCHES = """
import sys, torch
from torch import nn
from compress.graph.flops import count_macs

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return torch.cond(x.mean() > 0, self.one.forward, self.other.forward, (x,))

module, x = Branches(), torch.ones(2, 4)
for _ in range(2):
    before = "torch._dynamo" in sys.modules
    assert count_macs(module, (x,)) == 12
    with torch.inference_mode():
        assert torch.equal(module(x), module.one(x))
    print(before)
"""


@pytest.mark.slow  # Dynamo is imported in a fresh process
def test_a_model_with_torch_cond_runs_after_it_was_counted(fresh_process) -> None:
    """Whether Dynamo was imported before or not."""
    assert fresh_process(BRANCHES).split() == ["False", "True"]


@pytest.mark.parametrize(
    ("product", "macs"),
    [
        (lambda x, v, w: x @ v, 16),
        (lambda x, v, w: x[:, None].expand(-1, 3, -1) @ v, 3 * 16),
        (lambda x, v, w: torch.addmv(torch.zeros(2), x, v), 16),
        (lambda x, v, w: torch.stack([w @ row for row in x]), 5 * 16),
        (lambda x, v, w: torch.stack([torch.dot(row, v) for row in x]), 16),
        (lambda x, v, w: torch.addbmm(torch.zeros(16, 16), x[:, :, None], x[:, None]), 16 * 16),
        (lambda x, v, w: x @ w.mT, 5 * 16),
    ],
)
def test_products_with_vectors_are_counted(product, macs: int) -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vector, self.matrix = (nn.Parameter(torch.randn(*s)) for s in ((16,), (5, 16)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return product(x, self.vector, self.matrix)

    assert count_macs(Product(), (torch.randn(2, 16),)) == macs


def test_a_bilinear_layer_is_counted_as_its_two_products() -> None:
    class Bilinear(nn.Bilinear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x, x[..., :3])

    layer = Bilinear(4, 3, 5)
    assert count_macs(layer, (torch.randn(2, 4),)) == 5 * 4 * 3 + 5 * 3
    assert count_macs(layer, (torch.randn(2, 7, 4),)) == 7 * (5 * 4 * 3 + 5 * 3)
