"""Numeric comparison of quantized stages with their float model, read from a report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.quantization.numeric_debug.fidelity_report import Fidelity, LabelParity
from pipelines.results.measurement_warnings import FIDELITY

if TYPE_CHECKING:
    from pipelines.results.stage_reports import StageReport

SAMENESS = "same_as_trained"


def fidelity_of(stage: StageReport) -> Fidelity | None:
    """Return a stage's comparison with its float model; None where it has none."""
    found = stage.artifact.facts.get(FIDELITY)
    return None if found is None else Fidelity.model_validate(found)


def sameness_of(stage: StageReport) -> LabelParity | None:
    """Return how many labels of an int8 export equal those of its QAT model; None without QAT."""
    found = stage.artifact.facts.get(SAMENESS)
    return None if found is None else LabelParity.model_validate(found)
