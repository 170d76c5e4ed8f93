"""Weights become integers a few rows at a time, and are not dequantized on the way."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.fx import Node

from compress.common.signature import Signature, TensorSpec
from compress.quantization.config.dtype_scheme import scheme_for
from compress.quantization.pt2e import torchao_api
from compress.quantization.pt2e.graph_capture import capture
from compress.quantization.ptq.calibrate import DynamicQuantizer, convert, prepare

IDS = Signature(inputs=(TensorSpec(name="ids", shape=("batch", 6), dtype="int64"),))
QUANTIZED = torch.ops.quantized_decomposed


def integers_of(module: nn.Module) -> dict[str, torch.Tensor]:
    scheme = scheme_for("onnxruntime-cpu")
    prepared = prepare(capture(module, IDS), DynamicQuantizer(scheme, embeddings=True))
    prepared(*IDS.example())
    return dict(convert(prepared).state_dict())


def test_weights_in_parts_are_those_of_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 30)).eval()
    original: Callable[..., object] = torchao_api._deduce
    left: list[object] = []

    def record(folder: object, node: Node) -> object:
        left.append(node.target)
        return original(folder, node)

    monkeypatch.setattr(torchao_api, "_deduce", record)
    whole = integers_of(module)
    assert left.count(QUANTIZED.quantize_per_channel.default) == 2
    left.clear()
    monkeypatch.setattr(torchao_api, "AT_ONCE", 8 * 7)  # seven rows, and a rest
    parts = integers_of(module)
    assert not {QUANTIZED.quantize_per_channel.default} & {*left}
    assert QUANTIZED.dequantize_per_channel.default not in left
    assert whole.keys() == parts.keys()
    assert sum(tensor.dtype == torch.int8 for tensor in parts.values()) == 2
    for name, tensor in whole.items():
        assert torch.equal(parts[name], tensor)
        assert parts[name].stride() == tensor.stride()
    monkeypatch.setattr(torchao_api, "_constant_value", original)  # torchao's own
    assert all(torch.equal(parts[name], x) for name, x in integers_of(module).items())
