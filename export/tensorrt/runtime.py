"""Load TensorRT engines on the host they are bound to, run and compare them with their source."""

from __future__ import annotations

import logging
import subprocess
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from compress.common.errors import ArtifactInvalid, StageFailed, Unavailable
from compress.common.forward import accept_any_batch
from compress.export.common.compiled_code import CUDA, in_parts
from compress.export.parity.arithmetic_error import Float64Reference
from compress.export.parity.compare import check_axis_sizes
from compress.export.parity.sample_parity import check_on_samples, tolerance_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from compress.artifacts.artifact import Artifact
    from compress.common.forward import Predictor
    from compress.common.signature import Signature, TensorSpec
    from compress.export.parity.arithmetic_error import RoundingNoise

EXACT = {"tensorrt": "TensorRT", "gpu": "the GPU", "compute_capability": "compute capability"}
"""Facts that must be equal, and their names in messages; a newer driver runs older engines."""


def built_for(device: str = "cuda:0") -> dict[str, str]:
    """Return what an engine built here needs: GPU, driver and TensorRT."""
    import torch

    try:
        import tensorrt
    except ImportError as error:
        raise Unavailable(f"TensorRT cannot be imported: {error}") from error
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


def refuse_other_host(needed: Mapping[str, str], file: Path, device: str) -> None:
    """Raise Unavailable for an engine that was built for another machine; name what differs."""
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
    if (
        needed["driver"]
        and here["driver"]
        and _numbers(here["driver"]) < _numbers(needed["driver"])
    ):
        return f"driver {needed['driver']} or newer, found {here['driver']}"
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


BATCH = (1, 8, 32)
"""Sizes of the batch where the stage has none."""
LENGTH = 128
"""The usual size of another axis of which only the bounds are known, or the nearest allowed."""


class Shapes(NamedTuple):
    """The shapes of one input, as an optimization profile takes them."""

    smallest: tuple[int, ...]
    usual: tuple[int, ...]
    largest: tuple[int, ...]


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
    return Shapes(*(spec.sized({name: s[i] for name, s in sizes.items()}) for i in range(3)))


def with_fixed_sizes(signature: Signature, sizes: Mapping[str, int]) -> Signature:
    """Return a signature whose named axes are replaced by numbers."""
    inputs = tuple(
        spec.model_copy(update={"shape": spec.sized(dict(sizes))}) for spec in signature.inputs
    )
    return signature.model_copy(update={"inputs": inputs})


DTYPES = {
    **{"FLOAT": torch.float32, "HALF": torch.float16, "BF16": torch.bfloat16},
    **{"INT64": torch.int64, "INT32": torch.int32, "INT8": torch.int8},
    **{"UINT8": torch.uint8, "BOOL": torch.bool},
}
"""TensorRT's name of an element type → torch's."""

Tensors = tuple[torch.Tensor, ...]

logger = logging.getLogger(__name__)


@cache
def python_logger() -> Any:
    """Return TensorRT's logger: Python's log, which escapes a model's names.

    TensorRT keeps the first one of a process, and warns of others.
    """
    import tensorrt as trt

    class Logger(trt.ILogger):  # type: ignore[misc]  # tensorrt has no types
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.Logger.WARNING:  # the most severe is 0
                level = logging.WARNING if severity == trt.Logger.WARNING else logging.ERROR
                logger.log(level, "TensorRT: %s", message)

    return Logger()


def load(
    file: Path, signature: Signature, sizes: Mapping[str, Sequence[int]], device: str
) -> Callable[..., Tensors]:
    """Return a function that runs an engine on CUDA tensors."""
    import tensorrt as trt

    runtime = trt.Runtime(python_logger())
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
    run = _runner(engine, inputs, outputs, device)
    run.runtime = runtime  # type: ignore[attr-defined]  # it must outlive its engine
    if signature.batch_axis is None:
        return run
    return in_parts(run, signature, sizes[signature.batch_axis][2])


def in_order(names: Sequence[str], signature_names: Sequence[str]) -> list[str]:
    """Return an engine's tensors in the signature's order."""
    return list(signature_names if set(names) == set(signature_names) else names)


def _runner(
    engine: Any, inputs: Sequence[str], outputs: Sequence[str], device: str
) -> Callable[..., Tensors]:
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

    return run


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
    for profile in dict.fromkeys(zip(*sizes.values(), strict=True) if sizes else [()]):
        at = dict(zip(sizes, profile, strict=True))
        try:
            fixed = with_fixed_sizes(signature, at)
            check_axis_sizes(expected, engine, fixed, tolerance, reference)
        except StageFailed as error:
            raise StageFailed(f"at {at}: {error}" if at else str(error)) from error
    predictors = accept_any_batch(expected, signature), accept_any_batch(engine, signature)
    return check_on_samples(*predictors, val_batches, tolerance, noise).allowed
