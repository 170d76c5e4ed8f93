"""Number formats that a runtime has fast integer kernels for; settings only, no torch."""

from __future__ import annotations

from typing import Literal

from compress.core.settings import Settings

Target = Literal["onnxruntime-cpu"]
Observer = Literal["minmax", "moving_average", "histogram"]


class IntegerFormat(Settings):
    """How a float tensor becomes small integers."""

    dtype: Literal["uint8", "int8"]
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
    """The integer formats of activations and weights."""

    activations: IntegerFormat
    weights: IntegerFormat


SCHEMES: dict[Target, Scheme] = {
    # onnxruntime on x86 multiplies unsigned activations by signed weights in one instruction
    # (VNNI's vpdpbusd); with signed activations about half of the convolutions stay float.
    "onnxruntime-cpu": Scheme(
        activations=IntegerFormat(
            dtype="uint8", low=0, high=255, symmetric=False, per_channel=False
        ),
        weights=IntegerFormat(dtype="int8", low=-127, high=127, symmetric=True, per_channel=True),
    ),
}
