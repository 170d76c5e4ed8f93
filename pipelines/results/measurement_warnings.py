"""Warnings of a report that follow from its measurements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from compress.pipelines.results.measurements import Measurements
    from compress.pipelines.results.schema import StageReport

FIDELITY = "fidelity"
"""Fact of a quantized artifact: comparison of its outputs with the float model's."""
IN_PYTORCH = {"graph": "; PyTorch simulates integers: export it"}
"""Artifact kinds that simulate quantization, and the hint for their speed."""
SLOWER = 0.95
"""Speed ratio below which a stage is slower; medians of equal models differ by some percent."""


def measurement_warnings(
    stages: Sequence[StageReport], baseline_name: str, baseline: Measurements | None
) -> Iterator[str]:
    """Yield a line for each suspicious figure, and each warning in an artifact's facts."""
    yield from batch_warnings(baseline_name, baseline, stages)
    measured = {stage.name: stage.measurements for stage in stages}
    for name, found in ({baseline_name: baseline} | measured).items():
        yield from (f"{name}: {reason}" for reason in (found.unmeasurable_reasons if found else ()))
        own = found.same_runtime if found else None
        if own and not own.takes_uncompressed:
            yield f"{name}: what compression gains in speed is not known: {own.speedup_reason}"
    yield from slower_than_float(stages, baseline_name)
    usual = baseline.device if baseline else ""
    for stage in stages:
        device = stage.measurements.device
        if usual and device and device != usual:
            yield (
                f"{stage.name}: runs on {device}, and so did {baseline_name} where the two speeds "
                f"were compared; {baseline_name}'s own latency is that on {usual}"
            )
    for stage in stages:
        for output, distance in stage.unread_outputs.items():
            yield (
                f"{stage.name}: output {output!r} differs from that of {stage.input} by "
                f"{100 * distance:.2g} % of how much it varies on val, and no loss, metric or gate "
                "reads it: nothing made from it is named for deployment; judge it by a metric of "
                "your own (metric: module:function gets all outputs), add {gate: parity, atol: …}, "
                "or leave it out of model.outputs"
            )
        for prepared in stage.measurements.preparation:
            if prepared.difference:
                taken = "; servers do not take them" if prepared.is_wrong else ""
                yield f"{stage.name}: {prepared.difference}{taken}"
        warnings: Any = stage.artifact.facts.get("warnings", ())
        yield from (f"{stage.name}: {warning}" for warning in warnings)


def batch_warnings(
    baseline_name: str, baseline: Measurements | None, stages: Sequence[StageReport]
) -> Iterator[str]:
    """Yield a line for each model whose outputs depend on the other rows of the batch.

    Within a branch only the first such stage gets a line, which lists its descendants.
    """
    found = {s.name: s.measurements.batch_dependence for s in stages}
    if baseline is not None:
        found.setdefault(baseline_name, baseline.batch_dependence)
    rows = {stage.name: stage for stage in stages}
    depends = {name: d for name, d in found.items() if d is not None and d.depends}
    for name, dependence in depends.items():
        if name not in rows or rows[name].input not in depends:
            descendants = [
                s.name
                for s in stages
                if s.name in depends and any(at.input == name for at in _lineage(s, rows))
            ]
            also = f" (and {', '.join(descendants)})" if descendants else ""
            yield (
                f"{name}{also}: answers depend on what else is in the batch: {dependence.line()}; "
                "judged with `served_batch_size` rows in a call (1 by default), and its requests "
                "are not joined"
            )


def slower_than_float(stages: Sequence[StageReport], baseline: str) -> Iterator[str]:
    """Yield a line for each deployable stage that compression made slower.

    It is compared with the uncompressed model in the same runtime, and if it is quantized, with its
    float parent in that runtime if that was measured. A simulated model that a later stage exports
    is left out, as only the export is deployed.
    """
    rows = {stage.name: stage for stage in stages}
    read = {stage.input for stage in stages}
    for stage in stages:
        own, where = stage.measurements.same_runtime, IN_PYTORCH.get(stage.artifact.kind, "")
        if own is None or own.speedup is None or (where and stage.name in read):
            continue
        quantized = _quantizing_stage(stage, rows)
        parent = None
        if quantized is not None:
            exported = _exported_parent(stage, quantized.input, rows)
            parent = exported or (rows.get(quantized.input) if where else None)
        if own.is_slower:
            against = f"{baseline} in {own.runtime} ({own.speedup:.2g}×)"
            yield f"{stage.name}: slower than {against}{where}"
        elif parent and parent.measurements.speedup and stage.measurements.speedup:
            ratio = stage.measurements.speedup / parent.measurements.speedup
            if ratio < SLOWER:
                yield f"{stage.name}: slower than {parent.name} ({ratio:.2g}×){where}"


def _lineage(stage: StageReport, rows: Mapping[str, StageReport]) -> Iterator[StageReport]:
    """Yield a stage and its ancestors, up to the imported model."""
    current: StageReport | None = stage
    while current is not None:
        yield current
        current = rows.get(current.input)


def _quantizing_stage(stage: StageReport, rows: Mapping[str, StageReport]) -> StageReport | None:
    """Return the first stage of the lineage that quantized the model; None if all are float."""
    found = [s for s in _lineage(stage, rows) if FIDELITY in s.artifact.facts]
    return found[-1] if found else None


def _exported_parent(
    stage: StageReport, parent: str, rows: Mapping[str, StageReport]
) -> StageReport | None:
    """Return the stage that exported the float parent into the same format."""
    for other in rows.values():
        if other.artifact.kind != stage.artifact.kind or _quantizing_stage(other, rows):
            continue
        for ancestor in _lineage(other, rows):
            if ancestor.artifact.kind == "eager":  # a changed model, and no export of the parent
                break
            if ancestor.input == parent:
                return other
    return None
