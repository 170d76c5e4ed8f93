"""What a quantized artifact's manifest records about its accuracy; settings only, no torch."""

from __future__ import annotations

from compress.common.config import Settings
from compress.common.errors import StageFailed

NAMED_LAYERS = 5  # layers named in one line, the worst first
LARGEST_SHARE = 0.005
"""Share of labels that may differ without being near-ties; with more, conversion has a bug."""


class MetricPair(Settings):
    """The task's metric of both models, on the samples compared."""

    name: str
    before: float
    """Of the float model."""
    after: float
    """Of the quantized one."""


class OutputFidelity(Settings):
    """How near one output of the quantized model is to the float model's."""

    name: str
    cosine: float
    """Mean of the samples' cosine similarities."""
    sqnr_db: float
    """Signal to quantization noise ratio, in decibels."""


class LayerFidelity(Settings):
    """How near the output of one of the user's modules is to the float model's."""

    module: str
    sqnr_db: float
    """In the quantized model, with the quantization error of all layers before it."""
    own_sqnr_db: float
    """Where it alone is quantized: its input is the float model's."""


class Fidelity(Settings):
    """How near a quantized model's outputs are to the float model's."""

    samples: int
    split: str | None
    """Where the samples are from; None for seeded inputs, where there is no `val`."""
    label_agreement: float | None
    """Fraction of equal labels; None where the first output holds no scores of classes."""
    metric: MetricPair | None
    """None where it cannot be measured on these samples."""
    outputs: tuple[OutputFidelity, ...]
    layers: tuple[LayerFidelity, ...]
    """Layers with weights, smallest `own_sqnr_db` first."""

    def line(self) -> str:
        """Summarize the comparison in one line, with the worst layers."""
        parts = [f"{o.name} cosine {o.cosine:.4f}, SQNR {o.sqnr_db:.1f} dB" for o in self.outputs]
        if self.label_agreement is not None:
            parts.insert(0, f"{100 * self.label_agreement:.4g} % equal labels")
        source = f"samples of {self.split}" if self.split else "seeded inputs"
        worst = ", ".join(f"{x.module} {x.own_sqnr_db:.1f} dB" for x in self.worst)
        layers = f"; worst layers by themselves: {worst}" if worst else ""
        return f"{'; '.join(parts)} on {self.samples} {source}{layers}"

    @property
    def worst(self) -> tuple[LayerFidelity, ...]:
        """The layers with the largest error of their own."""
        return self.layers[:NAMED_LAYERS]


class LabelParity(Settings):
    """How many labels of an integer graph are those of the model that QAT trained."""

    labels: int
    differing: int
    near_ties: int | None
    """Of the differing ones, those where the trained model's two largest outputs are within
    `last_step`; None where that is unknown."""
    last_step: float | None
    """The last quantization step, in units of the outputs."""
    largest_difference: float

    def merge(self, other: LabelParity) -> LabelParity:
        """Return the counts over both sets of samples."""
        ties = None
        if self.near_ties is not None and other.near_ties is not None:
            ties = self.near_ties + other.near_ties
        return LabelParity(
            labels=self.labels + other.labels,
            differing=self.differing + other.differing,
            near_ties=ties,
            last_step=self.last_step,
            largest_difference=max(self.largest_difference, other.largest_difference),
        )

    def line(self) -> str:
        """Summarize the comparison in one line."""
        equal = f"{self.labels - self.differing} of {self.labels} labels as trained"
        if not self.differing:
            return equal
        if self.near_ties is None:
            return f"{equal}; the last quantization step is not known"
        step = f"margins below the last quantization step, {self.last_step:.3g}"
        return f"{equal}; near-ties ({step}): {self.near_ties} of {self.differing}"

    def require_same_model(self) -> None:
        """Raise StageFailed where too many labels differ of which the trained model is sure."""
        unexplained = self.differing - (self.near_ties or 0)
        if unexplained > max(1.0, LARGEST_SHARE * self.labels):
            raise StageFailed(
                f"the integer graph gives {self.differing} of {self.labels} labels otherwise than "
                f"the trained model, {unexplained} of them no near-ties; expected at most "
                f"{LARGEST_SHARE:.1%} such"
            )
