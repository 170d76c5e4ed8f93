"""What a report says of quantized stages: how near they stay to float, and which are slower."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.quantization.numeric_debug.fidelity_report import Fidelity, LabelParity

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pipelines.results.schema import StageReport

FIDELITY = "fidelity"
SAMENESS = "same_as_trained"
IN_PYTORCH = {"graph": " in PyTorch, which simulates integers; export it"}
"""Kinds of artifacts that are not the end of a road."""
SLOWER = 0.95
"""Two medians of equal speed differ by some percent: below this ratio a stage is called slower."""


def fidelity_of(stage: StageReport) -> Fidelity | None:
    """Return how near a stage's artifact stays to its float model; None where it says nothing."""
    found = stage.artifact.facts.get(FIDELITY)
    return None if found is None else Fidelity.model_validate(found)


def sameness_of(stage: StageReport) -> LabelParity | None:
    """Return how far a stage's integers give the labels they were trained for, if they were."""
    found = stage.artifact.facts.get(SAMENESS)
    return None if found is None else LabelParity.model_validate(found)


def slower_than_float(stages: Sequence[StageReport], baseline: str) -> Iterator[str]:
    """Yield a line for each quantized stage that is slower than its float parent.

    The figures are those of the table. What was exported is compared with the same export of the
    float parent where there is one, and else with the parent itself. What runs in PyTorch and is
    read by a later stage is left out: that one's export is what is deployed.
    """
    rows = {stage.name: stage for stage in stages}
    found = {stage.name: stage.measurements.speedup for stage in stages}
    speedups = {baseline: 1.0, **{name: s for name, s in found.items() if s is not None}}
    read = {stage.input for stage in stages}
    for stage in stages:
        quantized = _quantized_at(stage, rows)
        where = IN_PYTORCH.get(stage.artifact.kind)
        if quantized is None or (where and stage.name in read):
            continue
        parent = _twin(stage, quantized.input, rows) or quantized.input
        served = stage.artifact.kind == "torchserve" and parent == quantized.input
        if not {stage.name, parent} <= speedups.keys() or served:  # HTTP is in a server's latency
            continue
        ratio = speedups[stage.name] / speedups[parent]
        if ratio < SLOWER:
            yield f"{stage.name}: slower than {parent} ({ratio:.2g}×){where or ''}"


def _road(stage: StageReport, rows: Mapping[str, StageReport]) -> Iterator[StageReport]:
    """Yield a stage and those before it, up to the model as it came in."""
    at: StageReport | None = stage
    while at is not None:
        yield at
        at = rows.get(at.input)


def _quantized_at(stage: StageReport, rows: Mapping[str, StageReport]) -> StageReport | None:
    """Return the first stage on the road that quantized; None where all of it is float."""
    found = [s for s in _road(stage, rows) if FIDELITY in s.artifact.facts]
    return found[-1] if found else None


def _leads_to(other: StageReport, parent: str, rows: Mapping[str, StageReport]) -> bool:
    """Whether a stage brings another one's model into a format, and changes it no further."""
    for stage in _road(other, rows):
        if stage.artifact.kind == "eager":
            return False
        if stage.input == parent:
            return True
    return False


def _twin(stage: StageReport, parent: str, rows: Mapping[str, StageReport]) -> str | None:
    """Return the stage that brought the float parent into the same format."""
    for other in rows.values():
        same_kind = other.artifact.kind == stage.artifact.kind
        on_road = _leads_to(other, parent, rows)
        if same_kind and on_road and _quantized_at(other, rows) is None:
            return other.name
    return None
