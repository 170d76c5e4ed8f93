"""Causes of accuracy lost by fixed ranges of 8 bits: what they measure, and what mends them.

Thresholds were set on half of the injected faults of `benchmarks/explain.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from compress.core.diagnosis.cause import Cause, Repair
from compress.quantization.diagnosis.diagnosis import QuantizationDiagnosis

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from compress.core.diagnosis.cause import RefusedStage
    from compress.quantization.diagnosis.diagnosis import LayerEvidence
    from compress.quantization.diagnosis.rounding_switches import Rounded, RoundingSwitch

    Refused = RefusedStage[QuantizationDiagnosis]
    Range = tuple[torch.Tensor, torch.Tensor]

WEIGHT: tuple[Rounded, ...] = ("weight",)
KEPT_IN_TRAINING = ("target", "weight_bits", "exclude", "embeddings", "calibration_samples")
"""Settings that quantization-aware training has too."""
EPOCHS = 4
"""Of that training, where it is allowed."""


class QuantizationCause(Cause[QuantizationDiagnosis]):
    """A cause in what a layer of an integer model reads."""

    stages = ("quantize_static",)
    settings: ClassVar[tuple[tuple[dict[str, Any], int], ...]] = ()
    """Changes of the stage's settings that mend it, and what they cost."""

    def measure(self, refused: Refused, layer: str) -> float | None:
        """Return the value for a layer; None for the stage as a whole."""
        return self.measure_layer(refused.measured, layer) if layer else None

    def measure_layer(self, measured: QuantizationDiagnosis, layer: str) -> float | None:
        """Return the value for a layer; None where the test does not apply."""
        return None

    def repairs(self, refused: Refused, layers: Sequence[str]) -> tuple[Repair, ...]:
        """Return changes of the settings, then formats of more bits, then float layers."""
        own = refused.stage.own_settings()
        found = [Repair(_complete(settings, own), cost) for settings, cost in self.settings]
        found += self.more_repairs(refused, layers)
        modules = sorted(
            {refused.measured.switched.modules.get(name, "") for name in layers} - {""}
        )
        if modules:
            excluded = [*own["exclude"], *(m for m in modules if m not in own["exclude"])]
            found.append(Repair({"exclude": excluded}, 2))
        if own["activation_bits"] == 8 and own["target"] == "onnxruntime-cpu":
            found.append(Repair({"activation_bits": 16}, 3))
        trained = {n: own[n] for n in KEPT_IN_TRAINING if not refused.stage.has_default(n)}
        found.append(Repair({"stage": "quantize_aware_training", "epochs": EPOCHS, **trained}, 4))
        return tuple(r for r in found if any(own.get(k) != v for k, v in r.settings.items()))

    def more_repairs(self, refused: Refused, layers: Sequence[str]) -> list[Repair]:
        """Return repairs that follow from the settings."""
        return []

    def mended_range(self, evidence: LayerEvidence, observed: Range) -> Range | None:
        """Return the range of an activation without the cause; None where ranges are not it."""
        return None

    def returned(self, refused: Refused, layers: Sequence[str]) -> float | None:
        """Return the share of the loss that returns where these layers have other ranges."""
        measured, changed = refused.measured, []
        for layer in layers:
            evidence = measured.evidence[layer]
            for switch in measured.switched.activation_switches(layer):
                low, high = map(torch.tensor, switch.observed_range())
                switch.low_high = self.mended_range(evidence, (low, high))
                changed += [switch] if switch.low_high else []
        try:
            return measured.returned(measured.drop(())) if changed else None
        finally:
            for switch in changed:
                switch.low_high = None


class RangeCutOff(QuantizationCause):
    """The observer chose a range that leaves out values which matter."""

    limit = 0.01
    text = "range cut off ({value:.1%} of the values are outside; limit {limit:.0%})"
    settings = (({"observer": "minmax"}, 0), ({"observer": "mse"}, 0))

    def measure_layer(self, measured: QuantizationDiagnosis, layer: str) -> float | None:
        """Return the share of values outside of the chosen range, if calibration saw wider ones."""
        shares = []
        for switch in measured.switched.activation_switches(layer):
            (low, high), (least, most) = switch.chosen_range(), switch.observed_range()
            if least < low - 0.01 * (high - low) or most > high + 0.01 * (high - low):
                shares.append(measured.evidence[layer].share_outside(low, high))
        return max(shares, default=None)

    def mended_range(self, evidence: LayerEvidence, observed: Range) -> Range:
        """Return the range of all values."""
        low, high = evidence.extremes()
        return torch.minimum(observed[0], low), torch.maximum(observed[1], high)


class Outliers(QuantizationCause):
    """Few values make the range so wide that the steps are too coarse for the others."""

    limit = 4.0
    text = "range too wide, by outliers ({value:.3g}-fold; limit {limit:g})"
    settings = (
        ({"observer": "mse"}, 0),
        ({"observer": "percentile", "percentile": 99.9}, 0),
        ({"observer": "entropy"}, 0),
        ({"smooth": "auto"}, 1),
    )

    def measure_layer(self, measured: QuantizationDiagnosis, layer: str) -> float | None:
        """Return by how many times few values widen the range: on `val`, or of calibration."""
        switches = measured.switched.activation_switches(layer)
        inner = measured.calibrated[layer].inner_width()
        if not switches or inner <= 0:
            return None
        calibrated = max(width / inner for width in _widths(switches))
        return max(measured.evidence[layer].outlier_ratio(), calibrated)

    def mended_range(self, evidence: LayerEvidence, observed: Range) -> Range:
        """Return the range of all but a thousandth of the values."""
        low, high = evidence.values.quantiles(0.0005, 0.9995)
        return low.float(), high.float()


