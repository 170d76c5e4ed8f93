"""torchao's PT2E quantization, imported without the notes that it logs on the way."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _without_import_notes() -> Iterator[None]:
    """Hide what torchao 0.18 logs on import: absent CUDA libraries, a deprecation of its own."""

    def matters(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return "Failed to load" not in text and "is an Enum subclass" not in text

    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    for logger in loggers:
        logger.addFilter(matters)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(matters)


with _without_import_notes():
    from torchao.quantization.pt2e import (
        HistogramObserver,
        MinMaxObserver,
        MovingAverageMinMaxObserver,
        PerChannelMinMaxObserver,
    )
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import (
        DerivedQuantizationSpec,
        QuantizationAnnotation,
        QuantizationSpec,
        Quantizer,
        SharedQuantizationSpec,
    )
    from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

__all__ = [
    "Q_ANNOTATION_KEY",
    "DerivedQuantizationSpec",
    "HistogramObserver",
    "MinMaxObserver",
    "MovingAverageMinMaxObserver",
    "PerChannelMinMaxObserver",
    "QuantizationAnnotation",
    "QuantizationSpec",
    "Quantizer",
    "SharedQuantizationSpec",
    "convert_pt2e",
    "prepare_pt2e",
]
