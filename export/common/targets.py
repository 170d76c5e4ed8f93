"""Which graphs a runtime takes: in formats that it knows, quantized for it; settings, no torch."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact

logger = logging.getLogger(__name__)

SIXTEEN_BITS_SINCE = 21
"""The first operator set whose QuantizeLinear gives 16 bits."""
NO_BFLOAT16 = (
    "the model computes in bfloat16, for which onnxruntime has no kernels on the CPU (of Conv, "
    "Mul, LSTM and most others); use convert_precision with dtype: float16, or export_torchscript"
)
NO_WIDE_INTEGERS = (
    "AOTInductor's integer kernels take 8 bits, found uint16; quantize with 8 bits, or use "
    "export_onnx"
)


def no_sixteen_bits(opset: int) -> str:
    """Return why an operator set holds no 16-bit activations."""
    return (
        f"opset {opset} has no 16-bit activations; set opset: {SIXTEEN_BITS_SINCE} or more, or "
        "leave it out"
    )


def no_such_integers(found: str) -> str:
    """Return why TorchScript cannot compute with some activations."""
    return (
        f"TorchScript's integer kernels take activations of unsigned 8 bits, found {found}; "
        "quantize with target: onnxruntime-cpu and 8 bits, or use export_onnx"
    )


def warn_of_another(model: Artifact, fitting: tuple[str, ...], title: str) -> None:
    """Log that a graph was quantized for another runtime: it is right there, and may be slow.

    Args:
        model: what is exported; a float model is for every runtime.
        fitting: targets that quantize for this one, the usual one first.
        title: name of the stage that exports.
    """
    target = model.manifest.facts.get("target")
    if target is not None and target not in fitting:
        logger.warning(
            "%s: the graph was quantized for %s, whose patterns are not all fused here; quantize "
            "with `target: %s`",
            *(title, target, fitting[0]),
        )
