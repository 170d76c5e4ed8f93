"""Build TensorRT engines: from ONNX by TensorRT's parser, or from programs by torch-tensorrt.

The calls were written from the sources of torch-tensorrt 2.13 and the bindings of TensorRT 11.0,
whose networks are always strongly typed: they compute in the types that the model is written in.
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from compress.artifacts.graph_model import program_of
from compress.common.errors import StageFailed, first_line
from compress.export.onnx.stage import OnnxModel
from compress.export.tensorrt.runtime import Shapes, python_logger, shapes_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.export import ExportedProgram

    from compress.artifacts.eager_model import EagerModel
    from compress.artifacts.graph_model import GraphModel
    from compress.common.signature import Signature

MEBIBYTE = 2**20
TIMINGS = "timing.cache"
BFLOAT16_OPSET = 22
"""The first ONNX operator set whose Conv and poolings take bfloat16."""
RUN_TIME_INTEGERS = {"DynamicQuantizeLinear", "MatMulInteger", "ConvInteger"}


class BuildOptions(NamedTuple):
    """Settings of a build: see :class:`~compress.export.tensorrt.stage.ExportTensorRT`."""

    workspace_mebibytes: int | None = None
    optimization_level: int | None = None
    tf32: bool = False
    cache: Path | None = None


def build_from_onnx(
    model: EagerModel | GraphModel | OnnxModel,
    sizes: Mapping[str, Sequence[int]],
    options: BuildOptions,
) -> bytes:
    """Return a serialized engine, built by TensorRT's parser from the model as ONNX."""
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
) -> bytes:
    """Return a serialized engine, converted from the model's graph by torch-tensorrt."""
    import torch
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
    with TemporaryDirectory(prefix="compress-tensorrt-") as scratch:
        try:
            engine: bytes = torch_tensorrt.dynamo.convert_exported_program_to_serialized_trt_engine(
                move_program(program, device),
                arg_inputs=inputs,
                **conversion_settings(options, device, Path(scratch)),
            )
        except Exception as error:
            raise StageFailed(
                f"torch-tensorrt cannot convert the model: {type(error).__name__}: "
                f"{first_line(error)}"
            ) from error
    return bytes(engine)


def write_onnx(program: ExportedProgram, signature: Signature, file: Path) -> None:
    """Write the ONNX file that TensorRT's parser reads, without onnxruntime's own operators."""
    import torch

    from compress.export.onnx.graph import strip_
    from compress.export.onnx.lowering import lower
    from compress.export.onnx.passes.float_layers import has_weights_of
    from compress.export.onnx.proto_io import write

    opset = BFLOAT16_OPSET if has_weights_of(program, torch.bfloat16) else None
    graph = lower(program, signature, opset)
    unsupported = sorted(
        {n.op_type for n in graph.graph if n.domain or n.op_type in RUN_TIME_INTEGERS}
    )
    if unsupported:
        raise StageFailed(
            f"TensorRT has no form of {', '.join(unsupported)}, which rounds at run time or holds "
            "few bits; quantize with quantize_static and target: tensorrt"
        )
    strip_(graph)
    write(graph, file)


def refuse_quantized(program: ExportedProgram) -> None:
    """Raise StageFailed for an integer graph."""
    from compress.graph.torch_export import has_integer_operators

    # torch-tensorrt (2.13) converts those of its own quantizer alone.
    if has_integer_operators(program.graph):
        raise StageFailed(
            "torch-tensorrt has no converters for integer graphs; leave `through` out, and "
            "TensorRT reads the graph as ONNX"
        )


def parse_and_build(file: Path, shapes: Mapping[str, Shapes], options: BuildOptions) -> bytes:
    """Return an engine built from an ONNX file by TensorRT's parser."""
    import tensorrt as trt

    logger = python_logger()
    builder = trt.Builder(logger)
    # Version 11 knows no other networks, and ignores the flag.
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(file)):
        reason = parser.get_error(0).desc() if parser.num_errors else "it does not say why"
        raise StageFailed(f"TensorRT cannot read the model: {' '.join(reason.split())}")
    config = builder.create_builder_config()
    if options.workspace_mebibytes is not None:
        bytes_allowed = options.workspace_mebibytes * MEBIBYTE
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, bytes_allowed)
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    if not options.tf32:
        config.clear_flag(trt.BuilderFlag.TF32)
    profile = builder.create_optimization_profile()
    for name, (smallest, usual, largest) in shapes.items():
        profile.set_shape(name, smallest, usual, largest)
    config.add_optimization_profile(profile)
    timings = options.cache / TIMINGS if options.cache else None
    if timings:
        known = timings.read_bytes() if timings.is_file() else b""
        # False: timings of another GPU or TensorRT are refused.
        config.set_timing_cache(config.create_timing_cache(known), False)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise StageFailed("TensorRT found no kernels for the model; its lines in the log say where")
    if timings:
        # Written aside and renamed, as another build may be reading the file.
        timings.parent.mkdir(parents=True, exist_ok=True)
        partial = timings.with_name(f".{timings.name}.{os.getpid()}")
        partial.write_bytes(bytes(config.get_timing_cache().serialize()))
        partial.replace(timings)
    return bytes(plan)


def conversion_settings(options: BuildOptions, device: str, scratch: Path) -> dict[str, Any]:
    """Return the settings of a build as torch-tensorrt takes them."""
    # By default it writes its timings to a folder that all users share.
    folder = options.cache or scratch
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
