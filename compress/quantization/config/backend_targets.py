"""Where each runtime expects integers so that it fuses its kernels; settings only, no torch."""

from __future__ import annotations

from typing import Literal

from compress.common.config import Settings

Target = Literal["onnxruntime-cpu", "inductor-cpu", "xnnpack", "tensorrt", "onnxruntime-cuda"]

SIGNED_ACTIVATIONS = ("tensorrt", "onnxruntime-cuda")
"""Targets whose kernels take no zero points: activations are symmetric int8."""


class Patterns(Settings):
    """Which tensors around an operator are quantized."""

    outputs: bool
    """Whether an operator's output is quantized at once, so that poolings, reshapes and additions
    run on integers; otherwise only the inputs of layers with weights are quantized."""
    float_outputs: bool = True
    """Whether the kernel of a matrix product can give floats, which is more exact at no cost."""
    additions: Literal["integer", "convolution", "residual", "float"]
    """`integer`: additions of integers give integers; `residual`: the term that does not come from
    a layer is quantized, so that the addition is fused into the layer of the other term;
    `convolution`: the same with an integer result where that layer is a convolution of images, and
    others as by `integer`."""
    biases: bool
    """Whether biases become int32 with scale `input_scale * weight_scale`."""
    one_channel: bool
    """Whether convolutions of one input channel are quantized where an axis is dynamic."""


PATTERNS: dict[Target, Patterns] = {
    # QLinearConv, QLinearAdd, QGemm: an operator between DequantizeLinear and QuantizeLinear.
    "onnxruntime-cpu": Patterns(outputs=True, additions="integer", biases=True, one_channel=True),
    # oneDNN's kernels take float biases, and its convolutions add integers to their sums, which
    # saves a pass over memory and a rounding. Inductor (torch 2.13) mistakes the memory layout of
    # their output for one-channel inputs with a dynamic axis; accuracy is then that of chance.
    "inductor-cpu": Patterns(
        outputs=True, additions="convolution", biases=False, one_channel=False
    ),
    # XNNPACK rounds biases to int32 itself, and computes a layer in floats unless its output is
    # quantized too.
    "xnnpack": Patterns(
        outputs=True, float_outputs=False, additions="integer", biases=False, one_channel=True
    ),
    # TensorRT moves and fuses Q/DQ itself, starting at layer inputs, and takes float biases only
    # (its guide, "Working with Quantized Types", Q/DQ placement).
    "tensorrt": Patterns(outputs=False, additions="residual", biases=False, one_channel=True),
    # Without TensorRT the CUDA provider quantizes and dequantizes, but computes in float.
    "onnxruntime-cuda": Patterns(outputs=False, additions="float", biases=False, one_channel=True),
}
