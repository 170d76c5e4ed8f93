"""Write OpenVINO models, compile them for this processor, and run them."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from compress.common.errors import ArtifactInvalid, StageFailed, first_line
from compress.common.foreign.native_runtimes import open_vino, openvino_core

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from compress.common.forward import Predictor
    from compress.common.signature import Signature

INTEGERS = {"i8", "u8"}
HEAVY = {
    *("Convolution", "Deconvolution", "FullyConnected", "MatMul", "RNNCell", "RNNSeq"),
    *("ScaledDotProductAttention",),
}
"""Kernels of OpenVINO's CPU device that multiply matrices."""


def write(onnx_file: Path, file: Path, signature: Signature) -> None:
    """Write an ONNX file as an OpenVINO model, with its weights as they are, beside the graph.

    Its inputs have the bounds that the signature declares, so that other programs have them too.
    """
    openvino = open_vino()
    shapes = {}
    for spec in signature.inputs:
        sizes = []
        for axis in spec.shape:
            if isinstance(axis, int):
                sizes.append(openvino.Dimension(axis))
            elif axis in signature.axes:
                allowed = signature.bounds(axis)
                most = -1 if allowed.max is None else allowed.max  # -1: any
                sizes.append(openvino.Dimension(allowed.min, most))
            else:
                sizes.append(openvino.Dimension.dynamic())
        if not signature.axes.keys().isdisjoint(spec.shape):
            shapes[spec.name] = openvino.PartialShape(sizes)
    try:
        model = openvino_core().read_model(onnx_file)
        if shapes:
            model.reshape(shapes)
    except Exception as error:
        raise StageFailed(f"OpenVINO cannot read the model: {_reason(error)}") from error
    # Operators without a name get one by their place, so that a model is always written alike:
    # OpenVINO numbers them by how many the process has made, of all models.
    operators = model.get_ordered_ops()
    unnamed = {i for i, op in enumerate(operators) if op.get_friendly_name() == op.get_name()}
    taken = {op.get_friendly_name() for i, op in enumerate(operators) if i not in unnamed}
    for i in sorted(unnamed):
        name = f"{operators[i].get_type_name()}_{i}"
        operators[i].set_friendly_name(f"{name}_unnamed" if name in taken else name)
    open_vino().save_model(model, file, compress_to_fp16=False)


def compiled(file: Path, threads: int) -> Any:
    """Return `model.xml`, or an ONNX file, compiled for the CPU; ArtifactInvalid if it fails."""
    settings = {
        "INFERENCE_PRECISION_HINT": "f32",  # by default bfloat16, where the processor has it
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
    }
    try:
        return openvino_core().compile_model(file, "CPU", settings)
    except Exception as error:
        raise ArtifactInvalid(f"{file}: OpenVINO cannot load it: {_reason(error)}") from error


def predictor(model: Any) -> Predictor:
    """Return a predictor that runs a compiled model."""
    shapes = {port.get_any_name(): port.partial_shape for port in model.inputs}
    request = model.create_infer_request()

    def predict(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        arrays = {n: x.detach().cpu().numpy() for n, x in zip(shapes, inputs, strict=True)}
        for name, array in arrays.items():
            # OpenVINO 2026.4 gives outputs without rows for other sizes, instead of an error.
            if not shapes[name].compatible(open_vino().PartialShape(list(array.shape))):
                found, expected = list(array.shape), shapes[name].to_string()
                raise ValueError(f"input {name} has shape {found}, expected {expected}")
        # Arrays of its own: those that OpenVINO shares are overwritten by the next call.
        answers = request.infer(arrays, share_outputs=False)
        return tuple(torch.from_numpy(y) for y in answers.values())

    return predict


def opened(file: Path, threads: int) -> AbstractContextManager[Predictor]:
    """Open `model.xml`, or an ONNX file, on the CPU for a ``with`` block."""
    return nullcontext(predictor(compiled(file, threads)))


def within_bounds(predict: Predictor, signature: Signature) -> Predictor:
    """Return a predictor that refuses sizes that `model.axes` does not allow, naming the axis."""
    bounded = [
        (i, axis, name)
        for i, spec in enumerate(signature.inputs)
        for axis, name in enumerate(spec.shape)
        if name in signature.axes
    ]

    def predict_within(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for i, axis, name in bounded:
            allowed, shape = signature.bounds(str(name)), inputs[i].shape
            if axis < len(shape) and shape[axis] not in allowed:
                raise ValueError(
                    f"input {signature.inputs[i].name}: axis {name!r} has size {shape[axis]}, and "
                    f"model.axes allows {allowed}"
                )
        return predict(*inputs)

    return predict_within if bounded else predict


def count_kernels(model: Any) -> dict[str, dict[str, int]]:
    """Return how many kernels for integers and for floats do the heavy work of a compiled model."""
    kinds: dict[str, Counter[str]] = {"integer_kernels": Counter(), "float_kernels": Counter()}
    for node in model.get_runtime_model().get_ops():
        facts = node.get_rt_info()
        kind, precision = (facts[key].astype(str) for key in ("layerType", "runtimePrecision"))
        if kind in HEAVY:
            group = "integer_kernels" if precision in INTEGERS else "float_kernels"
            kinds[group][kind] += 1
    return {group: dict(sorted(counts.items())) for group, counts in kinds.items()}


def _reason(error: Exception) -> str:
    """Return the line of OpenVINO's message that says what is wrong; the first name its sources."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if not line.startswith(("Exception from", "Check '", "While"))]
    return named[0] if named else first_line(error)
