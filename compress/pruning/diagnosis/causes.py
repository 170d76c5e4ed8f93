"""Causes of accuracy lost by pruning: what they measure, and what mends them.

Thresholds were set on half of the injected faults of `benchmarks/explain.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from compress.core.diagnosis.cause import Cause, Repair
from compress.core.diagnosis.input_ranges import UNLIKE
from compress.pruning.diagnosis.diagnosis import (
    CutChannels,
    PruningDiagnosis,
    RemovedBlocks,
    ZeroedWeights,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compress.core.diagnosis.cause import RefusedStage

Diagnosis = TypeVar("Diagnosis", bound=PruningDiagnosis[Any])

EPOCHS = 4
"""Of the fine-tuning that is tried where training is allowed."""


class PruningCause(Cause[Diagnosis]):
    """A cause that is taken away after those that come before it."""

    settings: ClassVar[tuple[tuple[dict[str, Any], int], ...]] = ()
    """Changes of the stage's settings that mend it, and what they cost."""

    def measure(self, refused: RefusedStage[Diagnosis], layer: str) -> float | None:
        """Return the value for a part, or for the stage; None where it cannot be the cause."""
        measured = refused.measured
        # Of a stage that was to recover a loss, the training alone is tested.
        if measured is None or self.key not in measured.shares(refused.layers):
            return None
        return self.measure_part(measured, layer) if layer else self.measure_stage(measured)

    def measure_part(self, measured: Diagnosis, part: str) -> float | None:
        """Return the value for a guilty part."""
        return None

    def measure_stage(self, measured: Diagnosis) -> float | None:
        """Return the value for the stage as a whole."""
        return None

    def returned(self, refused: RefusedStage[Diagnosis], layers: Sequence[str]) -> float | None:
        """Return the share of the loss that returns beyond what earlier causes return."""
        return refused.measured.shares(refused.layers).get(self.key)

    def repairs(
        self, refused: RefusedStage[Diagnosis], layers: Sequence[str]
    ) -> tuple[Repair, ...]:
        """Return changes of the settings, then fine-tuning where there is none."""
        own = refused.stage.own_settings()
        found = [Repair(settings, cost) for settings, cost in self.settings]
        found += self.more_repairs(refused, own, layers)
        if own.get("finetune") is None:
            found.append(Repair({"finetune": {"epochs": EPOCHS}}, 4))
        return tuple(r for r in found if any(own.get(k) != v for k, v in r.settings.items()))

    def more_repairs(
        self, refused: RefusedStage[Diagnosis], own: dict[str, Any], layers: Sequence[str]
    ) -> list[Repair]:
        """Return repairs that follow from the settings."""
        return []


class CalibrationUnlikeVal(PruningCause[CutChannels]):
    """Layers are refitted to samples that are scaled otherwise than those of use."""

    stages = ("prune_channels",)
    limit = UNLIKE
    text = (
        "calibration sample unlike val (inputs are {value:.3g} times as wide, as narrow or "
        "shifted; limit {limit:g})"
    )
    settings = (({"refit": False}, 0), ({"calibration_samples": 0, "refit": None}, 0))

    def measure_stage(self, measured: CutChannels) -> float | None:
        """Return by how many times the sample's range differs."""
        return measured.sample_unlikeness


class StaleBatchNorm(PruningCause[PruningDiagnosis[Any]]):
    """BatchNorm statistics are those from before channels, weights or blocks were removed."""

    stages = ("prune_channels", "prune_weights", "prune_layers")
    limit = 0.1
    text = "BatchNorm statistics are stale (means are {value:.2g} deviations off; limit {limit:g})"

    def measure_stage(self, measured: PruningDiagnosis[Any]) -> float | None:
        """Return how far the statistics are from those of the pruned model."""
        shift: float = measured.statistics_shift()  # type: ignore[attr-defined]
        return shift

    def more_repairs(
        self,
        refused: RefusedStage[PruningDiagnosis[Any]],
        own: dict[str, Any],
        layers: Sequence[str],
    ) -> list[Repair]:
        """Return what re-estimates them."""
        if refused.stage.stage == "prune_weights":
            return [Repair({"batch_norm": "reestimate"}, 0)]
        if refused.stage.stage == "prune_layers":
            return [Repair({"refit": True}, 0)]
        return [
            Repair({"calibration_samples": None, "refit": False}, 0),
            Repair({"calibration_samples": None, "refit": None}, 0),
        ]


