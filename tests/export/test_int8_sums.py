"""Exact int8 sums are asked of onnxruntime where the processor needs it, and only there."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from compress.export.common import int8_sums
from compress.export.onnx.session import session_predictor
from compress.serve.worker.loaders import load_onnx

ENTRY = "session.x64quantprecision"


@pytest.fixture(autouse=True)
def _not_cached():
    int8_sums.has_16_bit_sums.cache_clear()
    yield
    int8_sums.has_16_bit_sums.cache_clear()


def test_the_processor_is_known_with_and_without_linux(monkeypatch):
    found = torch.cpu.get_capabilities()
    exact = any(found.get(name) for name in int8_sums.EXACT_INSTRUCTIONS)
    expected = found.get("architecture") == "x86_64" and not exact
    assert int8_sums.has_16_bit_sums() == expected

    def no_file(*_):
        raise FileNotFoundError

    int8_sums.has_16_bit_sums.cache_clear()
    monkeypatch.setattr(Path, "read_text", no_file)
    assert int8_sums.has_16_bit_sums() == expected


@pytest.mark.parametrize(
    ("flags", "machine", "expected"),
    [
        ("flags : avx2 fma", "x86_64", "1"),
        ("flags : avx2 avx512_vnni", "x86_64", "0"),
        ("flags : avx2 avx_vnni", "AMD64", "0"),
        ("Features : asimd", "aarch64", "0"),
    ],
)
def test_sessions_ask_for_exact_sums_on_x86_without_vnni_alone(
    flags, machine, expected, monkeypatch, tmp_path
):
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", [x], [y])
    opset = helper.make_opsetid("", 21)
    file = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=10), file)
    entries, session = [], onnxruntime.InferenceSession

    def observed(path, options, providers):
        try:
            entries.append(options.get_session_config_entry(ENTRY))
        except RuntimeError:  # not set
            entries.append("0")
        return session(path, options, providers)

    monkeypatch.setattr(onnxruntime, "InferenceSession", observed)
    monkeypatch.setattr(int8_sums.platform, "machine", lambda: machine)
    monkeypatch.setattr(Path, "read_text", lambda *_: flags)
    one = np.ones(1, np.float32)
    assert session_predictor(file, 1)(torch.from_numpy(one))[0].tolist() == [-1]
    settings = {"inputs": [{"name": "x"}], "outputs": ["y"]}
    assert load_onnx(file, settings, 1)([one])[0].tolist() == [-1]
    assert entries == [expected, expected]
