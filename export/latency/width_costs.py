"""Cost of a model by its widths and formats, as a sum over decisions that meet in a kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from compress.export.latency.kernels import kernels_of
from compress.export.latency.width_costs import KernelCost
from compress.export.onnx.proto_io import write
from compress.profiling.interaction_sum import InteractionSum

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from random import Random

    import onnx_ir as ir

    from compress.export.latency.kernels import Arrays, KernelTable
    from compress.profiling.interaction_sum import Choice, Value

    Grid = Mapping[str, Sequence[Value]]
    Values = np.ndarray[tuple[int], np.dtype[np.float64]]


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
