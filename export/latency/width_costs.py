"""Cost of a model as a function of its widths, as a sum over single groups and pairs of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from export.latency.kernels import kernels_of
from export.latency.latency_model import KernelCost
from export.onnx.proto_io import write

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from export.latency.kernel_table import KernelTable
    from export.latency.kernels import Arrays
    from export.latency.resizing import ResizableModel

    Widths = Mapping[str, int]
    Values = np.ndarray[tuple[int], np.dtype[np.float64]]


class WidthCost(NamedTuple):
    """What a model costs at some widths."""

    kernels: KernelCost
    file_bytes: int


@dataclass
class WidthCosts:
    """Costs of a model at any widths, from the kernels that onnxruntime runs it with there.

    Every model is resized, not exported, and only kernels that the table lacks are measured.
    """

    model: ResizableModel
    whole: Widths
    """The model's own widths."""
    inputs: Arrays
    table: KernelTable
    _known: dict[tuple[tuple[str, int], ...], WidthCost] = field(default_factory=dict)

    def at(self, widths: Widths) -> WidthCost:
        """Return the cost at some widths; groups that are left out have their own."""
        widths = {**self.whole, **widths}
        key = tuple(sorted(widths.items()))
        if key not in self._known:
            with TemporaryDirectory(prefix="compress-width-") as folder:
                file = Path(folder) / "model.onnx"
                write(self.model.resize(widths), file)
                kernels = kernels_of(file, self.inputs, self.table.threads)
                size = sum(part.stat().st_size for part in Path(folder).iterdir())
            self.table.measure(kernels)
            self._known[key] = WidthCost(KernelCost.of_kernels(kernels, self.table), size)
        return self._known[key]


@dataclass(frozen=True)
class PairwiseSum:
    """A quantity of a model as a sum of what single groups and pairs of groups add to it.

    A kernel's cost depends on the channels that it reads and on those that it writes, so on two
    groups at most, in all but joins of several branches; then the sum is exact. It is the
    decomposition of high-dimensional model representation around one point (Rabitz and Aliş,
    "General foundations of high-dimensional model representations", 1999), up to second order.
    """

    whole: float
    """At the model's own widths."""
    single: Mapping[str, Mapping[int, float]]
    """Group → width → what changes where this group alone has that width."""
    pair: Mapping[tuple[str, str], Mapping[tuple[int, int], float]]
    """Two groups → widths → what changes beyond that where both have these."""

    def __call__(self, widths: Widths) -> float:
        """Return the quantity at some widths of the grid."""
        total = self.whole + sum(own[widths[group]] for group, own in self.single.items())
        return total + sum(own[widths[a], widths[b]] for (a, b), own in self.pair.items())

    @classmethod
    def combine(cls, parts: Sequence[tuple[float, PairwiseSum]], constant: float) -> Self:
        """Return a weighted sum of quantities of one grid, and a constant."""
        (_, first), *_ = parts
        return cls(
            constant + sum(f * part.whole for f, part in parts),
            {
                group: {w: sum(f * part.single[group][w] for f, part in parts) for w in own}
                for group, own in first.single.items()
            },
            {
                both: {w: sum(f * part.pair[both][w] for f, part in parts) for w in own}
                for both, own in first.pair.items()
            },
        )


def measure_grid(
    costs: WidthCosts,
    grid: Mapping[str, Sequence[int]],
    pairs: Sequence[tuple[str, str]],
    progress: Callable[[int, int], None] = lambda *_: None,
) -> tuple[PairwiseSum, PairwiseSum, PairwiseSum]:
    """Decompose the costs of a model over a grid of widths.

    Args:
        costs: the model.
        grid: group → its widths, the model's own first.
        pairs: the groups that meet in a kernel.
        progress: called with the models done and those in all.

    Returns:
        Seconds of the kernels, bytes of the weights that they read, and bytes of the file.
    """
    whole = {group: widths[0] for group, widths in grid.items()}
    changes: list[dict[str, int]] = [{}]
    changes += [{group: width} for group, widths in grid.items() for width in widths[1:]]
    for a, b in pairs:
        changes += [{a: x, b: y} for x, y in product(grid[a][1:], grid[b][1:])]
    found: dict[tuple[tuple[str, int], ...], Values] = {}
    for done, change in enumerate(changes):
        progress(done, len(changes))
        cost = costs.at(whole | change)
        found[tuple(sorted(change.items()))] = np.array([*cost.kernels, cost.file_bytes], float)
    progress(len(changes), len(changes))

    def at(**change: int) -> Values:
        kept = {group: width for group, width in change.items() if width != whole[group]}
        return found[tuple(sorted(kept.items()))]

    sums = []
    for i in range(3):
        base = float(at()[i])
        single = {
            group: {width: float(at(**{group: width})[i]) - base for width in widths}
            for group, widths in grid.items()
        }
        pair = {
            (a, b): {
                (x, y): float(at(**{a: x, b: y})[i]) - base - single[a][x] - single[b][y]
                for x, y in product(grid[a], grid[b])
            }
            for a, b in pairs
        }
        sums.append(PairwiseSum(base, single, pair))
    seconds, weight_bytes, file_bytes = sums
    return seconds, weight_bytes, file_bytes