class NoRefit(PruningCause[Any]):
    """Layers were not refitted to their earlier outputs."""

    stages = ("prune_channels", "prune_layers")
    limit = 1.25
    text = (
        "layers are not refitted (the outputs' error is {value:.3g} times that of refitted ones; "
        "limit {limit:g})"
    )

    def measure_stage(self, measured: Any) -> float | None:
        """Return by how many times a refit lowers the error."""
        gain: float = measured.refit_gain()
        return gain

    def more_repairs(
        self, refused: RefusedStage[Any], own: dict[str, Any], layers: Sequence[str]
    ) -> list[Repair]:
        """Return a refit, with samples where there are none."""
        samples = {"calibration_samples": None} if own["calibration_samples"] == 0 else {}
        return [Repair({"refit": True, **samples}, 0)]


class FewCalibrationSamples(PruningCause[CutChannels]):
    """Layers are refitted, and channels ranked, on too few samples."""

    stages = ("prune_channels",)
    limit = 2.0
    text = "too few calibration samples ({value:.3g} times as many are there; limit {limit:g})"
    settings = (({"calibration_samples": None}, 0),)

    def measure_stage(self, measured: CutChannels) -> float | None:
        """Return how many times as many samples would be used by default."""
        return measured.usual_samples / max(1, measured.own.samples)


class PoorCriterion(PruningCause[CutChannels]):
    """The criterion removes channels that matter, and keeps others that do not."""

    stages = ("prune_channels",)
    limit = 0.1
    text = (
        "poor importance criterion ({value:.0%} of the removed channels are kept by obs; "
        "limit {limit:.0%})"
    )

    def measure_part(self, measured: CutChannels, part: str) -> float | None:
        """Return the share of the group's removed channels that the best criterion would keep."""
        return measured.unlike_best(part)

    def more_repairs(
        self, refused: RefusedStage[CutChannels], own: dict[str, Any], layers: Sequence[str]
    ) -> list[Repair]:
        """Return criteria that look at data."""
        samples = {"calibration_samples": None} if own["calibration_samples"] == 0 else {}
        refit = {"refit": True} if own["refit"] is False else {}
        return [
            Repair({"importance": criterion, **samples, **refit}, 0)
            for criterion in ("obs", "wanda", "taylor")
        ]


class GroupTooNarrow(PruningCause[CutChannels]):
    """One group of channels, or a few, lost more than the model can do without."""

    stages = ("prune_channels",)
    limit = 0.2
    text = "too narrow a group ({value:.0%} of its channels are removed; limit {limit:.0%})"

    def measure_part(self, measured: CutChannels, part: str) -> float | None:
        """Return the share of the group's channels that were removed."""
        return measured.removed_share(part)

    def more_repairs(
        self, refused: RefusedStage[CutChannels], own: dict[str, Any], layers: Sequence[str]
    ) -> list[Repair]:
        """Return half of the cut, then none, and the others' share of it."""
        measured = refused.measured
        if own["widths"] is not None:
            halfway = {
                group: (measured.whole[group] + width + 1) // 2
                for group, width in own["widths"].items()
                if group in layers
            }
            rest = {g: width for g, width in own["widths"].items() if g not in layers}
            found = [Repair({"widths": {**own["widths"], **halfway}}, 1)]
            return [*found, Repair({"widths": rest}, 2)] if rest else found
        excluded = [*own["exclude"], *(group for group in layers if group not in own["exclude"])]
        found = [Repair({"exclude": excluded}, 2)]
        if own["ratio"] is not None:
            whole = sum(measured.whole.values())
            others = sum(n for group, n in measured.whole.items() if group not in layers)
            ratio = round(own["ratio"] * whole / max(1, others), 3)
            if ratio < 1 and (own["scope"] == "uniform" or ratio <= own["max_ratio"]):
                found.insert(0, Repair({"exclude": excluded, "ratio": ratio}, 1))
        return found


