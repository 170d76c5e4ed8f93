import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
import pytest
import torch
from onnx import numpy_helper
from pydantic import ValidationError

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.errors import StageFailed, Unavailable
from compress.common.forward import Predictor
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.core.gates import Parity
from compress.export.common.compiled_code import in_parts
from compress.export.onnx.stage import ExportOnnx
from compress.export.parity.sample_parity import val_inputs
from compress.export.tensorrt.runtime import (
    BuildOptions,
    check_engine,
    conversion_settings,
    difference,
    in_order,
    parse_and_build,
    refuse_quantized,
    shapes_of,
    sizes_of,
    write_onnx,
)
from compress.export.tensorrt.stage import ExportTensorRT, TensorRTEngine
from compress.pipelines import Pipeline
from compress.pipelines.planning.planner import build_plan
from compress.quantization.stages.dynamic import QuantizeDynamic
from compress.quantization.stages.half_precision import ConvertPrecision
from tests.export.builders import IMAGE, images, network, samples

TENSORRT_RTX = "tensorrt_rtx_bindings"
"""Reads files without a GPU: `pip install --no-deps tensorrt-rtx-cu13-libs` and `-bindings`."""


TOKENS = Signature(
    inputs=(
        TensorSpec(name="tokens", shape=("batch", "length"), dtype="int64"),
        TensorSpec(name="table", shape=(4, 3)),
    )
)
HERE = {
    "gpu": "NVIDIA H200",
    "compute_capability": "9.0",
    "driver": "580.82.07",
    "tensorrt": "11.0.0.114",
    "cuda": "13.0",
}
INSTALLED = importlib.util.find_spec("tensorrt") is not None
without_tensorrt = pytest.mark.skipif(INSTALLED, reason="TensorRT is installed")
needs_tensorrt = pytest.mark.skipif(
    not (INSTALLED and torch.cuda.is_available()), reason="no TensorRT, or no CUDA device"
)


@without_tensorrt
@pytest.mark.parametrize("through", ["onnx", "torch_tensorrt"])
def test_a_plan_is_refused_where_tensorrt_is_not(tmp_path: Path, through: str) -> None:
    (tmp_path / "nets.py").write_text("def net(): ...\n")
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        "version: 1\n"
        "model: {factory: 'nets:net', checkpoint: x.pt, inputs: [{name: x, shape: [n]}]}\n"
        f"stages: [{{stage: export_tensorrt, through: {through}}}]\n"
    )
    with pytest.raises(Unavailable, match=r"needs (torch_)?tensorrt, .*\[tensorrt\]") as caught:
        build_plan(Pipeline.from_yaml(file))
    assert caught.value.exit_code == 4
    assert "\n" not in str(caught.value)


@without_tensorrt
def test_nothing_is_begun_and_no_engine_opened_where_tensorrt_is_not(
    model: EagerModel, tmp_path: Path
) -> None:
    with pytest.raises(
        Unavailable, match=r"export_tensorrt: needs tensorrt, which is not installed; pip install"
    ):
        ExportTensorRT()(model, Context(root=tmp_path / "engine"))
    assert not (tmp_path / "engine").exists()
    facts = {"built_for": HERE, "sizes": {"batch": [1, 8, 32]}, "parameters": 1, "macs": 1}
    with TensorRTEngine.atomic_write(tmp_path / "engine", IMAGE, facts=facts) as partial:
        (partial / TensorRTEngine.payload).write_bytes(b"plan")
    message = (
        r"model.engine: built for NVIDIA H200 with TensorRT 11\.0\.0\.114: .*cannot be imported"
    )
    with (
        pytest.raises(Unavailable, match=message) as caught,
        TensorRTEngine.from_directory(tmp_path / "engine").open(),
    ):
        pass
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("here", "message"),
    [
        ({}, ""),
        ({"driver": "580.95.05", "cuda": "13.1"}, ""),
        ({"driver": "580.9"}, "driver 580.82.07 or newer, found 580.9"),
        ({"tensorrt": "11.1.0.2"}, "TensorRT 11.0.0.114, found 11.1.0.2"),
        ({"gpu": "NVIDIA L4"}, "the GPU NVIDIA H200, found NVIDIA L4"),
        ({"driver": ""}, ""),
    ],
)
def test_engines_are_for_one_gpu_and_one_tensorrt(here: dict[str, str], message: str) -> None:
    assert difference(HERE, HERE | here) == message


