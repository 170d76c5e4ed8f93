"""The names of torchao's PT2E quantization that this package uses."""

from compress.common.process import gc_disabled

# Without garbage collection: the import creates many objects that all stay.
with gc_disabled():
    from torchao.quantization.pt2e import (
        DerivedObserverOrFakeQuantize,
        HistogramObserver,
        MinMaxObserver,
        MovingAverageMinMaxObserver,
        ObserverBase,
        PerChannelMinMaxObserver,
        PlaceholderObserver,
        quantize_pt2e,
    )
    from torchao.quantization.pt2e.observer import UniformQuantizationObserverBase
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
    from torchao.quantization.pt2e.quantizer import (
        DerivedQuantizationSpec,
        QuantizationAnnotation,
        QuantizationSpec,
        Quantizer,
        SharedQuantizationSpec,
    )
    from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY
    from torchao.quantization.pt2e.utils import _fuse_conv_bn_ as fuse_conv_bn_

__all__ = [
    "Q_ANNOTATION_KEY",
    "DerivedObserverOrFakeQuantize",
    "DerivedQuantizationSpec",
    "HistogramObserver",
    "MinMaxObserver",
    "MovingAverageMinMaxObserver",
    "ObserverBase",
    "PerChannelMinMaxObserver",
    "PlaceholderObserver",
    "QuantizationAnnotation",
    "QuantizationSpec",
    "Quantizer",
    "SharedQuantizationSpec",
    "UniformQuantizationObserverBase",
    "fuse_conv_bn_",
    "prepare_pt2e",
    "quantize_pt2e",
]
