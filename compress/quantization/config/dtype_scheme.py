"""Number formats that a runtime has fast integer kernels for; settings only, no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from compress.common.config import Settings
from compress.quantization.config.backend_targets import (
    PATTERNS,
    SIGNED_ACTIVATIONS,
    Patterns,
    Target,
)

WeightBits = Literal[4, 8]
ActivationBits = Literal[8, 16]
WeightMethod = Literal["rtn", "hqq", "gptq", "awq"]
Rounding = Literal["nearest", "adaround"]
Smoothing = Annotated[
    Literal["auto", "off"] | Annotated[float, Field(gt=0, lt=1)],
    BeforeValidator(lambda given: "off" if given is False else given),  # what YAML makes of off
]
Observer = Literal["minmax", "moving_average", "histogram", "percentile", "entropy", "mse"]


class IntegerFormat(Settings):
    """How a float tensor becomes small integers."""

    dtype: Literal["uint8", "uint16", "int8"]
    """Integer type."""
    low: int
    """Smallest integer used."""
    high: int
    """Largest integer used."""
    symmetric: bool
    """Whether the zero point is fixed to 0."""
    per_channel: bool
    """Whether each output channel has its own scale."""


class Scheme(Settings):
    """The integer formats of activations and weights, and where a runtime wants them."""

    activations: IntegerFormat
    weights: IntegerFormat
    tables: IntegerFormat
    """Of embeddings; their rows are held, not multiplied, and 8 bits is what a row costs anyway."""
    patterns: Patterns


def scheme_of(target: Target, weight_bits: int = 8, activation_bits: int = 8) -> Scheme:
    """Return the formats that a runtime computes fast with.

    Args:
        target: the runtime.
        weight_bits: bits of a weight; fewer than 8 are held in 8.
        activation_bits: bits of an activation, alike; of 16 bits a runtime computes in floats.
    """
    if target in SIGNED_ACTIVATIONS:
        most = 2 ** (activation_bits - 1)
        activations = IntegerFormat(
            dtype="int8", low=-most, high=most - 1, symmetric=True, per_channel=False
        )
    else:
        # x86 multiplies unsigned activations by signed weights in one instruction (VNNI's
        # vpdpbusd); with signed ones onnxruntime leaves about half of the convolutions in float.
        activations = unsigned(activation_bits)
    return Scheme(
        activations=activations,
        weights=_signed(weight_bits),
        tables=_signed(8),
        patterns=PATTERNS[target],
    )


def one_backend(given: Any) -> Any:
    """Refuse the key `backend`, which users of torch.ao's FX and eager modes look for.

    Raises:
        ValueError: the key is there.
    """
    if isinstance(given, dict) and "backend" in given:
        raise ValueError(
            "backend: torch.ao's fx and eager modes are deprecated and not supported; leave the "
            "key out (the backend is torchao's pt2e)"
        )
    return given


def unsigned(bits: int) -> IntegerFormat:
    """Return the format of activations with a zero point, in 8 or 16 bits."""
    return IntegerFormat(
        dtype="uint8" if bits <= 8 else "uint16",
        low=0,
        high=2**bits - 1,
        symmetric=False,
        per_channel=False,
    )


def formats_of(target: Target, activation_bits: int = 8) -> frozenset[str]:
    """Return the integer type of a target's activations, as stages tell it beforehand."""
    return frozenset({scheme_of(target, activation_bits=activation_bits).activations.dtype})


def _signed(bits: int) -> IntegerFormat:
    largest = 2 ** (bits - 1) - 1
    return IntegerFormat(dtype="int8", low=-largest, high=largest, symmetric=True, per_channel=True)
