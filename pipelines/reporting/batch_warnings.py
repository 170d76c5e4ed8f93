"""What a report says of models whose answers depend on what else is in the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from compress.profiling.batch_dependence import BatchDependence
    from pipelines.results.measurements import Measurements
    from pipelines.results.schema import StageReport


def batch_warnings(
    baseline_name: str, baseline: Measurements | None, stages: Sequence[StageReport]
) -> Iterator[str]:
    """Yield a line for each model whose answers depend on its batch.

    A stage is named where it is the first on its branch: those that read it inherit the dependence,
    and are counted there.

    Args:
        baseline_name: name of the baseline.
        baseline: what was measured of it.
        stages: the run's stages.
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
