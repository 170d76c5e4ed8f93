"""What a quantized artifact says about how near it stays to its float model; no torch."""

from __future__ import annotations

from compress.common.config import Settings

NAMED_LAYERS = 5
"""Layers named in one line, the worst first."""


class MetricPair(Settings):
    """The task's metric before and after, on the samples compared."""

    name: str
    before: float
    """Of the float model."""
    after: float
    """Of the quantized one."""


class OutputFidelity(Settings):
    """How near one output stays."""

    name: str
    cosine: float
    """Mean of the samples' cosines."""
    sqnr_db: float
    """Signal to quantization noise ratio, in decibels."""


class LayerFidelity(Settings):
    """How near the result of one of the user's modules stays."""

    module: str
    sqnr_db: float
    """Of its result in the quantized model, where all layers before it are rounded too."""
    own_sqnr_db: float
    """Of its result where it alone is rounded: it reads what the float model gives it."""


class Fidelity(Settings):
    """A quantized model beside its float model."""

    samples: int
    split: str | None
    """Where the samples are from; None for seeded inputs, where there is no `val`."""
    label_agreement: float | None
    """Fraction of equal labels; None where the first output holds no scores of classes."""
    metric: MetricPair | None
    """None where it cannot be measured on these samples."""
    outputs: tuple[OutputFidelity, ...]
    layers: tuple[LayerFidelity, ...]
    """Layers with weights, that which loses most by itself first."""

    def line(self) -> str:
        """Return the comparison in one line, the worst layers named."""
        told = [f"{o.name} cosine {o.cosine:.4f}, SQNR {o.sqnr_db:.1f} dB" for o in self.outputs]
        if self.label_agreement is not None:
            told.insert(0, f"{100 * self.label_agreement:.4g} % equal labels")
        where = f"samples of {self.split}" if self.split else "seeded inputs"
        worst = ", ".join(f"{x.module} {x.own_sqnr_db:.1f} dB" for x in self.worst)
        layers = f"; worst layers by themselves: {worst}" if worst else ""
        return f"{'; '.join(told)} on {self.samples} {where}{layers}"

    @property
    def worst(self) -> tuple[LayerFidelity, ...]:
        """The layers that lose most by themselves."""
        return self.layers[:NAMED_LAYERS]
