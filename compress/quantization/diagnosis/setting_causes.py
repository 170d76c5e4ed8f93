"""Causes of accuracy lost by stages that are run again with other settings, to see what returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from compress.core.diagnosis.cause import Cause, Repair
from compress.quantization.diagnosis.diagnosis import RequantizationDiagnosis

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compress.core.diagnosis.cause import RefusedStage

    Refused = RefusedStage[RequantizationDiagnosis]


class SettingCause(Cause[RequantizationDiagnosis]):
    """A setting without which half of the loss returns."""

    limit = 0.5
    without: ClassVar[dict[str, Any]]
    """Settings of the stage without the cause."""
    tried: ClassVar[tuple[tuple[dict[str, Any], int], ...]] = ()
    """Changes that may mend it, and what they cost."""

    def measure(self, refused: Refused, layer: str) -> float | None:
        """Return the share of the loss that returns without the cause."""
        own = refused.stage.own_settings()
        if layer or all(own[name] == value for name, value in self.without.items()):
            return None
        return refused.measured.returned(refused.measured.drop_with(self.without))

    def returned(self, refused: Refused, layers: Sequence[str]) -> float | None:
        """Return the measured value: the share of the loss that returns without the cause."""
        return self.measure(refused, "")

    def repairs(self, refused: Refused, layers: Sequence[str]) -> tuple[Repair, ...]:
        """Return the changes, and the guilty layers in float."""
        own = refused.stage.own_settings()
        found = [Repair(settings, cost) for settings, cost in self.tried]
        if refused.layers:
            found.append(Repair({"exclude": [*own["exclude"], *refused.layers]}, 2))
        return tuple(r for r in found if any(own[k] != v for k, v in r.settings.items()))


class FewWeightBits(SettingCause):
    """Weights that need 8 bits."""

    stages = ("quantize_weights",)
    text = "weights need 8 bits (with them {value:.0%} returns; limit {limit:.0%})"
    without = {"bits": 8, "method": "rtn"}
    tried = (
        ({"method": "gptq"}, 0),
        ({"method": "awq"}, 0),
        ({"group_size": 16}, 1),
        ({"bits": 8}, 3),
    )


class RoundedInputs(SettingCause):
    """Inputs of linear layers that are rounded to 8 bits."""

    stages = ("quantize_weights",)
    text = "inputs need more than 8 bits (in float they return {value:.0%}; limit {limit:.0%})"
    without = {"activation_bits": 32}
    tried = (({"activation_bits": 32}, 2),)


class UnlikeRows(SettingCause):
    """One range for rows of which some have far larger values than others."""

    stages = ("quantize_dynamic",)
    text = "one scale for unlike rows (with a scale each {value:.0%} returns; limit {limit:.0%})"
    without = {"activation_range": "row"}
    tried = (({"activation_range": "row"}, 2),)


class UnlikeInputs(SettingCause):
    """One range for inputs of linear layers of which some have far larger values than most."""

    stages = ("quantize_dynamic",)
    text = "one scale for unlike channels (smoothed {value:.0%} returns; limit {limit:.0%})"
    without = {"smooth": "auto"}
    tried = (({"smooth": "auto"}, 1),)


SETTING_CAUSES: tuple[type[SettingCause], ...] = (
    FewWeightBits,
    RoundedInputs,
    UnlikeInputs,
    UnlikeRows,
)
