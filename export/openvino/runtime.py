"""Write OpenVINO models, compile them for this processor, and run them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from compress.common.errors import ArtifactInvalid, StageFailed, first_line

if TYPE_CHECKING:
    from pathlib import Path

    from compress.common.forward import Predictor

INTEGERS = {"i8", "u8"}
HEAVY = {
    *("Convolution", "Deconvolution", "FullyConnected", "MatMul", "RNNCell", "RNNSeq"),
    *("ScaledDotProductAttention",),
}
"""Kernels of OpenVINO's CPU device that multiply matrices."""


def write(onnx_file: Path, file: Path) -> None:
    """Write an ONNX file as an OpenVINO model, with its weights as they are, beside the graph.

    Raises:
        StageFailed: OpenVINO has no such operators.
    """
    import openvino

    try:
        model = openvino.Core().read_model(onnx_file)
    except Exception as error:
        raise StageFailed(f"OpenVINO cannot read the model: {_reason(error)}") from error
    openvino.save_model(model, file, compress_to_fp16=False)


def compiled(file: Path, threads: int) -> Any:
    """Return `model.xml`, or an ONNX file, compiled for the CPU with so many threads for a call.

    Raises:
        ArtifactInvalid: OpenVINO cannot load or compile it.
    """
    import openvino

    settings = {
        "INFERENCE_PRECISION_HINT": "f32",  # by default bfloat16, where the processor has it
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
    }
    try:
        return openvino.Core().compile_model(file, "CPU", settings)
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
            if not shapes[name].compatible(_shape(array)):
                found, expected = list(array.shape), shapes[name].to_string()
                raise ValueError(f"input {name} has shape {found}, expected {expected}")
        # Arrays of its own: those that OpenVINO shares are overwritten by the next call.
        answers = request.infer(arrays, share_outputs=False)
        return tuple(torch.from_numpy(y) for y in answers.values())

    return predict


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


def _shape(array: Any) -> Any:
    import openvino

    return openvino.PartialShape(list(array.shape))


def _reason(error: Exception) -> str:
    """Return the line of OpenVINO's message that says what is wrong; the first name its sources."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if not line.startswith(("Exception from", "Check '", "While"))]
    return named[0] if named else first_line(error)
