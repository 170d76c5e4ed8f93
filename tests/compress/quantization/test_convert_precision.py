import math
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.errors import StageFailed
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.data.splits import Splits
from compress.export.onnx.stage import ExportOnnx
from compress.export.torchscript.stage import ExportTorchScript
from compress.quantization.stages.half_precision import ConvertPrecision
from tests.compress.quantization.builders import (
    IMAGE,
    TOKENS,
    answer,
    build_model,
    relative_error,
)
from tests.compress.quantization.conftest import FreshProcessCheck

ROWS = Signature(inputs=(TensorSpec(name="x", shape=("batch", 8)),))
SERIES = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4, 7)),))
MASKED = Signature(
    inputs=(
        TensorSpec(name="tokens", shape=("batch", "length"), dtype="int64"),
        TensorSpec(name="mask", shape=("batch", "length"), dtype="int64"),
    )
)


def data(signature: Signature) -> Splits:
    rows = [tuple(x[0] for x in signature.example(1, seed=seed)) for seed in range(32)]
    samples = [(row, torch.tensor(0)) for row in rows]
    return Splits({"train": samples, "val": samples}, batch_size=16)


def halved(model: EagerModel, root: Path, dtype: str = "float16", **settings: object) -> GraphModel:
    stage = ConvertPrecision.model_validate({"dtype": dtype, "calibration_samples": 32, **settings})
    return stage(model, Context(root=root, data=data(model.signature)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_are_halved_and_answers_keep_type_and_value(tmp_path: Path, dtype: str) -> None:
    model = build_model(tmp_path / "source", "networks:mobilenet", IMAGE)
    half = halved(model, tmp_path / "half", dtype)
    state = half.program().state_dict
    assert {tensor.dtype for tensor in state.values()} == {getattr(torch, dtype)}
    assert half.manifest.facts["float32_for_their_numbers"] == {}
    assert half.manifest.facts["quantized_operators"]["conv2d"] == 3
    (image,) = IMAGE.example(5)
    expected, got = answer(model, image), answer(half, image)
    assert got.dtype is torch.float32
    eps = torch.finfo(getattr(torch, dtype)).eps
    assert 0 < relative_error(expected, got) < 2 * eps
    assert half.macs() == model.macs()


@pytest.mark.slow
def test_sensitive_operators_and_hidden_scores_stay_float32(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "halves:encoder", MASKED)
    half = halved(model, tmp_path / "half")
    facts = half.manifest.facts
    assert facts["float32_operators"] == {"layer_norm": 1, "mean": 1, "softmax": 1}
    # The mask's -3.4e38 would be infinite in float16, and infinity times 0 is no number.
    (reason,) = set(facts["float32_for_their_numbers"].values()) - {"computes with -3.4e+38"}
    assert reason == "reaches 3.4e+38, float16 ends at 6.55e+04"
    tokens = torch.arange(12).view(2, 6)
    for mask in (torch.ones(2, 6, dtype=torch.int64), torch.zeros(2, 6, dtype=torch.int64)):
        assert relative_error(answer(model, tokens, mask), answer(half, tokens, mask)) < 1e-3


def test_what_overflows_on_the_data_stays_float32(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "halves:wide", ROWS)
    half = halved(model, tmp_path / "half")
    reasons = half.manifest.facts["float32_for_their_numbers"]
    assert set(reasons) == {"weight loud.weight", "linear of loud"}
    assert "float16 ends at 6.55e+04" in reasons["linear of loud"]
    state = half.program().state_dict
    assert {name for name, t in state.items() if t.dtype is torch.float32} == {
        "loud.weight",
        "loud.bias",
    }
    (x,) = ROWS.example(9)
    assert relative_error(answer(model, x), answer(half, x)) < 1e-3
    wide_range = halved(model, tmp_path / "bf16", "bfloat16")
    assert wide_range.manifest.facts["float32_for_their_numbers"] == {}


def test_headroom_lowers_the_largest_value_allowed(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "networks:mlp", IMAGE)
    largest = max(float(x.abs().max()) for b in data(IMAGE).batches("train") for x in b.inputs)
    just = torch.finfo(torch.float16).max / largest
    near = halved(model, tmp_path / "near", headroom=math.floor(just))
    assert near.manifest.facts["float32_for_their_numbers"] == {}
    far = halved(model, tmp_path / "far", headroom=math.ceil(just))
    (reason,) = far.manifest.facts["float32_for_their_numbers"].values()
    assert reason == f"reaches {largest:.3g}, float16 ends at 6.55e+04"


def test_weights_that_would_vanish_stay_float32(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "halves:faint", ROWS)
    half = halved(model, tmp_path / "half")
    reasons = half.manifest.facts["float32_for_their_numbers"]
    assert "loses" in reasons["weight faint.weight"]
    assert half.program().state_dict["faint.weight"].dtype is torch.float32
    (x,) = ROWS.example(9)
    assert relative_error(answer(model, x), answer(half, x)) < 1e-3


def test_excluded_modules_stay_float32(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "networks:sequence", TOKENS)
    state = halved(model, tmp_path / "half", exclude=["d*n"]).program().state_dict
    assert state["down.weight"].dtype is torch.float32
    assert state["up.weight"].dtype is torch.float16


def test_a_shared_weight_is_stored_once(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "halves:tied", TOKENS)
    half = halved(model, tmp_path / "half")
    held = {t.data_ptr(): t.numel() * t.element_size() for t in half.program().state_dict.values()}
    assert sum(held.values()) == 40 * 32 * 2


def test_onnxruntime_answers_like_torch_from_half_the_file(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "networks:recurrent", SERIES)
    half = halved(model, tmp_path / "half")
    onnx = ExportOnnx()(half, Context(root=tmp_path / "onnx"))
    (x,) = SERIES.example(3)
    # A transposed batch before a float16 product ends onnxruntime's process, if left alone.
    assert relative_error(answer(half, x), answer(onnx, x)) < 1e-3
    assert onnx.manifest.facts["operators"]["LSTM"] == 1
    assert onnx.parameters() == half.parameters()


def test_torchscript_answers_like_torch(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "networks:sequence", TOKENS)
    half = halved(model, tmp_path / "half", "bfloat16")
    scripted = ExportTorchScript()(half, Context(root=tmp_path / "ts"))
    (tokens,) = TOKENS.example(3)
    assert torch.equal(answer(scripted, tokens), answer(half, tokens))
    assert scripted.parameters() == model.parameters()
    assert scripted.payload_bytes < model.payload_bytes


def test_bfloat16_is_refused_by_onnx_before_anything_is_lowered(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "networks:mlp", IMAGE)
    half = ConvertPrecision(dtype="bfloat16")(model, Context(root=tmp_path / "half"))
    with pytest.raises(StageFailed, match=r"no kernels on the CPU .* dtype: float16"):
        ExportOnnx()(half, Context(root=tmp_path / "onnx"))


def test_float16_needs_data_and_numbers(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "networks:mlp", IMAGE)
    with pytest.raises(StageFailed, match="needs data"):
        ConvertPrecision(dtype="float16")(model, Context(root=tmp_path / "half"))
    rows = [((torch.full((1, 8, 8), math.nan),), torch.tensor(0))] * 32
    context = Context(root=tmp_path / "half", data=Splits({"train": rows}, 16))
    with pytest.raises(StageFailed, match="input image is NaN"):
        ConvertPrecision(dtype="float16", calibration_samples=32)(model, context)
    with pytest.raises(StageFailed, match="no operator can compute in float16"):
        halved(model, tmp_path / "half", exclude=["*"])
    with pytest.raises(ValidationError, match="headroom"):
        ConvertPrecision(dtype="float16", headroom=0.5)
    assert not (tmp_path / "half").exists()


@pytest.mark.slow
def test_a_fresh_process_answers_alike(
    tmp_path: Path, assert_same_in_fresh_process: FreshProcessCheck
) -> None:
    model = build_model(tmp_path / "source", "networks:sequence", TOKENS)
    assert_same_in_fresh_process(halved(model, tmp_path / "half"), *TOKENS.example(3))
