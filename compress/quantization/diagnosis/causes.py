"""Causes of accuracy lost by quantization: what they measure, and what mends them.

Those of `quantize_static` look at what each layer reads and writes; those of stages without
calibration run the stage again with other settings, to see what returns. Thresholds were set on
half of the injected faults of `benchmarks/explain.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from compress.core.diagnosis.cause import Cause, RefusedStage, Repair, changing, excluding

if TYPE_CHECKING:
    from compress.quantization.diagnosis.diagnosis import (
        LayerEvidence,
        RequantizationDiagnosis,
        Rounded,
        RoundingSwitch,
    )
    from compress.quantization.diagnosis.diagnosis import QuantizationDiagnosis as Diagnosis

    Switches = list[RoundingSwitch]
    MeasureLayer = Callable[[Diagnosis, str, Switches], float | None]
    Refused = RefusedStage[Diagnosis]
    Requantized = RefusedStage[RequantizationDiagnosis]
    Range = tuple[torch.Tensor, torch.Tensor]
    Changes = tuple[tuple[dict[str, Any], int], ...]
    """Settings that mend a cause, and what they cost."""

WEIGHT: tuple[Rounded, ...] = ("weight",)
KEPT_IN_TRAINING = ("target", "weight_bits", "exclude", "embeddings", "calibration_samples")
"""Settings that quantization-aware training has too."""
EPOCHS = 4  # of that training, where it is allowed


def _cause(
    key: str,
    limit: float,
    text: str,
    settings: Changes = (),
    *,
    of_layer: MeasureLayer | None = None,
    mended_range: Callable[[LayerEvidence, Range], Range | None] | None = None,
    weights_in_float: bool = False,
    more: Callable[[Refused], list[Repair]] | None = None,
) -> Cause:
    """Return a cause in what a layer of an integer model reads, of `quantize_static`.

    `of_layer` measures a layer, given the switches of what it reads; without it, the weights of all
    guilty layers are. `mended_range` is an activation's without the cause, given that of the
    calibration sample.
    """

    def measure(refused: Refused, layer: str) -> float | None:
        if not layer:
            return None if of_layer else _share_of_weights(refused, refused.layers)
        switches = refused.measured.switched.activation_switches(layer)
        return of_layer(refused.measured, layer, switches) if of_layer else None

    def recovered_share(refused: Refused, layers: Sequence[str]) -> float | None:
        if of_layer is None:
            return _share_of_weights(refused, layers)
        if mended_range is None:
            return None
        measured, changed = refused.measured, []
        for layer in layers:
            for switch in measured.switched.activation_switches(layer):
                low, high = map(torch.tensor, switch.observed_range())
                switch.low_high = mended_range(measured.evidence[layer], (low, high))
                changed += [switch] if switch.low_high else []
        # The switches are those of the search, which goes on with their own ranges.
        try:
            floats = layers if weights_in_float else ()
            points = measured.drop_on(measured.halves[0], floats, WEIGHT) if changed else None
            return None if points is None else measured.recovered_share(points)
        finally:
            for switch in changed:
                switch.low_high = None

    def repairs(refused: Refused, layers: Sequence[str]) -> tuple[Repair, ...]:
        """Return changes of the settings, then formats of more bits, then float layers."""
        own = refused.stage.own_settings()
        found = []
        for change, cost in settings:
            # The share of an observer goes with the observer that it was for.
            is_left = own["observer"] == "percentile" and "percentile" not in change
            share = {"percentile": None} if "observer" in change and is_left else {}
            found.append(Repair({**change, **share}, cost))
        found += more(refused) if more else []
        of_layers = refused.measured.switched.modules
        if modules := sorted({of_layers[name] for name in layers if of_layers.get(name)}):
            found.append(excluding(own, modules, 2))
        if own["activation_bits"] == 8 and own["target"] == "onnxruntime-cpu":
            found.append(Repair({"activation_bits": 16}, 3))
        # Defaults of the training are its own, such as its samples.
        trained = {n: own[n] for n in KEPT_IN_TRAINING if not refused.stage.has_default(n)}
        found.append(Repair({"stage": "quantize_aware_training", "epochs": EPOCHS, **trained}, 4))
        return changing(own, found)

    return Cause(key, ("quantize_static",), limit, text, measure, recovered_share, repairs)


def _share_of_weights(refused: Refused, layers: Sequence[str]) -> float | None:
    """Return the share of the loss that returns with these weights in float."""
    measured, known = refused.measured, refused.measured.weights_returned
    rounds = [s.rounds for layer in layers for s in measured.switched.switches[layer]]
    if "weight" not in rounds:
        return None
    if tuple(layers) not in known:
        points = measured.drop_on(measured.halves[0], layers, WEIGHT)
        known[tuple(layers)] = measured.recovered_share(points)
    return known[tuple(layers)]


def _share_cut_off(measured: Diagnosis, layer: str, switches: Switches) -> float | None:
    """Return the share of values outside of the chosen range, if calibration saw wider ones."""
    shares = []
    for switch in switches:
        (low, high), (least, most) = switch.chosen_range(), switch.observed_range()
        # Less than a hundredth is how the ends fall on whole steps.
        if least < low - 0.01 * (high - low) or most > high + 0.01 * (high - low):
            shares.append(measured.evidence[layer].share_outside(low, high))
    return max(shares, default=None)


def _outlier_ratio(measured: Diagnosis, layer: str, switches: Switches) -> float | None:
    """Return by how many times few values widen the range: on `val`, or of calibration."""
    inner = measured.calibrated[layer].inner_width()
    if not switches or inner <= 0:
        return None
    ranges = [switch.observed_range() for switch in switches]
    widest = max(max(high, 0.0) - min(low, 0.0) for low, high in ranges)
    return max(measured.evidence[layer].outlier_ratio(), widest / inner)


def _all_but_outliers(evidence: LayerEvidence, observed: Range) -> Range:
    low, high = evidence.values.quantiles(0.0005, 0.9995)
    return low.float(), high.float()


def _sample_width(measured: Diagnosis, layer: str, switches: Switches) -> float | None:
    """Return the width of the middle values of the calibration sample over that on `val`."""
    width = measured.evidence[layer].inner_width()
    return measured.calibrated[layer].inner_width() / width if switches and width > 0 else None


def _larger_sample(refused: Refused) -> list[Repair]:
    """Return larger calibration samples, where there are more."""
    stage: Any = refused.stage
    data = refused.context.data
    if data is None:
        return []
    available = len(data.split(data.calibration_split))  # type: ignore[arg-type]
    drawn = stage.available_samples(data)
    wanted = sorted({min(2 * drawn, available), available})
    return [Repair({"calibration_samples": n}, 0) for n in wanted if n > drawn]


STATIC_CAUSES = (
    # The observer chose a range that leaves out values which matter.
    _cause(
        "range_cut_off",
        0.01,
        "range cut off ({value:.1%} of the values are outside; limit {limit:.0%})",
        (({"observer": "minmax"}, 0), ({"observer": "mse"}, 0)),
        of_layer=_share_cut_off,
        mended_range=lambda evidence, observed: (
            torch.minimum(observed[0], evidence.extremes()[0]),
            torch.maximum(observed[1], evidence.extremes()[1]),
        ),
    ),
    # The calibration sample has smaller values than those of use.
    _cause(
        "sample_too_narrow",
        0.005,
        "calibration sample unlike val ({value:.1%} of the values are beyond all of the sample's; "
        "limit {limit:.1%})",
        of_layer=lambda measured, layer, switches: max(
            (measured.evidence[layer].share_outside(*s.observed_range()) for s in switches),
            default=None,
        ),
        mended_range=lambda evidence, _: evidence.extremes(),
        more=_larger_sample,
    ),
    # One scale for channels of which some have far wider ranges than most. Weights of such layers
    # are unlike the other way round, so what returns is measured with these in float.
    _cause(
        "unlike_channels",
        16.0,
        "one scale for unlike channels (ranges differ {value:.3g}-fold; limit {limit:g})",
        (({"equalize": True}, 0), ({"smooth": "auto"}, 1), ({"rounding": "adaround"}, 0)),
        of_layer=lambda measured, layer, switches: (
            measured.evidence[layer].channel_ratio() if switches else None
        ),
        mended_range=lambda evidence, _: evidence.channel_ranges(),
        weights_in_float=True,
    ),
    # Few values make the range so wide that the steps are too coarse for the others.
    _cause(
        "outliers",
        4.0,
        "range too wide, by outliers ({value:.3g}-fold; limit {limit:g})",
        (
            ({"observer": "mse"}, 0),
            ({"observer": "percentile", "percentile": 99.9}, 0),
            ({"observer": "entropy"}, 0),
            ({"smooth": "auto"}, 1),
        ),
        of_layer=_outlier_ratio,
        mended_range=_all_but_outliers,
    ),
    # The calibration sample has far larger values than those of use.
    _cause(
        "sample_too_wide",
        2.0,
        "calibration sample unlike val (its range is {value:.3g} times as wide; limit {limit:g})",
        (({"observer": "percentile", "percentile": 99.9}, 0), ({"observer": "mse"}, 0)),
        of_layer=_sample_width,
        mended_range=lambda evidence, _: evidence.extremes(),
        more=_larger_sample,
    ),
    # Rounded alone, the weights cost the loss.
    _cause(
        "weight_bits",
        0.5,
        "weights need more bits (in float they return {value:.0%} of the loss; limit {limit:.0%})",
        (({"rounding": "adaround"}, 0), ({"bias_correction": True}, 0), ({"weight_bits": 8}, 1)),
    ),
    # The rounding error has a mean, which later layers do not average out.
    _cause(
        "mean_shift",
        0.5,
        "mean shifted (the error's mean is {value:.2g} of its deviation; limit {limit:g})",
        (({"bias_correction": True}, 0), ({"rounding": "adaround"}, 0)),
        of_layer=lambda measured, layer, _: measured.evidence[layer].shift(),
    ),
)
"""Where two of them explain as much, the one that stands first is named first."""


def _setting(
    key: str, stage: str, text: str, without: dict[str, Any], settings: Changes = ()
) -> Cause:
    """Return a setting of a stage; with the settings `without` it, half of the loss returns."""

    def share(refused: Requantized, layers: Sequence[str] | str) -> float | None:
        own, measured = refused.stage.own_settings(), refused.measured
        if all(own[name] == value for name, value in without.items()):
            return None
        return measured.recovered_share(measured.drop_with(without))

    def repairs(refused: Requantized, layers: Sequence[str]) -> tuple[Repair, ...]:
        own = refused.stage.own_settings()
        found = [Repair(change, cost) for change, cost in settings]
        if refused.layers:
            found.append(excluding(own, refused.layers, 2))
        return changing(own, found)

    return Cause(
        key=key,
        stages=(stage,),
        limit=0.5,
        text=text,
        measure=lambda refused, layer: None if layer else share(refused, ()),
        recovered_share=share,
        repairs=repairs,
    )


SETTING_CAUSES = (
    _setting(
        "few_weight_bits",
        "quantize_weights",
        "weights need 8 bits (with them {value:.0%} returns; limit {limit:.0%})",
        {"bits": 8, "method": "rtn"},
        (
            ({"method": "gptq"}, 0),
            ({"method": "awq"}, 0),
            ({"group_size": 16}, 1),
            ({"bits": 8}, 3),
        ),
    ),
    _setting(
        "rounded_inputs",
        "quantize_weights",
        "inputs need more than 8 bits (in float they return {value:.0%}; limit {limit:.0%})",
        {"activation_bits": 32},
        (({"activation_bits": 32}, 2),),
    ),
    # Some inputs of linear layers have far larger values than most.
    _setting(
        "unlike_inputs",
        "quantize_dynamic",
        "one scale for unlike channels (smoothed {value:.0%} returns; limit {limit:.0%})",
        {"smooth": "auto"},
        (({"smooth": "auto"}, 1),),
    ),
    _setting(
        "unlike_rows",
        "quantize_dynamic",
        "one scale for unlike rows (with a scale each {value:.0%} returns; limit {limit:.0%})",
        {"activation_range": "row"},
        (({"activation_range": "row"}, 2),),
    ),
)
CAUSES = (*STATIC_CAUSES, *SETTING_CAUSES)
