"""Build TensorRT engines, run them on the host they are bound to, compare them with their source.

Portable ones are built by TensorRT for RTX, whose bindings have the same calls. For torch-tensorrt
2.13 and TensorRT 11.0 these were written from the sources. Networks are strongly typed: they
compute in the types that the model is written in.
"""

from __future__ import annotations

import importlib
import logging
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from compress.artifacts.graph_model import GraphModel, program_of
from compress.common.atomic_files import write_atomically
from compress.common.errors import ArtifactInvalid, StageFailed, Unavailable, raised_as
from compress.common.forward import Predictor, accept_any_batch
from compress.export.common.compiled_code import CUDA, in_parts
from compress.export.onnx.stage import OnnxModel
from compress.export.parity.compare import check_axis_sizes, usual_sizes
from compress.export.parity.sample_parity import Float64Reference, check_on_samples, tolerance_for

if TYPE_CHECKING:
    import onnx_ir as ir
    from torch.export import ExportedProgram

    from compress.artifacts.artifact import Artifact
    from compress.artifacts.eager_model import EagerModel
    from compress.common.signature import Signature, TensorSpec
    from compress.export.parity.sample_parity import RoundingNoise

    Shapes = tuple[tuple[int, ...], ...]  # smallest, usual, largest: as a profile takes them

RTX, RTX_MODULE = "TensorRT for RTX", "tensorrt_rtx_bindings"
EXACT = {"tensorrt": "TensorRT", "gpu": "the GPU", "compute_capability": "compute capability"}
"""Facts that must be equal, and their names in messages; a newer driver runs older engines."""


def bindings(*, portable: bool = False) -> Any:
    """Return the module `tensorrt`, or the one of TensorRT for RTX, which has the same calls."""
    name, title = (RTX_MODULE, RTX) if portable else ("tensorrt", "TensorRT")
    with raised_as(Unavailable, f"{title} cannot be imported"):
        return importlib.import_module(name)


def not_run_reason(capabilities: Sequence[str], device: str = "cuda:0") -> str:
    """Return why a portable engine for these compute capabilities cannot be called here."""
    wanted = f"built for {', '.join(capabilities)} with {RTX}, and not run"
    if CUDA.missing():
        return f"{wanted}: there is no CUDA device here"
    major, minor = torch.cuda.get_device_capability(device)
    found = f"sm{major}{minor}"
    return "" if found in capabilities else f"{wanted}: the GPU here is {found}"


def built_for(device: str = "cuda:0") -> dict[str, str]:
    """Return what an engine built here needs: GPU, driver and TensorRT."""
    tensorrt = bindings()
    if CUDA.missing():
        raise Unavailable("TensorRT needs a CUDA device, and there is none here")
    major, minor = torch.cuda.get_device_capability(device)
    return {
        "gpu": torch.cuda.get_device_name(device),
        "compute_capability": f"{major}.{minor}",
        "driver": driver(),
        "tensorrt": tensorrt.__version__,
        "cuda": str(torch.version.cuda),
    }


