"""Functions whose plain ONNX forms overflow or lose their digits, against torch in float64."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compress.common.errors import StageFailed
from compress.common.forward import Predictor
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.export.onnx.lowering import TRANSLATIONS, lower
from compress.export.onnx.proto_io import write
from compress.export.onnx.session import session_predictor
from compress.export.onnx.stage import ExportOnnx
from compress.export.parity import report
from compress.graph.torch_export import trace
from tests.export.builders import network_of

Function = Callable[[torch.Tensor], torch.Tensor]
ROWS = Signature(inputs=(TensorSpec(name="x", shape=("batch", 8)),))
SIZES = torch.tensor([-1e3, -3e2, -1e2, -20, -3, -0.7, -1e-3, -1e-9])
X = torch.stack([SIZES, -SIZES, SIZES.roll(3), -SIZES.roll(1), torch.linspace(-2, 2, 8)])
POSITIVE = X.abs()


def left(x: torch.Tensor) -> torch.Tensor:
    return x[:, :4]


def right(x: torch.Tensor) -> torch.Tensor:
    return x[:, 4:]


def loss(x: torch.Tensor, **settings: object) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(left(x), right(x).sigmoid(), **settings)


CASES: dict[str, tuple[Function, torch.Tensor]] = {
    "logsigmoid": (F.logsigmoid, X),
    "logaddexp": (lambda x: torch.logaddexp(left(x), right(x)), X),
    "logaddexp2": (lambda x: torch.logaddexp2(left(x), right(x)), X),
    "logcumsumexp": (lambda x: torch.logcumsumexp(x, -1), X),
    "logcumsumexp_of_rows": (lambda x: torch.logcumsumexp(x, 0), X),
    "log1p": (torch.log1p, POSITIVE),
    "log1p_below_zero": (torch.log1p, -POSITIVE.clamp(max=0.999)),
    "expm1": (torch.expm1, X.clamp(max=80)),
    "erfc": (torch.erfc, X.clamp(max=9)),
    "erfcx": (torch.special.erfcx, X.clamp(min=-8)),
    "log_ndtr": (torch.special.log_ndtr, X),
    "xlog1py": (lambda x: torch.special.xlog1py(left(x), right(x).abs()), X),
    "loss": (lambda x: loss(x, reduction="none"), X),
    "mean_loss": (lambda x: loss(x), X),
    "sum_of_weighted_losses": (
        lambda x: loss(x, reduction="sum", weight=torch.tensor([1.0, 2, 3, 4]).to(x)),
        X,
    ),
    "loss_of_rare_labels": (
        lambda x: loss(x, reduction="none", pos_weight=torch.tensor([9.0, 2, 3, 0.5]).to(x)),
        X,
    ),
}


class Net(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def exported(function: Function, folder: Path) -> Predictor:
    with torch.no_grad():
        program = trace(Net(function).eval(), ROWS.example(), ROWS)
    write(lower(program, ROWS, None), folder / "model.onnx")
    return session_predictor(folder / "model.onnx", threads=1)


@pytest.mark.parametrize("name", CASES)
def test_every_element_is_as_exact_as_float32_allows(name: str, tmp_path: Path) -> None:
    function, x = CASES[name]
    expected, (got,) = function(x.double()), exported(function, tmp_path)(x)
    # What is smaller than float32's least normal number may be 0.
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-37)


@pytest.mark.parametrize("name", ["logsigmoid", "logaddexp", "logaddexp2", "log1p", "expm1"])
def test_infinities_and_nan_are_torch_s(name: str, tmp_path: Path) -> None:
    inf, nan = torch.inf, torch.nan
    x = torch.tensor([[inf, -inf, nan, inf, inf, -inf, 1, -inf], [-1, inf, -inf, -2, 0, 0, 0, 0]])
    function = CASES[name][0]
    torch.testing.assert_close(exported(function, tmp_path)(x)[0], function(x), equal_nan=True)


def test_sums_of_nothing_but_infinities(tmp_path: Path) -> None:
    x = torch.full((2, 8), -torch.inf)
    x[1, 3:] = 1
    x[1, 6] = torch.inf
    function = CASES["logcumsumexp"][0]
    torch.testing.assert_close(exported(function, tmp_path)(x)[0], function(x))


PLAIN = {
    "logsigmoid": (torch.ops.aten.log_sigmoid.default, "times 10"),
    "log1p": (torch.ops.aten.log1p.default, "brought to 1e-09"),
    "expm1": (torch.ops.aten.expm1.default, "brought to 1e-09"),
    "logaddexp": (torch.ops.aten.logaddexp.default, "brought to 1000"),
}
SOURCE = """
import torch
import torch.nn.functional as F
from torch import nn

class Function(nn.Module):
    def forward(self, x):
        return {expression}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.function = Function()

    def forward(self, x):
        return 2 * self.function(x)
"""
EXPRESSIONS = {
    "logsigmoid": "F.logsigmoid(x)",
    "log1p": "torch.log1p(x.abs())",
    "expm1": "torch.expm1(-x.abs())",
    "logaddexp": "torch.logaddexp(x[:, :4], x[:, 4:])",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    # The inputs that show log1p's show expm1's.
    "name",
    [pytest.param(n, marks=[pytest.mark.soak] * (n == "expm1")) for n in PLAIN],
)
def test_the_plain_form_is_refused_and_its_layer_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SOURCE.format(expression=EXPRESSIONS[name])
    model = network_of(tmp_path, source, "stable:Net", ROWS)
    ExportOnnx()(model, Context(root=tmp_path / "stable"))
    monkeypatch.setattr(report, "LEAST_SECONDS", 120.0)  # on a busy machine too
    operator, kind = PLAIN[name]
    monkeypatch.delitem(TRANSLATIONS, operator)
    layer = rf"adversarial inputs \(real inputs {kind}\).* first layer .* is function \(aten"
    with pytest.raises(StageFailed, match=layer):
        ExportOnnx()(model, Context(root=tmp_path / "plain"))
