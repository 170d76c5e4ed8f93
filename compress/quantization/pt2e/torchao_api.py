"""The names of torchao's PT2E quantization that this package uses."""

from torch.fx import GraphModule

from compress.common.process import gc_disabled
from compress.graph.library_cache import patched_attribute

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
    "convert_pt2e",
    "fuse_conv_bn_",
    "prepare_pt2e",
]


def convert_pt2e(prepared: GraphModule) -> GraphModule:
    """Convert a graph of `prepare_pt2e`, once calibrated or trained, to integers."""
    # Where a batch normalization is left, torchao (0.18) looks for 96 patterns of its own training
    # with quantization, which is not used here, and traces them anew each time: ten seconds.
    with patched_attribute(quantize_pt2e, "_fold_conv_bn_qat", lambda graph: graph):
        converted: GraphModule = quantize_pt2e.convert_pt2e(prepared)
    return converted