def driver() -> str:
    """Return the version of the NVIDIA driver; empty where nvidia-smi fails."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().partition("\n")[0]


def refuse_other_host(needed: Mapping[str, Any], file: Path, device: str) -> None:
    """Raise Unavailable for an engine that was built for another machine; name what differs."""
    if capabilities := needed.get("compute_capabilities"):
        if reason := not_run_reason(capabilities, device):
            raise Unavailable(f"{file}: {reason}")
        if (found := bindings(portable=True).__version__) != needed["tensorrt_rtx"]:
            raise Unavailable(f"{file}: built with {RTX} {needed['tensorrt_rtx']}, found {found}")
        return
    wanted = f"built for {needed['gpu']} with TensorRT {needed['tensorrt']}"
    try:
        here = built_for(device)
    except Unavailable as error:
        raise Unavailable(f"{file}: {wanted}: {error}") from error
    mismatch = difference(needed, here)
    if mismatch:
        raise Unavailable(f"{file}: built for {mismatch}; run export_tensorrt here")


def difference(needed: Mapping[str, str], here: Mapping[str, str]) -> str:
    """Return the first thing that differs from what an engine needs; empty where nothing does."""
    for key, name in EXACT.items():
        if needed[key] != here[key]:
            return f"{name} {needed[key]}, found {here[key]}"
    least, found = needed["driver"], here["driver"]
    if least and found and _numbers(found) < _numbers(least):
        return f"driver {least} or newer, found {found}"
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


BATCH = (1, 8, 32)  # sizes of the batch where the stage has none
LENGTH = 128
"""The usual size of another axis of which only the bounds are known, or the nearest allowed."""


def sizes_of(
    signature: Signature, given: Mapping[str, Sequence[int]]
) -> dict[str, tuple[int, int, int]]:
    """Return the sizes of every named axis; StageFailed for those without, or unknown ones."""
    axes = signature.dynamic_axes
    for name in given:
        if name not in axes:
            raise StageFailed(
                f"sizes: {name!r} is not a named axis of the model's inputs; they have "
                f"{', '.join(axes) or 'none'}"
            )
    all_sizes = {}
    for name in axes:
        bounds = signature.bounds(name)
        usual = BATCH if name == signature.batch_axis else None
        if usual is None and bounds.max is not None:
            usual = (bounds.min, bounds.nearest(LENGTH), bounds.max)
        sizes = given.get(name, usual)
        if sizes is None:
            raise StageFailed(
                f"axis {name!r} has no sizes to build the engine for; add them, for example "
                f"sizes: {{{name}: [1, 128, 512]}}, or declare its bounds in model.axes"
            )
        if not all(size in bounds for size in sizes):
            raise StageFailed(
                f"sizes: {{{name}: {[*sizes]}}} leaves what model.axes allows, {bounds}"
            )
        all_sizes[name] = (sizes[0], sizes[1], sizes[2])
    return all_sizes


def shapes_of(spec: TensorSpec, sizes: Mapping[str, Sequence[int]]) -> Shapes:
    """Return the shapes of an input at the three sizes."""
    return tuple(spec.sized({name: s[i] for name, s in sizes.items()}) for i in range(3))


DTYPES = {
    **{"FLOAT": torch.float32, "HALF": torch.float16, "BF16": torch.bfloat16},
    **{"INT64": torch.int64, "INT32": torch.int32, "INT8": torch.int8},
    **{"UINT8": torch.uint8, "BOOL": torch.bool},
}
"""TensorRT's name of an element type → torch's."""
Tensors = tuple[torch.Tensor, ...]
logger = logging.getLogger(__name__)
NO_DRIVER = "CUDA driver version is insufficient"


@cache
def python_logger(trt: Any) -> Any:
    """Return the logger of one of the libraries: Python's log, which escapes a model's names.

    TensorRT keeps the first one of a process, and warns of others.
    """

    class Logger(trt.ILogger):  # type: ignore[misc]  # tensorrt has no types
        last_line = ""

        def log(self, severity: Any, message: str) -> None:
            # The most severe is 0. Without a GPU another line follows each error, on the driver.
            if severity <= trt.Logger.WARNING and NO_DRIVER not in message:
                level = logging.WARNING if severity == trt.Logger.WARNING else logging.ERROR
                logger.log(level, "TensorRT: %s", message)
                self.last_line = message

    return Logger()


def load(
    trt: Any, file: Path, signature: Signature, sizes: Mapping[str, Sequence[int]], device: str
) -> Callable[..., Tensors]:
    """Return a function that runs an engine on CUDA tensors, by one of the libraries."""
    runtime = trt.Runtime(python_logger(trt))
    with torch.cuda.device(device):
        engine = runtime.deserialize_cuda_engine(file.read_bytes())
    if engine is None:
        raise ArtifactInvalid(f"{file}: not an engine that this TensorRT can load, or truncated")
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    inputs = [n for n in names if engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT]
    outputs = [n for n in names if n not in inputs]
    # Engines built from ONNX have the signature's names, others its order alone.
    inputs = in_order(inputs, [spec.name for spec in signature.inputs])
    outputs = in_order(outputs, [spec.name for spec in signature.outputs])
    context = engine.create_execution_context()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch
    dtypes = {n: DTYPES[engine.get_tensor_dtype(n).name] for n in (*inputs, *outputs)}

    def run(*tensors: torch.Tensor) -> Tensors:
        # In a list, so that the memory lives until the engine has read it.
        buffers = [x.to(dtypes[n]).contiguous() for n, x in zip(inputs, tensors, strict=True)]
        for name, tensor in zip(inputs, buffers, strict=True):
            if not context.set_input_shape(name, tuple(tensor.shape)):
                raise ValueError(
                    f"input {name} has shape {list(tensor.shape)}, which the engine was not built "
                    "for; set export_tensorrt's sizes"
                )
            context.set_tensor_address(name, tensor.data_ptr())
        results = []
        for name in outputs:
            shape = tuple(context.get_tensor_shape(name))
            if min(shape, default=0) < 0:
                raise StageFailed(f"the size of output {name} depends on the values of the inputs")
            results.append(torch.empty(shape, dtype=dtypes[name], device=device))
            context.set_tensor_address(name, results[-1].data_ptr())
        stream.wait_stream(torch.cuda.current_stream(device))
        if not context.execute_async_v3(stream.cuda_stream):
            raise RuntimeError("TensorRT could not run the engine; its own log says why")
        stream.synchronize()
        return tuple(results)

    run.runtime = runtime  # type: ignore[attr-defined]  # it must outlive its engine
    if signature.batch_axis is None:
        return run
    return in_parts(run, signature, sizes[signature.batch_axis][2])


def in_order(names: Sequence[str], signature_names: Sequence[str]) -> list[str]:
    """Return an engine's tensors in the signature's order."""
    return list(signature_names if set(names) == set(signature_names) else names)


def check_engine(
    source: Artifact,
    expected: Predictor,
    engine: Predictor,
    sizes: Mapping[str, Sequence[int]],
    val_batches: Sequence[Tensors],
    noise: RoundingNoise | None = None,
) -> float:
    """Compare an engine with its source at its smallest, usual and largest sizes, and on `val`.

    Returns what the source's rounding noise allowed on `val`, as `compare_outputs` does; raises
    StageFailed where outputs differ.
    """
    signature, tolerance = source.signature, tolerance_for(source)
    reference = Float64Reference(source, expected, noise)
    predictors = accept_any_batch(expected, signature), accept_any_batch(engine, signature)
    usual = usual_sizes(predictors[0], signature, val_batches[:1])
    for profile in dict.fromkeys(zip(*sizes.values(), strict=True) if sizes else [()]):
        at = dict(zip(sizes, profile, strict=True))
        sized = (spec.model_copy(update={"shape": spec.sized(at)}) for spec in signature.inputs)
        fixed = signature.model_copy(update={"inputs": tuple(sized)})
        try:
            check_axis_sizes(expected, engine, fixed, tolerance, reference, usual=usual)
        except StageFailed as error:
            raise StageFailed(f"at {at}: {error}" if at else str(error)) from error
    return check_on_samples(*predictors, val_batches, tolerance, noise).allowed


MEBIBYTE = 2**20
TIMINGS = "timing.cache"
BFLOAT16_OPSET = 22  # the first ONNX operator set whose Conv and poolings take bfloat16
RUN_TIME_INTEGERS = {"DynamicQuantizeLinear", "MatMulInteger", "ConvInteger"}


class BuildOptions(NamedTuple):
    """Settings of a build: see :class:`~compress.export.tensorrt.stage.ExportTensorRT`."""

    workspace_mebibytes: int | None = None
    optimization_level: int | None = None
    tf32: bool = False
    cache: str | None = None
    compute_capabilities: tuple[str, ...] = ()


class BuiltEngine(NamedTuple):
    """A serialized engine, and what its parser made of the model."""

    plan: bytes
    layers: dict[str, int] = {}
    """TensorRT's type of layer → how many the network has; empty for torch-tensorrt."""
    integer_layers: int = 0
    """Convolutions and matrix products whose factors are all 8-bit integers."""


