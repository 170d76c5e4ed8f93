"""Integer formats as torchao's `QuantizationSpec`: dtype, range, and the observer of the scale."""

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


def qspec(numbers: IntegerFormat, observer: Any, **options: float) -> QuantizationSpec:
    """Return the torchao spec of an integer format, with the class of its observer and options."""
    granularity = "channel" if numbers.per_channel else "tensor"
    symmetry = "symmetric" if numbers.symmetric else "affine"
    return QuantizationSpec(
        dtype=getattr(torch, numbers.dtype),
        observer_or_fake_quant_ctr=observer.with_args(eps=SMALLEST_SCALE, **options),
        quant_min=numbers.quant_min,
        quant_max=numbers.quant_max,
        qscheme=getattr(torch, f"per_{granularity}_{symmetry}"),
        ch_axis=0 if numbers.per_channel else None,
    )


def bias_qspec(node: Node, source: Node, weight: Node) -> DerivedQuantizationSpec:
    """Return the int32 spec of a bias, with scale `input_scale * weight_scale`."""

    # onnxruntime would round a float bias to the same integers. Doing so here gives both runtimes
    # equal sums, and lets onnxruntime compute a Gemm with a float output in integers.
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