class UnlikeChannels(QuantizationCause):
    """One scale for channels of which some have far wider ranges than most."""

    limit = 16.0
    text = "one scale for unlike channels (ranges differ {value:.3g}-fold; limit {limit:g})"
    settings = (
        ({"equalize": True}, 0),
        ({"smooth": "auto"}, 1),
        ({"rounding": "adaround"}, 0),
    )

    def measure_layer(self, measured: QuantizationDiagnosis, layer: str) -> float | None:
        """Return the widest channel's range over the median one's."""
        if not measured.switched.activation_switches(layer):
            return None
        return measured.evidence[layer].channel_ratio()

    def returned(self, refused: Refused, layers: Sequence[str]) -> float | None:
        """Return the share that returns with a scale for each channel.

        Weights of such layers are unlike the other way round, so they are in float.
        """
        measured = refused.measured
        with measured.switched.in_float(layers, WEIGHT):
            return super().returned(refused, layers)

    def mended_range(self, evidence: LayerEvidence, observed: Range) -> Range | None:
        """Return the range of each channel."""
        return evidence.channel_ranges()


class SampleTooNarrow(QuantizationCause):
    """The calibration sample has smaller values than those of use."""

    limit = 0.005
    text = (
        "calibration sample unlike val ({value:.1%} of the values are beyond all of the sample's; "
        "limit {limit:.1%})"
    )

    def measure_layer(self, measured: QuantizationDiagnosis, layer: str) -> float | None:
        """Return the share of values on `val` beyond the extremes of the calibration sample."""
        evidence = measured.evidence[layer]
        switches = measured.switched.activation_switches(layer)
        return max((evidence.share_outside(*s.observed_range()) for s in switches), default=None)

    def more_repairs(self, refused: Refused, layers: Sequence[str]) -> list[Repair]:
        """Return a larger sample, where there is one."""
        own, data = refused.stage, refused.context.data
        if data is None:
            return []
        available = len(data.split(data.calibration_split))  # type: ignore[arg-type]
        drawn = own.available_samples(data)
        wanted = sorted({min(2 * drawn, available), available})
        return [Repair({"calibration_samples": n}, 0) for n in wanted if n > drawn]

    def mended_range(self, evidence: LayerEvidence, observed: Range) -> Range:
        """Return the range on `val`."""
        return evidence.extremes()


class SampleTooWide(SampleTooNarrow):
    """The calibration sample has far larger values than those of use."""

    limit = 2.0
    text = "calibration sample unlike val (its range is {value:.3g} times as wide; limit {limit:g})"
    settings = (({"observer": "percentile", "percentile": 99.9}, 0), ({"observer": "mse"}, 0))

    def measure_layer(self, measured: QuantizationDiagnosis, layer: str) -> float | None:
        """Return the width of the middle values of the calibration sample over that on `val`."""
        width = measured.evidence[layer].inner_width()
        if not measured.switched.activation_switches(layer) or width <= 0:
            return None
        return measured.calibrated[layer].inner_width() / width


class WeightBits(QuantizationCause):
    """Weights that need more bits: rounded alone they cost the loss."""

    limit = 0.5
    text = (
        "weights need more bits (in float they return {value:.0%} of the loss; limit {limit:.0%})"
    )
    settings = (
        ({"rounding": "adaround"}, 0),
        ({"bias_correction": True}, 0),
        ({"weight_bits": 8}, 1),
    )

    def measure(self, refused: Refused, layer: str) -> float | None:
        """Return the share of the loss that returns with all guilty layers' weights in float."""
        return None if layer else self.returned(refused, refused.layers)

    def returned(self, refused: Refused, layers: Sequence[str]) -> float | None:
        """Return the share of the loss that returns with these weights in float."""
        measured, known = refused.measured, refused.measured.weights_returned
        rounds = [s.rounds for layer in layers for s in measured.switched.switches[layer]]
        if "weight" not in rounds:
            return None
        if tuple(layers) not in known:
            known[tuple(layers)] = measured.returned(measured.drop(layers, WEIGHT))
        return known[tuple(layers)]


class MeanShift(QuantizationCause):
    """The rounding error has a mean, which later layers do not average out."""

    limit = 0.5
    text = "mean shifted (the error's mean is {value:.2g} of its deviation; limit {limit:g})"
    settings = (({"bias_correction": True}, 0), ({"rounding": "adaround"}, 0))

    def measure_layer(self, measured: QuantizationDiagnosis, layer: str) -> float | None:
        """Return the mean of the error over its deviation."""
        return measured.evidence[layer].shift()


CAUSES: tuple[type[QuantizationCause], ...] = (
    RangeCutOff,
    SampleTooNarrow,
    UnlikeChannels,
    Outliers,
    SampleTooWide,
    WeightBits,
    MeanShift,
)
"""Where two of them explain as much, the one that stands first is named first."""


def _complete(settings: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return settings without the share of an observer that they replace."""
    replaces = own["observer"] == "percentile" and "percentile" not in settings
    return {**settings, "percentile": None} if "observer" in settings and replaces else settings


def _widths(switches: Sequence[RoundingSwitch]) -> Iterator[float]:
    """Yield the width of each range of the calibration sample, zero included."""
    for switch in switches:
        low, high = switch.observed_range()
        yield max(high, 0.0) - min(low, 0.0)
