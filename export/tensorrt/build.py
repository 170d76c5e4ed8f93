"""TensorRT engines, built from ONNX by TensorRT's parser or from programs by torch-tensorrt.

The calls were written from the sources of torch-tensorrt 2.13 and the bindings of TensorRT 11.0,
whose networks are always strongly typed: they compute in the types that the model is written in.
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from compress.artifacts.graph_model import GraphModel
from compress.common.errors import StageFailed, first_line
from export.onnx.stage import OnnxModel
from export.tensorrt.shape_profiles import Shapes, shapes_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import onnx
    from torch.export import ExportedProgram

    from compress.artifacts.eager_model import EagerModel
    from compress.common.signature import Signature
    from export.tensorrt.stage import ExportTensorRT

MEBIBYTE = 2**20
TIMINGS = "timing.cache"
BFLOAT16_SINCE = 22
"""The first operator set whose Conv, and what pools, take bfloat16."""
ROUNDED = "quantized_decomposed."


def build(
    model: EagerModel | GraphModel | OnnxModel,
    stage: ExportTensorRT,
    sizes: Mapping[str, Sequence[int]],
    device: str,
) -> bytes:
    """Return a serialized engine.

    Raises:
        StageFailed: an operator cannot be converted, or no kernel fits.
    """
    shapes = {spec.name: shapes_of(spec, sizes) for spec in model.signature.inputs}
    with TemporaryDirectory(prefix="compress-tensorrt-") as scratch:
        if stage.through == "onnx":
            file = model.payload_path
            if not isinstance(model, OnnxModel):
                file = Path(scratch) / OnnxModel.payload
                write_onnx(_program(model), model.signature, file)
            return parse_and_build(file, shapes, stage)
        program = _program(model)
        refuse_integers(program)
        return convert(program, model.signature, shapes, stage, device, Path(scratch))


def _program(model: EagerModel | GraphModel | OnnxModel) -> ExportedProgram:
    from compress.graph.torch_export import export_program

    if isinstance(model, OnnxModel):
        raise StageFailed("torch-tensorrt does not read ONNX; leave `through` out")
    if isinstance(model, GraphModel):
        return model.program()
    return export_program(model.load(), model.signature)


def write_onnx(program: ExportedProgram, signature: Signature, file: Path) -> None:
    """Write the ONNX file that TensorRT's parser reads.

    Raises:
        StageFailed: the graph has operators that only onnxruntime has.
    """
    import torch

    from export.onnx.graph import shrink_
    from export.onnx.lowering import lower
    from export.onnx.passes.float16 import holds
    from export.onnx.proto_io import write

    opset = BFLOAT16_SINCE if holds(program, torch.bfloat16) else None
    graph = lower(program, signature, opset)
    foreign = sorted(foreign_operators(graph))
    if foreign:
        raise StageFailed(
            f"TensorRT has no form of {', '.join(foreign)}, which rounds at run time or holds few "
            "bits; quantize with quantize_static and target: tensorrt"
        )
    shrink_(graph)
    write(graph, file)


def foreign_operators(graph: onnx.ModelProto) -> set[str]:
    """Return the operators of a model that are onnxruntime's own, or round at run time."""
    run_time = {"DynamicQuantizeLinear", "MatMulInteger", "ConvInteger"}
    return {node.op_type for node in graph.graph.node if node.domain or node.op_type in run_time}


def refuse_integers(program: ExportedProgram) -> None:
    """Refuse what torch-tensorrt (2.13) has no converters for: it knows its own quantizer's alone.

    Raises:
        StageFailed: the program quantizes.
    """
    if any(str(node.target).startswith(ROUNDED) for node in program.graph.nodes):
        raise StageFailed(
            "torch-tensorrt has no converters for integer graphs; leave `through` out, and "
            "TensorRT reads the graph as ONNX"
        )


