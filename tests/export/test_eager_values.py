"""Exports answer as PyTorch does for masks, windows, shared weights and outputs of any kind."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from compress.artifacts.artifact import Artifact
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.forward import plain_attention, run_in_eval
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.core.stage import Stage
from compress.export.exported_program import ExportProgram
from compress.export.onnx.stage import ExportOnnx
from compress.export.openvino.stage import ExportOpenVINO
from compress.export.torchscript.stage import ExportTorchScript
from compress.quantization.stages.dynamic import QuantizeDynamic
from compress.quantization.stages.static import QuantizeStatic
from tests.export.builders import samples

ROWS, LENGTH, WIDTH = 14, 6, 8


class Function(nn.Module):
    """Calls a function with some layers and the inputs."""

    def __init__(self, function: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(*self.layers, x)


class TwoInputs(Function):
    """The same with two inputs."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:  # type: ignore[override]
        return self.function(*self.layers, x, y)


def built(
    module: nn.Module,
    *inputs: torch.Tensor,
    names: tuple[str, ...] = ("x", "y"),
    open_: bool = False,
) -> tuple[EagerModel, Context]:
    """Return a module as an artifact, and a context whose `val` are the inputs."""
    specs = []
    for name, x in zip(names, inputs, strict=False):
        axes = tuple(f"axis_{i}" if open_ and i else size for i, size in enumerate(x.shape[2:], 1))
        shape = ("batch", *x.shape[1:2], *axes)
        specs.append(TensorSpec(name=name, shape=shape, dtype=str(x.dtype)[6:]))  # type: ignore[arg-type]
    model = EagerModel.from_module(module.eval(), signature=Signature(inputs=tuple(specs)))
    return model, Context(root=Path(), data=samples(*inputs))