def test_every_named_axis_has_three_sizes() -> None:
    sizes = sizes_of(TOKENS, {"length": (1, 16, 64)})
    assert sizes == {"batch": (1, 8, 32), "length": (1, 16, 64)}
    assert shapes_of(TOKENS.inputs[0], sizes) == ((1, 1), (8, 16), (32, 64))
    assert shapes_of(TOKENS.inputs[1], sizes) == ((4, 3), (4, 3), (4, 3))
    with pytest.raises(StageFailed, match=r"axis 'length' has no sizes .* sizes: \{length: "):
        sizes_of(TOKENS, {})
    unknown = r"'lenght' is not a named axis .*; they have batch, length"
    with pytest.raises(StageFailed, match=unknown):
        sizes_of(TOKENS, {"lenght": (1, 2, 3)})
    with pytest.raises(ValidationError, match="smallest, usual, largest"):
        ExportTensorRT(sizes={"batch": (8, 1, 32)})


def test_the_parser_is_given_integers_about_zero_and_float_biases(
    int8: GraphModel, tmp_path: Path
) -> None:
    file = tmp_path / "model.onnx"
    write_onnx(int8.program(), IMAGE, file)
    graph = onnx.load(file).graph
    constants = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    rounding = [n for n in graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert len(rounding) >= 6
    for node in rounding:
        zero_points = [constants[name] for name in node.input[2:] if name]
        assert all(z.dtype == "int8" and not z.any() for z in zero_points)
    layers = [n for n in graph.node if n.op_type in ("Conv", "Gemm", "MatMul")]
    assert {n.op_type for n in layers} >= {"Conv"}
    biases = [constants[n.input[2]] for n in layers if len(n.input) > 2]
    assert all(bias.dtype == "float32" for bias in biases)


@pytest.mark.slow
def test_what_tensorrt_has_no_form_of_is_refused(
    model: EagerModel, int8: GraphModel, tmp_path: Path
) -> None:
    with pytest.raises(StageFailed, match="no converters for integer graphs; leave `through` out"):
        refuse_quantized(int8.program())
    context = Context(root=tmp_path / "dynamic")
    at_run_time = QuantizeDynamic()(network(tmp_path / "mlp", "networks:mlp"), context)
    with pytest.raises(StageFailed, match=r"no form of .*MatMulInteger.* target: tensorrt"):
        write_onnx(at_run_time.program(), IMAGE, tmp_path / "model.onnx")


@pytest.mark.slow
def test_bfloat16_is_written_for_tensorrt_and_refused_for_onnxruntime(
    model: EagerModel, tmp_path: Path
) -> None:
    half = ConvertPrecision(dtype="bfloat16")(model, Context(root=tmp_path / "half"))
    write_onnx(half.program(), IMAGE, tmp_path / "model.onnx")
    types = {t.data_type for t in onnx.load(tmp_path / "model.onnx").graph.initializer}
    assert onnx.TensorProto.BFLOAT16 in types
    with pytest.raises(StageFailed, match="onnxruntime has no kernels"):
        ExportOnnx()(half, Context(root=tmp_path / "onnx"))


def test_large_batches_are_answered_in_parts() -> None:
    asked: list[tuple[int, int]] = []

    def run(tokens: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        asked.append((len(tokens), len(table)))
        return (tokens.float().sum(1) + table.sum(),)

    tokens, table = torch.arange(50).reshape(10, 5), torch.ones(4, 3)
    (answer,) = in_parts(run, TOKENS, 4)(tokens, table)
    assert asked == [(4, 4), (4, 4), (2, 4)]
    assert torch.equal(answer, tokens.float().sum(1) + 12)


def test_tensors_are_in_the_signatures_order_where_they_have_its_names() -> None:
    assert in_order(["mask", "tokens"], ["tokens", "mask"]) == ["tokens", "mask"]
    assert in_order(["output1", "output0"], ["a", "b"]) == ["output1", "output0"]


def test_a_wrong_output_is_reported_with_the_sizes_of_its_inputs(
    model: EagerModel, tmp_path: Path
) -> None:
    sizes = {"batch": (1, 8, 32)}
    batches = [*val_inputs(Context(root=tmp_path, data=samples(images())), model)]
    with model.open() as right:
        check_engine(model, right, right, sizes, batches)

        def wrong_when_large(image: torch.Tensor) -> tuple[torch.Tensor, ...]:
            (answer,) = right(image)
            return (answer + (len(image) == 32),)

        with pytest.raises(StageFailed, match=r"at \{'batch': 32\}: .* answers differ"):
            check_engine(model, right, wrong_when_large, sizes, batches)


def test_an_engine_from_an_earlier_run_is_proved_at_its_own_sizes(
    model: EagerModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"sizes": {"batch": [1, 2, 5]}}
    with TensorRTEngine.atomic_write(tmp_path / "engine", model.signature, facts=facts) as partial:
        (partial / TensorRTEngine.payload).write_bytes(b"no engine: there is no TensorRT here")
    engine = TensorRTEngine.from_directory(tmp_path / "engine")
    assert [engine.runs_on(d) for d in ("cpu", "cuda", "cuda:1")] == ["cuda", "cuda", "cuda:1"]
    asked: list[int] = []

    @contextmanager
    def opened(*_: object) -> Iterator[Predictor]:
        with model.open() as right:

            def answer(image: torch.Tensor) -> tuple[torch.Tensor, ...]:
                asked.append(len(image))
                return (right(image)[0] * (1 + (len(image) == wrong_at)),)

            yield answer

    monkeypatch.setattr(TensorRTEngine, "open", opened)
    wrong_at = 0
    ExportTensorRT().check_parity(model, engine, Context(root=tmp_path / "again"))
    assert asked == [1, 2, 5]
    wrong_at = 5
    with pytest.raises(StageFailed, match=r"at \{'batch': 5\}: .* answers differ"):
        ExportTensorRT().check_parity(model, engine, Context(root=tmp_path / "again"))


def test_a_cache_is_no_part_of_what_is_built(tmp_path: Path) -> None:
    stage = ExportTensorRT(cache="engines").resolve_paths(tmp_path, tmp_path)
    assert stage.cache == str(tmp_path / "engines")
    assert stage.own_settings() == ExportTensorRT().own_settings()
    settings = conversion_settings(stage.build_options(), "cuda:0", tmp_path / "scratch")
    assert settings["engine_cache_dir"].startswith(stage.cache)
    assert settings["immutable_weights"] is False  # else torch-tensorrt keeps no engine
    settings = conversion_settings(ExportTensorRT().build_options(), "cuda:0", tmp_path / "scratch")
    assert settings["timing_cache_path"] == str(tmp_path / "scratch" / "timing.cache")


def test_settings_import_neither_torch_nor_onnx(fresh_process: Callable[[str], str]) -> None:
    code = (
        "import sys; from compress.export import ExportTensorRT; ExportTensorRT()\n"
        "print([m for m in ('torch', 'onnx', 'tensorrt') if m in sys.modules])"
    )
    assert fresh_process(code) == "[]"


@pytest.mark.tensorrt
@pytest.mark.skipif(not INSTALLED, reason="no TensorRT")
def test_every_call_is_one_that_the_libraries_have() -> None:
    import tensorrt as trt

    wanted = {
        trt.Builder: "create_network create_builder_config create_optimization_profile "
        "build_serialized_network",
        trt.OnnxParser: "parse_from_file get_error num_errors",
        trt.IBuilderConfig: "set_memory_pool_limit builder_optimization_level clear_flag "
        "add_optimization_profile create_timing_cache set_timing_cache get_timing_cache",
        trt.IOptimizationProfile: "set_shape",
        trt.ITimingCache: "serialize",
        trt.Runtime: "deserialize_cuda_engine",
        trt.ICudaEngine: "num_io_tensors get_tensor_name get_tensor_mode get_tensor_dtype "
        "create_execution_context",
        trt.IExecutionContext: "set_input_shape set_tensor_address get_tensor_shape "
        "execute_async_v3",
        trt.MemoryPoolType: "WORKSPACE",
        trt.BuilderFlag: "TF32",
        trt.NetworkDefinitionCreationFlag: "STRONGLY_TYPED",
        trt.TensorIOMode: "INPUT",
        trt.DataType: "FLOAT HALF BF16 INT64 INT32 INT8 UINT8 BOOL",
    }
    lacking = [
        f"{c.__name__}.{n}" for c, ns in wanted.items() for n in ns.split() if not hasattr(c, n)
    ]
    assert lacking == []
    torch_tensorrt = pytest.importorskip("torch_tensorrt")
    convert = torch_tensorrt.dynamo.convert_exported_program_to_serialized_trt_engine
    # It takes any keyword, and would ignore a misspelt one.
    known = set(inspect.signature(convert).parameters)
    assert {"exported_program", "arg_inputs"} <= known
    options = ExportTensorRT(cache="x").build_options()
    assert conversion_settings(options, "cuda:0", Path()).keys() <= known
    torch_tensorrt.Input(min_shape=(1, 2), opt_shape=(2, 2), max_shape=(3, 2), dtype=torch.int64)


@pytest.mark.tensorrt
@needs_tensorrt
@pytest.mark.parametrize("through", ["onnx", "torch_tensorrt"])
def test_an_engine_answers_like_the_model(
    model: EagerModel, tmp_path: Path, through: str, fresh_process: Callable[[str], str]
) -> None:
    if through == "torch_tensorrt":
        pytest.importorskip("torch_tensorrt")
    context = Context(root=tmp_path / "engine", data=samples(images()), device="cuda:0")
    stage = ExportTensorRT.model_validate({"through": through, "cache": str(tmp_path / "cache")})
    engine = stage(model, context)
    assert Parity(atol=0).measure(model, engine, context) < 1e-4
    with engine.open() as predict:
        assert predict(torch.zeros(70, 1, 8, 8))[0].shape[0] == 70
    code = (
        "from compress.export import TensorRTEngine\n"
        f"e = TensorRTEngine.from_directory({str(engine.path)!r})\n"
        "with e.open() as p: print(len(p(*e.signature.example(3))[0]))"
    )
    assert fresh_process(code) == "3"
    manifest = json.loads((engine.path / "manifest.json").read_text())
    assert manifest["facts"]["built_for"]["gpu"] == torch.cuda.get_device_name()


@pytest.mark.tensorrt
@needs_tensorrt
def test_integers_become_an_engine(int8: GraphModel, tmp_path: Path) -> None:
    context = Context(root=tmp_path / "engine", data=samples(images()), device="cuda:0")
    engine = ExportTensorRT()(int8, context)
    assert Parity(atol=0).measure(int8, engine, context) < 0.1


def test_what_tensorrt_says_of_a_file_goes_to_pythons_log(tmp_path, monkeypatch, caplog) -> None:
    trt = pytest.importorskip(TENSORRT_RTX)
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    (tmp_path / "model.onnx").write_bytes(b"no model")
    with pytest.raises(StageFailed, match="TensorRT cannot read the model"):
        parse_and_build(tmp_path / "model.onnx", {}, BuildOptions())
    assert "TensorRT: " in caplog.text
