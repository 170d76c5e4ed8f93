"""Integer formats and patterns that a runtime has fast kernels for; settings only, no torch."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, WrapValidator

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
    lone_depthwise: bool = True
    """Whether depthwise convolutions that read floats and are read by none but float operators are
    quantized."""


PATTERNS: dict[Target, Patterns] = {
    # QLinearConv, QLinearAdd, QGemm: an operator between DequantizeLinear and QuantizeLinear.
    # Its integer depthwise kernel takes longer than the float one (200 channels of 2 x 96, 5 x 5,
    # with AVX-512 VNNI: 118 and 15 us), which pays off only where it saves conversions to floats.
    "onnxruntime-cpu": Patterns(
        outputs=True, additions="integer", biases=True, one_channel=True, lone_depthwise=False
    ),
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

WeightBits = Literal[4, 7, 8]
Rounding = Literal["nearest", "adaround", "gptq"]
FALSE_IS_OFF = BeforeValidator(lambda value: "off" if value is False else value)
"""For settings that may be `off`, which YAML 1.1 reads as False."""
Smoothing = Annotated[Literal["auto", "off"] | Annotated[float, Field(gt=0, lt=1)], FALSE_IS_OFF]
BuiltInObserver = Literal[
    "minmax", "moving_average", "histogram", "percentile", "entropy", "mse", "l3"
]

OBSERVER_ENTRY_POINTS = "compress.observers"
"""Entry-point group in which installed packages announce observers of their own."""


@cache
def added_observers() -> dict[str, EntryPoint]:
    """Return the observers of installed packages by name, not imported yet."""
    return {entry.name: entry for entry in entry_points(group=OBSERVER_ENTRY_POINTS)}


Observer = Annotated[
    BuiltInObserver,
    WrapValidator(
        lambda value, built_in: (
            value if isinstance(value, str) and value in added_observers() else built_in(value)
        )
    ),
    PlainSerializer(str),  # pydantic's own warns of a name that the literal lacks
]
"""Name of a built-in observer, or of one that an installed package adds."""


class WeightFormat(Settings):
    """How `quantize_weights` holds weights."""

    bits: Literal[4, 8] = 4
    """Bits of a weight."""
    group_size: Literal[16, 32, 64, 128, 256] = 32
    """Inputs of a layer that share a scale and a zero point."""
    method: Literal["rtn", "hqq", "gptq", "awq"] = "rtn"
    """`rtn` rounds to the nearest step, `hqq` also fits the zero points of 4-bit weights, `gptq`
    lets later weights make up for earlier ones' errors on a sample of the data, `awq` scales up
    before rounding what is multiplied with large inputs."""
    symmetric: bool = False
    """Whether zero points lie in the middle of the integers instead of where a group's range has
    them. GGUF's `Q8_0` and `Q4_0` have no others; ONNX files do not store them, and compute faster.
    """
    activation_bits: Literal[8, 32] | None = None
    """Bits of what linear layers multiply with these weights. 8, the default, rounds each
    `group_size` numbers of a row with a scale of their own, as onnxruntime's fast kernel does
    (`MatMulNBits` with `accuracy_level` 4); 32 multiplies floats, as `hqq` always does, whose zero
    points that kernel does not take. Set 32 for `export_aot` and `export_torchscript`, which have
    no such kernel."""
    embeddings: bool = True
    """Whether tables of embeddings are held in few bits too."""
    embedding_bits: Literal[4, 8] = 8
    """Bits of a table's numbers. With 8 each row has a scale; with 4 each 64 numbers of a row have
    one (32 or 16 where 64 do not divide it), and ONNX files look them up by
    `GatherBlockQuantized`."""

    @property
    def calibrates(self) -> bool:
        """Whether the method looks at data."""
        return self.method in ("gptq", "awq")

    @property
    def rounds_activations(self) -> bool:
        """Whether linear layers read activations rounded to 8 bits, by groups of `group_size`."""
        return self.activation_bits != 32 and self.method != "hqq"


class IntegerFormat(Settings):
    """An integer type, its range, and whether scales are per tensor or per channel."""

    dtype: Literal["uint8", "uint16", "int8"]
    quant_min: int
    quant_max: int
    symmetric: bool = False
    """Whether the zero point is fixed to 0."""
    per_channel: bool = False


class Scheme(Settings):
    """The integer formats of activations, weights and embeddings for one runtime."""

    activations: IntegerFormat
    weights: IntegerFormat
    embeddings: IntegerFormat
    """Always 8 bits: rows are looked up rather than multiplied, and are stored as bytes."""
    patterns: Patterns


def scheme_for(target: Target, weight_bits: int = 8, activation_bits: int = 8) -> Scheme:
    """Return the integer formats for which a runtime has fast kernels.

    Weights of fewer bits are stored in 8; with 16-bit activations runtimes multiply in float.
    """
    # x86 multiplies unsigned activations by signed weights in one instruction (VNNI's vpdpbusd);
    # with signed ones onnxruntime leaves about half of the convolutions in float (12 of 21 in a
    # ResNet-20).
    activations = unsigned_format(activation_bits)
    if target == "xnnpack" or target in SIGNED_ACTIVATIONS:
        activations = IntegerFormat(
            dtype="int8", quant_min=-128, quant_max=127, symmetric=target != "xnnpack"
        )
    return Scheme(
        activations=activations,
        weights=_signed_per_channel(weight_bits),
        embeddings=_signed_per_channel(8),
        patterns=PATTERNS[target],
    )


def unsigned_format(bits: int) -> IntegerFormat:
    """Return the per-tensor format of activations with a zero point, in 8 or 16 bits."""
    return IntegerFormat(
        dtype="uint8" if bits <= 8 else "uint16",
        quant_min=0,
        quant_max=2**bits - 1,
    )


def require_16_bit_kernels(setting: str, target: Target, remedy: str) -> None:
    """Refuse 16-bit activations (ValueError) for a runtime that has no kernels for them."""
    if target != "onnxruntime-cpu":
        raise ValueError(
            f"{setting} is for target: onnxruntime-cpu, found {target}, which "
            f"has no kernel that reads 16 bits; {remedy}"
        )


def _signed_per_channel(bits: int) -> IntegerFormat:
    largest = 2 ** (bits - 1) - 1
    return IntegerFormat(
        dtype="int8", quant_min=-largest, quant_max=largest, symmetric=True, per_channel=True
    )
