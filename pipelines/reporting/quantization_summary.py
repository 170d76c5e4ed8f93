"""What a report says of quantized stages: how near they stay to their float model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.quantization.numeric_debug.fidelity_report import Fidelity, LabelParity
from pipelines.results.measurement_warnings import FIDELITY

if TYPE_CHECKING:
    from pipelines.results.stage_reports import StageReport

SAMENESS = "same_as_trained"


def fidelity_of(stage: StageReport) -> Fidelity | None:
    """Return how near a stage's artifact stays to its float model; None where it says nothing."""
    found = stage.artifact.facts.get(FIDELITY)
    return None if found is None else Fidelity.model_validate(found)


def sameness_of(stage: StageReport) -> LabelParity | None:
    """Return how far a stage's integers give the labels they were trained for, if they were."""
    found = stage.artifact.facts.get(SAMENESS)
    return None if found is None else LabelParity.model_validate(found)
