"""Latency of artifacts measured in turn, at several batch sizes and numbers of threads."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from compress.common.config import Settings
from compress.common.errors import PipelineInvalid
from compress.profiling.benchmark import MEASURED_SECONDS, Latency, compare_latencies
from compress.profiling.quantiles import Interval

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from compress.artifacts.artifact import Artifact
    from compress.common.signature import Signature
    from compress.core.context import Context


class BenchRow(Settings):
    """One model's figures at a batch size and a number of threads."""

    model: str
    latency: Latency
    rows_per_second: float
    """Rows of the batch over the median latency."""
    speedup: float
    """How many times faster than the first model: the median over blocks of calls."""
    speedup_interval: Interval
    """95 % confidence interval of the speedup."""
    unreliable_reason: str = ""
    """Why the figures are too uncertain to be shown; empty where they are not."""


class BenchCell(Settings):
    """All models at one batch size and number of threads."""

    batch: int
    threads: int
    rows: tuple[BenchRow, ...]
    fastest: tuple[str, ...]
    """The model of the least median latency, then those level with it; empty where the machine was
    too busy to tell."""

    @property
    def verdict(self) -> str:
        """Which model is fastest, in words."""
        where = f"batch {self.batch}, {self.threads} thread{'s' * (self.threads > 1)}"
        if not self.fastest:
            return f"{where}: not measurable on this machine now"
        if len(self.fastest) > 1:
            return f"{where}: {' and '.join(self.fastest)} are level"
        return f"{where}: {self.fastest[0]} is fastest"


def measure_fastest(
    models: Mapping[str, Artifact],
    context: Context,
    batches: Sequence[int],
    threads: Sequence[int],
    seconds: float = MEASURED_SECONDS,
) -> list[BenchCell]:
    """Measure models on rows of `val`, or seeded ones, for each number of threads and batch size.

    Each is measured for some seconds in turn. Raise PipelineInvalid where the models' inputs
    differ, StageFailed where a model's batch is fixed at another size.
    """
    names = list(models)
    signature = models[names[0]].signature
    inputs = _described(signature)
    for name, model in models.items():
        own = _described(model.signature)
        if own != inputs:
            raise PipelineInvalid(
                f"{name} takes {own}, and {names[0]} takes {inputs}; expected artifacts of one "
                "model, whose inputs are the same"
            )
    cells = []
    for count in threads:
        openers = [partial(model.open_anew, context.device, count) for model in models.values()]
        for batch in batches:
            tensors = context.measured_batches(signature, batch)
            measured = compare_latencies(openers, tensors, seconds, threads=count)
            rows = []
            for i, name in enumerate(names):
                comparison = measured.comparison(0, i)
                row = BenchRow(
                    model=name,
                    latency=comparison.after,
                    rows_per_second=1e3 * batch / comparison.after.p50,
                    speedup=comparison.speedup,
                    speedup_interval=comparison.interval,
                    unreliable_reason=comparison.after.p50_doubt or comparison.speedup_doubt,
                )
                rows.append(row)
            doubtful = any(row.unreliable_reason for row in rows)
            fastest = () if doubtful else tuple(names[i] for i in measured.fastest())
            cell = BenchCell(batch=batch, threads=count, rows=tuple(rows), fastest=fastest)
            cells.append(cell)
    return cells


def _described(signature: Signature) -> str:
    """Describe inputs by type and shape, for two exports of a model alike."""

    def sizes(shape: Sequence[int | str]) -> str:
        return ", ".join("*" if isinstance(axis, str) else str(axis) for axis in shape)

    return " and ".join(f"{spec.dtype} [{sizes(spec.shape)}]" for spec in signature.inputs)
