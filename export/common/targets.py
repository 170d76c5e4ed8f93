"""Which quantized graphs a runtime takes, and messages for those it does not; imports no torch."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact

logger = logging.getLogger(__name__)

UINT16_OPSET = 21
"""The first ONNX operator set whose QuantizeLinear has 16-bit integers."""
NO_BFLOAT16 = (
    "the model computes in bfloat16, for which onnxruntime has no kernels on the CPU (of Conv, "
    "Mul, LSTM and most others); use convert_precision with dtype: float16, or export_torchscript"
)
NO_UINT16_KERNELS = (
    "AOTInductor's integer kernels take 8 bits, found uint16; quantize with 8 bits, or use "
    "export_onnx"
)


def no_uint16_in(opset: int) -> str:
    """Return why an ONNX operator set has no 16-bit activations."""
    return (
        f"opset {opset} has no 16-bit activations; set opset: {UINT16_OPSET} or more, or "
        "leave it out"
    )


def uint8_only(dtype: str) -> str:
    """Return why TorchScript cannot compute with activations of an integer type."""
    return (
        f"TorchScript's integer kernels take activations of unsigned 8 bits, found {dtype}; "
        "quantize with target: onnxruntime-cpu and 8 bits, or use export_onnx"
    )


def warn_of_other_target(model: Artifact, targets: tuple[str, ...], title: str) -> None:
    """Warn that a graph was quantized for another runtime: it is right here, and may be slow.

    Args:
        model: what is exported; a float model is for every runtime.
        targets: those that quantize for this runtime, the usual one first.
        title: name of the stage that exports.
    """
    target = model.manifest.facts.get("target")
    if target is not None and target not in targets:
        logger.warning(
            "%s: the graph was quantized for %s, whose patterns are not all fused here; quantize "
            "with `target: %s`",
            *(title, target, targets[0]),
        )