def parse_and_build(file: Path, shapes: Mapping[str, Shapes], stage: ExportTensorRT) -> bytes:
    """Return an engine built from an ONNX file by TensorRT's parser.

    Raises:
        StageFailed: the parser refuses the file, or no kernel fits.
    """
    import tensorrt as trt

    logger = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(logger)
    # Version 11 knows no other networks, and ignores the flag.
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(file)):
        told = parser.get_error(0).desc() if parser.num_errors else "it does not say why"
        raise StageFailed(f"TensorRT cannot read the model: {' '.join(told.split())}")
    config = builder.create_builder_config()
    _configure_(config, stage)
    profile = builder.create_optimization_profile()
    for name, (smallest, usual, largest) in shapes.items():
        profile.set_shape(name, smallest, usual, largest)
    config.add_optimization_profile(profile)
    timings = Path(stage.cache) / TIMINGS if stage.cache else None
    if timings:
        known = timings.read_bytes() if timings.is_file() else b""
        config.set_timing_cache(config.create_timing_cache(known), False)  # of this GPU alone
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise StageFailed("TensorRT found no kernels for the model; its own log, above, says where")
    if timings:
        _keep(bytes(config.get_timing_cache().serialize()), timings)
    return bytes(plan)


def _configure_(config: Any, stage: ExportTensorRT) -> None:
    import tensorrt as trt

    if stage.workspace_mebibytes is not None:
        config.set_memory_pool_limit(
            trt.MemoryPoolType.WORKSPACE, stage.workspace_mebibytes * MEBIBYTE
        )
    if stage.optimization_level is not None:
        config.builder_optimization_level = stage.optimization_level
    if not stage.tf32:
        config.clear_flag(trt.BuilderFlag.TF32)


def _keep(timings: bytes, file: Path) -> None:
    """Write the timings whole, or not at all: another build may be reading them."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_bytes(timings)
    partial.replace(file)


def convert(
    program: ExportedProgram,
    signature: Signature,
    shapes: Mapping[str, Shapes],
    stage: ExportTensorRT,
    device: str,
    scratch: Path,
) -> bytes:
    """Return an engine converted from a program by torch-tensorrt.

    Raises:
        StageFailed: an operator has no converter, or no kernel fits.
    """
    import torch
    import torch_tensorrt
    from torch.export.passes import move_to_device_pass

    inputs = [
        torch_tensorrt.Input(
            **input_shapes(shapes[spec.name]), dtype=getattr(torch, spec.dtype), name=spec.name
        )
        for spec in signature.inputs
    ]
    try:
        engine: bytes = torch_tensorrt.dynamo.convert_exported_program_to_serialized_trt_engine(
            move_to_device_pass(program, device),
            arg_inputs=inputs,
            **conversion_settings(stage, device, scratch),
        )
    except Exception as error:
        raise StageFailed(
            f"torch-tensorrt cannot convert the model: {type(error).__name__}: {first_line(error)}"
        ) from error
    return bytes(engine)


def input_shapes(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Return an input's shapes as torch-tensorrt takes them."""
    if shapes.smallest == shapes.largest:
        return {"shape": shapes.usual}
    return {"min_shape": shapes.smallest, "opt_shape": shapes.usual, "max_shape": shapes.largest}


def conversion_settings(stage: ExportTensorRT, device: str, scratch: Path) -> dict[str, Any]:
    """Return a stage's settings as torch-tensorrt takes them."""
    # Left alone, it would keep its timings in a folder that all users share.
    folder = Path(stage.cache) if stage.cache else scratch
    settings: dict[str, Any] = {
        "device": device,
        "disable_tf32": not stage.tf32,
        "workspace_size": (stage.workspace_mebibytes or 0) * MEBIBYTE,  # 0: all there is
        "optimization_level": stage.optimization_level,
        "timing_cache_path": str(folder / TIMINGS),
    }
    if stage.cache:
        # It keeps engines whose weights can be put in anew, and no others.
        settings |= {"cache_built_engines": True, "reuse_cached_engines": True}
        settings |= {"engine_cache_dir": str(folder / "engines"), "immutable_weights": False}
    return settings