def build_from_onnx(
    model: EagerModel | GraphModel | OnnxModel,
    sizes: Mapping[str, Sequence[int]],
    options: BuildOptions,
) -> BuiltEngine:
    """Return an engine that TensorRT's parser built from the model as ONNX."""
    shapes = {spec.name: shapes_of(spec, sizes) for spec in model.signature.inputs}
    if isinstance(model, OnnxModel):
        return parse_and_build(model.payload_path, shapes, options)
    with TemporaryDirectory(prefix="compress-tensorrt-") as scratch:
        file = Path(scratch) / OnnxModel.payload
        write_onnx(program_of(model), model.signature, file)
        return parse_and_build(file, shapes, options)


def build_from_program(
    model: EagerModel | GraphModel | OnnxModel,
    sizes: Mapping[str, Sequence[int]],
    options: BuildOptions,
    device: str,
) -> BuiltEngine:
    """Return an engine that torch-tensorrt converted from the model's graph."""
    import torch_tensorrt

    from compress.graph.torch_export import move_program

    if isinstance(model, OnnxModel):
        raise StageFailed("torch-tensorrt does not read ONNX; leave `through` out")
    program = program_of(model)
    refuse_quantized(program)
    inputs = []
    for spec in model.signature.inputs:
        least, usual, most = shapes_of(spec, sizes)
        shape = {"min_shape": least, "opt_shape": usual, "max_shape": most}
        if least == most:
            shape = {"shape": usual}
        dtype = getattr(torch, spec.dtype)
        inputs.append(torch_tensorrt.Input(**shape, dtype=dtype, name=spec.name))
    with (
        TemporaryDirectory(prefix="compress-tensorrt-") as scratch,
        raised_as(StageFailed, "torch-tensorrt cannot convert the model"),
    ):
        engine: bytes = torch_tensorrt.dynamo.convert_exported_program_to_serialized_trt_engine(
            move_program(program, device),
            arg_inputs=inputs,
            **conversion_settings(options, device, Path(scratch)),
        )
    return BuiltEngine(bytes(engine))


