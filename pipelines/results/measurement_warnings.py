"""Warnings that follow from what was measured of the stages of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from compress.profiling.batch_dependence import BatchDependence
    from pipelines.results.measurements import Measurements
    from pipelines.results.stage_reports import StageReport

FIDELITY = "fidelity"
"""Fact of an artifact that was quantized: how near its outputs are to those of the float model."""
IN_PYTORCH = {"graph": " in PyTorch, which simulates integers; export it"}
"""Kinds of artifacts that are exported before they are deployed."""
SLOWER = 0.95
"""Two medians of equal speed differ by some percent: below this ratio a stage is called slower."""


def measurement_warnings(
    stages: Sequence[StageReport], baseline_name: str, baseline: Measurements | None
) -> Iterator[str]:
    """Yield a line for each figure that calls for attention, and each warning of an artifact."""
    yield from batch_warnings(baseline_name, baseline, stages)
    measured = {stage.name: stage.measurements for stage in stages}
    for name, found in ({baseline_name: baseline} | measured).items():
        yield from (f"{name}: {doubt}" for doubt in (found.unmeasurable_reasons if found else ()))
    yield from slower_than_float(stages, baseline_name)
    for stage in stages:
        warnings: Any = stage.artifact.facts.get("warnings", ())
        yield from (f"{stage.name}: {warning}" for warning in warnings)


def batch_warnings(
    baseline_name: str, baseline: Measurements | None, stages: Sequence[StageReport]
) -> Iterator[str]:
    """Yield a line for each model whose outputs depend on what else is in the batch.

    Of a branch, only the first such stage gets a line; those that inherit it are listed there.
    """
    found = {s.name: s.measurements.batch_dependence for s in stages}
    if baseline is not None:
        found.setdefault(baseline_name, baseline.batch_dependence)
    inputs = {s.name: s.input for s in stages}
    depends = {name: d for name, d in found.items() if d is not None and d.depends}
    for name, dependence in depends.items():
        if inputs.get(name) not in depends:
            heirs = [n for n in depends if n != name and name in _ancestors(n, inputs)]
            yield _line(name, dependence, heirs)


def _ancestors(name: str, inputs: dict[str, str]) -> Iterator[str]:
    while name in inputs:
        name = inputs[name]
        yield name


def _line(name: str, dependence: BatchDependence, heirs: Sequence[str]) -> str:
    also = f" (and {', '.join(heirs)})" if heirs else ""
    return (
        f"{name}{also}: answers depend on what else is in the batch: {dependence.line()}; judged "
        "with `served_batch_size` rows in a call (1 by default), and its requests are not joined"
    )


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
        quantized = _quantizing_stage(stage, rows)
        where = IN_PYTORCH.get(stage.artifact.kind)
        if quantized is None or (where and stage.name in read):
            continue
        parent = _exported_parent(stage, quantized.input, rows) or quantized.input
        served = stage.artifact.kind == "torchserve" and parent == quantized.input
        if not {stage.name, parent} <= speedups.keys() or served:  # HTTP is in a server's latency
            continue
        ratio = speedups[stage.name] / speedups[parent]
        if ratio < SLOWER:
            yield f"{stage.name}: slower than {parent} ({ratio:.2g}×){where or ''}"


def _lineage(stage: StageReport, rows: Mapping[str, StageReport]) -> Iterator[StageReport]:
    """Yield a stage and those before it, up to the model as it came in."""
    at: StageReport | None = stage
    while at is not None:
        yield at
        at = rows.get(at.input)


def _quantizing_stage(stage: StageReport, rows: Mapping[str, StageReport]) -> StageReport | None:
    """Return the first stage on the road that quantized; None where all of it is float."""
    found = [s for s in _lineage(stage, rows) if FIDELITY in s.artifact.facts]
    return found[-1] if found else None


def _only_exports(other: StageReport, parent: str, rows: Mapping[str, StageReport]) -> bool:
    """Whether a stage brings another one's model into a format, and changes it no further."""
    for stage in _lineage(other, rows):
        if stage.artifact.kind == "eager":
            return False
        if stage.input == parent:
            return True
    return False


def _exported_parent(
    stage: StageReport, parent: str, rows: Mapping[str, StageReport]
) -> str | None:
    """Return the stage that brought the float parent into the same format."""
    for other in rows.values():
        same_kind = other.artifact.kind == stage.artifact.kind
        on_road = _only_exports(other, parent, rows)
        if same_kind and on_road and _quantizing_stage(other, rows) is None:
            return other.name
    return None
