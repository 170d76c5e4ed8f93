"""A graph is traced anew only where an operator has no ONNX form, and the file is the same."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.onnx._internal.exporter import _fx_passes

from compress.common.errors import StageFailed
from compress.common.signature import Signature, TensorSpec
from compress.export.onnx import lowering
from compress.graph.torch_export import export_program

SIGNATURE = Signature(inputs=(TensorSpec(name="x", shape=("batch", 3, 16, 16)),))


class Network(nn.Module):
    def __init__(self, compute: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.plain_norm = nn.BatchNorm2d(3, affine=False)
        self.register_buffer("calls", torch.zeros(1))
        self.compute = compute

    def forward(self, x: torch.Tensor) -> Any:
        return self.compute(self, x)


def residual(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = F.relu(net.norm(net.conv(x)), inplace=True)
    y += x
    return F.dropout(F.adaptive_avg_pool2d(F.relu(y, inplace=True), 1).flatten(1), 0.5, False)


def outputs(net: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    inside = (x > 0) & (x < 1)
    return x.to(torch.float32), inside.to(torch.int64), F.relu_(x * 2), x.flatten(1), net.norm(x)


def moved(net: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    mask = torch.ones(16, device=x.device).to(device=x.device, dtype=torch.float64)
    return net.norm(x).to("cpu") * 2, mask.expand_as(x) * x, x.mean((2, 3), True).expand_as(x) + x


def reshaped(net: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = net.conv(x)
    return y.flatten(2), y.flatten(1, 2), y.unflatten(1, (1, -1)), y.unflatten(-1, (4, 4))


def merged_with_rows(net: Any, x: torch.Tensor) -> torch.Tensor:
    return net.conv(x).flatten(0, 1)


def written_and_read(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.conv(x)
    before = y * 2
    y.add_(1)
    return before + y


def written_view(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.conv(x)
    y.view(-1, 3, 256).mul_(2)
    return y


def written_copy(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.to(torch.float32, copy=True)
    y += 1
    return x * y


def written_buffer(net: Any, x: torch.Tensor) -> torch.Tensor:
    return x + net.calls.add_(1)


def wider_write(net: Any, x: torch.Tensor) -> torch.Tensor:
    return net.conv(x).add_(x.double())


def without_weights(net: Any, x: torch.Tensor) -> torch.Tensor:
    return F.adaptive_avg_pool2d(net.plain_norm(x), (2, 2)).flatten(2)


def written_list(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.conv(x)
    torch._foreach_add_([y], 1.0)
    return y


PLAIN = [residual, outputs, moved, reshaped]
OTHERS = [
    merged_with_rows,
    written_and_read,
    written_view,
    written_buffer,
    wider_write,
    without_weights,
]


def exported(compute: Any, monkeypatch: pytest.MonkeyPatch, *, as_torch: bool) -> tuple[Any, int]:
    """Return a network's ONNX graph, by operator, and how often it was traced anew."""
    retrace, traced = _fx_passes.decompose_with_registry, []

    def count(*arguments: Any) -> Any:
        traced.append(arguments)
        return retrace(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(_fx_passes, "decompose_with_registry", count)
        if as_torch:
            patch.setattr(lowering, "retraced_where_needed", nullcontext)
        program = export_program(Network(compute).eval(), SIGNATURE)
        model = lowering.lower(program, SIGNATURE, None)
    return [operator_of(node) for node in model.graph], len(traced)


def operator_of(node: ir.Node) -> tuple[Any, ...]:
    attributes = [str(attribute) for attribute in node.attributes.values()]
    return node.op_type, attributes, [(str(v.type), str(v.shape)) for v in node.outputs]


@pytest.mark.parametrize("compute", PLAIN + OTHERS)
def test_a_graph_is_traced_anew_only_where_it_must(
    compute: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    expected, _ = exported(compute, monkeypatch, as_torch=True)
    caplog.clear()
    found, traced = exported(compute, monkeypatch, as_torch=False)
    if compute is moved:  # a size is read where it is needed, and not first
        found, expected = sorted(found, key=str), sorted(expected, key=str)
    assert found == expected
    assert not caplog.records, "users would wonder what torch's notes mean"
    assert traced == (compute in OTHERS)


def test_a_write_to_a_list_of_tensors_is_named_as_what_has_no_form() -> None:
    program = export_program(Network(written_list).eval(), SIGNATURE)
    with pytest.raises(StageFailed, match="_foreach_add"):
        lowering.lower(program, SIGNATURE, None)
