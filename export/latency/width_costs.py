"""Cost of a model by its widths and formats, as a sum over decisions that meet in a kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import numpy as np
from scipy.optimize import nnls

from compress.common.config import Settings
from compress.common.errors import StageFailed
from compress.export.latency.kernels import kernels_of
from compress.export.onnx.proto_io import write
from compress.export.onnx.session import opened_session
from compress.profiling.benchmark import compare_latencies, unmeasurable
from compress.profiling.interaction_sum import InteractionSum

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from random import Random

    import onnx_ir as ir
    import torch

    from compress.export.latency.kernels import Arrays, Kernel, KernelTable
    from compress.profiling.interaction_sum import Choice, Value

    Grid = Mapping[str, Sequence[Value]]
    Values = np.ndarray[tuple[int], np.dtype[np.float64]]


def measure_files(
    files: Sequence[Path], batches: Sequence[Sequence[torch.Tensor]], threads: int
) -> list[float]:
    """Return the median latency of ONNX files in seconds, measured in turn.

    Raises:
        StageFailed: the machine is too busy to measure them.
    """
    openers = [partial(opened_session, file, threads) for file in files]
    measured = compare_latencies(openers, batches, threads=threads).latencies
    for latency in measured:
        if latency.p50_doubt:
            raise StageFailed(unmeasurable("the latency of a variant", latency.p50_doubt))
    return [1e-3 * latency.p50 for latency in measured]


class KernelCost(NamedTuple):
    """What the kernels of a model add up to."""

    seconds: float
    """Of all kernels, each measured alone."""
    weight_bytes: int
    """Bytes of constants that they read."""

    @classmethod
    def of_kernels(cls, kernels: Sequence[Kernel], table: KernelTable) -> Self:
        """Add up the kernels of a model; all of them are in the table."""
        return cls(sum(map(table.seconds, kernels)), sum(k.weight_bytes for k in kernels))


class LatencyModel(Settings):
    """A model's latency as a sum over its kernels, corrected by the latencies of whole models."""

    per_kernel_second: float
    """Seconds for each second of the kernels alone."""
    per_weight_byte: float
    """Seconds for each byte of weights. A kernel that is called alone again and again finds its
    weights in the processor's nearest cache; in a model whose weights do not fit, the layers
    between have replaced them. On a ResNet-20 of 1.1 M weights this is two thirds of the time."""
    per_call: float
    """Seconds for each call of the model."""

    @classmethod
    def fit(cls, costs: Sequence[KernelCost], seconds: Sequence[float]) -> Self:
        """Fit the three coefficients, none negative, to the least relative errors."""
        measured = np.array(seconds)
        features = np.array([[cost.seconds, cost.weight_bytes, 1.0] for cost in costs])
        # Columns of the same magnitude, as bytes are millions and seconds fractions.
        scale = features.max(axis=0)
        scale[scale == 0] = 1.0
        relative = features / scale / measured[:, None]
        coefficients, _ = nnls(relative, np.ones(len(measured)))
        kernels, weights, call = (coefficients / scale).tolist()
        return cls(per_kernel_second=kernels, per_weight_byte=weights, per_call=call)

    def predict(self, cost: KernelCost) -> float:
        """Return the seconds of one call of a model."""
        return (
            self.per_kernel_second * cost.seconds
            + self.per_weight_byte * cost.weight_bytes
            + self.per_call
        )


class WidthCost(NamedTuple):
    """What a model costs at some widths and formats."""

    kernels: KernelCost
    file_bytes: int


class ChangeableModel(Protocol):
    """A model whose widths or formats can be changed without an export."""

    def resize(self, choice: Any, /) -> ir.Model:
        """Return the model with other values of some decisions."""


@dataclass
class WidthCosts:
    """Costs of a model at any widths and formats, from the kernels that onnxruntime runs then.

    Every model is made from one file, not exported, and only kernels that the table lacks are
    measured.
    """

    model: ChangeableModel
    whole: Choice
    """The model's own values of all decisions."""
    inputs: Arrays
    table: KernelTable
    _known: dict[tuple[tuple[str, Value], ...], WidthCost] = field(default_factory=dict)

    def at(self, choice: Choice) -> WidthCost:
        """Return the cost at some values; decisions that are left out have the model's own."""
        choice = {**self.whole, **choice}
        key = tuple(sorted(choice.items()))
        if key not in self._known:
            with TemporaryDirectory(prefix="compress-width-") as folder:
                file = Path(folder) / "model.onnx"
                write(self.model.resize(choice), file)
                kernels = kernels_of(file, self.inputs, self.table.threads)
                size = sum(part.stat().st_size for part in Path(folder).iterdir())
            self.table.measure(kernels)
            self._known[key] = WidthCost(KernelCost.of_kernels(kernels, self.table), size)
        return self._known[key]


def measure_grid(
    costs: WidthCosts,
    grid: Grid,
    scopes: Sequence[tuple[str, ...]],
    progress: Callable[[int, int], None] = lambda *_: None,
) -> tuple[InteractionSum, InteractionSum, InteractionSum]:
    """Decompose the costs of a model over a grid of widths and formats.

    Args:
        costs: the model.
        grid: decision → its values, that of the model itself first.
        scopes: decisions that meet in a kernel, beside each single one.
        progress: called with the models done and those in all.

    Returns:
        Seconds of the kernels, bytes of the weights that they read, and bytes of the file.
    """
    base = {decision: values[0] for decision, values in grid.items()}
    # Smaller ones first, as the changes of these are subtracted from those of larger ones.
    parts = {
        part
        for scope in scopes
        for size in range(2, len(scope) + 1)
        for part in combinations(sorted(scope), size)
    }
    ordered = [
        *((decision,) for decision in grid),
        *sorted(parts, key=lambda part: (len(part), part)),
    ]
    models = [
        (scope, values)
        for scope in ordered
        for values in product(*(grid[decision][1:] for decision in scope))
    ]
    whole = _values(costs.at(base))
    terms: dict[tuple[str, ...], dict[tuple[Value, ...], Values]] = {scope: {} for scope in ordered}
    for done, (scope, values) in enumerate(models):
        progress(done, len(models))
        chosen = dict(zip(scope, values, strict=True))
        change = _values(costs.at(base | chosen)) - whole
        for size in range(1, len(scope)):
            for part in combinations(scope, size):
                change = change - terms[part][tuple(chosen[decision] for decision in part)]
        terms[scope][values] = change
    progress(len(models), len(models))
    seconds, weight_bytes, file_bytes = (
        InteractionSum(
            float(whole[i]),
            {
                scope: {values: float(change[i]) for values, change in own.items()}
                for scope, own in terms.items()
            },
        )
        for i in range(3)
    )
    return seconds, weight_bytes, file_bytes


def spread_widths(grid: Grid, count: int, generator: Random) -> list[dict[str, Value]]:
    """Return the largest and the smallest widths of a grid, and random ones between."""
    drawn = [
        {group: generator.choice(widths) for group, widths in grid.items()}
        for _ in range(count - 2)
    ]
    largest, smallest = ({group: widths[i] for group, widths in grid.items()} for i in (0, -1))
    return [largest, smallest, *drawn]


def _values(cost: WidthCost) -> Values:
    return np.array([*cost.kernels, cost.file_bytes], float)