def outputs_of(artifact: Artifact, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with artifact.open() as predict:
        return tuple(y.clone() for y in predict(*inputs))


def exported(module: nn.Module, folder: Path, *inputs: torch.Tensor, **named: Any) -> Artifact:
    """Export a module to ONNX by torch's usual exporter; compare it with the module."""
    model, context = built(module, *inputs, **named)
    artifact = ExportOnnx()(model, context.with_root(folder / "onnx"))
    assert artifact.manifest.facts["exporter"] == "dynamo"
    with plain_attention():
        expected = run_in_eval(module, inputs)
    for a, b in zip(expected, outputs_of(artifact, *inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
    return artifact


def lengths_mask() -> torch.Tensor:
    """Return masks of rows of no element, of one, and so on to all, twice."""
    return torch.arange(LENGTH)[None] < (torch.arange(ROWS) % (LENGTH + 1))[:, None]


def bool_mask(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    heads = x.view(-1, LENGTH, 2, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, keep.bool()[:, None, None])


def infinite_mask(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    heads = x.view(-1, LENGTH, 2, 4).transpose(1, 2)
    mask = torch.zeros(keep.shape).masked_fill(~keep.bool(), -math.inf)[:, None, None]
    return F.scaled_dot_product_attention(heads, heads, heads, mask)


def lowest_mask(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    heads = x.view(-1, LENGTH, 2, 4).transpose(1, 2)
    mask = (1.0 - keep.float()) * torch.finfo(torch.float32).min
    return F.scaled_dot_product_attention(heads, heads, heads, mask[:, None, None])


def without_heads(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x, keep.bool()[:, None])


MASKS = (bool_mask, infinite_mask, lowest_mask, without_heads)


@pytest.mark.parametrize(
    ("attend", "name"),
    [
        *((attend, "mask") for attend in MASKS),
        # By its name it is no mask: one of these goes the way of the others.
        (bool_mask, "valid"),
        *(pytest.param(attend, "valid", marks=pytest.mark.soak) for attend in MASKS[1:]),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_rows_that_are_masked_whole_have_torchs_answers(
    tmp_path: Path, attend: Callable[..., torch.Tensor], name: str
) -> None:
    x = torch.randn(ROWS, LENGTH, WIDTH)
    exported(TwoInputs(attend), tmp_path, x, lengths_mask(), names=("x", name))


@pytest.mark.parametrize(
    "name", ["padding", pytest.param("key_padding_mask", marks=pytest.mark.soak)]
)
def test_padding_of_torchs_own_attention_may_fill_a_row(tmp_path: Path, name: str) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1)
    module = TwoInputs(lambda encoder, x, pad: encoder(x, src_key_padding_mask=pad), encoder)
    x = torch.randn(ROWS, LENGTH, WIDTH)
    exported(module, tmp_path, x, ~lengths_mask(), names=("x", name))


class Decoder(nn.Module):
    """torch's own decoder, with a causal mask that it is given, or makes."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(WIDTH, 2, 16, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is None:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.decoder(x, x[:, :2], tgt_mask=mask)


@pytest.mark.parametrize(
    "stage",
    # OpenVINO's files are made of the graph that is written as ONNX.
    [
        ExportOnnx(),
        *(pytest.param(s, marks=pytest.mark.soak) for s in (ExportTorchScript(), ExportOpenVINO())),
    ],
)
def test_torchs_decoder_is_exported_with_its_mask(tmp_path: Path, stage: Stage[Any, Any]) -> None:
    if stage.stage == "export_openvino":
        pytest.importorskip("openvino")
    module, x = Decoder().eval(), torch.randn(3, LENGTH, WIDTH)
    spec = TensorSpec(name="x", shape=("batch", "length", WIDTH))
    model = EagerModel.from_module(module, signature=Signature(inputs=(spec,)))
    artifact = stage(model, Context(root=tmp_path / "made"))
    for inputs in (x, x[:, :3]):
        torch.testing.assert_close(
            outputs_of(artifact, inputs)[0], module(inputs), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("stage", [ExportOnnx(), ExportTorchScript()])
def test_a_mask_that_is_an_input_is_read(tmp_path: Path, stage: Stage[Any, Any]) -> None:
    causal = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    module, x = Decoder().eval(), torch.randn(3, LENGTH, WIDTH)
    specs = (
        TensorSpec(name="x", shape=("batch", LENGTH, WIDTH)),
        TensorSpec(name="mask", shape=(LENGTH, LENGTH)),
    )
    model = EagerModel.from_module(
        module, signature=Signature(inputs=specs), example_inputs=(x, causal)
    )
    artifact = stage(model, Context(root=tmp_path / "made"))
    for mask in (causal, torch.zeros(LENGTH, LENGTH), causal.T.contiguous()):
        torch.testing.assert_close(
            outputs_of(artifact, x, mask)[0], module(x, mask), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("dtype", [torch.int64, pytest.param(torch.int32, marks=pytest.mark.soak)])
def test_numbers_minus_integers_are_exported_from_graphs(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    module = TwoInputs(lambda layer, x, keep: layer(x) * (1.0 - keep), nn.Linear(WIDTH, WIDTH))
    x, keep = torch.randn(32, WIDTH), torch.randint(0, 2, (32, WIDTH), dtype=dtype)
    model, context = built(module, x, keep)
    for i, stage in enumerate((ExportProgram(), QuantizeDynamic(), QuantizeStatic())):
        graph = stage(model, context.with_root(tmp_path / f"{i}"))  # type: ignore[operator]
        artifact = ExportOnnx()(graph, context.with_root(tmp_path / f"{i}_onnx"))
        (expected,), (found,) = outputs_of(graph, x, keep), outputs_of(artifact, x, keep)
        torch.testing.assert_close(expected, found, rtol=0.02, atol=0.02)


WINDOWS = {
    "average, last in the padding": nn.AvgPool2d(3, 3, 1, ceil_mode=True),
    "largest, last in the padding": nn.MaxPool2d(2, 2, 1, ceil_mode=True),
    "average, over the end": nn.AvgPool2d(3, 2, 1, ceil_mode=True),
    "average without padding": nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
    "largest, dilated": nn.MaxPool2d(2, 2, 1, dilation=2, ceil_mode=True),
    "divisor": nn.AvgPool2d(3, 2, 1, divisor_override=5),
    "divisor, over the end": nn.AvgPool2d(3, 3, 1, ceil_mode=True, divisor_override=4),
    "adaptive": nn.AdaptiveAvgPool2d((7, 5)),
    "adaptive, divisible": nn.AdaptiveAvgPool2d((4, 4)),
    "adaptive, largest": nn.AdaptiveMaxPool2d((7, 5)),
}


def all_of(pools: Iterable[nn.Module], x: torch.Tensor) -> list[torch.Tensor]:
    return [pool(x) for pool in pools]


def test_windows_are_torchs(tmp_path: Path) -> None:
    # All in one file: an output for each.
    pools = nn.ModuleList(WINDOWS.values())
    module = Function(lambda conv, pools, x: all_of(pools, conv(x)), nn.Conv2d(1, 2, 1), pools)
    artifact = exported(module, tmp_path, torch.randn(8, 1, 8, 8))
    assert len(artifact.signature.outputs) == len(WINDOWS)


CEIL = [
    nn.AvgPool2d(2, 2, ceil_mode=True),
    nn.AvgPool2d(3, 2, 1, ceil_mode=True),
    nn.AvgPool2d(3, 3, 1, ceil_mode=True),
    nn.AvgPool2d(3, 3, 1, ceil_mode=True, count_include_pad=False),
    nn.AvgPool2d(3, 2, 1, ceil_mode=True, divisor_override=2),
    nn.AvgPool2d((3, 2), (2, 3), (1, 0), ceil_mode=True),
    nn.MaxPool2d(2, 2, 1, ceil_mode=True),
    nn.MaxPool2d(3, 3, 1, ceil_mode=True),
    nn.MaxPool2d(1, 2, ceil_mode=True),
    nn.MaxPool2d(3, 4, 1, ceil_mode=True),
    nn.MaxPool2d(2, 3, 1, 2, ceil_mode=True),
]


@pytest.mark.parametrize(
    "stage",
    [ExportOnnx(), pytest.param(ExportOpenVINO(), marks=pytest.mark.soak)],
    ids=["onnx", "openvino"],
)
def test_windows_of_any_size_are_torchs(tmp_path: Path, stage: Stage[Any, Any]) -> None:
    if stage.stage == "export_openvino":
        pytest.importorskip("openvino")

    module = Function(lambda conv, x: all_of(CEIL, conv(x)), nn.Conv2d(1, 2, 1))
    model, context = built(module, torch.randn(8, 1, 8, 8), open_=True)
    artifact = stage(model, context.with_root(tmp_path / "exported"))
    with artifact.open() as predict, torch.no_grad():
        for size in [(h, w) for h in range(5, 13) for w in (5, 8, 11)]:
            x = torch.randn(2, 1, *size)
            torch.testing.assert_close(predict(x), tuple(module(x)))


def test_adaptive_windows_of_any_size_are_torchs(tmp_path: Path) -> None:
    pools = nn.AdaptiveAvgPool2d((7, 5)), nn.AdaptiveMaxPool2d((7, 5))
    module = Function(lambda conv, x: all_of(pools, conv(x)), nn.Conv2d(1, 2, 1))
    artifact = exported(module, tmp_path, torch.randn(4, 1, 8, 8), open_=True)
    for size in ((13, 17), (5, 4), (7, 10)):
        x = torch.randn(3, 1, 8, 8)[:, :, : size[0], : size[1]] if max(size) < 9 else None
        x = torch.randn(3, 1, *size) if x is None else x
        torch.testing.assert_close(outputs_of(artifact, x), tuple(module(x)))


@pytest.mark.parametrize("groups", [2, pytest.param(4, marks=pytest.mark.soak)])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_grouped_transposed_convolutions_before_batch_norm_are_quantized(
    tmp_path: Path, axes: int, groups: int
) -> None:
    conv, transposed, norm = (
        getattr(nn, f"{name}{axes}d") for name in ("Conv", "ConvTranspose", "BatchNorm")
    )
    module = nn.Sequential(conv(3, 4, 1), transposed(4, 4, 3, groups=groups), norm(4))
    module[2].running_var.uniform_(0.5, 2)
    x = torch.randn(32, 3, *[4] * axes)
    model, context = built(module, x)
    graph = QuantizeStatic()(model, context.with_root(tmp_path / "int8"))
    (found,) = outputs_of(graph, x)
    assert (found - module(x)).norm() < 0.05 * module(x).norm()


def shared_convolution() -> nn.Module:
    layer = nn.Conv2d(2, 2, 1)
    return Function(lambda layer, x: layer(layer(x).relu()), layer)


def shared_products() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    return Function(lambda layer, x: layer(layer(x).relu()) + layer(x / 2), layer)


def shared_bias() -> nn.Module:
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    second.bias = first.bias
    return Function(lambda first, second, x: second(first(x * 9).relu()), first, second)


@pytest.mark.parametrize(
    ("build", "stage", "shape"),
    [
        (shared_convolution, QuantizeStatic(), (32, 2, 4, 4)),
        (shared_products, QuantizeStatic(), (32, WIDTH)),
        (shared_products, QuantizeDynamic(), (32, WIDTH)),
        (shared_bias, QuantizeStatic(), (32, WIDTH)),
    ],
)
def test_operators_share_no_integers(
    tmp_path: Path, build: Callable[[], nn.Module], stage: Any, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model, context = built(build(), torch.randn(shape))
    graph = stage(model, context.with_root(tmp_path / "int8"))
    artifact = ExportOnnx()(graph, context.with_root(tmp_path / "onnx"))
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")
    onnxruntime.InferenceSession(str(artifact.payload_path), options, ["CPUExecutionProvider"])


PARAMETRIZED = (
    lambda: parametrizations.weight_norm(nn.LayerNorm(WIDTH)),
    lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
)


def test_parametrized_weights_are_computed_once(tmp_path: Path) -> None:
    module = nn.Sequential(*(build() for build in PARAMETRIZED), nn.Linear(WIDTH, 3))
    exported(module, tmp_path, torch.randn(32, WIDTH))
    model, context = built(module, torch.randn(32, WIDTH))
    graph = QuantizeStatic()(model, context.with_root(tmp_path / "int8"))
    layers = sum("Linear" in type(layer).__name__ for layer in module)
    assert graph.manifest.facts["quantized_operators"] == {"linear": layers}


class Pair(NamedTuple):
    logits_of: torch.Tensor
    features: torch.Tensor


@dataclasses.dataclass
class Scores:
    scores: torch.Tensor
    hidden: list[torch.Tensor]
    absent: torch.Tensor | None = None


@pytest.mark.parametrize(
    ("wrap", "names"),
    [
        (Pair, ["logits_of", "features"]),
        (lambda y, x: Scores(y, [x, x * 2]), ["scores", "hidden_0", "hidden_1"]),
        (lambda y, x: {"a": {"b": y}, "c": [x, {"d": x * 3}]}, ["a_b", "c_0", "c_1_d"]),
        (lambda y, x: {"inner": Scores(y, [x])}, ["inner_scores", "inner_hidden_0"]),
    ],
)
def test_outputs_of_any_class_are_flattened(
    tmp_path: Path, wrap: Callable[..., Any], names: list[str]
) -> None:
    module = Function(lambda layer, x: wrap(layer(x), x), nn.Linear(WIDTH, 3))
    artifact = exported(module, tmp_path, torch.randn(32, WIDTH))
    assert [spec.name for spec in artifact.signature.outputs] == names


def test_outputs_of_a_dictionary_are_flattened_in_integer_graphs(tmp_path: Path) -> None:
    module = Function(lambda layer, x: {"a": {"b": layer(x)}, "c": [x]}, nn.Linear(WIDTH, 3))
    model, context = built(module, torch.randn(32, WIDTH))
    graph = QuantizeStatic()(model, context.with_root(tmp_path / "int8"))
    assert isinstance(graph, GraphModel)
    assert [spec.name for spec in graph.signature.outputs] == ["a_b", "c_0"]


def test_attention_is_as_before_once_overlapping_blocks_have_ended() -> None:
    def settings() -> tuple[bool, object]:
        detects = torch.nn.modules.transformer._detect_is_causal_mask
        return torch.backends.mha.get_fastpath_enabled(), detects

    before = settings()
    one, other = plain_attention(), plain_attention()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert settings() != before
    other.__exit__(None, None, None)
    assert settings() == before
