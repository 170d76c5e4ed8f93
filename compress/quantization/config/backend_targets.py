"""Where each runtime wants integers, so that its kernels are fused; settings only, no torch."""

from __future__ import annotations

from typing import Literal

from compress.common.config import Settings

Target = Literal["onnxruntime-cpu", "inductor-cpu", "tensorrt", "onnxruntime-cuda"]

SIGNED_ACTIVATIONS = ("tensorrt", "onnxruntime-cuda")
"""Targets whose kernels have no zero points: activations are int8 about 0."""


class Patterns(Settings):
    """Which numbers around an operator become integers."""

    results: bool
    """Whether results become integers at once, so that poolings, moves and additions take them;
    otherwise only what a layer with weights reads does."""
    additions: Literal["integer", "residual", "float"]
    """`integer`: additions of integers give integers; `residual`: the term that does not come from
    a layer is rounded, so that the addition is fused into the layer of the other term."""
    biases: bool
    """Whether biases become 32-bit integers, in steps of the sums that they are added to."""
    one_channel: bool
    """Whether convolutions of one channel take integers where an axis is dynamic."""


PATTERNS: dict[Target, Patterns] = {
    # QLinearConv, QLinearAdd, QGemm: an operator between DequantizeLinear and QuantizeLinear.
    "onnxruntime-cpu": Patterns(results=True, additions="integer", biases=True, one_channel=True),
    # oneDNN's kernels take float biases. Inductor (torch 2.13) mistakes the layout of what they
    # make of one channel where an axis is dynamic, and answers at chance.
    "inductor-cpu": Patterns(results=True, additions="integer", biases=False, one_channel=False),
    # TensorRT moves and fuses Q and DQ itself, from the inputs of layers; it takes no other biases
    # than float ones (its guide, "Working with Quantized Types", Q/DQ placement).
    "tensorrt": Patterns(results=False, additions="residual", biases=False, one_channel=True),
    # Without TensorRT the CUDA provider rounds, and computes in floats.
    "onnxruntime-cuda": Patterns(results=False, additions="float", biases=False, one_channel=True),
}
