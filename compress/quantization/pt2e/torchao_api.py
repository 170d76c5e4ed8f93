"""The names of torchao's PT2E quantization that this package uses, imported without log noise."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from compress.common.process import gc_disabled


@contextmanager
def _quiet_import() -> Iterator[None]:
    """Hide what torchao 0.18 logs on import: absent CUDA libraries, its own deprecations."""

    def is_relevant(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return "Failed to load" not in text and "is an Enum subclass" not in text

    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    for logger in loggers:
        logger.addFilter(is_relevant)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_relevant)


# Without garbage collection: the import creates many objects that all stay.
with _quiet_import(), gc_disabled():
    from torchao.quantization.pt2e import (
        DerivedObserverOrFakeQuantize,
        HistogramObserver,
        MinMaxObserver,
        MovingAverageMinMaxObserver,
        ObserverBase,
        PerChannelMinMaxObserver,
        PlaceholderObserver,
    )
    from torchao.quantization.pt2e.observer import UniformQuantizationObserverBase
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
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
