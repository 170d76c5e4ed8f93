"""A gate's verdict, and the record of the stages and verdicts that led to a packaged artifact."""

from __future__ import annotations

import math

from pydantic import JsonValue

from compress.common.config import Settings
from compress.core.bounds import CLOPPER_PEARSON, samples_for


class Uncertainty(Settings):
    """On how many samples a figure was measured, and how far off the figure of all data may be."""

    samples: int
    """Samples that have a target."""
    interval: tuple[float, float] | None = None
    """95 % confidence interval, in the figure's unit; None for metrics that no sums over samples
    give, and where no sample makes a difference."""
    lost: int | None = None
    """Samples that the model compared with has right and the other has not; None for a figure of
    one model, and where samples are not just right or wrong."""
    gained: int | None = None
    """Samples that only the other model has right."""

    def scaled(self, factor: float) -> Uncertainty:
        """Return the same of the figure times a factor."""
        ends = sorted(factor * end for end in self.interval or ())
        return self.model_copy(update={"interval": (ends[0], ends[1]) if ends else None})

    def in_words(self, unit: str = "", factor: float = 1.0) -> str:
        """Describe it: ``1 of 360 samples; 95 %: -0.3 to 0.8``; ends are multiplied by `factor`."""
        counted = f"{self.samples} samples"
        if self.lost and self.gained:
            counted = f"{self.lost} lost and {self.gained} gained of {counted}"
        elif self.lost is not None:
            counted = f"{self.lost or self.gained} of {counted}"
        if self.interval is None:
            return f"{counted}; no interval"
        low, high = (f"{end:.2g}" for end in sorted(factor * end for end in self.interval))
        return f"{counted}; 95 %: {low} to {high}{unit}"


class Bound(Settings):
    """A confidence bound of a figure, which a gate judges in its place, and what it rests on."""

    value: float
    """The bound, in the gate's unit as the others here."""
    measured: float
    """The figure of the samples themselves."""
    samples: int
    """Samples of `val` that both models answered."""
    changed: int
    """Samples that count as answered otherwise."""
    confidence: float
    method: str
    """What the bound is computed by."""
    classes: dict[str, float] = {}
    """Bounds for inputs of each class that the model compared with predicts, where there are few;
    they hold all at once with the confidence (Bonferroni)."""
    is_half: bool = False
    """Whether the samples are the half of `val` that chose nothing of the model."""
    quantiles: dict[str, float] = {}
    """Percent of inputs → error that so many do not exceed; each holds with the confidence. Those
    for which the samples are too few are left out."""

    def in_words(self, factor: float = 1.0) -> str:
        """Describe what was measured: ``measured 0.16: 8 of 5000 samples changed``."""
        which = " of the half of val that chose nothing" if self.is_half else ""
        counted = f"{self.changed} of {self.samples} samples{which} changed"
        return f"measured {factor * self.measured:.3g}: {counted}"

    def needed(self, limit: float) -> str:
        """Say how many samples it would take to show a limit that the bound does not keep."""
        if self.measured >= limit:
            return "no number of samples would show the limit, as what was measured is not below it"
        if self.method == CLOPPER_PEARSON:
            count = samples_for(self.measured / 100, limit / 100, self.confidence)
            return f"{count} samples would show the limit at this rate"
        # The distance falls with the root of the samples, and with their number if none changed.
        ratio = (self.value - self.measured) / (limit - self.measured)
        count = math.ceil(self.samples * ratio ** (2 if self.changed else 1))
        return f"about {count} samples would show the limit at this rate"

    def statement(self) -> str:
        """Say what the bound promises, and what it assumes."""
        percent = f"{100 * self.confidence:g} %"
        parts = [
            f"The bound {self.value:.4g} holds with {percent} confidence ({self.method}; "
            f"{self.in_words()}) for inputs from where the samples of `val` come from. It assumes "
            "that these were drawn independently of each other, and that nothing of the model was "
            "chosen on them. Each bound holds with this confidence by itself."
        ]
        if self.classes:
            each = ", ".join(f"{name}: {bound:.3g}" for name, bound in self.classes.items())
            parts.append(f"By predicted class, all at once with {percent} (Bonferroni): {each}.")
        if self.quantiles:
            each = ", ".join(f"{q} % by at most {e:.3g}" for q, e in self.quantiles.items())
            parts.append(f"Of all inputs err, with {percent} each: {each}.")
        return " ".join(parts)