def write_onnx(program: ExportedProgram, signature: Signature, file: Path) -> None:
    """Write the ONNX file that TensorRT's parser reads, without onnxruntime's own operators."""
    from onnx_ir.passes.common import NameFixPass

    from compress.export.onnx.graph import forget_shapes_
    from compress.export.onnx.lowering import lower
    from compress.export.onnx.passes.float_layers import has_weights_of
    from compress.export.onnx.proto_io import write

    opset = BFLOAT16_OPSET if has_weights_of(program, torch.bfloat16) else None
    graph = lower(program, signature, opset)
    dequantize_constants_(graph)
    unsupported = sorted(
        {n.op_type for n in graph.graph if n.domain or n.op_type in RUN_TIME_INTEGERS}
    )
    if unsupported:
        raise StageFailed(
            f"TensorRT has no form of {', '.join(unsupported)}, which rounds at run time or holds "
            "few bits; quantize with quantize_static and target: tensorrt"
        )
    for part in graph.graphs():
        forget_shapes_(part)  # where a pad became a convolution's, they are of before
    # Names stay for the parser's messages, and the exporter gives some twice.
    NameFixPass()(graph)
    write(graph, file)


def dequantize_constants_(model: ir.Model) -> None:
    """Let nothing but DequantizeLinear read 8-bit constants, in place, as TensorRT takes no other.

    Layers that share a weight then share its tensor, and embeddings look up dequantized rows.
    """
    import onnx_ir as ir

    from compress.export.onnx.graph import add_tensor, become_, producer, remove_unread_, stored

    for reshape in [node for node in model.graph if node.op_type == "Reshape"]:
        value, (tensor, shape) = reshape.inputs[0], map(stored, reshape.inputs)
        if value is None or tensor is None or shape is None or tensor.dtype != ir.DataType.INT8:
            continue
        shaped = tensor.numpy().reshape(shape.numpy())
        if shaped.shape != tuple(tensor.shape):
            value = add_tensor(model.graph, f"{reshape.outputs[0].name}_shaped", shaped)
        ir.convenience.replace_all_uses_with(reshape.outputs[0], value)
    for product in [node for node in model.graph if node.op_type == "Mul"]:
        cast, scales = producer(product.inputs[0], "Cast"), producer(product.inputs[1], "Gather")
        rows = producer(cast.inputs[0], "Gather") if cast and scales else None
        if rows is None or scales is None:
            continue
        table, scale = stored(rows.inputs[0]), stored(scales.inputs[0])
        if table is None or scale is None or scale.size != table.shape[0]:
            continue
        if table.dtype != ir.DataType.INT8:
            continue
        name = product.outputs[0].name
        floats = ir.Value(name=f"{name}_table")
        flat = add_tensor(model.graph, f"{name}_scales", scale.numpy().reshape(-1))
        inputs = [rows.inputs[0], flat]
        product.prepend(ir.node("DequantizeLinear", inputs, {"axis": 0}, outputs=[floats]))
        become_(product, "Gather", [floats, rows.inputs[1]], {"axis": 0})
    remove_unread_(model)


def refuse_quantized(program: ExportedProgram) -> None:
    """Raise StageFailed for an integer graph."""
    from compress.graph.torch_export import has_integer_operators

    # torch-tensorrt (2.13) converts those of its own quantizer alone.
    if has_integer_operators(program.graph):
        raise StageFailed(
            "torch-tensorrt has no converters for integer graphs; leave `through` out, and "
            "TensorRT reads the graph as ONNX"
        )


