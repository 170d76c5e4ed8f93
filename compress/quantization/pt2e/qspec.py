"""Number formats as torchao's quantizers take them: a dtype, its ends, and who finds the scale."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from compress.quantization.pt2e.torchao_api import (
    DerivedQuantizationSpec,
    MinMaxObserver,
    QuantizationSpec,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Node

    from compress.quantization.config.dtype_scheme import IntegerFormat

SMALLEST_SCALE = 2.0**-60
"""Keeps the product of two scales, which both runtimes hold in a float32, a normal number."""


def spec_of(numbers: IntegerFormat, observer: Any, **options: float) -> QuantizationSpec:
    """Return a format whose scales an observer finds.

    Args:
        numbers: the format.
        observer: class of the observer.
        options: what the observer takes besides.
    """
    kind = "channel" if numbers.per_channel else "tensor"
    form = "symmetric" if numbers.symmetric else "affine"
    return QuantizationSpec(
        dtype=getattr(torch, numbers.dtype),
        observer_or_fake_quant_ctr=observer.with_args(eps=SMALLEST_SCALE, **options),
        quant_min=numbers.low,
        quant_max=numbers.high,
        qscheme=getattr(torch, f"per_{kind}_{form}"),
        ch_axis=0 if numbers.per_channel else None,
    )


def bias_spec(node: Node, source: Node, weight: Node) -> DerivedQuantizationSpec:
    """Return the 32-bit format in which a bias is added to integer products.

    onnxruntime would round a float bias itself; doing so here keeps both runtimes' sums equal, and
    is what lets it compute a Gemm with a float result in integers.
    """

    def derive(observers: Sequence[MinMaxObserver]) -> tuple[torch.Tensor, torch.Tensor]:
        (scale, _), (scale_O, _) = (observer.calculate_qparams() for observer in observers)
        bias_scale_O = scale * scale_O
        return bias_scale_O, torch.zeros_like(bias_scale_O, dtype=torch.int32)

    return DerivedQuantizationSpec(
        derived_from=[(source, node), (weight, node)],
        derive_qparams_fn=derive,
        dtype=torch.int32,
        quant_min=-(2**31),
        quant_max=2**31 - 1,
        qscheme=torch.per_channel_symmetric,
        ch_axis=0,
    )