class Verdict(Settings):
    """The result of a gate."""

    gate: str
    """The gate's type."""
    value: float | None
    """What was measured; None when it could not be."""
    limit: float
    """What the value was compared with."""
    passed: bool
    against: str | None
    """Name of the artifact compared with; None where the gate measures the result alone."""
    on: str = ""
    """Name of the device that answered; empty for this machine."""
    rule: str
    """The rule with its unit, such as ``size ratio <= 0.25``."""
    reason: str = ""
    """Why it could not be measured."""
    was_busy: bool = False
    """Whether that was only because the machine had too much else to do."""
    uncertainty: Uncertainty | None = None
    """Of a value that is measured on samples, in its unit; None for others, and in reports of older
    versions."""
    bound: Bound | None = None
    """Of a value that is a confidence bound."""
    outputs: dict[str, float] = {}
    """Value of each output that was read, where the model has several and a gate has a value for
    each; the worst is the verdict's."""

    @property
    def located(self) -> str:
        """Say on which device: `` on web``; empty for this machine."""
        return f" on {self.on}" if self.on else ""

    @property
    def compared(self) -> str:
        """Say where, and against what, such as `` on web against train``."""
        return self.located + (f" against {self.against}" if self.against else "")

    @property
    def measured(self) -> JsonValue:
        """What the gate measured, as :meth:`Gate.stored_verdict` takes it; None where nothing."""
        if self.value is None or not (self.uncertainty or self.bound or self.outputs):
            return self.value
        return self.model_dump(mode="json", include={"value", "uncertainty", "bound", "outputs"})

    def basis(self, unit: str = "", factor: float = 1.0) -> str:
        """Return in parentheses of what the value is: the output, and the samples.

        The ends of an interval are multiplied by `factor`.
        """
        worst = [name for name, value in self.outputs.items() if value == self.value]
        of_several = f", the worst of {len(self.outputs)}" if len(self.outputs) > 1 else ""
        parts = [f"output {name!r}{of_several}" for name in worst[:1]]
        if self.bound:
            parts += [self.bound.in_words(factor)]
            parts += [] if self.passed else [self.bound.needed(self.limit)]
        elif self.uncertainty:
            parts += [self.uncertainty.in_words(unit, factor)]
        return f" ({'; '.join(parts)})" if parts else ""


def explain(verdict: Verdict) -> str:
    """Format a verdict in one line: the gate, its rule, and the measured value."""
    found = verdict.reason or f"found {verdict.value:.4g}"
    found += verdict.basis()
    shown = verdict.model_copy(update={"against": None}) if verdict.against == "input" else verdict
    return f"{verdict.gate}{shown.compared}: {verdict.rule}, {found}"


class PastStage(Settings):
    """One stage that led to an artifact; equal runs give equal records."""

    name: str
    stage: str
    input: str
    """Name of the stage whose artifact it read, or `source`."""
    settings: dict[str, JsonValue]
    kind: str
    digest: str
    """Of the artifact that it wrote."""
    bytes: int
    """Size of that artifact's file."""
    parameters: int | None
    macs: int | None
    metric: dict[str, JsonValue] | None
    """Name, split and value of the pipeline's metric."""
    certificate: str = ""
    """What the stage itself promises of the result, as `cascade` does."""
    verdicts: tuple[Verdict, ...]
    """Without values that differ from run to run, such as latencies."""


class History(Settings):
    """All stages from the source model to an artifact."""

    pipeline: str
    seed: int
    data: str | None
    """Fingerprint of the data."""
    versions: dict[str, str]
    """Of Python, this toolkit and its libraries."""
    source: dict[str, JsonValue]
    """What identifies the source model: the hash of its checkpoint and of its code."""
    source_digest: str
    """Digest of the artifact that was made of the source model."""
    stages: tuple[PastStage, ...]