def parse_and_build(file: Path, shapes: Mapping[str, Shapes], options: BuildOptions) -> BuiltEngine:
    """Return an engine built from an ONNX file by TensorRT's parser.

    Raise StageFailed where the file rounds to integers and no layer computes with them.
    """
    capabilities = options.compute_capabilities
    trt = bindings(portable=bool(capabilities))
    logger = python_logger(trt)
    builder = trt.Builder(logger)
    # Version 11 knows no other networks, and ignores the flag.
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(file)):
        raise StageFailed(f"TensorRT cannot read the model: {_first_error(parser)}")
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    counts, integer = Counter(layer.type.name for layer in layers), _integer_layers(layers)
    if counts["QUANTIZE"] and not integer:
        raise StageFailed(
            "TensorRT would compute the quantized model in floats: none of its "
            f"{sum(counts[kind] for kind in PRODUCTS)} convolutions and matrix products reads "
            "integers; quantize with quantize_static and target: tensorrt"
        )
    config = builder.create_builder_config()
    if options.workspace_mebibytes is not None:
        bytes_allowed = options.workspace_mebibytes * MEBIBYTE
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, bytes_allowed)
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    if capabilities:
        config.num_compute_capabilities = len(capabilities)
        for i, name in enumerate(capabilities):
            config.set_compute_capability(getattr(trt.ComputeCapability, name.upper()), i)
    if not options.tf32:
        config.clear_flag(trt.BuilderFlag.TF32)
    profile = builder.create_optimization_profile()
    for name, (smallest, usual, largest) in shapes.items():
        profile.set_shape(name, smallest, usual, largest)
    config.add_optimization_profile(profile)
    timings = Path(options.cache, TIMINGS) if options.cache else None
    if timings:
        known = timings.read_bytes() if timings.is_file() else b""
        # False: timings of another GPU or TensorRT are refused.
        config.set_timing_cache(config.create_timing_cache(known), False)
    logger.last_line = "it does not say why"
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise StageFailed(f"TensorRT found no kernels for the model: {logger.last_line}")
    if timings:
        # Atomically, as another build may be reading the file.
        timings.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(timings, bytes(config.get_timing_cache().serialize()))
    return BuiltEngine(bytes(plan), dict(sorted(counts.items())), integer)


def _first_error(parser: Any) -> str:
    """Return what a parser refused first: the ONNX node, its operator and why."""
    if not parser.num_errors:
        return "it does not say why"
    error = parser.get_error(0)
    lines = (line for line in error.desc().splitlines() if NO_DRIVER not in line)
    node = f"{error.node_operator()} {error.node_name()}".strip()
    return " ".join(f"{node and f'at {node}: '}{' '.join(lines)}".split())


PRODUCTS = ("CONVOLUTION", "DECONVOLUTION", "MATRIX_MULTIPLY")
MOVING = ("SHUFFLE", "IDENTITY", "SLICE", "SQUEEZE", "UNSQUEEZE")
"""Layers that only move numbers, between a DEQUANTIZE and the product that it feeds."""


def _integer_layers(layers: Sequence[Any]) -> int:
    """Count the products of a network that read nothing but dequantized tensors (not the bias)."""
    writers = {
        layer.get_output(i).name: layer for layer in layers for i in range(layer.num_outputs)
    }

    def is_dequantized(tensor: Any) -> bool:
        writer = writers.get(tensor.name) if tensor is not None else None
        while writer is not None and writer.type.name in MOVING:
            writer = writers.get(writer.get_input(0).name)
        return writer is not None and writer.type.name == "DEQUANTIZE"

    products = (layer for layer in layers if layer.type.name in PRODUCTS)
    return sum(is_dequantized(p.get_input(0)) and is_dequantized(p.get_input(1)) for p in products)


def conversion_settings(options: BuildOptions, device: str, scratch: Path) -> dict[str, Any]:
    """Return the settings of a build as torch-tensorrt takes them."""
    # By default it writes its timings to a folder that all users share.
    folder = Path(options.cache or scratch)
    settings: dict[str, Any] = {
        "device": device,
        "disable_tf32": not options.tf32,
        "workspace_size": (options.workspace_mebibytes or 0) * MEBIBYTE,  # 0: all there is
        "optimization_level": options.optimization_level,
        "timing_cache_path": str(folder / TIMINGS),
    }
    if options.cache:
        # It caches only engines whose weights can be replaced.
        settings |= {"cache_built_engines": True, "reuse_cached_engines": True}
        settings |= {"engine_cache_dir": str(folder / "engines"), "immutable_weights": False}
    return settings