class RatioTooHigh(PruningCause[CutChannels]):
    """All groups together lost more channels than the model can do without."""

    stages = ("prune_channels",)
    limit = 0.2
    text = "too many channels ({value:.0%} are removed; limit {limit:.0%})"

    def measure_stage(self, measured: CutChannels) -> float | None:
        """Return the share of all channels that were removed."""
        return measured.removed_share()

    def more_repairs(
        self, refused: RefusedStage[CutChannels], own: dict[str, Any], layers: Sequence[str]
    ) -> list[Repair]:
        """Return three quarters and half of the cut."""
        if own["ratio"] is not None:
            return [Repair({"ratio": round(own["ratio"] * part, 3)}, 3) for part in (0.75, 0.5)]
        if own["widths"] is not None:
            whole = refused.measured.whole
            halfway = {g: (whole[g] + width + 1) // 2 for g, width in own["widths"].items()}
            return [Repair({"widths": halfway}, 3)]
        return []


class PoorMethod(PruningCause[ZeroedWeights]):
    """The other weights do not compensate those that are zero."""

    stages = ("prune_weights",)
    limit = 0.3
    text = (
        "nothing compensates the zeros (sparsegpt returns {value:.0%} of the loss; "
        "limit {limit:.0%})"
    )
    settings = (
        ({"method": "sparsegpt", "scope": None}, 0),
        ({"method": "wanda", "scope": None}, 0),
    )

    def measure(self, refused: RefusedStage[ZeroedWeights], layer: str) -> float | None:
        """Return what the best method returns, for the stage as a whole."""
        return None if layer or refused.measured is None else self.returned(refused, ())


class LayerTooSparse(PruningCause[ZeroedWeights]):
    """One layer, or a few, have more zeros than the model can do with."""

    stages = ("prune_weights",)
    limit = 0.2
    text = "too many zeros in a layer ({value:.0%}; limit {limit:.0%})"

    def measure_part(self, measured: ZeroedWeights, part: str) -> float | None:
        """Return the layer's share of zeros."""
        return measured.zeros[part]

    def more_repairs(
        self, refused: RefusedStage[ZeroedWeights], own: dict[str, Any], layers: Sequence[str]
    ) -> list[Repair]:
        """Return the layers with all of their weights."""
        return [Repair({"exclude": [*own["exclude"], *layers]}, 2)]


class AmountTooHigh(PruningCause[ZeroedWeights]):
    """All layers together have more zeros than the model can do with."""

    stages = ("prune_weights",)
    limit = 0.2
    text = "too many zeros ({value:.0%} of the weights; limit {limit:.0%})"

    def measure_stage(self, measured: ZeroedWeights) -> float | None:
        """Return the share of zeros that the stage asks for."""
        return measured.stage.amount

    def more_repairs(
        self, refused: RefusedStage[ZeroedWeights], own: dict[str, Any], layers: Sequence[str]
    ) -> list[Repair]:
        """Return fewer zeros in all, or where they cost least."""
        found = [Repair({"amount": round(own["amount"] * part, 3)}, 3) for part in (0.75, 0.5)]
        if own["method"] in ("l1", "random"):
            found.insert(0, Repair({"scope": "global"}, 0))
        return found


class BlockNeeded(PruningCause[RemovedBlocks]):
    """A block was removed that the model cannot do without."""

    stages = ("prune_layers",)
    limit = 0.25
    text = "blocks are needed (back, they return {value:.0%} of the loss; limit {limit:.0%})"

    def measure(self, refused: RefusedStage[RemovedBlocks], layer: str) -> float | None:
        """Return what the guilty blocks return together, for the stage as a whole."""
        return None if layer or refused.measured is None else self.returned(refused, ())

    def more_repairs(
        self, refused: RefusedStage[RemovedBlocks], own: dict[str, Any], layers: Sequence[str]
    ) -> list[Repair]:
        """Return other blocks, then fewer."""
        found = [Repair({"exclude": [*own["exclude"], *layers]}, 1)] if layers else []
        fewer = len(refused.measured.removed) - 1
        if fewer:
            found.append(Repair({"remove": fewer, "keep": None, "ratio": None, "blocks": None}, 3))
        return found


PRUNING_CAUSES: tuple[type[PruningCause[Any]], ...] = (
    CalibrationUnlikeVal,
    StaleBatchNorm,
    NoRefit,
    FewCalibrationSamples,
    PoorCriterion,
    GroupTooNarrow,
    RatioTooHigh,
    PoorMethod,
    LayerTooSparse,
    AmountTooHigh,
    BlockNeeded,
)
"""Where two of them explain as much, the one that stands first is named first."""
